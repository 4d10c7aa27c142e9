"""Memory that is handed out again only when nobody holds it."""

import copy
import gc
import threading

import torch
from torch import nn

from driveprune.sparse import memory, sparsify
from driveprune.sparse.memory import SMALL, Memory


def test_what_is_held_is_never_handed_out_again():
    pool = Memory()
    first = pool.empty(2, SMALL)
    second = pool.empty(SMALL, 2)
    assert first.shape == (2, SMALL)
    assert second.shape == (SMALL, 2)
    assert first.data_ptr() != second.data_ptr()


def test_what_nobody_holds_is_handed_out_again():
    pool = Memory()
    first = pool.empty(2, SMALL)
    place = first.data_ptr()
    del first
    assert pool.empty(SMALL, 2).data_ptr() == place


def test_views_arrays_and_graphs_hold():
    pool = Memory()
    for holder in (
        lambda x: x.view(-1)[5:7],
        lambda x: x.numpy(),
        lambda x: (torch.ones(1, requires_grad=True) * x).sum(),  # saved for backward
        lambda x: x.untyped_storage(),
    ):
        tensor = pool.empty(SMALL)
        place, held = tensor.data_ptr(), holder(tensor)
        del tensor
        assert pool.empty(SMALL).data_ptr() != place
        del held


def test_small_ones_are_left_to_torch():
    pool = Memory()
    assert pool.empty(3, 4).shape == (3, 4)
    assert pool.empty(3, 4).dtype == torch.float32
    assert not pool._known


def test_unused_memory_is_given_back_above_the_limit(monkeypatch):
    monkeypatch.setattr(memory, "LIMIT", 4 * SMALL)
    monkeypatch.setattr(memory, "WHILE", 1)
    pool = Memory()
    held = pool.empty(SMALL)
    for extra in range(1, 6):
        pool.empty(SMALL + extra)
    assert pool._bytes() <= 4 * (4 * SMALL + 20)
    assert pool.empty(SMALL).data_ptr() != held.data_ptr()


def test_what_is_asked_for_again_and_again_is_kept_above_the_limit(monkeypatch):
    monkeypatch.setattr(memory, "LIMIT", 4 * SMALL)
    pool = Memory()
    places = []
    for _ in range(3):
        tensors = [pool.empty(SMALL + extra) for extra in range(5)]
        places.append([tensor.data_ptr() for tensor in tensors])
        del tensors
    assert places[0] == places[1] == places[2]


def test_a_size_is_forgotten_after_so_many_bytes_of_others(monkeypatch):
    monkeypatch.setattr(memory, "LIMIT", 4 * SMALL)
    monkeypatch.setattr(memory, "WHILE", 15 * SMALL)
    pool = Memory()
    pool.empty(SMALL)
    for extra in range(1, 4):
        pool.empty(SMALL + extra)
    assert (
        len(pool._known[SMALL]) == 1
    )  # three others of as many bytes, and a few more: it was looked at before those
    pool.empty(SMALL + 4)
    assert not pool._known[SMALL]


def test_threads_get_memory_of_their_own():
    pool, wrong = Memory(), []

    def work(number):
        for _ in range(200):
            tensor = pool.empty(SMALL)
            tensor.fill_(number)
            if not bool((tensor == number).all()):
                wrong.append(number)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for each in workers:
        each.start()
    for each in workers:
        each.join()
    assert not wrong
    assert len(pool._known[SMALL]) <= 8


def test_a_lease_that_ends_gives_back_what_nobody_holds(monkeypatch):
    pool = Memory()
    monkeypatch.setattr(memory.Lease, "_memory", pool)
    first, second = memory.Lease(), copy.deepcopy(memory.Lease())
    held = pool.empty(SMALL)
    pool.empty(SMALL + 1)
    pool.empty(SMALL)
    place = held.data_ptr()
    del second
    assert {count: len(arrays) for count, arrays in pool._known.items()} == {SMALL: 1}
    assert pool._known[SMALL][0].ctypes.data == place
    del held, first
    assert not pool._known
    assert not pool._asked


def test_a_lease_may_end_while_memory_is_asked_for(monkeypatch):
    """The collection of garbage may begin anywhere, also in the thread that has the lock."""
    pool = Memory()
    pool.empty(SMALL)
    with pool._lock:
        pool.give_back()
        assert pool._known
    held = pool.empty(SMALL + 1)
    assert list(pool._known) == [held.numel()]


def test_the_memory_of_a_network_goes_with_it(monkeypatch):
    pool = Memory()
    monkeypatch.setattr(memory, "MEMORY", pool)
    monkeypatch.setattr(memory.Lease, "_memory", pool)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 2))
    mask = {name: torch.rand_like(w) < 0.2 for name, w in net.named_parameters() if w.dim() > 1}
    fast = sparsify(net, mask, torch.ones(1, 3, 8, 8), layers="sparse")
    for images in (256, 512):
        fast(torch.randn(images, 3, 8, 8)).sum().backward()
    assert len(pool._known) >= 2
    gc.disable()
    try:
        del fast  # at once, not only when garbage is collected
        assert not pool._known
    finally:
        gc.enable()
