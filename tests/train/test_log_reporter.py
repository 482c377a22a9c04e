"""A rank's log file has the events of a run, and how long this rank waited."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hpctrain import rank_log
from hpctrain.comm.progress import ProgressEngine
from hpctrain.train.log_reporter import LogReporter
from hpctrain.train.metrics import RunningSums


@pytest.fixture
def lines() -> Iterator[object]:
    log = rank_log.begin()
    yield log._waiting
    rank_log.end()


def test_steps_are_told_at_intervals_with_the_time_that_this_rank_waited(lines: list[str]) -> None:
    now = [0.0]
    engine = ProgressEngine(rank=0, deadline_seconds=1.0, abort=lambda code: None)
    reporter = LogReporter(engine, interval_seconds=10.0, clock=lambda: now[0])
    reporter.start(1, 100, 0, 100)
    sums = RunningSums(loss=4.0, count=2)
    for step in range(1, 30):
        now[0] += 1.0
        engine.waited_seconds += 0.25
        reporter.step(1, step, sums, 0.1, 50.0)
    steps = [line.partition("DEBUG   ")[2] for line in lines if " step" in line]
    assert steps == [
        "epoch 1, step 1: loss 2; in 1 step this rank waited 0.250 s for others",
        "epoch 1, step 11: loss 2; in 10 steps this rank waited 2.500 s of 10.0 s for others",
        "epoch 1, step 21: loss 2; in 10 steps this rank waited 2.500 s of 10.0 s for others",
    ]


def test_events_are_told_and_intervals_are_not(lines: list[str]) -> None:
    reporter = LogReporter(ProgressEngine(rank=0, deadline_seconds=1.0, abort=lambda code: None))
    reporter.say("a sentence")
    reporter.record("interval", {"loss": 1.0})
    reporter.record("evaluation", {"epoch": 1, "loss": 2.0})
    reporter.close()
    assert [line.split(maxsplit=2)[2] for line in lines] == [
        "INFO    a sentence",
        'DEBUG   evaluation: {"epoch": 1, "loss": 2.0}',
        "INFO    the run is over on this rank",
    ]
