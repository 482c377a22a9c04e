"""Offsets are within the bound that they state, whatever the ways there and back take."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from hpctrain.comm.clock import ClockMap, Offset, measure_offset
from hpctrain.comm.single import SingleCommunicator
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine


class Time:
    """True time, which every look at any clock advances: by how much is chance."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self.now = 0.0

    def clock_ns(self, shift_ns: int, rate: float) -> Callable[[], int]:
        def read() -> int:
            self.now += self._chance.expovariate(1 / 5000)
            return round(self.now * rate) + shift_ns

        return read


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("seed", range(6))
def test_an_offset_is_true_to_within_its_bound(ranks: int, seed: int) -> None:
    time = Time(seed)
    shifts = [0, 10**12, -(10**9), 17, -3]

    def measure(comm: ThreadCommunicator) -> Offset:
        wait = virtual_engine(comm).wait_handle
        return measure_offset(comm, wait, clock_ns=time.clock_ns(shifts[comm.rank], 1.0), rounds=7)

    found = run_virtual(ranks, measure, seed=seed)
    assert (found[0].offset_ns, found[0].error_ns) == (0, 0)
    for rank in range(1, ranks):
        assert 0 < found[rank].error_ns < 10**6
        assert abs(found[rank].offset_ns - shifts[rank]) <= found[rank].error_ns


def test_a_drifting_clock_follows_the_line() -> None:
    begin, end = Offset(1000, 500, 3), Offset(1_001_000, 1500, 8)
    clock = ClockMap(begin, end)
    assert clock.error_ns == 8
    assert clock.to_root(np.array([1000, 501_000, 1_001_000])).tolist() == [500, 500_000, 999_500]


def test_one_measurement_alone_is_a_shift() -> None:
    once = Offset(1000, 400, 1)
    assert ClockMap(once, once).to_root(np.array([5, 10**15])).tolist() == [-395, 10**15 - 400]


def test_one_process_has_its_own_clock() -> None:
    assert measure_offset(SingleCommunicator(), lambda handle, what: None).offset_ns == 0
