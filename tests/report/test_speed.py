import xml.etree.ElementTree as ET

import pytest
from PIL import Image

from driveprune.bench import Bench, Timing
from driveprune.report import speed

BENCH = Bench(
    (Timing("inference", 1, 0.01, 0.02), Timing("inference", 32, 0.09, 0.03), Timing("training step", 128, 1.0, 1.0)),
    sparsity=0.98, mac_density=0.13, threads=2, load=0.0,
)  # fmt: skip


def test_bars_are_as_high_as_the_speedup():
    figure = speed.picture(BENCH, "net_$1")
    left, right = figure.axes
    assert [bar.get_height() for bar in left.patches] == pytest.approx([0.5, 3.0])
    assert [bar.get_height() for bar in right.patches] == [1.0]
    assert len({bar.get_facecolor() for axes in (left, right) for bar in axes.patches}) == 3
    assert left.texts[1].get_text() == "3.0×\n90 → 30 ms"
    assert right.get_title() == "training step"


def test_pictures_are_written(tmp_path):
    for name in ("a.svg", "again.svg", "a.png", "a.pdf"):
        speed.write(tmp_path / name, BENCH, "net_$1")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "again.svg").read_bytes()
    assert ET.parse(tmp_path / "a.svg").getroot().tag.endswith("svg")
    with Image.open(tmp_path / "a.png") as image:
        assert image.width > 600


def test_what_cannot_be_drawn_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"must end with \.svg, \.png, \.pdf, got a\.gif"):
        speed.write(tmp_path / "a.gif", BENCH)
    with pytest.raises(ValueError, match="nothing was measured"):
        speed.picture(Bench((), 0.5, None, 1, None))
