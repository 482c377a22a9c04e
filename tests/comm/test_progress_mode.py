"""The progress mode that is chosen by a measurement, and that a measurement is the same on all ranks."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.comm.progress import ProgressEngine
from hpctrain.comm.progress_mode import OverlapMeasurement, ProgressMode, apply, choose, measure
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual

NONE, TEST, THREAD = ProgressMode.NONE, ProgressMode.TEST, ProgressMode.THREAD


def _hiding(**times: tuple[float, ...]) -> OverlapMeasurement:
    return OverlapMeasurement(0.04, 0.04, 5e-3, 1 << 20, {ProgressMode(name): values for name, values in times.items()})


@pytest.mark.parametrize(
    ("times", "mode"),
    [
        ({"test": (50,) * 9, "none": (80,) * 9, "thread": (49, 50, 48) * 3}, TEST),  # not clearly better
        ({"test": (80,) * 9, "none": (80, 81, 80) * 3, "thread": (50, 52, 51) * 3}, THREAD),
        ({"test": (80,) * 9, "none": (45, 46, 45) * 3, "thread": (50, 52, 51) * 3}, NONE),  # the transport moves by itself
        ({"test": (80,) * 9, "none": (90,) * 9, "thread": (50, 99, 51) * 3}, TEST),  # often it was much worse
        ({"test": (80,) * 8 + (200,), "none": (90,) * 9, "thread": (79,) * 9}, TEST),  # one slow round decides nothing
        ({"test": (80,) * 9, "none": (90,) * 9}, TEST),  # no thread allowed
        ({"test": (80,) * 6, "none": (90,) * 6, "thread": (50,) * 6}, TEST),  # too few rounds
        ({"test": (80,) * 7, "none": (90,) * 7, "thread": (50,) * 7}, THREAD),
        ({"test": (80,) * 15, "none": (90,) * 15, "thread": (50,) * 13 + (99,) * 2}, THREAD),  # disturbed twice
        ({"test": (80,) * 15, "none": (90,) * 15, "thread": (50,) * 12 + (99,) * 3}, TEST),
        ({"test": (), "none": (), "thread": ()}, TEST),
    ],
)
def test_only_what_is_surely_better_is_chosen(times: dict[str, tuple[float, ...]], mode: ProgressMode) -> None:
    assert choose(_hiding(**times)) is mode


def _simulated(random: np.random.Generator, true: dict[str, float], rounds: int, *, noise: float) -> OverlapMeasurement:
    """Rounds beside other work: slow phases that all modes of a round share, and bursts that hit one measurement."""
    phase = random.lognormal(0, 2 * noise, rounds)
    times = {
        name: tuple(phase * seconds * random.lognormal(0, noise, rounds) * np.where(random.random(rounds) < noise, 3.0, 1.0))
        for name, seconds in true.items()
    }
    return _hiding(**times)


@pytest.mark.parametrize("rounds", [3, 7, 11, 15, 25])
@pytest.mark.parametrize("none", [1.0, 0.95, 2.0])
def test_a_repeated_measurement_chooses_alike_where_no_way_is_clearly_better(rounds: int, none: float) -> None:
    random = np.random.default_rng(rounds)
    chosen = [choose(_simulated(random, {"test": 1.0, "none": none, "thread": 1.02}, rounds, noise=0.15)) for _ in range(500)]
    assert chosen.count(TEST) >= 495


def test_a_repeated_measurement_chooses_alike_where_a_way_is_clearly_better_on_a_quiet_machine() -> None:
    random = np.random.default_rng(0)
    chosen = [choose(_simulated(random, {"test": 1.0, "none": 1.4, "thread": 0.6}, 15, noise=0.02)) for _ in range(500)]
    assert chosen.count(THREAD) >= 495


@pytest.mark.parametrize("mode", ProgressMode)
def test_a_mode_says_what_it_does_in_words(mode: ProgressMode) -> None:
    assert "move" in mode.in_words
    assert "test" not in mode.in_words


def test_the_hidden_share_is_of_the_smaller_of_both() -> None:
    found = OverlapMeasurement(0.03, 0.05, 5e-3, 1, {TEST: (0.05, 0.05, 0.09), NONE: (0.08,) * 3, THREAD: (0.065,) * 3})
    assert found.hidden(TEST) == pytest.approx(1.0)
    assert found.hidden(NONE) == pytest.approx(0.0)
    assert found.hidden(THREAD) == pytest.approx(0.5)
    assert "test hides 100%" in str(found)


def test_a_mode_is_applied_and_taken_back() -> None:
    engine = ProgressEngine(rank=0, deadline_seconds=9.0, abort=lambda code: None)
    apply(engine, NONE)
    assert not engine.polls_between_operators
    apply(engine, THREAD)
    assert engine.polls_between_operators
    block = engine.computing()
    apply(engine, THREAD)
    assert engine.computing() is block  # one thread, not two
    apply(engine, TEST)
    assert engine.polls_between_operators
    assert engine.computing() is not block


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_measurement_is_the_same_on_all_ranks(ranks: int) -> None:
    def work(comm: ThreadCommunicator) -> OverlapMeasurement:
        engine = ProgressEngine(rank=comm.rank, deadline_seconds=1e9, abort=comm.abort, sleep=lambda seconds: None)
        found = measure(comm, engine, [TEST, NONE], operator_seconds=1e-3, most_bytes=40_000)
        assert engine.polls_between_operators
        assert found is not None
        return found

    found = run_virtual(ranks, work)
    assert all(each == found[0] for each in found)
    assert found[0].by_round.keys() == {TEST, NONE}
    assert 4 <= found[0].message_bytes <= 40_000
    assert min(min(times) for times in found[0].by_round.values()) > 0


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_short_exchange_is_not_measured(ranks: int) -> None:
    def work(comm: ThreadCommunicator) -> OverlapMeasurement | None:
        engine = ProgressEngine(rank=comm.rank, deadline_seconds=1e9, abort=comm.abort, sleep=lambda seconds: None)
        return measure(comm, engine, [TEST, NONE], operator_seconds=1e-3, most_bytes=40_000, worth_seconds=3600)

    assert run_virtual(ranks, work) == [None] * ranks
