"""Operations as data: bytes as the schedule counts them, work as owners do it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpctrain.averaging.collective_schedule import CollectiveSchedule, Operation, OperationKind, Stream
from hpctrain.averaging.dependencies import dependencies
from hpctrain.averaging.slices import Slice
from hpctrain.planner import collective_costs
from hpctrain.planner.machine import OperatorClass, OperatorRate
from hpctrain.planner.simulation.group_tasks import group_tasks
from hpctrain.planner.tasks import AveragedGroup
from tests.support.simulated import ITEM_BYTES, allreduces, link, machine, placement, sharded

SIZES = (10, 21, 32)
MACHINE = machine(link(1e-3, 1e-6))


def _group(schedule: CollectiveSchedule | None, ranks: int = 2) -> AveragedGroup:
    return AveragedGroup("all", sum(SIZES), ITEM_BYTES, schedule, placement(ranks), ("class 0",), (3,) * ranks)


def test_operations_come_after_what_the_schedule_says() -> None:
    schedule = sharded(SIZES, 2)
    for task, needs in zip(group_tasks(_group(schedule), MACHINE, 0.0).operations, dependencies(schedule), strict=True):
        assert (task.events, task.operations, task.gathers_before) == (needs.events, needs.operations, needs.gathers_before)


def test_stages_are_those_of_the_slices_bytes() -> None:
    schedule = sharded(SIZES, 2)
    for task, operation in zip(group_tasks(_group(schedule), MACHINE, 0.0).operations, schedule.operations, strict=True):
        n_bytes = SIZES[operation.slice] * ITEM_BYTES
        assert task.stages == collective_costs.stages(MACHINE, operation.kind, n_bytes, placement(2))
        assert task.text == schedule.text(operation)


def test_owners_update_their_part_before_its_gather() -> None:
    tasks = group_tasks(_group(sharded(SIZES, 2)), MACHINE, 1e-3)
    updates = {task.gathers: task.update_seconds for task in tasks.operations if task.gathers is not None}
    assert updates == {0: 5e-3, 1: pytest.approx(11e-3), 2: 16e-3}
    assert not any(task.update_seconds for task in tasks.operations if task.gathers is None)
    assert tasks.touching["l1.weight"] == (1,)


def test_allreduced_slices_are_updated_whole_and_late() -> None:
    tasks = group_tasks(_group(allreduces(SIZES, 2)), MACHINE, 1e-3)
    assert tasks.allreduce
    assert tasks.late_updates == pytest.approx([size * 1e-3 for size in SIZES])
    assert not any(task.update_seconds for task in tasks.operations)


def test_without_a_schedule_one_allreduce_has_all() -> None:
    whole = group_tasks(_group(None), MACHINE, 1e-3).whole
    assert whole is not None
    n_bytes = sum(SIZES) * ITEM_BYTES
    assert whole.stages == collective_costs.stages(MACHINE, OperationKind.ALLREDUCE, n_bytes, placement(2))
    assert whole.update_seconds == pytest.approx(sum(SIZES) * 1e-3)


def _factors() -> CollectiveSchedule:
    """A linear layer of 8 inputs and 5 outputs that exchanges inputs and errors."""
    piece = Slice("fc.weight", 0, 40, 0, ("fc.weight",), 5, True, ("fc.bias",))
    kinds = (OperationKind.INPUTS, OperationKind.ERRORS, OperationKind.NORMS, OperationKind.ALLGATHER)
    operations = tuple(Operation(kind, -1 if kind is OperationKind.NORMS else 0, Stream.GRADIENTS) for kind in kinds)
    return CollectiveSchedule("toy exchange", 2, (piece,), operations)


def test_exchanged_factors_move_samples_and_need_a_product() -> None:
    tasks = group_tasks(_group(_factors()), MACHINE, 1e-3, {"fc.weight": 0.25})
    inputs, errors, norms, gather = tasks.operations
    assert inputs.stages == collective_costs.stages(MACHINE, OperationKind.INPUTS, 3 * 8 * ITEM_BYTES, placement(2))
    assert errors.stages == collective_costs.stages(MACHINE, OperationKind.ERRORS, 6 * 5 * ITEM_BYTES, placement(2))
    assert norms.prepare_seconds == pytest.approx(20 * 0.25)  # before the squares, which are free here
    assert gather.prepare_seconds == 0.0
    assert gather.update_seconds == pytest.approx((20 + 5) * 1e-3)  # half of the weight, and the whole bias


def test_norms_of_some_slices_are_prepared_and_sent_by_themselves() -> None:
    """Squares of their own elements only; gathers come after those of their parameters."""
    schedule = sharded(SIZES, 2)
    reductions = [one for one in schedule.operations if one.kind is OperationKind.REDUCE_SCATTER]
    gathers = [one for one in schedule.operations if one.kind is OperationKind.ALLGATHER]
    norms = [Operation(OperationKind.NORMS, start, Stream.NORMS) for start in (1, 0)]
    schedule = replace(schedule, operations=(*reductions, *norms, *gathers))
    rate = {OperatorClass.MEMORY: OperatorRate(1.0, 100.0, 0.0)}
    late, front, *behind = group_tasks(_group(schedule), replace(MACHINE, rates=rate), 0.0).operations[len(reductions) :]
    # The first rank owns 5, 11 and 16 elements: sums are copied (read and written), parameters and gradients are read.
    assert late.prepare_seconds == pytest.approx((2 + 2) * (11 + 16) * ITEM_BYTES / 100)
    assert front.prepare_seconds == pytest.approx((2 + 2) * 5 * ITEM_BYTES / 100)
    for task, parameters in ((late, 2), (front, 1)):
        assert task.stages == collective_costs.stages(MACHINE, OperationKind.NORMS, 16 * parameters, placement(2))
        assert task.stream is Stream.NORMS
    at = {1: len(reductions), 2: len(reductions), 0: len(reductions) + 1}
    for task in behind:
        assert task.prepare_seconds == 0.0
        assert at[task.slice] in task.operations
        assert not set(at.values()) - {at[task.slice]} & set(task.operations)
