"""A few mutated inputs for each parser; the campaign of all of them is slow, and its counts are kept."""

import importlib
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest

from driveprune.runs.job import environment
from tests.fuzz.campaign import SECONDS, TARGETS

HOME = Path(__file__).parents[2]
COUNT = 10_000
"""Mutated inputs for each parser."""

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="a campaign limits memory and time as POSIX does")


def campaign(names, count, seed):
    """Counts by name, from a process of its own, whose end by a signal would be a find, too."""
    command = [sys.executable, "-m", "tests.fuzz.campaign", names, str(count), str(seed)]
    done = subprocess.run(command, cwd=HOME, capture_output=True, text=True, check=False, timeout=4 * 3600)
    assert done.returncode == 0, f"{' '.join(command[1:])}: {done.returncode}\n{done.stderr[-4000:]}"
    found = {}
    for line in done.stdout.splitlines():
        found |= json.loads(line)
    return found


def test_each_parser_takes_or_refuses_what_it_is_given():
    found = campaign("all", 15, 1)
    assert found.keys() == set(TARGETS)
    assert all(counts["inputs"] == 15 == counts["taken"] + counts["refused"] for counts in found.values())


def test_every_target_stands_in_a_file_of_its_own():
    files = {path.stem for path in Path(__file__).parent.glob("*.py")}
    assert files - {"__init__", "test_fuzz", "campaign", "mutations"} == set(TARGETS)


def test_an_input_is_known_by_its_number_alone(tmp_path):
    target = importlib.import_module("tests.fuzz.places")
    honest = target.honest(tmp_path)

    def made(number):
        chance = Random(f"{target.__name__} 0 {number}")
        return target.mutated(chance.choice(honest), chance)

    assert [made(number) for number in range(50)] == [made(number) for number in range(50)]
    assert len({made(number) for number in range(50)}) > 25


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("raise KeyError('x')", "KeyError"),
        ("assert False, 'wrong weights'", "wrong weights"),
        ("x = bytearray(3 << 30)", "MemoryError"),
        ("import time; time.sleep(9)", "it hangs"),
        ("import os; os.abort()", "-6"),
    ],
)
def test_a_find_is_told(tmp_path, wrong, message):
    """The campaign is tried on a target that is wrong, in every way in which one can be."""
    (tmp_path / "wrong.py").write_text(
        "def honest(folder): return [b'abc']\n"
        "def mutated(data, chance): return data + b'!'\n"
        f"def target(data, folder):\n    if data != b'abc':\n        {wrong}\n"
    )
    code = (
        "import sys, tests.fuzz, tests.fuzz.campaign as c; tests.fuzz.__path__.append(sys.argv[1]); c.SECONDS = 1; "
        "c.main(['wrong', '3', '0'])"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, cwd=HOME, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode != 0
    assert message in f"{done.returncode} {done.stderr}"
    assert done.returncode < 0 or "wrong 0 0: " in done.stderr


@pytest.mark.slow
def test_10_000_mutated_inputs_for_each_parser():
    """None of them gives wrong weights, a crash, a hang, or more than twice the memory of an honest file."""
    start, found, finds = time.time(), {}, []

    def run(name):
        try:
            found.update(campaign(name, COUNT, 0))
        except AssertionError as find:  # the others are looked at all the same
            finds.append(str(find))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, TARGETS))
    assert not finds, "\n\n".join(finds)
    assert found.keys() == set(TARGETS)
    assert all(counts["inputs"] == COUNT == counts["taken"] + counts["refused"] for counts in found.values())
    content = {
        "command": "make test-all",
        "what": "mutated inputs of each parser, under a limit of memory and of time: taken with the right result, or "
        "refused with one clear error",
        "seed": 0,
        "targets": {name: found[name] for name in TARGETS},
        "inputs": sum(counts["inputs"] for counts in found.values()),
        "wrong results, crashes, hangs, more than twice the memory": 0,
        "seconds_for_an_input_at_most": SECONDS,
        "seconds": round(time.time() - start),
        **environment(),
    }
    (HOME / "results" / "fuzz.json").write_text(json.dumps(content, indent=2) + "\n")
