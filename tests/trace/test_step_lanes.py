"""The last step of every rank in a trace file."""

import pytest

from hpctrain.trace.step_lanes import MESSAGES, last_steps
from tests.support.written_runs import trace_events


def test_each_rank_has_the_lanes_of_its_last_step() -> None:
    content = {"traceEvents": [event for rank in (1, 0) for event in trace_events(rank, 4)]}
    first, second = last_steps(content)
    assert (first.rank, first.begin_seconds, first.seconds) == (0, 0.0, pytest.approx(0.01))
    assert (second.rank, second.begin_seconds) == (1, pytest.approx(1e-4))
    ((begin, end),) = first.lanes["forward"]
    assert (begin, end) == (0.0, pytest.approx(1.25e-3))
    assert [round(1e6 * (last - first)) for first, last in first.lanes["backward"]] == [1250, 1250]
    ((begin, end),) = second.lanes["waiting"]
    assert (begin, end) == (pytest.approx(9.1e-3), pytest.approx(10.1e-3))


def test_messages_of_another_step_are_cut_to_this_one() -> None:
    """The first step's message ends 2 ms inside the second, whose own has begun then."""
    (step,) = last_steps({"traceEvents": list(trace_events(0, 2))})
    ((begin, end),) = step.lanes[MESSAGES]
    assert (begin, end) == (0.0, pytest.approx(0.01))


def test_pieces_that_touch_are_one() -> None:
    def event(category: str, begin: float, length: float) -> dict[str, object]:
        return {"ph": "X", "cat": category, "pid": 0, "ts": begin, "dur": length}

    events = [event("step", 0.0, 100.0), event("input", 10.0, 5.0), event("parameters", 15.0, 5.0), event("input", 30.0, 5.0)]
    (step,) = last_steps({"traceEvents": events})
    assert [(round(1e6 * first), round(1e6 * last)) for first, last in step.lanes["backward"]] == [(10, 20), (30, 35)]


@pytest.mark.parametrize("content", [{}, {"traceEvents": []}, {"traceEvents": [{"ph": "M", "pid": 0}]}])
def test_a_trace_without_steps_has_no_lanes(content: dict[str, object]) -> None:
    assert last_steps(content) == ()
