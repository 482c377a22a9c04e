"""Times of a step are seconds of compute since its begin, medians over the measured steps, and over the ranks."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.averaging.compute_times import Times
from hpctrain.averaging.step_clock import StepClock, over_ranks
from hpctrain.comm.progress import ProgressEngine
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine


class Hand:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def _step(clock: StepClock, hand: Hand, engine: ProgressEngine, seconds: float, waited: float) -> None:
    """Forward reads both; backward computes b, then a, and waits in between. The last event of c is never announced."""
    clock.begin(True)
    for name in ("a", "b"):
        clock.needed(name)
        hand.seconds += seconds
    clock.ready("b")
    clock.free("b")
    hand.seconds += waited
    engine.waited_seconds += waited
    hand.seconds += seconds
    clock.ready("a")
    clock.free("a")
    hand.seconds += seconds
    clock.end(("a", "b", "c"))


def test_medians_without_waits() -> None:
    hand = Hand()
    engine = ProgressEngine(rank=0, deadline_seconds=5, abort=lambda code: None, clock=hand)
    clock = StepClock(engine)
    clock.begin(False)
    hand.seconds += 100
    clock.ready("a")  # not measured
    for seconds, waited in ((1.0, 7.0), (2.0, 0.0), (3.0, 50.0)):
        _step(clock, hand, engine, seconds, waited)
    times = clock.times()
    assert times.needed == {"a": 0.0, "b": 2.0}
    assert times.ready == {"b": 4.0, "a": 6.0, "c": 8.0}
    assert times.free == times.ready
    assert times.end_seconds == 8.0


NAMES = ("a", "b", "c")


def _measured(rank: int) -> Times:
    """Made-up times of a rank; no rank knows when c is read, and only some when b is."""
    random = np.random.default_rng(rank)
    ready, free, needed = (dict(zip(NAMES, random.random(3).tolist(), strict=True)) for _ in range(3))
    del needed["c"]
    if rank % 2:
        del needed["b"]
    return Times(ready, free, needed, random.random())


def _upper_median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 12])  # more ranks than events, too
@pytest.mark.parametrize("seed", [None, 3])
def test_a_typical_rank_has_the_upper_median_of_each_event(ranks: int, seed: int | None) -> None:
    def program(comm: ThreadCommunicator) -> Times:
        return over_ranks(_measured(comm.rank), NAMES, comm, virtual_engine(comm))

    results = run_virtual(ranks, program, seed=seed)
    everyone = [_measured(rank) for rank in range(ranks)]
    assert all(result == results[0] for result in results)
    for kind in ("ready", "free", "needed"):
        by_rank = [getattr(times, kind) for times in everyone]
        known = {name: [times[name] for times in by_rank if name in times] for name in NAMES}
        assert getattr(results[0], kind) == {name: _upper_median(values) for name, values in known.items() if values}
    assert results[0].end_seconds == _upper_median([times.end_seconds for times in everyone])


def test_of_two_ranks_the_later_one_counts_and_of_three_no_odd_one() -> None:
    """A collective starts when all have posted it; a disturbed rank decides nothing where there are others to ask."""
    usual, odd = Times({"a": 1.0}, {"a": 2.0}, {"a": 0.5}, 3.0), Times({"a": 9.0}, {"a": 9.5}, {"a": 9.0}, 10.0)
    quick = Times({"a": 0.1}, {"a": 0.1}, {"a": 0.1}, 0.1)
    for of_ranks, expected in (([usual, odd], odd), ([odd, usual, usual], usual), ([quick, usual, usual], usual)):

        def program(comm: ThreadCommunicator, of_ranks: list[Times] = of_ranks) -> Times:
            return over_ranks(of_ranks[comm.rank], ("a",), comm, virtual_engine(comm))

        assert run_virtual(len(of_ranks), program) == [expected] * len(of_ranks)
