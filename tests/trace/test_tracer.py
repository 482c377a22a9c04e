"""Recorded events: nothing is lost or allocated, intervals of them, the file that viewers read, and lanes of its last step."""

from __future__ import annotations

import json
import tracemalloc
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.trace import time_table
from hpctrain.trace.chrome import MESSAGES, ChromeTrace, last_steps
from hpctrain.trace.time_table import Intervals
from hpctrain.trace.tracer import Category, Tracer, capacity_for
from tests.support.runs import trace_events
from tests.support.sampling import amount


def test_events_come_back_as_they_were_recorded() -> None:
    ticks = count(100, 7)
    tracer = Tracer(5, clock_ns=lambda: next(ticks))
    tracer.add(Category.FORWARD, "conv1", tracer.clock_ns(), tracer.clock_ns())
    tracer.add(Category.WAIT, "conv1.weight", 3, 1 << 40, "column", 12)
    tracer.add(Category.FORWARD, "conv1", 5, 6)
    events = tracer.events()
    assert len(events) == len(tracer) == 3
    assert [events.names[index] for index in events.name] == ["conv1", "conv1.weight", "conv1"]
    assert [events.tracks[index] for index in events.track] == ["", "column", ""]
    assert events.category.tolist() == [Category.FORWARD, Category.WAIT, Category.FORWARD]
    assert events.number.tolist() == [0, 12, 0]
    assert events.start_ns.tolist() == [100, 3, 5]
    assert events.stop_ns.tolist() == [107, 1 << 40, 6]
    assert events.of(Category.WAIT).stop_ns.tolist() == [1 << 40]


def test_a_full_tracer_keeps_what_it_has_and_counts_the_rest() -> None:
    tracer = Tracer(2)
    for number in range(5):
        tracer.add(Category.WORK, "w", number, number + 1)
    events = tracer.events()
    assert events.start_ns.tolist() == [0, 1]
    assert events.dropped == 3
    tracer.clear()
    tracer.add(Category.WORK, "w", 9, 10)
    assert tracer.events().start_ns.tolist() == [9]
    assert tracer.events().dropped == 0
    assert events.start_ns.tolist() == [0, 1]  # a copy


def test_recording_keeps_no_memory() -> None:
    tracer = Tracer(4000)
    for name in ("a", "b"):
        tracer.add(Category.WORK, name, 1 << 50, 1 << 51, "queue")
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(3000):
            tracer.add(Category.WORK, "a", (1 << 50) + number, (1 << 51) + number, "queue", number)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 1000  # the last few numbers, not 3000 events


@pytest.mark.parametrize("ranks", [1, 7, 64, 4096])
def test_a_jobs_events_fit_into_one_file(ranks: int) -> None:
    assert 1 << 14 <= capacity_for(ranks) <= 1 << 18
    assert capacity_for(ranks) * ranks <= max(1 << 21, ranks << 14)


SPAN = 60
PAIRS = st.lists(st.tuples(st.integers(0, SPAN), st.integers(0, SPAN)).map(sorted), max_size=12)


