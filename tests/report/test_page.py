"""The page in a real browser, compared with the files of the store."""

import json
import os
import re
import statistics
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from driveprune.files import read_json
from driveprune.report.groups import groups
from driveprune.report.page import page
from driveprune.runs.store import Run, read_runs
from tests.report.browser import EVIL, browser, write_store
from tests.report.stores import run, unfinished

pytestmark = pytest.mark.xdist_group("browser")
VGG, RESNET = "vgg16 on cifar10", "resnet18 on cifar100"


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    return write_store(tmp_path_factory.mktemp("page") / "runs")


@pytest.fixture(scope="module")
def html(store) -> Path:
    path = store.parent / "report.html"
    path.write_text(page(groups(read_runs([store])), title="A <b>report</b>"))
    return path


@pytest.fixture(scope="module")
def started():
    with browser() as found:
        yield found


@pytest.fixture
def opened(started, html):
    """Opens the page; in the end nothing may have been asked of a network, said on the console or alerted."""
    wrong, contexts = [], []

    def opener(*, width=1280, height=900, hash="", **options):
        context = started.new_context(viewport={"width": width, "height": height}, reduced_motion="reduce", **options)
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda said: wrong.append(f"console: {said.text}"))
        tab.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        tab.on("dialog", lambda alert: (wrong.append(f"alert: {alert.message}"), alert.dismiss()))
        tab.on(
            "request", lambda asked: wrong.append(asked.url) if not asked.url.startswith(("file:", "blob:")) else None
        )
        tab.goto(f"{html.as_uri()}{hash}")
        return tab

    yield opener
    for context in contexts:
        context.close()
    assert not wrong


def results(store: Path) -> list[tuple[dict, dict]]:
    """Spec and result of each finished run, straight from its files."""
    folders = sorted(path.parent for path in store.glob("*/result.json"))
    return [(read_json(folder / "spec.json"), read_json(folder / "result.json")) for folder in folders]


def section(tab, title: str):
    return tab.locator("section.group", has=tab.locator("h2", has_text=title))


def table_of(tab, title: str, name: str) -> dict[str, list[str]]:
    """Method -> the numbers of its row, as a reader sees them."""
    rows = section(tab, title).locator(f"table.{name} tbody tr:visible")
    return {row.locator("th").inner_text().strip(): row.locator(".ours").all_inner_texts() for row in rows.all()}


def expected(store: Path, model: str, data: str, of: str) -> dict[str, list[str]]:
    """Mean and deviation of each cell, and how many of its runs are done if not all are."""
    cells, begun = defaultdict(list), Counter()
    for path in sorted(store.glob("*/spec.json")):
        spec = json.loads(path.read_text()) if path.stat().st_size > 1 else {}  # one is damaged
        if spec and (spec["recipe"]["model"], spec["recipe"]["data"]) == (model, data):
            key = spec["method"], spec["sparsity"]
            begun[key] += 1
            if (path.parent / "result.json").exists():
                cells[key].append(100 * read_json(path.parent / "result.json")[of])
    said = {key: f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}" for key, values in cells.items()}
    said |= {key: f"{said[key]} ({len(cells[key])} of {begun[key]})" for key in cells if len(cells[key]) < begun[key]}
    sparsities = sorted({sparsity for _, sparsity in cells} - {0.0})
    return {method: [said[method, s if method != "dense" else 0.0] for s in sparsities] for method, _ in cells}


@pytest.mark.parametrize(("model", "data"), [("vgg16", "cifar10"), ("resnet18", "cifar100")])
@pytest.mark.parametrize("of", ["last", "best"])
def test_tables_say_what_the_files_say(opened, store, model, data, of):
    found = table_of(opened(), f"{model} on {data},", f"accuracy-{of}")
    assert found == expected(store, model, data, of)
    assert len(found) >= 4


def test_times_are_those_of_the_files(opened, store):
    found = table_of(opened(), VGG, "times")
    pruning = defaultdict(list)
    for spec, result in results(store):
        if spec["recipe"]["model"] == "vgg16":
            pruning[spec["method"]].append(result["seconds"]["pruning"])
    means = {method: statistics.mean(values) for method, values in pruning.items()}
    assert found["drive"][0] == f"{means['drive']:,.2f}"
    assert found["drive"][2] == f"{means['imp'] / means['drive']:,.1f}× faster"


