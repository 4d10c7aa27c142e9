"""Threads that share work: every piece once, and none before what it waits for."""

from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
import pytest

from driveprune.sparse.team import COUNTERS, DONE, TAKEN, report, take, wait


@numba.njit(nogil=True)
def work(counters, before, log, clock):
    while True:
        number = take(counters)
        if number >= len(before):
            return
        wait(counters, before[number])
        total = 0.0
        for k in range(1000 * (number % 3)):  # pieces of different lengths
            total += k
        log[number, 0] += 1
        log[number, 1] = counters[DONE]  # how many were done when this one was
        clock[number] = total
        report(counters)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_each_piece_once_and_in_order(threads):
    steps = 60
    before = np.repeat(np.arange(steps) * 3, 3)  # three pieces a step, each waits for all before the step
    for _ in range(20):
        counters, log, clock = (
            np.zeros(COUNTERS, np.int64),
            np.zeros((len(before), 2), np.int64),
            np.zeros(len(before)),
        )
        with ThreadPoolExecutor(threads) as pool:
            for each in [pool.submit(work, counters, before, log, clock) for _ in range(threads)]:
                each.result()
        assert (log[:, 0] == 1).all()
        assert (log[:, 1] >= before).all()
        assert counters[DONE] == len(before)
        assert counters[TAKEN] == len(before) + threads
