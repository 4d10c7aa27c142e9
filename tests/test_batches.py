import hashlib
import json
from dataclasses import replace
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from driveprune.batches import Batches, Data, Images, crop_and_flip, split, statistics, subset

MEAN, DEVIATION = (0.4, 0.5, 0.6), (0.2, 0.3, 0.25)


def some(count=20, channels=3, side=6, classes=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(256, (count, channels, side, side + 1), dtype=torch.uint8, generator=generator)
    return Images(x, torch.randint(classes, (count,), generator=generator))


def mapped(images):
    """The same images as a choice from a file that also holds others."""
    rows = torch.randperm(2 * len(images), generator=torch.Generator().manual_seed(1))[: len(images)]
    x = torch.zeros(2 * len(images), *images.shape, dtype=torch.uint8)
    x[rows] = images.x
    return Images(x, images.y, rows, mapped=True)


def data(train, test):
    return Data("some", train, test, tuple("abcd"), (0.5,), (0.5,), official=True)


# Images.


def test_taking_copies_what_is_in_memory_and_only_remembers_what_is_mapped():
    images, chosen = some(), torch.tensor([7, 0, 7])
    taken, lazy = images.take(chosen), mapped(images).take(chosen)
    assert torch.equal(taken.x, images.x[chosen])
    assert torch.equal(taken.y, images.y[chosen])
    assert torch.equal(lazy.pixels(slice(None)), taken.x)
    assert lazy.x.data_ptr() == lazy.take(torch.tensor([1])).x.data_ptr()
    assert torch.equal(lazy.take(torch.tensor([1])).pixels(slice(None)), images.x[:1])
    assert len(taken) == len(lazy) == 3


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (torch.zeros(2, 1, 3, 3), torch.zeros(2).long(), "images must be uint8"),
        (torch.zeros(2, 3, 3).byte(), torch.zeros(2).long(), "images must be uint8"),
        (torch.zeros(2, 1, 3, 3).byte(), torch.zeros(2), "classes must be int64"),
        (torch.zeros(2, 1, 3, 3).byte(), torch.zeros(3).long(), "there are 2 images, but 3 classes"),
    ],
)
def test_what_is_not_images_and_classes_raises(x, y, message):
    with pytest.raises(ValueError, match=message):
        Images(x, y)


# Data.


def test_the_label_says_when_data_are_not_official():
    images = some()
    assert data(images, images).label == "some"
    assert Data("x", images, images, (), (), (), official=False).label == "x (not the official data)"


def test_the_fingerprint_is_what_it_says():
    train, test = some(5), some(3, seed=1)
    digest = hashlib.sha256()
    for images in (train, test):
        digest.update(json.dumps(["uint8", *images.x.shape]).encode())
        digest.update(bytes(images.x.flatten().tolist()))
        digest.update(b"".join(label.to_bytes(8, "little") for label in images.y.tolist()))
    assert data(train, test).fingerprint == digest.hexdigest()


def test_the_fingerprint_is_of_the_content_not_of_how_it_is_stored(monkeypatch):
    train, test = some(50), some(10, seed=1)
    expected = data(train, test).fingerprint
    strided = Images(train.x.contiguous(memory_format=torch.channels_last), train.y)
    monkeypatch.setattr("driveprune.batches._CHUNK", 300)
    assert data(mapped(train), test).fingerprint == expected
    assert data(strided, test).fingerprint == expected


def test_the_fingerprint_sees_every_change():
    train, test = some(6), some(4, seed=1)
    changed_pixel, changed_class = train.x.clone(), train.y.clone()
    changed_pixel[3, 2, 1, 0] ^= 1
    changed_class[5] ^= 1
    variants = [
        data(train, test),
        data(test, train),
        data(Images(changed_pixel, train.y), test),
        data(Images(train.x, changed_class), test),
        data(Images(train.x.transpose(2, 3), train.y), test),
        data(train.take(torch.arange(5)), test),
    ]
    assert len({variant.fingerprint for variant in variants}) == len(variants)


def test_statistics_are_those_of_the_pixels():
    images = some(40)
    mean, deviation = statistics(images)
    values = images.x.double() / 255
    assert mean == pytest.approx(values.mean((0, 2, 3)).tolist())
    assert deviation == pytest.approx(values.std((0, 2, 3), correction=0).tolist())
    assert statistics(mapped(images)) == (mean, deviation)
    assert statistics(Images(torch.full((2, 1, 2, 2), 51, dtype=torch.uint8), torch.zeros(2).long())) == (
        (0.2,),
        (1,),
    )


# Choices of images.


@given(count=st.integers(1, 60), data=st.data())
def test_a_split_parts_the_images(count, data):
    images = Images(torch.arange(count, dtype=torch.uint8).view(-1, 1, 1, 1), torch.arange(count))
    held = data.draw(st.integers(0, count - 1))
    training, heldout = split(images, held)
    assert len(heldout) == held
    assert sorted([*training.y.tolist(), *heldout.y.tolist()]) == list(range(count))
    assert torch.equal(heldout.x.flatten().long(), heldout.y)