def test_the_papers_numbers_stand_beside(opened, store):
    tab = opened()
    row = section(tab, VGG).locator("table.accuracy-last tr", has_text="drive")
    beside = row.locator("td").nth(2).locator(".paper").inner_text()
    values = [
        100 * result["last"]
        for spec, result in results(store)
        if (spec["recipe"]["model"], spec["method"], spec["sparsity"]) == ("vgg16", "drive", 0.98)
    ]
    difference = statistics.mean(values) - 91.36  # the paper's table
    assert beside == f"paper 91.36 ({difference:+.2f})".replace("-", "−")


def test_best_early_is_bold_and_collapsed_is_underlined_and_explained(opened):
    tab = opened()
    part = section(tab, VGG)
    strong = part.locator("table.accuracy-last .strong")
    assert strong.count() == 4
    assert all(
        float(weight) >= 700 for weight in strong.evaluate_all("e => e.map(x => getComputedStyle(x).fontWeight)")
    )
    collapsed = part.locator("table.accuracy-last .collapsed")
    assert collapsed.all_inner_texts() == ["10.00 ± 0.00"]
    assert "underline" in collapsed.evaluate("e => getComputedStyle(e).textDecorationLine")
    assert "no path leads from input to output" in part.locator(".notes").inner_text()


def test_overview_names_method_sparsity_and_cost(opened):
    card = opened().locator("#overview .card", has_text=VGG)
    said = card.locator(".answer").inner_text()
    assert re.search(r"drive at 90%\s+network in 4\d\d s, 4\d\.\d× faster than IMP", said)


def test_claims_have_a_verdict_and_numbers(opened):
    tab = opened()
    rows = tab.locator("table.claims tbody tr")
    verdicts = [row.locator("> td .verdict").first.inner_text()[2:] for row in rows.all()]
    assert len(verdicts) > 5
    assert set(verdicts) <= {"held", "did not hold", "not tested"}
    rows.first.locator("summary").click()
    assert "against" in rows.first.locator("li").first.inner_text()


def test_filters_hide_groups_rows_and_points(opened):
    tab = opened()
    assert tab.locator("#count").inner_text().startswith("94 of 94 runs")
    tab.get_by_label("Data set").select_option("cifar10")
    tab.get_by_label("Model").select_option("vgg16")
    assert tab.locator("section.group:visible h2").count() == 1
    assert tab.locator("#overview .card:visible").count() == 1
    chart = section(tab, VGG).locator("figure[data-figure=accuracy]")
    chart.scroll_into_view_if_needed()
    chart.locator("svg a").first.wait_for()
    assert chart.locator("svg a").count() == 32  # 4 methods, 4 sparsities, 2 seeds
    tab.get_by_label("snip", exact=True).uncheck()
    assert "snip" not in table_of(tab, VGG, "accuracy-last")
    assert chart.locator("svg a").count() == 24
    assert "snip" not in chart.locator(".legend").inner_text()
    assert tab.locator("#count").inner_text().startswith("27 of 94 runs")  # 26 done and one failed
    tab.get_by_role("button", name="None").click()
    assert table_of(tab, VGG, "accuracy-last") == {}
    assert "Nothing to show" in chart.inner_text()
    tab.get_by_role("button", name="All").click()
    assert chart.locator("svg a").count() == 32


def test_every_figure_is_drawn(opened):
    tab = opened()
    part = section(tab, VGG)
    names = part.locator("figure").evaluate_all("all => all.map(figure => figure.dataset.figure)")
    assert set(names) == {"accuracy", "cost", "relative", "phases", "layers", "curves", "effective", "size"}
    for name in names:
        figure = part.locator(f"figure[data-figure={name}]")
        figure.scroll_into_view_if_needed()
        figure.locator("svg[class^=plot]").first.wait_for()
        assert "NaN" not in figure.inner_html()


def test_figures_of_what_few_runs_have_are_only_with_those(opened):
    tab = opened()
    figure = section(tab, "digits_net on digits").locator("figure[data-figure=speedup]")
    figure.scroll_into_view_if_needed()
    figure.locator("svg a").first.wait_for()
    assert figure.locator("svg a").count() == 16
    assert section(tab, "digits_net on digits").locator("figure[data-figure=relative]").count() == 0  # no IMP


