"""What is recorded comes back; a full tracer counts; nothing is allocated for an event."""

from __future__ import annotations

import tracemalloc
from itertools import count

import numpy as np
import pytest

from hpctrain.trace.tracer import Category, Tracer, capacity_for, cost_per_event_seconds, joined


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


def test_the_cost_of_an_event_is_measured() -> None:
    assert 0 < cost_per_event_seconds(500) < 1e-3


def test_selecting_keeps_names() -> None:
    tracer = Tracer(3)
    tracer.add(Category.UPDATE, "x", 0, 1)
    tracer.add(Category.UPDATE, "y", 1, 2)
    chosen = tracer.events().select(np.array([False, True]))
    assert [chosen.names[index] for index in chosen.name] == ["y"]


def test_events_of_two_processes_of_work_are_joined_with_their_names() -> None:
    first, second = Tracer(4), Tracer(4)
    first.add(Category.FORWARD, "conv", 1, 2)
    first.add(Category.COMMUNICATION, "fc", 2, 3, "row", 7)
    second.add(Category.THREAD, "fc", 5, 6, "posting thread")
    second.add(Category.COMMUNICATION, "new", 6, 8, "row", 8)
    events = joined(first.events(), second.events())
    rows = zip(events.category, events.name, events.track, events.number, events.start_ns, events.stop_ns, strict=True)
    assert [(kind, events.names[name], events.tracks[track], *more) for kind, name, track, *more in rows] == [
        (Category.FORWARD, "conv", "", 0, 1, 2),
        (Category.COMMUNICATION, "fc", "row", 7, 2, 3),
        (Category.THREAD, "fc", "posting thread", 0, 5, 6),
        (Category.COMMUNICATION, "new", "row", 8, 6, 8),
    ]