def test_choices_are_frozen():
    """Runs must repeat for years: these images may not change."""
    images = Images(torch.zeros(20, 1, 1, 1, dtype=torch.uint8), torch.arange(20) % 4)
    rows = Images(images.x, images.y, torch.arange(20), mapped=True)
    assert split(rows, 5)[1].rows.tolist() == [2, 9, 13, 14, 15]
    assert subset(rows, 6).rows.tolist() == [4, 6, 9, 11, 13, 15]


@given(
    labels=st.lists(st.integers(0, 4), min_size=1, max_size=50),
    data=st.data(),
)
def test_a_subset_is_balanced_as_far_as_counts_allow_and_grows(labels, data):
    y = torch.tensor(labels)
    images = Images(torch.arange(len(y), dtype=torch.uint8).view(-1, 1, 1, 1), y)
    count = data.draw(st.integers(1, len(y)))
    chosen = subset(images, count)
    assert len(chosen) == count
    assert len(set(chosen.x.flatten().tolist())) == count
    sizes, has = torch.bincount(y, minlength=5), torch.bincount(chosen.y, minlength=5)
    short = has < sizes  # a class that could give more has at most one image less than any other
    assert not short.any() or int(has.max()) - int(has[short].min()) <= 1
    larger = subset(images, data.draw(st.integers(count, len(y))))
    assert set(chosen.x.flatten().tolist()) <= set(larger.x.flatten().tolist())


def test_all_images_are_a_subset():
    images = some()
    assert subset(images, None) is images
    assert torch.equal(subset(images, len(images)).x, images.x)


def test_impossible_choices_raise():
    with pytest.raises(ValueError, match="holdout must be from 0 to 19 of 20 images, got 20"):
        split(some(), 20)
    with pytest.raises(ValueError, match="got -1"):
        split(some(), -1)
    with pytest.raises(ValueError, match="a subset must have from 1 to 20 images, got 21"):
        subset(some(), 21)
    with pytest.raises(ValueError, match="got 0"):
        subset(some(), 0)


# Batches.


def literal(image, top, left, flipped, padding):
    """One image as torchvision does it: black around it, a crop, a mirror."""
    channels, height, width = image.shape
    padded = torch.zeros(channels, height + 2 * padding, width + 2 * padding, dtype=torch.uint8)
    padded[:, padding : padding + height, padding : padding + width] = image
    cropped = padded[:, top : top + height, left : left + width]
    return cropped.flip(-1) if flipped else cropped


@given(
    count=st.integers(1, 6), channels=st.sampled_from([1, 3]), height=st.integers(1, 7), width=st.integers(1, 7),
    padding=st.integers(0, 4), data=st.data(),
)  # fmt: skip
def test_crops_and_flips_are_those_of_a_loop_over_images(count, channels, height, width, padding, data):
    x = torch.arange(1, 1 + count * channels * height * width).remainder(255).byte().view(count, channels, height, -1)
    corners = st.lists(st.integers(0, 2 * padding), min_size=count, max_size=count)
    top, left = data.draw(corners), data.draw(corners)
    flipped = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    found = crop_and_flip(x, torch.tensor(top), torch.tensor(left), torch.tensor(flipped), padding)
    expected = [literal(*each, padding) for each in zip(x, top, left, flipped, strict=True)]
    assert torch.equal(found, torch.stack(expected))


def recognise(batch, images, padding):
    """For each image of a batch which one it is and what was done to it, by trying everything."""
    pixels = (batch * 255).round().byte()
    places = range(2 * padding + 1)
    tries = {
        literal(image, top, left, flipped, padding).numpy().tobytes(): (number, top, left, flipped)
        for number, image in enumerate(images.x)
        for top in places
        for left in places
        for flipped in (False, True)
    }
    return [tries[image.numpy().tobytes()] for image in pixels]


def test_an_epoch_has_every_image_once_cropped_and_flipped_at_random():
    images = some(200, side=9)
    batches = Batches(images, size=64, padding=1, flip=True)
    found = [recognise(x, images, 1) for x, _ in batches.epoch(0, 0)]
    labels = torch.cat([y for _, y in batches.epoch(0, 0)])
    numbers, tops, lefts, flips = zip(*chain.from_iterable(found), strict=True)
    assert [len(batch) for batch in found] == [64, 64, 64, 8]
    assert sorted(numbers) == list(range(200))
    assert torch.equal(labels, images.y[list(numbers)])
    assert set(tops) == set(lefts) == {0, 1, 2}
    assert 60 < sum(flips) < 140


def test_pixels_are_normalised():
    images = some(10)
    batches = Batches(images, size=4, mean=MEAN, deviation=DEVIATION, shuffle=False)
    x = torch.cat([x for x, _ in batches.epoch(0, 0)])
    mean, deviation = (torch.tensor(values).double().view(3, 1, 1) for values in (MEAN, DEVIATION))
    torch.testing.assert_close(x.double(), (images.x.double() / 255 - mean) / deviation, rtol=1e-6, atol=1e-6)
    assert x.dtype == torch.float32


