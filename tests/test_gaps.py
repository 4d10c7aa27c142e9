import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from driveprune import gaps
from driveprune.gaps import Gaps, decode, encode, entropy_bits


def decoded(code: Gaps) -> np.ndarray:
    kept = np.full(code.size, code.inverted)
    for places in decode(code):
        kept[places] = not code.inverted
    return kept


def literal(code: Gaps) -> list[int]:
    """The listed places, read bit by bit as the format says."""
    high = "".join(f"{byte:08b}" for byte in code.high)
    low = "".join(f"{byte:08b}" for byte in code.low)
    places, at, place = [], 0, -1
    for number in range(code.listed):
        end = high.index("1", at)
        rest = low[number * code.k : (number + 1) * code.k]
        place += ((end - at) << code.k) + (int(rest, 2) if rest else 0) + 1
        places.append(place)
        at = end + 1
    return places


def test_by_hand():
    code = encode(np.array([0, 0, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0], bool))
    assert (code.listed, code.inverted, code.k) == (2, False, 2)
    assert "".join(f"{byte:08b}" for byte in code.high) == "01100000"  # 5 = 1·4 + 1, 2 = 0·4 + 2
    assert "".join(f"{byte:08b}" for byte in code.low) == "01100000"


@given(st.lists(st.booleans(), max_size=300), st.integers(8, 64))
def test_what_was_encoded_is_decoded_in_blocks_of_any_size(flags, block):
    kept = np.array(flags, bool)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gaps, "BLOCK", block)
        code = encode(kept)
        assert np.array_equal(decoded(code), kept)
    assert np.array_equal(decoded(code), kept)
    assert literal(code) == list(np.flatnonzero(~kept if code.inverted else kept))


@pytest.mark.parametrize("density", [1e-5, 0.001, 0.02, 0.1, 0.3, 0.5, 0.7, 0.93, 0.999])
def test_near_the_entropy(density):
    kept = np.random.default_rng(0).random(1_000_000) < density
    code = encode(kept)
    bound = entropy_bits(int(kept.sum()), kept.size)
    assert 8 * (code.high.size + code.low.size) <= 1.04 * bound + 16
    assert np.array_equal(decoded(code), kept)


@pytest.mark.parametrize("density", [0.001, 0.02, 0.1, 0.3, 0.5])
def test_never_far_from_the_entropy_however_the_places_lie(density):
    kept = np.zeros(100_000, bool)
    kept[-int(density * kept.size) :] = True  # one long gap, then none
    code = encode(kept)
    assert 8 * (code.high.size + code.low.size) <= 1.1 * entropy_bits(int(kept.sum()), kept.size) + 16


def test_entropy():
    assert entropy_bits(0, 10) == entropy_bits(10, 10) == 0
    assert entropy_bits(5, 10) == 10
    assert entropy_bits(1, 4) == pytest.approx(4 * (0.25 * 2 + 0.75 * np.log2(4 / 3)))


def test_streams_that_make_no_sense():
    kept = np.random.default_rng(0).random(1000) < 0.1
    code = encode(kept)
    more = np.concatenate([code.high, np.array([0x80], np.uint8)])
    odd = [
        {"listed": code.listed - 1}, {"listed": code.listed + 8}, {"size": 500}, {"k": code.k + 1}, {"k": -1},
        {"k": 63}, {"listed": -1}, {"listed": 10**9}, {"high": code.high[:-1]}, {"high": more},
        {"low": code.low[:-1]}, {"high": np.zeros_like(code.high)}, {"high": np.full_like(code.high, 255)},
    ]  # fmt: skip
    for change in odd:
        with pytest.raises(ValueError, match="make|listed|bytes are no"):
            list(decode(Gaps(**{**vars(code), **change})))


@given(st.lists(st.booleans(), max_size=200), st.integers(0, 2**32), st.integers(8, 64))
def test_what_two_lists_have_in_common(flags, seed, block):
    kept = np.array(flags, bool)
    other = np.random.default_rng(seed).random(kept.size) < 0.4
    first, second = encode(kept), encode(other)
    listed = [code ^ made.inverted for code, made in ((kept, first), (other, second))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gaps, "BLOCK", block)
        assert gaps.common(first, second) == gaps.common(second, first) == int((listed[0] & listed[1]).sum())


@pytest.mark.parametrize("k", [1, 20, 39, 40])
def test_streams_of_a_huge_tensor_never_leave_64_bits(k):
    """Remainders as large as they can be: their sum is beyond every place, and says so."""
    many = 1000
    code = Gaps(
        gaps.MOST_WEIGHTS, many, False, k, np.full(many // 8, 255, np.uint8), np.full(many * k // 8, 255, np.uint8)
    )
    if many << k > gaps.MOST_WEIGHTS:
        with pytest.raises(ValueError, match="a place is listed beyond"):
            list(decode(code))
    else:
        (places,) = decode(code)
        assert places[-1] == many * (1 << k) - 1
    with pytest.raises(ValueError, match="more than a tensor can have|make no sense"):
        list(decode(Gaps(**{**vars(code), "size": 10 * gaps.MOST_WEIGHTS})))
