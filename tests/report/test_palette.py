from driveprune import methods
from driveprune.report import palette
from driveprune.report.groups import WORKS


def test_methods_have_colours_and_marks_of_their_own():
    names = ["dense", *methods.names()]
    assert len({palette.colour(name, names) for name in names}) == len(names)
    some = ["imp", "snip", "synflow", "drive", "drive +shuffle"]
    looks = {(palette.colour(name, some), palette.mark(name, some)) for name in some}
    assert len(looks) == len(some)
    assert len({palette.mark(name, some) for name in some[:4]}) == 4
    assert palette.mark("drive", ["drive"]) == palette.mark("drive", some)
    assert palette.colour("drive", some) == palette.colour("drive +shuffle", some)
    assert palette.colour("mine", ["mine", "yours"]) != palette.colour("yours", ["mine", "yours"])


def test_works_have_colours():
    assert palette.WORKS.keys() == set(WORKS)


def test_shades_go_from_light_to_dark():
    assert len({palette.shade(place, 4) for place in range(4)}) == 4
    assert palette.shade(0, 1) == palette.shade(0, 9)