def test_every_run_is_listed_and_none_dropped(opened, store):
    tab = opened()
    listed = set(tab.locator("#list tbody th").all_inner_texts())
    assert listed == {path.name for path in store.iterdir()}
    odd = tab.locator("#unfinished tbody tr")
    assert sorted(odd.locator(".standing").all_inner_texts()) == ["damaged", "failed", "unfinished"]
    assert f"ValueError: {EVIL}" in odd.filter(has_text="failed").inner_text()
    assert "30%: step 1,200 of 4,000, training" in odd.filter(has_text="unfinished").inner_text()


def test_a_run_opens_by_its_address_with_numbers_command_and_spec(opened, store, tmp_path):
    folder = next(path for path in sorted(store.glob("cifar10-vgg16-drive-98-*")))
    result = read_json(folder / "result.json")
    tab = opened(hash=f"#run={folder.name}")
    dialog = tab.get_by_role("dialog")
    assert dialog.locator("h2").inner_text() == folder.name
    assert f"{100 * result['last']:.2f}%" in dialog.locator("dl").inner_text()
    assert dialog.locator("#command").inner_text() == f"driveprune run --spec {folder}/spec.json --runs repeated"
    assert (
        json.loads(dialog.locator("#spec").inner_text())["sha256"]
        == json.loads((folder / "spec.json").read_text())["sha256"]
    )
    assert '"label_smoothing": 0.0' in dialog.locator("#spec").inner_text()
    with tab.expect_download() as waiting:
        dialog.get_by_role("link", name="Download").click()
    waiting.value.save_as(tmp_path / "spec.json")
    assert read_json(tmp_path / "spec.json") == read_json(folder / "spec.json")
    dialog.get_by_role("button", name="Copy").click()
    dialog.get_by_role("status").filter(has_text=re.compile("copied|press")).wait_for()
    dialog.get_by_role("button", name="Close").click()
    tab.wait_for_url(lambda url: "#run" not in url)  # a dialog says a moment later that it was closed


def test_the_keyboard_is_enough(opened):
    tab = opened()
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.textContent") == "Skip to the results"
    for _ in range(60):
        tab.keyboard.press("Tab")
        if tab.evaluate("document.activeElement.name === 'method'"):
            break
    tab.keyboard.press("Space")
    assert not tab.get_by_label("dense", exact=True).is_checked()
    chart = section(tab, VGG).locator("figure[data-figure=accuracy]")
    chart.scroll_into_view_if_needed()
    chart.locator("svg a").first.wait_for()
    section(tab, VGG).locator("table.times").locator("..").focus()
    tab.keyboard.press("Tab")
    first = tab.evaluate("document.activeElement.getAttribute('aria-label')")
    tab.keyboard.press("ArrowRight")
    second = tab.evaluate("document.activeElement.getAttribute('aria-label')")
    assert first != second
    assert second == tab.locator("#tip").inner_text()
    assert re.match(r"\w+ at \d+%, seed \d\naccuracy \d\d\.\d\d%", second)
    tab.keyboard.press("Enter")
    tab.get_by_role("dialog").wait_for()
    tab.keyboard.press("Escape")
    tab.get_by_role("dialog").wait_for(state="hidden")
    assert tab.evaluate("document.activeElement.getAttribute('aria-label')") == second


def test_hovering_shows_the_runs_numbers(opened, store):
    tab = opened()
    chart = section(tab, RESNET).locator("figure[data-figure=accuracy]")
    chart.scroll_into_view_if_needed()
    chart.locator("svg a").first.wait_for()
    point = chart.locator("svg a").last  # nothing is drawn over it
    point.hover()
    tip = tab.locator("#tip").inner_text()
    name = point.get_attribute("href").removeprefix("#run=")
    assert f"accuracy {100 * read_json(store / name / 'result.json')['last']:.2f}%" in tip


def test_names_that_are_html_are_text(opened, html):
    tab = opened()
    assert tab.locator("h1").inner_text() == "A <b>report</b>"
    assert tab.locator("img").count() == 0
    assert section(tab, "net<img").locator("table.accuracy-last th[scope=row]").inner_text().strip() == f"mine{EVIL}"
    tab.locator("#list a", has_text="onerror").click()
    said = tab.get_by_role("dialog").inner_text()
    assert EVIL in said
    assert "'\"'\"'quoted'\"'\"'/spec.json' --runs repeated" in said
    for raw in ("<img", "<script>alert", "</script><script>alert"):
        assert raw not in html.read_text()