OPTIONS = {"size": 8, "mean": MEAN, "deviation": DEVIATION, "padding": 2, "flip": True, "seed": 5}


@pytest.mark.parametrize("start", range(5))
def test_an_epoch_can_start_at_any_batch(start):
    batches = Batches(some(30), **OPTIONS)
    whole, rest = list(batches.epoch(1, 2)), list(batches.epoch(1, 2, start))
    assert len(batches) == len(whole) == 4
    assert len(rest) == 4 - start
    for (x, y), (same_x, same_y) in zip(whole[start:], rest, strict=True):
        assert torch.equal(x, same_x)
        assert torch.equal(y, same_y)


def test_cycles_epochs_seeds_and_scoring_differ():
    def first(seed, *counter):
        batches = Batches(some(30), **{**OPTIONS, "seed": seed})
        return next(batches.epoch(*counter) if counter else iter(batches))[0]

    draws = [first(0, 0, 0), first(0, 0, 1), first(0, 1, 0), first(1, 0, 0), first(0)]
    for index, draw in enumerate(draws):
        assert not any(torch.equal(draw, other) for other in draws[:index])
    assert torch.equal(first(0), first(0))


def test_epochs_are_frozen():
    """Runs must repeat for years: these numbers may not change."""
    images = Images(torch.arange(1, 17, dtype=torch.uint8).view(4, 1, 2, 2), torch.arange(4))
    batches = Batches(images, size=2, padding=1, flip=True, deviation=(1 / 255,), seed=3)
    found = [(y.tolist(), x.round().int().flatten().tolist()) for x, y in batches.epoch(0, 1)]
    assert found == [([1, 3], [5, 0, 7, 0, 13, 14, 15, 16]), ([0, 2], [1, 0, 3, 0, 0, 11, 0, 0])]


def test_nothing_is_random_without_shuffling_and_augmentation():
    images = some(10)
    batches = Batches(images, size=4, shuffle=False)
    assert torch.equal(torch.cat([y for _, y in batches]), images.y)
    assert all(
        torch.equal(x, again) for (x, _), (again, _) in zip(batches.epoch(0, 0), batches.epoch(3, 4), strict=True)
    )


def test_global_random_numbers_are_left_alone():
    before = torch.get_rng_state()
    list(Batches(some(), **OPTIONS))
    assert torch.equal(torch.get_rng_state(), before)


def test_mapped_images_and_channels_last_give_the_same_batches():
    images = some(30)
    expected = list(Batches(images, **OPTIONS).epoch(0, 0))
    for other in (
        Batches(mapped(images), **OPTIONS),
        Batches(images, **OPTIONS, channels_last=True),
        Batches(Images(images.x.contiguous(memory_format=torch.channels_last), images.y), **OPTIONS),
    ):
        for (x, y), (same_x, same_y) in zip(expected, other.epoch(0, 0), strict=True):
            assert torch.equal(x, same_x)
            assert torch.equal(y, same_y)
            layout = torch.channels_last if other.channels_last else torch.contiguous_format
            assert same_x.is_contiguous(memory_format=layout)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_a_gpu_gives_the_same_batches(place):
    images = some(30)
    there = Batches(Images(images.x.to(place), images.y.to(place)), **OPTIONS, device="cuda")
    for (x, y), (same_x, same_y) in zip(Batches(images, **OPTIONS), there, strict=True):
        assert same_x.is_cuda
        torch.testing.assert_close(same_x.cpu(), x)
        assert torch.equal(same_y.cpu(), y)


def test_another_device_is_where_batches_end_up():
    x, y = next(iter(Batches(some(), **OPTIONS, device="meta")))
    assert x.is_meta
    assert y.is_meta


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "size of a batch must be at least 1, got 0"),
        ({"padding": -1}, "padding must be at least 0"),
        ({"mean": (0.1, 0.2)}, "mean needs 1 or 3 values, got 2"),
        ({"deviation": (0.1, 0.2)}, "deviation needs 1 or 3 values, got 2"),
        ({"deviation": (0.0,)}, "deviations must be above 0"),
    ],
)
def test_impossible_settings_raise(options, message):
    with pytest.raises(ValueError, match=message):
        Batches(some(), **options)


def test_a_start_beyond_the_epoch_raises_at_once():
    batches = Batches(some(20), size=8)
    assert list(batches.epoch(0, 0, 3)) == []
    with pytest.raises(ValueError, match="start must be from 0 to 3 batches, got 4"):
        batches.epoch(0, 0, 4)


def test_the_shares_of_ranks_are_the_batches_of_one_process():
    images = Images(torch.randint(256, (13, 3, 8, 8), dtype=torch.uint8), torch.arange(13))
    whole = Batches(images, size=4, padding=2, flip=True, seed=5)
    shares = [replace(whole, share=(rank, 3)) for rank in range(3)]
    for (x, y), *parts in zip(whole.epoch(0, 1), *(each.epoch(0, 1) for each in shares), strict=True):
        assert torch.equal(torch.cat([part[0] for part in parts]), x)
        assert torch.equal(torch.cat([part[1] for part in parts]), y)
