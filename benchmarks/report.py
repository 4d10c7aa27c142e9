"""A report of 5,000 runs: how long it takes to be made, and to be opened in a browser.

python benchmarks/report.py    # about 2 minutes on 2 cores
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import measure

from driveprune import recipes
from driveprune.recipes import scaled
from driveprune.report.groups import groups
from driveprune.report.page import page
from driveprune.runs.store import read_runs

sys.path.append(str(Path(__file__).parent.parent))
from tests.report.browser import browser, write_group

METHODS = ("dense", "imp", "random", "snip", "synflow", "drive")
RECIPES = (
    "paper-vgg16-cifar10",
    "paper-resnet18-cifar10",
    "paper-vgg16-cifar100",
    "paper-resnet18-cifar100",
    "demo-digits",
)
SECONDS_TO_MAKE, SECONDS_TO_OPEN = 20.0, 3.0


def write_runs(root: Path) -> int:
    """Ten groups of 500 runs: methods, sparsities and seeds, each with 50 epochs."""
    chosen = [recipes.get(name) for name in RECIPES]
    for recipe in (*chosen, *(scaled(recipe, epochs=99) for recipe in chosen)):
        write_group(root, recipe, METHODS[:5], 24)
        write_group(root, recipe, METHODS[5:], 23)
    return len(list(root.iterdir()))


def seconds_to_make(root: Path, html: Path) -> float:
    start = time.perf_counter()
    html.write_text(page(groups(read_runs([root]))))
    return time.perf_counter() - start


FILTER = """() => {
  const start = performance.now();
  document.querySelector("[name=data]").value = "cifar10";
  document.getElementById("filters").dispatchEvent(new Event("change"));
  document.body.getBoundingClientRect();
  return performance.now() - start;
}"""
MARKED = "name => performance.getEntriesByName(name)[0].startTime"


def milliseconds_to_open(html: Path, times: int = 5) -> dict[str, float]:
    """Until the page is usable, until it is loaded, for a filter to be applied, for a figure to appear: medians."""
    found = []
    with browser() as started:
        for _ in range(times):
            tab = started.new_context(viewport={"width": 1280, "height": 900}).new_page()
            tab.goto(html.as_uri())
            usable, loaded = (
                tab.evaluate(MARKED, "usable"),
                tab.evaluate("performance.timing.loadEventEnd - performance.timing.navigationStart"),
            )
            scrolled = tab.evaluate(
                "document.querySelector('figure').scrollIntoView({behavior: 'instant'}), performance.now()"
            )
            tab.locator("figure svg a").first.wait_for()
            found.append((usable, loaded, tab.evaluate(MARKED, "first-chart") - scrolled, tab.evaluate(FILTER)))
            tab.context.close()
    names = ("usable_ms", "loaded_ms", "first_figure_ms", "filter_ms")
    return {
        name: round(statistics.median(values)) for name, values in zip(names, zip(*found, strict=True), strict=True)
    }


def rows() -> list[dict[str, object]]:
    with tempfile.TemporaryDirectory() as folder:
        root, html = Path(folder) / "runs", Path(folder) / "report.html"
        count = write_runs(root)
        made = seconds_to_make(root, html)
        opened = milliseconds_to_open(html)
        size = html.stat().st_size
    longest = max(opened["usable_ms"], opened["loaded_ms"]) / 1000
    return [
        {"question": f"seconds to read {count:,} runs and write their page", "seconds": round(made, 2),
         "limit": SECONDS_TO_MAKE, "holds": made < SECONDS_TO_MAKE, "megabytes": round(size / 1e6, 1)},
        {"question": f"seconds until the page of {count:,} runs is open", "seconds": round(longest, 2),
         "limit": SECONDS_TO_OPEN, "holds": longest < SECONDS_TO_OPEN, **opened},
    ]  # fmt: skip


if __name__ == "__main__":
    measure.write("report", rows())