def test_nothing_is_loaded_from_elsewhere(html):
    text = html.read_text()
    assert not re.findall(r"""<[^>]+(?:src|href)=["']?(?:https?:)?//""", text)
    assert "default-src 'none'" in text


def test_an_empty_or_hopeless_store_is_a_page(tmp_path):
    assert "No run is done yet" in page([])
    damaged = Run(tmp_path / "x", "damaged", {}, error="no luck")
    assert "no luck" in page(groups([damaged]))
    nameless = Run(tmp_path / "\udcff", "damaged", {}, error="\udcff")  # bytes that are no text
    assert page(groups([nameless])).encode()


@pytest.mark.parametrize("width", [360, 375, 390])
def test_a_phone_does_not_scroll_sideways(opened, width):
    tab = opened(width=width, height=740)
    section(tab, VGG).locator("figure").last.scroll_into_view_if_needed()
    assert tab.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast(opened, scheme):
    tab = opened(color_scheme=scheme)
    assert tab.evaluate(CONTRAST) == []


CONTRAST = """() => {
  const context = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = (colour) => {
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    return [...context.getImageData(0, 0, 1, 1).data];
  };
  const linear = (v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const ground = (e) => {
    const own = e ? rgb(getComputedStyle(e).backgroundColor) : [255, 255, 255, 255];
    return own[3] === 255 ? own : ground(e.parentElement);
  };
  const hasText = (e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
  const weak = new Set();
  for (const e of document.querySelectorAll("body *:not(script)")) {
    if (!hasText(e) || !e.checkVisibility()) continue;
    const [a, b] = [light(rgb(getComputedStyle(e).color)), light(ground(e))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) weak.add(`${e.localName}.${e.className}: ${e.textContent.slice(0, 20)}`);
  }
  return [...weak];
}"""


def test_the_theme_can_be_switched(opened):
    tab = opened(color_scheme="light")
    before = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    tab.get_by_role("button", name="Dark").click()
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") != before
    tab.get_by_role("button", name="Light").click()
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == before


def test_the_page_is_of_use_without_scripts(opened, store):
    tab = opened(java_script_enabled=False)
    assert table_of(tab, VGG, "accuracy-last") == expected(store, "vgg16", "cifar10", "last")
    assert tab.locator("#filters").is_hidden()


LOOKS = {
    "desktop-light": {"width": 1280, "color_scheme": "light"},
    "desktop-dark": {"width": 1280, "color_scheme": "dark"},
    "phone-light": {"width": 375, "color_scheme": "light"},
    "phone-dark": {"width": 375, "color_scheme": "dark"},
    "print": {"width": 900, "color_scheme": "dark"},
    "dialog": {"width": 1280, "color_scheme": "light"},
    "dialog-phone": {"width": 375, "color_scheme": "dark"},
}


@pytest.mark.parametrize("name", LOOKS)
def test_pictures_for_who_wants_to_look(opened, store, tmp_path, name):
    folder = Path(os.environ.get("DRIVEPRUNE_SCREENSHOTS", tmp_path))
    run = next(path.name for path in sorted(store.glob("cifar10-vgg16-drive-98-*")))
    dialog = name.startswith("dialog")
    tab = opened(**LOOKS[name], hash=f"#run={run}" if dialog else "")
    if name == "print":
        tab.emulate_media(media="print")
        assert tab.locator("#filters").is_hidden()
        assert tab.evaluate("getComputedStyle(document.documentElement).colorScheme") == "light"
    if not dialog:
        tab.evaluate("charts.forEach((_, figure) => draw(figure))")
        assert section(tab, VGG).locator("svg[class^=plot]").count() > 10
    tab.screenshot(path=folder / f"{name}.png", full_page=not dialog)
    assert (folder / f"{name}.png").stat().st_size > 10_000


def test_runs_that_are_missing_or_running_are_on_the_page():
    runs = [run("snip", 0.9, 0.9), unfinished("drive", 0.9, "missing"), unfinished("imp", 0.9, "running")]
    text = page(groups(runs))
    for one in runs[1:]:
        assert one.path.name in text
        assert one.standing in text
