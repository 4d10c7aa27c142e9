"""A process that forks a child for each run, so that tests can kill real processes without waiting for imports.

It reads orders, see `Server.run`, and answers {"code", "said", "error", ...}. A child does something to itself at a
place of the real code, the `at`-th time that it comes by, and says so just before: it sends itself a signal, by
default SIGKILL, fills its disk, limits its memory, or sets the clock back. Or it is killed after some seconds. One
that is asked to stop does so as the command does.
"""

import json
import os
import resource
import select
import signal
import sys
import time
from pathlib import Path

import torch
import torch._dynamo

import driveprune.cut
import driveprune.files
import driveprune.train
from driveprune import datasets
from driveprune.pruner import Pruner
from driveprune.runs import worker
from driveprune.runs.job import carry_out
from driveprune.runs.spec import Spec
from driveprune.runs.stopping import asked
from driveprune.runs.store import FolderCheckpoints, write_wanted
from driveprune.train import Moment, Stopped

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests import disks
from tests.runs.faults import Faults

torch.set_num_threads(1)  # threads do not survive a fork
DATA = datasets.load("digits")
worker._data = lambda *_: DATA


class Death:
    """Does something to this process the `at`-th time it is called."""

    def __init__(self, order: dict, said: int) -> None:
        self.place, self.left, self.said, self.order = order["place"], order["at"], said, order

    def __call__(self) -> None:
        self.left -= 1
        if self.left != 0:
            return
        os.write(self.said, self.place.encode())
        match self.order["act"]:
            case "fill":
                disks.fill(Path(self.order["root"]))
            case "memory":
                pages = int(Path("/proc/self/statm").read_text().split()[0])
                used = pages * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (used, used))
            case "clock":
                Path(os.environ["FAKETIME_TIMESTAMP_FILE"]).write_text("-2h")
            case _:
                os.kill(os.getpid(), self.order["signal"])


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


def child(order: dict, said: int) -> int:
    """Do a run; the exit code."""
    die = Death(order, said)
    arm(die)

    def watch(moment: Moment) -> None:
        select.select([], [], [], order["pause"])
        if moment.work == die.place:
            die()

    with asked() as stop:
        try:
            carry_out(
                Path(order["root"]), Spec.from_json(order["spec"]), DATA, share=order["share"], every=order["every"],
                watch=watch, stop=stop,
            )  # fmt: skip
        except Stopped:
            return stop.code
    return 0


def faulty(order: dict, said: int) -> int:
    """Do a run as a sweep and its process do, while calls of the system fail: 1 if it has failed."""
    root, spec = Path(order["root"]), Spec.from_json(order["spec"])
    faults = Faults(root, **order["faults"])
    save, saved = FolderCheckpoints.save, [0]

    def noted(self: FolderCheckpoints, state: dict) -> None:
        save(self, state)
        saved[0] = state["steps_done"]

    FolderCheckpoints.save = noted
    faults.install()
    try:
        root.mkdir(exist_ok=True)
        write_wanted(root, [spec], {spec.id: 10})
        ordered = {"spec": order["spec"], "data_dir": None, "share": True, "every": 0.0, "engine": "dense"}
        error = worker.do(root, ordered)["error"]
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    tell(said, {"calls": faults.calls, "saved": saved[0], "error": error})
    return int(error is not None)


def tell(said: int, content: dict) -> None:
    """Write to the process that has forked this one, however much it is."""
    with os.fdopen(os.dup(said), "w") as file:
        file.write("\0" + json.dumps(content))


def answer(order: dict) -> dict:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(read)
            os.dup2(2, 1)
            code = faulty(order, write) if order["faults"] else child(order, write)
        except BaseException as error:
            tell(write, {"error": f"{type(error).__name__}: {error}"})
        finally:
            os._exit(code)
    os.close(write)
    start = time.perf_counter()
    if order["after"] is not None:
        time.sleep(order["after"])
        os.kill(pid, signal.SIGKILL)
    with os.fdopen(read) as file:
        said, _, more = file.read().partition("\0")
    _, status = os.waitpid(pid, 0)
    found = {"code": os.waitstatus_to_exitcode(status), "said": said, "seconds": time.perf_counter() - start}
    return {**found, **json.loads(more or "{}")}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
