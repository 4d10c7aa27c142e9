"""Processes with gloo end clean, also if its threads are still at work: a user's own script, and `driveprune run`."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from driveprune import gloo
from tests.patience import PATIENCE
from tests.ranks import torchrun

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux to look at the threads")

SCRIPT = """\
import sys
import threading

imported, kind = sys.argv[1:3]
if imported == "early":
    import driveprune as dp
import atexit
import time
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", **(dict(store=dist.HashStore(), rank=0, world_size=1) if kind == "alone" else {}))
import driveprune as dp

torch.manual_seed(0)
x, y = torch.randn(64, 20), torch.randint(3, (64,))
model = nn.Sequential(nn.Linear(20, 100), nn.ReLU(), nn.Linear(100, 3))
if kind == "fsdp":
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
else:
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
mask = dp.prune(model, [(x, y)], method="snip", sparsity=0.9)
held = dp.hold(model, optimizer, mask)
nn.functional.cross_entropy(model(x), y).backward()
optimizer.step()
optimizer.zero_grad()


busy = threading.Event()


def be_busy(_):  # in a thread of gloo, which needs the interpreter for it
    if threading.current_thread() is threading.main_thread():
        return  # the sum was there before it was asked for
    busy.set()
    end = time.monotonic() + (60 if "unprotected" in sys.argv else 1)
    while time.monotonic() < end:
        pass


if "unprotected" in sys.argv:
    atexit.unregister(dp.gloo.settle)
while not busy.wait(0.1):
    dist.all_reduce(torch.ones(3_000_000), async_op=True).get_future().then(be_busy)
    if kind != "alone":
        break  # all ranks have the same number of sums
print("the last line", flush=True)
if "kept" in sys.argv:
    dist.barrier()  # else a rank may end before another one has got the sum
else:
    dist.destroy_process_group()
if "error" in sys.argv:
    raise KeyError("of the user")
"""
"""With all that keeps a group alive, and a thread that is at work when the interpreter ends, as on a busy machine."""


def script(tmp_path, *words, alone=False):
    (tmp_path / "train.py").write_text(SCRIPT)
    if not alone:
        return torchrun(None, str(tmp_path / "train.py"), *words)
    return subprocess.run(
        [sys.executable, tmp_path / "train.py", *words], capture_output=True, text=True, timeout=PATIENCE, check=False
    )


CASES = [("late", "ddp"), ("late", "fsdp", "kept")]
SLOW = [("early", "fsdp"), ("early", "ddp", "kept"), ("late", "ddp", "kept"), ("late", "fsdp")]


@pytest.mark.parametrize("words", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)])
def test_a_script_of_ones_own_ends_clean(words, tmp_path):
    """Whether driveprune is imported before there is a group or after, and whether the script ends the group."""
    done = script(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    assert "terminate called" not in done.stderr
    assert done.stdout.count("the last line") == 2


@pytest.mark.parametrize("more", [(), ("kept",)])
def test_a_script_that_fails_ends_with_its_own_error(more, tmp_path):
    done = script(tmp_path, "early", "alone", "error", *more, alone=True)
    assert done.returncode == 1
    assert "KeyError: 'of the user'" in done.stderr
    assert "terminate called" not in done.stderr


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="threads wait for ever when the interpreter has ended")
def test_without_waiting_for_the_threads_the_process_aborts(tmp_path):
    """Else the other tests could not fail, or PyTorch has mended it, and the file can go."""
    assert "terminate called" in script(tmp_path, "early", "alone", "unprotected", alone=True).stderr


def test_no_function_of_torch_holds_the_group():
    """Neither if driveprune is imported before there is a group, as here, nor after."""
    assert torch.distributed.nn.functional.all_gather.__defaults__ == (None,)
    code = (
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "import driveprune\n"
        "import torch.distributed.nn.functional as F\n"
        "assert F.all_gather.__defaults__ == (None,), F.all_gather.__defaults__\n"
        "assert driveprune.gloo._switches()\n"
        "dist.destroy_process_group()\n"
        "assert not driveprune.gloo._switches()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_it_waits_for_threads_that_work_or_wait_for_the_interpreter(group):
    done = threading.Event()

    def be_busy(_):
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            sum(range(1000))
        done.set()

    dist.all_reduce(torch.ones(3_000_000), async_op=True).get_future().then(be_busy)
    gloo.settle()
    assert done.is_set()


def test_it_does_not_wait_for_long(group, monkeypatch):
    start = time.monotonic()
    gloo.settle()
    monkeypatch.setattr(gloo, "_switches", lambda: {"1": ""})  # one that never rests
    gloo.settle(seconds=0.1)
    assert time.monotonic() - start < 30


def test_without_threads_it_returns_at_once(monkeypatch):
    assert gloo._switches() == {}
    monkeypatch.setattr(gloo, "_TASKS", Path("no such folder"))
    assert gloo._switches() == {}
    gloo.settle()
