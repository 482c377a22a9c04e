"""Recorded events are those of runs: tables and traces read them."""

import numpy as np

from hpctrain.planner.simulation.recorder import EventRecorder
from hpctrain.trace.time_table import tabulate
from hpctrain.trace.tracer import Category


def test_only_what_ends_after_the_begin_and_begins_before_the_end_is_recorded() -> None:
    recorder = EventRecorder()
    recorder.add(Category.WORK, "early", 0.0, 1.0)
    recorder.begin()
    recorder.add(Category.COMMUNICATION, "sum", 0.5, 1.5, "queue", 7)
    recorder.end(3.0)
    recorder.add(Category.WORK, "late", 3.0, 4.0)
    events = recorder.events()
    assert [events.names[name] for name in events.name] == ["sum"]
    assert (events.start_ns[0], events.stop_ns[0], events.number[0]) == (500_000_000, 1_500_000_000, 7)
    assert events.tracks[events.track[0]] == "queue"
    assert events.start_ns.dtype == np.int64


def test_of_events_of_the_same_instants_the_outer_one_comes_first() -> None:
    recorder = EventRecorder()
    recorder.begin()
    recorder.add(Category.UPDATE, "w", 0.0, 1.0)
    recorder.add(Category.WAIT, "sum", 0.0, 1.0, "queue")
    recorder.add(Category.STEP, "step", 0.0, 1.0)
    table = tabulate(recorder.events(), skip=0)
    assert table is not None
    assert (table.total.compute_seconds, table.total.exposed_seconds, table.left_over_seconds) == (1.0, 0.0, 0.0)
