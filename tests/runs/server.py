"""A process that forks a child for each run, so that tests can kill real processes without waiting for imports.

It reads {"root", "spec", "place", "at", "every", "share", "after"} from stdin and answers {"code", "said"}. A child
kills itself with SIGKILL at a place of the real code, the `at`-th time that it comes by, and says so just before; or
it is killed after some seconds.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch._dynamo  # noqa: F401  an optimiser imports it, for two seconds

import driveprune.cut
import driveprune.files
import driveprune.train
from driveprune import datasets
from driveprune.pruner import Pruner
from driveprune.runs.job import carry_out
from driveprune.runs.spec import Spec

DATA = datasets.load("digits")


class Death:
    """Kills this process the `at`-th time it is called."""

    def __init__(self, place: str, at: int, said: int) -> None:
        self.place, self.left, self.said = place, at, said

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            os.write(self.said, self.place.encode())
            os.kill(os.getpid(), signal.SIGKILL)


def arm(die: Death) -> None:
    """Have this process die in a place of the code that is not told to watchers."""
    if die.place == "cut":  # after the score, before the new mask is applied
        keep_top = driveprune.cut.keep_top
        driveprune.cut.keep_top = lambda *args, **options: (keep_top(*args, **options), die())[0]
    elif die.place == "rewound":
        rewind = Pruner._rewind
        Pruner._rewind = lambda self, phase: (rewind(self, phase), die())[0]
    elif die.place == "inside evaluation":
        evaluating = driveprune.train.evaluating
        driveprune.train.evaluating = lambda model: (die(), evaluating(model))[1]
    elif die.place == "writing":
        fsync = os.fsync

        def half(descriptor: int) -> None:
            if ".checkpoint-" in os.readlink(f"/proc/self/fd/{descriptor}"):
                size = os.fstat(descriptor).st_size
                os.ftruncate(descriptor, size // 2)
                die()
                os.ftruncate(descriptor, 0)  # not yet: as it was
                os.pwrite(descriptor, content[0], 0)
            fsync(descriptor)

        content = [b""]
        write = driveprune.files.write_atomically

        def noted(path: str, data: bytes, **options: bool) -> None:
            content[0] = data
            write(path, data, **options)

        driveprune.files.write_atomically = noted
        driveprune.files.os.fsync = half


def child(order: dict, said: int) -> None:
    die = Death(order["place"], order["at"], said)
    arm(die)
    carry_out(
        Path(order["root"]), Spec.from_json(order["spec"]), DATA, share=order["share"], every=order["every"],
        watch=lambda moment: die() if moment.work == die.place else None,
    )  # fmt: skip


def answer(order: dict) -> dict:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.dup2(2, 1)
            child(order, write)
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    start = time.perf_counter()
    if order["after"] is not None:
        time.sleep(order["after"])
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    said = os.read(read, 100).decode()
    os.close(read)
    return {"code": os.waitstatus_to_exitcode(status), "said": said, "seconds": time.perf_counter() - start}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
