"""Tasks of a step in the program's order, with their traces."""

from __future__ import annotations

import pytest

from hpctrain.averaging.dependencies import EventKind, LocalEventKey
from hpctrain.comm.progress_mode import ProgressMode
from hpctrain.planner.collective_costs import stages, unhindered_seconds
from hpctrain.planner.prediction import SimulatedStep, SimulationOptions
from hpctrain.planner.simulation.simulate import simulate
from hpctrain.planner.tasks import (
    BeginExchange,
    Compute,
    EndBackward,
    EndExchange,
    Exchange,
    Happens,
    Merge,
    NeedsParameters,
    StepMessage,
    Task,
)
from hpctrain.trace.tracer import Category
from tests.support.simulated import ITEM_BYTES, allreduces, link, machine, placement, program, sharded, tasks

MACHINE = machine(link(1e-3, 1e-5))
SIZES, SECONDS = (1000, 2000, 4000), (0.1, 0.2, 0.3)


def _work(seconds: float, name: str = "work", *, polls: bool = True) -> Compute:
    return Compute(name, Category.WORK, seconds, polls)


def _posted(step: SimulatedStep, track: str) -> list[str]:
    """Names of a queue's operations in the order of their numbers."""
    (events,) = step.events.values()
    operations = events.of(Category.COMMUNICATION)
    mine = [k for k, index in enumerate(operations.track.tolist()) if operations.tracks[index] == track]
    mine.sort(key=lambda k: (operations.start_ns[k], operations.number[k]))
    assert (operations.number[mine][1:] > operations.number[mine][:-1]).all()
    return [operations.names[operations.name[k]] for k in mine]


def test_the_order_of_postings_is_the_schedules() -> None:
    schedule = sharded(SIZES, 2, window=1)
    step = simulate(program([(2, tasks(SECONDS))], SIZES, schedule), MACHINE)
    for stream in ("gradients", "parameters"):
        expected = [schedule.text(operation) for operation in schedule.operations if operation.stream == stream]
        posted = _posted(step, f"all {stream}")
        assert set(posted) == set(expected)
        begin = expected.index(posted[0])
        assert posted == [expected[(begin + k) % len(expected)] for k in range(len(posted))]


def test_exchanges_hide_under_what_lies_between() -> None:
    exchange = Exchange("halo", 1000, 1000, 1)
    seconds = unhindered_seconds(stages(MACHINE, "exchange", 1000, placement(2), None, 1))
    assert seconds > 0.01

    def step(between: float) -> float:
        body: tuple[Task, ...] = (BeginExchange(0, exchange), _work(between), EndExchange(0), _work(0.5))
        return simulate(program([(1, body), (1, body)], split=2), MACHINE).seconds

    assert step(0.0) == pytest.approx(seconds + 0.5)
    assert step(0.005) == pytest.approx(seconds + 0.5)
    assert step(1.0) == pytest.approx(1.5)


def test_an_exchange_ends_once_both_have_come() -> None:
    def body(before: float) -> tuple[Task, ...]:
        return _work(before), BeginExchange(0, Exchange("halo", 0, 0, 1)), EndExchange(0), _work(0.5)

    step = simulate(program([(1, body(0.2)), (1, body(1.2))], split=2), MACHINE)
    assert step.seconds == pytest.approx(1.7)
    assert step.exposed_seconds == pytest.approx(0.5)  # one of two ranks waits for a second


def test_merged_statistics_are_waited_for() -> None:
    seconds = unhindered_seconds(stages(MACHINE, "merge", 2 * 64, placement(2)))
    step = simulate(program([(2, (_work(1.0), Merge("moments of bn", "all", 64)))]), MACHINE)
    assert step.seconds == pytest.approx(1.0 + seconds)
    assert step.table.rows[0].name == "moments of bn"
    assert step.exposed_seconds == pytest.approx(seconds)


def test_the_steps_message_is_waited_for_one_step_later() -> None:
    seconds = unhindered_seconds(stages(MACHINE, "message", 1000, placement(2)))
    assert simulate(program([(2, (_work(1.0), StepMessage(1000)))]), MACHINE).seconds == pytest.approx(1.0)
    assert simulate(program([(2, (_work(0.0), StepMessage(1000)))]), MACHINE).seconds == pytest.approx(seconds)


def test_late_updates_are_of_whole_slices() -> None:
    step = simulate(program([(2, tasks(SECONDS))], SIZES, allreduces(SIZES, 2), update_seconds=1e-6), machine())
    assert step.seconds == pytest.approx(1.8 + sum(SIZES) * 1e-6)
    sharded_step = simulate(program([(2, tasks(SECONDS))], SIZES, sharded(SIZES, 2), update_seconds=1e-6), machine())
    assert sharded_step.seconds == pytest.approx(1.8 + sum(SIZES) / 2 * 1e-6)


def test_polls_between_operators_are_left_out_without_progress() -> None:
    """Of three messages, 1,000 bytes each move between two polls: 30 ms of the wire."""
    body = (BeginExchange(0, Exchange("halo", 10_000, 10_000, 3)), _work(0.2), _work(0.2), EndExchange(0))
    slow = machine(link(0.0, 1e-5, unattended_bytes=1_000))

    def seconds(mode: ProgressMode) -> float:
        return simulate(program([(1, body)] * 4, split=4), slow, SimulationOptions(progress=mode)).seconds

    assert seconds(ProgressMode.NONE) == pytest.approx(0.4 + 0.07)
    assert seconds(ProgressMode.TEST) == pytest.approx(0.4 + 0.04)
    assert seconds(ProgressMode.THREAD) == pytest.approx(0.4)


def test_operators_are_recorded_by_phase() -> None:
    step = simulate(program([(1, tasks(SECONDS))], SIZES, sharded(SIZES, 1)), machine())
    for row, seconds in zip(step.table.rows, SECONDS, strict=False):
        assert (row.forward_seconds, row.parameters_seconds, row.input_seconds) == pytest.approx((seconds,) * 3)


def test_a_posting_thread_starts_what_comes_after_a_message_while_an_operator_computes() -> None:
    """One slice: its sum takes 0.1 s, its gather 0.1 s; the program looks again after a long operator only."""
    schedule = sharded((10_000,), 2)
    gradient = LocalEventKey(EventKind.GRADIENT, "l0.weight")
    read = LocalEventKey(EventKind.LAST_READ, "l0.weight")
    body = (NeedsParameters("all", ("l0.weight",)), Happens("all", gradient), Happens("all", read), _work(1.0), EndBackward())
    slow = machine(link(0.0, 0.1 / (10_000 * ITEM_BYTES / 2)))

    def seconds(mode: ProgressMode) -> float:
        return simulate(program([(2, body)], (10_000,), schedule), slow, SimulationOptions(progress=mode)).seconds

    assert seconds(ProgressMode.TEST) == pytest.approx(1.1)
    assert seconds(ProgressMode.POSTING) == pytest.approx(1.0)
