"""Which way of progress is chosen from what was measured, and that a measurement is the same on all ranks."""

from __future__ import annotations

import pytest

from hpctrain.comm.progress import ProgressEngine
from hpctrain.comm.progress_mode import Hiding, ProgressMode, apply, choose, measure
from hpctrain.comm.threads import ThreadCommunicator
from hpctrain.testing.virtual import run_virtual

NONE, TEST, THREAD = ProgressMode.NONE, ProgressMode.TEST, ProgressMode.THREAD


def _hiding(**times: tuple[float, ...]) -> Hiding:
    return Hiding(0.04, 0.04, 5e-3, 1 << 20, {ProgressMode(name): values for name, values in times.items()})


@pytest.mark.parametrize(
    ("times", "mode"),
    [
        ({"test": (50, 50, 50), "none": (80, 80, 80), "thread": (49, 50, 48)}, TEST),  # not clearly better
        ({"test": (80, 80, 80), "none": (80, 81, 80), "thread": (50, 52, 51)}, THREAD),
        ({"test": (80, 80, 80), "none": (45, 46, 45), "thread": (50, 52, 51)}, NONE),  # the transport moves by itself
        ({"test": (80, 80, 80), "none": (90, 90, 90), "thread": (50, 99, 51)}, TEST),  # once it was much worse
        ({"test": (80, 80, 200), "none": (90, 90, 90), "thread": (79, 79, 79)}, TEST),  # one slow round decides nothing
        ({"test": (80, 80, 80), "none": (90, 90, 90)}, TEST),  # no thread allowed
        ({"test": (80, 80), "none": (90, 90), "thread": (50, 50)}, TEST),  # too few rounds
    ],
)
def test_only_what_is_clearly_better_is_chosen(times: dict[str, tuple[float, ...]], mode: ProgressMode) -> None:
    assert choose(_hiding(**times)) is mode


def test_the_hidden_share_is_of_the_smaller_of_both() -> None:
    found = Hiding(0.03, 0.05, 5e-3, 1, {TEST: (0.05, 0.05, 0.09), NONE: (0.08,) * 3, THREAD: (0.065,) * 3})
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
    def work(comm: ThreadCommunicator) -> Hiding:
        engine = ProgressEngine(rank=comm.rank, deadline_seconds=1e9, abort=comm.abort, sleep=lambda seconds: None)
        found = measure(comm, engine, [TEST, NONE], operator_seconds=1e-3, most_bytes=40_000)
        assert engine.polls_between_operators
        return found

    found = run_virtual(ranks, work)
    assert all(each == found[0] for each in found)
    assert found[0].by_round.keys() == {TEST, NONE}
    assert 4 <= found[0].message_bytes <= 40_000
    assert min(min(times) for times in found[0].by_round.values()) > 0