def _arrays(pairs: list[list[int]]) -> Intervals:
    table = np.array(pairs, np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _instants(pairs: Intervals) -> set[int]:
    return {instant for start, stop in zip(*pairs, strict=True) for instant in range(start, stop)}


@given(PAIRS)
def test_a_union_has_the_same_instants_and_no_overlap(pairs: list[list[int]]) -> None:
    found = time_table.union(*_arrays(pairs))
    assert _instants(found) == _instants(_arrays(pairs))
    assert time_table.total_length(found) == len(_instants(found))
    assert np.all(found[0][1:] > found[1][:-1])


@settings(deadline=None, max_examples=amount(30, 200))
@given(PAIRS, PAIRS)
def test_common_length_and_clipping_count_shared_instants(a: list[list[int]], b: list[list[int]]) -> None:
    ours, theirs = time_table.union(*_arrays(a)), time_table.union(*_arrays(b))
    shared = _instants(ours) & _instants(theirs)
    assert time_table.common_length(ours, theirs) == len(shared)
    clipped = time_table.clip(ours, theirs)
    assert _instants(clipped) == shared
    assert time_table.total_length(clipped) == len(shared)


@st.composite
def _calls(draw: st.DrawFn) -> list[tuple[int, int]]:
    """Nested intervals, as calls make them: any number inside of each other and one after another, in any order."""
    made: list[tuple[int, int]] = []

    def fill(low: int, high: int, depth: int) -> None:
        at = low
        while high - at >= 1 and depth < 4 and draw(st.booleans()):
            start = draw(st.integers(at, high - 1))
            stop = draw(st.integers(start + 1, high))
            made.append((start, stop))
            fill(start, stop, depth + 1)
            at = stop

    fill(0, SPAN, 0)
    return draw(st.permutations(made))


@given(_calls())
def test_every_instant_belongs_to_the_innermost_call(calls: list[tuple[int, int]]) -> None:
    start, stop = _arrays([list(call) for call in calls])
    begin, end, owner = time_table.own_time(start, stop)
    assert np.all(begin < end)
    assert np.all(begin[1:] >= end[:-1])
    found = {instant: index for low, high, index in zip(begin, end, owner, strict=True) for instant in range(low, high)}
    assert found.keys() == _instants((start, stop))
    for instant, index in found.items():
        covering = [stop[k] - start[k] for k in range(len(calls)) if start[k] <= instant < stop[k]]
        assert stop[index] - start[index] == min(covering)


def _events(shift: int) -> Tracer:
    tracer = Tracer(9)
    tracer.add(Category.FORWARD, 'a "quoted" layer', 1000 + shift, 3500 + shift)
    tracer.add(Category.COMMUNICATION, "fc.weight", 2000 + shift, 9000 + shift, "column", 4)
    tracer.add(Category.COMMUNICATION, "fc.bias", 2500 + shift, 8000 + shift, "column", 5)
    tracer.add(Category.WAIT, "fc.weight", 4000 + shift, 9000 + shift, "column", 4)
    tracer.add(Category.STEP, "step", 0 + shift, 10000 + shift, "", 3)
    return tracer


def test_all_ranks_in_one_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with ChromeTrace(path, base_ns=1000) as file:
        for rank in range(3):
            file.add_rank(rank, _events(rank * 100).events())
        file.describe({"clock_error_seconds": 1e-6, "ranks": 3})
    content = json.loads(path.read_text())
    assert content["otherData"] == {"clock_error_seconds": 1e-6, "ranks": 3}
    events = content["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {"rank 0", "rank 1", "rank 2"}
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name" and event["pid"] == 1}
    assert tracks == {0: "program", 1: "column"}
    whole = [event for event in events if event["ph"] == "X" and event["pid"] == 1]
    assert {(event["name"], event["cat"], event["ts"], event["dur"]) for event in whole} == {
        ('a "quoted" layer', "forward", 0.1, 2.5),
        ("fc.weight", "wait", 3.1, 5.0),
        ("step", "step", -0.9, 10.0),
    }
    begins = {event["id"]: event for event in events if event["ph"] == "b"}
    ends = {event["id"]: event for event in events if event["ph"] == "e"}
    assert len(begins) == len(ends) == 6  # each operation of each rank has an id of its own
    for key, begin in begins.items():
        assert ends[key]["ts"] > begin["ts"]
        assert (ends[key]["name"], ends[key]["pid"], ends[key]["tid"]) == (begin["name"], begin["pid"], 1)


def test_a_rank_may_have_a_name_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with ChromeTrace(path, base_ns=0) as file:
        file.add_rank(0, _events(0).events(), name="ranks 0 to 7")
    events = json.loads(path.read_text())["traceEvents"]
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == ["ranks 0 to 7"]
    assert 'a "quoted" layer' in {event["name"] for event in events}


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
