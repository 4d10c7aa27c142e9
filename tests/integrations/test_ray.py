"""Sweeps on real Ray clusters: nodes and workers that are killed, Ctrl-C, and what is said when it cannot be."""

import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from driveprune import datasets
from driveprune.cli import app
from driveprune.integrations import ray as on_ray
from driveprune.runs.spec import Spec
from driveprune.runs.store import read_run, read_runs, read_wanted, write_wanted
from driveprune.runs.sweep import sweep
from tests.patience import PATIENCE
from tests.runs.kills import assert_same, small_spec
from tests.runs.test_sweep import wait_for

GATED = """\
\"\"\"Gated: by magnitude, as soon as there is a file `gate`.\"\"\"

import os
import time
from pathlib import Path

from driveprune.plan import Prune, Train


def score(model, mask, batches, *, loss, generator):
    Path(f"waiting-{os.getpid()}").touch()
    while not Path("gate").exists():
        time.sleep(0.1)
    return {name: dict(model.named_parameters())[name].abs() for name in mask}


def plan(sparsity, steps, steps_per_epoch):
    return [Train(5), Prune(score, (sparsity,)), Train(steps)]
"""
DEADLY = "import os\ndef score(model, mask, batches, *, loss, generator):\n    os.kill(os.getpid(), 9)\n"
SMALL = "--sparsities 0.9 --threads 1 --every 0 --no-share --width 0.25 --images 400 --epochs 5 --json --cluster ray"
LISTENING = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # ignored in the background

HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 4,
    "health_check_timeout_ms": 120_000,
}
"""A dead node refuses to answer and is known to be dead after 2 s; one that is slow on a loaded machine has 120 s."""


