"""`driveprune` with a thread of gloo at work when the group is destroyed: `torchrun -m tests.ending run`."""

import time

import torch
import torch.distributed as dist

from driveprune import gloo
from driveprune.cli import main


def be_busy(_):
    """In a thread of gloo, which needs the interpreter for it."""
    end = time.monotonic() + 1
    while time.monotonic() < end:
        pass


def end_at_work(end=dist.destroy_process_group):
    dist.all_reduce(torch.ones(3_000_000), async_op=True).get_future().then(be_busy)
    end()
    assert not gloo._switches(), "threads have outlived their group"


if __name__ == "__main__":
    dist.destroy_process_group = end_at_work
    main()
