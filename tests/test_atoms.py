import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from driveprune.atoms import Space


def test_joined_atoms_have_one_root():
    space = Space()
    a, b, c = space.new(3), space.new(3), space.new(3)
    assert np.array_equal(space.join(a, b), a)
    assert np.array_equal(space.roots(a), space.roots(b))
    assert not np.array_equal(space.roots(a), space.roots(c))
    space.join(b, c[::-1].copy())
    assert np.array_equal(space.roots(a), space.roots(c)[::-1])


def test_an_axis_without_atoms_or_of_another_size_pins_what_it_meets():
    space = Space()
    a, b, c = space.new(3), space.new(3), space.new(2)
    assert space.join(a, None) is None
    assert set(space.pinned_roots()) == set(a)
    assert space.join(b, c) is None
    assert set(space.pinned_roots()) == {*a, *b, *c}


def test_a_pin_holds_for_all_that_is_joined_later():
    space = Space()
    a, b = space.new(2), space.new(2)
    space.pin(b[:1])
    space.join(a, b)
    assert set(space.pinned_roots()) == {space.root(int(a[0]))}


@given(st.lists(st.tuples(st.integers(0, 19), st.integers(0, 19)), max_size=40))
def test_roots_are_the_classes_of_what_was_joined(pairs):
    space = Space()
    atoms = space.new(20)
    classes = [{number} for number in range(20)]
    for a, b in pairs:
        space.join(atoms[[a]], atoms[[b]])
        merged = classes[a] | classes[b]
        for number in merged:
            classes[number] = merged
    roots = space.roots(atoms)
    for number in range(20):
        assert {other for other in range(20) if roots[other] == roots[number]} == classes[number]