@pytest.fixture(scope="module")
def two_nodes():
    """A cluster of two nodes with a CPU and (as far as Ray knows) a GPU each, and the second node."""
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    (folder / "ray").mkdir()
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")  # Ray's own
        patch.setenv("RAY_TMPDIR", str(folder))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        for name, value in on_ray.PATIENT.items():
            patch.setenv(name, value)
        from ray.cluster_utils import Cluster

        room = {"num_cpus": 1, "num_gpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args={**room, "_system_config": HEALTH_CHECKS})
        second = cluster.add_node(**room)
        yield cluster, second
        cluster.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def start(tmp_path):
    """Starts the command in a folder with methods of our own; it does not outlive the test."""
    (tmp_path / "gated.py").write_text(GATED)
    (tmp_path / "deadly.py").write_text(DEADLY)
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | on_ray.PATIENT
    command = [sys.executable, "-c", f"{LISTENING}; from driveprune.cli import main; main()", "sweep", *SMALL.split()]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = []

    def begin(*words):
        started.append(subprocess.Popen([*command, *words], cwd=tmp_path, env=environment, **pipes))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def test_killed_workers_and_nodes_lose_nothing(two_nodes, start, tmp_path, monkeypatch):
    cluster, second = two_nodes
    words = "--methods gated --seeds 0,1,2,3,4 --cpus-per-run 0.5 --gpus-per-run 0.25"
    process = start(*words.split(), "--address", cluster.address)
    wait_for(lambda: len(list(tmp_path.glob("waiting-*"))) == 4, process)  # halves of CPUs: two a node
    first = min(tmp_path.glob("waiting-*"))
    os.kill(int(first.name.partition("-")[2]), signal.SIGKILL)
    wait_for(lambda: len(list(tmp_path.glob("waiting-*"))) == 5, process)  # the run goes on elsewhere
    cluster.remove_node(second, allow_graceful=False)
    (tmp_path / "gate").touch()
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    told = json.loads(output)
    assert len(told["done"]) == 5
    assert told["failed"] == {}
    runs = [read_run(tmp_path / "runs" / name) for name in told["done"]]
    assert (
        sum(run.status.get("began_step", 0) >= 4 for run in runs) >= 2
    )  # from their checkpoints, not from the beginning
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    specs = [Spec.from_json(run.spec) for run in runs]
    sweep(tmp_path / "local", specs, datasets.load("digits"), every=1e9, console=Console(file=io.StringIO()))
    for run in runs:
        assert_same(run.path, tmp_path / "local" / run.path.name)


@pytest.mark.slow
def test_a_run_that_always_kills_its_worker_fails_and_the_others_are_done(two_nodes, start):
    process = start("--methods", "deadly,snip", "--retries", "1", "--address", two_nodes[0].address)
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1, errors
    told = json.loads(output)
    assert [name.split("-")[2] for name in told["done"]] == ["snip"]
    (failed,) = told["failed"].values()
    assert failed.startswith("its worker was lost, and so were those of 1 retries")


def test_ctrl_c_leaves_nobody_behind_and_the_sweep_goes_on(start, tmp_path, monkeypatch):
    process = start("--methods", "gated", "--seeds", "0,1,2")
    wait_for(lambda: list(tmp_path.glob("waiting-*")), process)
    os.kill(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, errors
    assert "the same command goes on" in errors
    assert json.loads(output)["interrupted"] is True
    assert not any(run.standing == "running" for run in read_runs([tmp_path / "runs"]))
    (tmp_path / "gate").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    specs = [Spec.from_json(spec) for spec, _ in read_wanted(tmp_path / "runs").values()]
    outcome = sweep(tmp_path / "runs", specs, datasets.load("digits"), every=0, console=Console(file=io.StringIO()))
    assert len(outcome.done) + len(outcome.skipped) == 3  # on this machine alone: the same store
    assert any(run.status.get("began_step", 0) >= 4 for run in read_runs([tmp_path / "runs"]))


@pytest.mark.slow
def test_a_run_that_fits_nowhere_is_an_error(start):
    process = start("--methods", "snip", "--cpus-per-run", "1000")
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    assert "no node has 1000 CPUs and 0 GPUs for a run: there are" in errors


def test_nothing_is_started_if_nothing_is_to_be_done(tmp_path):
    spec = small_spec("snip")
    quiet = {"console": Console(file=io.StringIO())}
    sweep(tmp_path, [spec], datasets.load("digits"), **quiet)
    again = sweep(tmp_path, [spec], datasets.load("digits"), hire=on_ray.cluster("no-such-host:1"), **quiet)
    assert again.skipped == [spec.id]


def test_an_address_where_nobody_answers_is_an_error_at_once(tmp_path):
    with pytest.raises(ConnectionError, match="there is no Ray cluster at 127.0.0.1:1"):
        sweep(
            tmp_path, [small_spec("snip")], datasets.load("digits"), hire=on_ray.cluster("127.0.0.1:1"),
            console=Console(file=io.StringIO()),
        )  # fmt: skip


def test_a_node_that_does_not_see_the_folder_says_so(tmp_path):
    spec = small_spec("snip")
    order = {"spec": spec.to_json(), "data_dir": None, "share": False, "every": 60.0, "engine": "dense"}
    told = on_ray._do(str(tmp_path), order, os.getcwd())
    assert "does not see" in told["error"]
    assert "all nodes must share it" in told["error"]
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks_is_refused(tmp_path, monkeypatch):
    spec = small_spec("snip")
    write_wanted(tmp_path, [spec], {spec.id: 1})
    monkeypatch.setattr("fcntl.flock", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSYS, "no locks")))
    order = {"spec": spec.to_json(), "data_dir": None, "share": False, "every": 60.0, "engine": "dense"}
    told = on_ray._do(str(tmp_path), order, os.getcwd())
    assert "flock not supported" in told["error"]
    assert not (tmp_path / spec.id / "result.json").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--cluster slurm", "--cluster must be ray, got 'slurm'"),
        ("--cluster ray --jobs 2", "--jobs is for this machine alone"),
        ("--cpus-per-run 0.5", "--cpus-per-run is for a cluster: say --cluster ray, too"),
        ("--cluster ray --cpus-per-run -1", "cpus_per_run must be at least 0, got -1"),
        ("--cluster ray --gpus-per-run 1.5", "gpus_per_run must be a part of one or a whole number, got 1.5"),
        ("--cluster ray --retries -1", "retries must be at least 0, got -1"),
    ],
)
def test_what_cannot_be_is_one_clear_line(words, said):
    done = CliRunner().invoke(app, ["sweep", *words.split()])
    assert done.exit_code == 2
    assert said in done.output


def test_a_cluster_of_ones_own_is_waited_for_on_a_loaded_machine(tmp_path, monkeypatch):
    """And what is set already stays as it is."""
    ray, seen = pytest.importorskip("ray"), []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda *_, **__: seen.append(dict(os.environ)))
    for name in on_ray.PATIENT:  # the cluster of other tests has set them
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_gcs_rpc_server_connect_timeout_s", "7")
    order = {"data_dir": None, "share": False, "every": 60.0, "engine": "dense"}
    crew = on_ray.cluster()(tmp_path, [small_spec("snip")], order)
    crew._connect()
    crew.close()
    assert {name: seen[0][name] for name in on_ray.PATIENT} == {
        **on_ray.PATIENT, "RAY_gcs_rpc_server_connect_timeout_s": "7",
    }  # fmt: skip
    assert "RAY_gcs_server_port_wait_time_s" not in os.environ


def test_without_ray_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    done = CliRunner().invoke(app, ["sweep", "--cluster", "ray"])
    assert done.exit_code == 2
    assert "pip install 'driveprune[ray]'" in done.output
