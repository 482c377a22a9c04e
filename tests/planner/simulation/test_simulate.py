"""Laws of simulated steps: closed forms of small cases, sums that must hold, and what never gets worse."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from hpctrain.averaging.collective_schedule import CollectiveSchedule, OperationKind
from hpctrain.comm.progress_mode import ProgressMode
from hpctrain.errors import ConfigError, DeadlockError
from hpctrain.planner.collective_costs import stages, unhindered_seconds
from hpctrain.planner.machine import Machine
from hpctrain.planner.prediction import SimulatedStep, SimulationOptions
from hpctrain.planner.simulation.simulate import simulate
from hpctrain.planner.tasks import BeginExchange, Compute, EndExchange, Exchange, StepProgram, Task
from hpctrain.trace.time_table import tabulate
from hpctrain.trace.tracer import Category
from tests.support.simulated import ITEM_BYTES, allreduces, link, machine, placement, program, sharded, tasks

SIZES, SECONDS = (1000, 2000, 4000), (0.1, 0.2, 0.3)
COMPUTE = 3 * sum(SECONDS)
MACHINE = machine(link(1e-3, 1e-5))
SCHEDULES = {"blocking": None, "allreduces": allreduces(SIZES, 2), "sharded": sharded(SIZES, 2), "window": sharded(SIZES, 2, 1)}
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
every_mode = pytest.mark.parametrize("mode", ProgressMode)


def _allreduce(elements: int, on: Machine = MACHINE) -> float:
    return unhindered_seconds(stages(on, OperationKind.ALLREDUCE, elements * ITEM_BYTES, placement(2)))


def _step(schedule: CollectiveSchedule | None, on: Machine = MACHINE, **options: object) -> SimulatedStep:
    step = program([(2, tasks(SECONDS))], SIZES, schedule, update_seconds=1e-6)
    return simulate(step, on, SimulationOptions(**options))  # type: ignore[arg-type]


# -- closed forms ----------------------------------------------------------------------------------------------------------------


@every_schedule
def test_one_rank_takes_the_sum_of_its_tasks(schedule: CollectiveSchedule | None) -> None:
    alone = None if schedule is None else replace(schedule, ranks=1)
    step = simulate(program([(1, tasks(SECONDS))], SIZES, alone, update_seconds=1e-6), MACHINE)
    assert step.seconds == pytest.approx(COMPUTE + sum(SIZES) * 1e-6)
    assert step.exposed_seconds == 0


@every_schedule
def test_on_a_free_network_the_slowest_class_counts(schedule: CollectiveSchedule | None) -> None:
    slower = tuple(2 * seconds for seconds in SECONDS)
    step = simulate(program([(1, tasks(SECONDS)), (1, tasks(slower))], SIZES, schedule), machine())
    assert step.seconds == pytest.approx(2 * COMPUTE)


def test_blocking_is_compute_then_the_allreduce_then_the_update() -> None:
    assert _step(None).seconds == pytest.approx(COMPUTE + _allreduce(sum(SIZES)) + sum(SIZES) * 1e-6)
    assert _step(None).exposed_seconds == pytest.approx(_allreduce(sum(SIZES)))


def test_without_compute_communication_remains() -> None:
    body = tasks((0.0, 0.0, 0.0))
    one_by_one = allreduces(SIZES, 2, window=1)
    step = simulate(program([(2, body)], SIZES, one_by_one), MACHINE)
    assert step.seconds == pytest.approx(sum(_allreduce(size) for size in SIZES))


def test_operations_in_flight_together_share_the_wire_and_overlap_their_latencies() -> None:
    body = tasks((0.0, 0.0))
    latency_bound, wire_bound = machine(link(1.0, 0.0)), machine(link(0.0, 1e-5))
    sizes = (1000, 1000)
    both = program([(2, body)], sizes, allreduces(sizes, 2))
    assert simulate(both, latency_bound).seconds == pytest.approx(_allreduce(1000, latency_bound))
    assert simulate(both, wire_bound).seconds == pytest.approx(2 * _allreduce(1000, wire_bound))
    serial = program([(2, body)], sizes, allreduces(sizes, 2, window=1))
    assert simulate(serial, latency_bound).seconds == pytest.approx(2 * _allreduce(1000, latency_bound))


def test_two_ranks_on_one_core_take_twice_as_long() -> None:
    free = machine(ranks_per_node=2, cores_per_rank=0.5)
    step = program([(2, tasks(SECONDS))], SIZES, sharded(SIZES, 2), ranks_per_node=2)
    assert simulate(step, free).seconds == pytest.approx(2 * COMPUTE, abs=3e-3)  # a wait ends at a tick


def test_ranks_of_a_node_share_its_card() -> None:
    def seconds(ranks_per_node: int) -> float:
        on = machine(link(0.0, 1e-5), ranks_per_node=ranks_per_node)
        exchanged = CollectiveSchedule("toy", 8, allreduces((8000,), 8).slices, sharded((8000,), 8).operations)
        step = program([(8, tasks((0.0,)))], (8000,), exchanged, ranks_per_node=ranks_per_node)
        return simulate(step, on).seconds

    assert seconds(2) > 1.3 * seconds(1)


# -- sums ------------------------------------------------------------------------------------------------------------------------


@every_schedule
@every_mode
def test_compute_messages_exposed_and_the_rest_are_the_step(schedule: CollectiveSchedule | None, mode: ProgressMode) -> None:
    step = _step(schedule, progress=mode)
    table = step.table
    own = table.total.compute_seconds + table.total.messages_seconds
    total = own + table.total.exposed_seconds + table.left_over_seconds
    assert total == pytest.approx(step.seconds, abs=1e-7)
    assert table.step_seconds == pytest.approx(step.seconds, abs=1e-7)
    assert table.total.hidden_seconds <= table.total.communication_seconds + 1e-9


def test_events_are_tabulated_as_those_of_runs() -> None:
    step = _step(SCHEDULES["sharded"])
    (events,) = step.events.values()
    table = tabulate(events, skip=0)
    assert table is not None
    assert table.rows == step.table.rows
    assert {row.name for row in table.rows} == {"l0", "l1", "l2", "optimizer update"}


def test_the_table_is_a_mean_over_ranks() -> None:
    slower = tuple(2 * seconds for seconds in SECONDS)
    step = simulate(program([(3, tasks(SECONDS)), (1, tasks(slower))], SIZES, sharded(SIZES, 4)), machine())
    assert step.table.total.compute_seconds == pytest.approx((3 * COMPUTE + 2 * COMPUTE) / 4, rel=1e-6)
    assert step.table.total.exposed_seconds == pytest.approx(3 * COMPUTE / 4, rel=1e-6)


# -- what never gets worse -------------------------------------------------------------------------------------------------------


@every_mode
@pytest.mark.parametrize("schedule", [None, allreduces(SIZES, 2, 1)], ids=["blocking", "one by one"])
def test_better_machines_never_make_a_chain_slower(schedule: CollectiveSchedule | None, mode: ProgressMode) -> None:
    """On a chain each task waits for the one before: no faster one lets another overtake."""
    usual = machine(link(1e-3, 1e-5, unattended_bytes=1500))
    seconds = _step(schedule, usual, progress=mode).seconds
    for factor in (1.1, 2.0, 10.0):
        assert _step(schedule, usual.scaled(bandwidth=factor), progress=mode).seconds <= seconds + 1e-9
        assert _step(schedule, usual.scaled(latency=1 / factor), progress=mode).seconds <= seconds + 1e-9


@every_schedule
def test_polls_between_operators_never_hurt(schedule: CollectiveSchedule | None) -> None:
    held_up = machine(link(1e-3, 1e-5, unattended_bytes=500))
    none, test, thread, posting = (
        _step(schedule, held_up, progress=mode).seconds
        for mode in (ProgressMode.NONE, ProgressMode.TEST, ProgressMode.THREAD, ProgressMode.POSTING)
    )
    assert test <= none + 1e-9
    assert thread <= test + 1e-9
    assert posting <= thread + 1e-9


@every_schedule
@every_mode
def test_a_step_is_no_shorter_than_compute_and_no_longer_than_everything_in_turn(
    schedule: CollectiveSchedule | None, mode: ProgressMode
) -> None:
    for unattended in (None, 0, 1000):
        on = machine(link(1e-3, 1e-5, unattended_bytes=unattended))
        seconds = _step(schedule, on, progress=mode).seconds
        update = sum(SIZES) * 1e-6
        assert seconds >= COMPUTE
        assert seconds <= COMPUTE + update + sum(_allreduce(size) for size in SIZES) + 1e-9


# -- folding, noise and errors ---------------------------------------------------------------------------------------------------


def _halves(split: int) -> StepProgram:
    # Odd numbers: where two things happen at one instant, roundings would decide which one a poll sees.
    def body(seconds: float) -> tuple[Task, ...]:
        exchange = (BeginExchange(0, Exchange("halo", 500, 500, 1)), Compute("early", Category.WORK, 0.0137), EndExchange(0))
        return *exchange, *tasks((seconds, 0.0219, 0.0313))

    return program(
        [(4, body(0.0117)), (4, body(0.0331))], SIZES, sharded(SIZES, 8), ranks_per_node=4, split=split, update_seconds=1e-6
    )


@every_mode
@pytest.mark.parametrize("cores_per_rank", [1.0, 0.5])
def test_folded_ranks_give_what_single_ones_give(cores_per_rank: float, mode: ProgressMode) -> None:
    on = machine(
        link(1e-4, 1e-6, unattended_bytes=3000, byte_seconds=1e-8, operation_seconds=1e-5),
        link(1e-5, 1e-7, unattended_bytes=2000, byte_seconds=1e-7, operation_seconds=1e-5),
        ranks_per_node=4,
        cores_per_rank=cores_per_rank,
    )
    folded = simulate(_halves(2), on, SimulationOptions(progress=mode))
    single = simulate(_halves(2), on, SimulationOptions(progress=mode, slow={0: 1.0}))
    assert len(single.events) == 8
    assert single.seconds == pytest.approx(folded.seconds, abs=1e-9)
    assert single.exposed_seconds == pytest.approx(folded.exposed_seconds, abs=1e-8)


def test_a_slow_rank_holds_all_up() -> None:
    step = program([(4, tasks(SECONDS))], SIZES, sharded(SIZES, 4))
    slow = simulate(step, machine(), SimulationOptions(slow={2: 1.5}))
    assert slow.seconds == pytest.approx(1.5 * COMPUTE)
    assert set(slow.events) == {f"rank {rank}" for rank in range(4)}


def test_jitter_follows_from_its_seed() -> None:
    step = program([(4, tasks(SECONDS))], SIZES, sharded(SIZES, 4))

    def seconds(seed: int) -> float:
        return simulate(step, MACHINE, SimulationOptions(jitter=0.1, seed=seed)).seconds

    assert seconds(3) == seconds(3) != seconds(4)


def test_random_schedules_end() -> None:
    draw = random.Random(11)
    for _ in range(20):
        sizes = [draw.randrange(1, 5000) for _ in range(6)]
        body = tasks([draw.uniform(0, 0.05) for _ in sizes])
        schedule = draw.choice([sharded, allreduces])(sizes, 4, draw.choice([None, 1, 3]))
        on = machine(link(1e-4, 1e-6, unattended_bytes=draw.choice([None, 0, 2000]), byte_seconds=1e-9))
        mode = draw.choice(list(ProgressMode))
        assert simulate(program([(4, body)], sizes, schedule), on, SimulationOptions(progress=mode)).seconds > 0


def test_ranks_that_wait_without_end_are_named() -> None:
    """One rank exchanges, the other does not."""
    alone: tuple[Task, ...] = (BeginExchange(0, Exchange("halo of conv1", 10, 10, 1)), EndExchange(0))
    with pytest.raises(DeadlockError, match=r"rank 0 \(class 0\) waits for halo of conv1"):
        simulate(program([(1, alone), (1, (Compute("c", Category.WORK, 1.0),))], split=2), MACHINE)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (SimulationOptions(slow={7: 2.0}), "Rank 7 .* 0 to 1; .* 1"),
        (SimulationOptions(slow={0: -1.0}), "Rank 0 .* above 0"),
        (SimulationOptions(steps=0), "0 steps"),
        (SimulationOptions(jitter=-0.1), "jitter is -0.1"),
    ],
    ids=["rank", "factor", "steps", "jitter"],
)
def test_options_that_cannot_be_are_refused(options: SimulationOptions, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        simulate(program([(2, tasks(SECONDS))]), MACHINE, options)
