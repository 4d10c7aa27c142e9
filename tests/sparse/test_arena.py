"""Places in a piece of memory: nobody gets one that somebody has."""

from hypothesis import given
from hypothesis import strategies as st

from driveprune.sparse.arena import Arena
from driveprune.sparse.code import LINE


def test_the_smallest_gap_is_taken():
    arena = Arena()
    places = [arena.take(n * LINE) for n in (4, 1, 2, 1)]
    assert places == [0, 4 * LINE, 5 * LINE, 7 * LINE]
    arena.give_back(places[0], 4 * LINE)
    arena.give_back(places[2], 2 * LINE)
    assert arena.take(LINE + 1) == places[2]  # whole lines
    assert arena.take(3 * LINE) == 0
    assert arena.take(LINE) == 3 * LINE  # what was left of the gap
    assert arena.take(LINE) == arena.size - LINE == 8 * LINE


def test_what_is_added_is_no_gap():
    arena = Arena(5)
    first = arena.take(LINE)
    arena.give_back(first, LINE)
    assert first == LINE
    assert arena.add(1) == 2 * LINE


@given(st.lists(st.tuples(st.integers(0, 100), st.booleans())))
def test_no_two_share_a_place(wishes):
    arena, held = Arena(), []
    for size, gives_back in wishes:
        place = arena.take(size)
        assert place % LINE == 0
        assert place + size <= arena.size
        assert all(place + size <= other or other + length <= place for other, length in held)
        held.append((place, size))
        if gives_back:
            arena.give_back(*held.pop(0))
