"""Schedules are data: they survive JSON, differ by digest, and a rank with another one is named. No ranks needed to count."""

from __future__ import annotations

import pytest

from hpctrain.averaging.collective_schedule import CollectiveSchedule, Operation, OperationKind, Stream
from hpctrain.averaging.slices import Slice, layer_slices
from hpctrain.comm.base import Communicator
from hpctrain.errors import CheckpointError
from hpctrain.virtual.run import run_virtual, virtual_engine
from tests.support.averaging import STRATEGIES, make


def _schedule(strategy: str, ranks: int = 3) -> CollectiveSchedule:
    def program(comm: Communicator) -> CollectiveSchedule:
        schedule = make(strategy, "clipping", comm, virtual_engine(comm)).schedule  # type: ignore[arg-type]
        assert schedule is not None
        return schedule

    schedules = run_virtual(ranks, program)
    assert len({each.digest() for each in schedules}) == 1
    return schedules[0]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_json_gives_the_same_schedule_again(strategy: str) -> None:
    schedule = _schedule(strategy)
    again = CollectiveSchedule.from_json(schedule.to_json())
    assert again == schedule
    assert again.digest() == schedule.digest()


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"slices": [{}], "operations": []}'])
def test_text_that_is_no_schedule_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match="measured again"):
        CollectiveSchedule.from_json(text)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_table_names_every_operation(strategy: str) -> None:
    schedule = _schedule(strategy)
    lines = schedule.table().splitlines()
    assert len(lines) == 2 + len(schedule.operations)
    for operation, line in zip(schedule.operations, lines[2:], strict=True):
        assert operation.kind.value in line
        assert operation.slice < 0 or schedule.slices[operation.slice].name in line


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_slice_is_reduced_before_it_is_gathered(strategy: str) -> None:
    schedule = _schedule(strategy)
    if all(each.kind is OperationKind.ALLREDUCE for each in schedule.operations):
        assert sorted(each.slice for each in schedule.operations) == list(range(len(schedule.slices)))
        return
    norms = next(i for i, each in enumerate(schedule.operations) if each.kind is OperationKind.NORMS)
    for k, each in enumerate(schedule.slices):
        at = {operation.kind: i for i, operation in enumerate(schedule.operations) if operation.slice == k}
        reduced = (OperationKind.INPUTS, OperationKind.ERRORS) if each.sufficient_factors else (OperationKind.REDUCE_SCATTER,)
        lead = layer_slices(schedule.slices, k)[0]
        first = {operation.kind: i for i, operation in enumerate(schedule.operations) if operation.slice == lead}
        assert set(at) == {*(reduced if lead == k else ()), OperationKind.ALLGATHER}
        assert max(first[kind] for kind in reduced) < norms < at[OperationKind.ALLGATHER]


def test_exchanged_counts_one_allreduce_as_two_ways() -> None:
    slices = (Slice("x", 0, 10, 0, ("x",)),)
    schedule = CollectiveSchedule("x", 4, slices, (Operation(OperationKind.ALLREDUCE, 0, Stream.GRADIENTS),))
    assert [schedule.exchanged(rank, (1,) * 4)[OperationKind.ALLREDUCE] for rank in range(4)] == [14, 14, 16, 16]
