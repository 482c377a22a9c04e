"""Schedules are data: they survive JSON, differ by digest, and a rank with another one is named. No ranks needed to count."""

from __future__ import annotations

import pytest

from hpctrain.averaging.collective_schedule import CollectiveSchedule, Operation, OperationKind, Stream
from hpctrain.averaging.norm_groups import covered_slices
from hpctrain.averaging.slices import Compression, Slice, layer_slices
from hpctrain.boxes import even
from hpctrain.comm.base import Communicator
from hpctrain.errors import CheckpointError
from hpctrain.virtual.run import run_virtual, virtual_engine
from tests.support.averaging import STRATEGIES, make


def _schedule(strategy: str, ranks: int = 3, optimizer: str = "clipping") -> CollectiveSchedule:
    def program(comm: Communicator) -> CollectiveSchedule:
        schedule = make(strategy, optimizer, comm, virtual_engine(comm)).schedule  # type: ignore[arg-type]
        assert schedule is not None
        return schedule

    schedules = run_virtual(ranks, program)
    assert len({each.digest() for each in schedules}) == 1
    return schedules[0]


@pytest.mark.parametrize("optimizer", ["clipping", "lars"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_json_gives_the_same_schedule_again(strategy: str, optimizer: str) -> None:
    schedule = _schedule(strategy, optimizer=optimizer)
    again = CollectiveSchedule.from_json(schedule.to_json())
    assert again == schedule
    assert again.digest() == schedule.digest()


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"slices": [{}], "operations": []}'])
def test_text_that_is_no_schedule_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match="measured again"):
        CollectiveSchedule.from_json(text)


@pytest.mark.parametrize("optimizer", ["clipping", "lars"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_table_names_every_operation(strategy: str, optimizer: str) -> None:
    schedule = _schedule(strategy, optimizer=optimizer)
    lines = schedule.table().splitlines()
    assert len(lines) == 2 + len(schedule.operations)
    for operation, line in zip(schedule.operations, lines[2:], strict=True):
        assert operation.kind.value in line
        assert operation.slice < 0 or schedule.slices[operation.slice].name in line


@pytest.mark.parametrize("optimizer", ["clipping", "lars"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_slice_is_reduced_before_it_is_gathered(strategy: str, optimizer: str) -> None:
    schedule = _schedule(strategy, optimizer=optimizer)
    if all(each.kind is OperationKind.ALLREDUCE for each in schedule.operations):
        assert sorted(each.slice for each in schedule.operations) == list(range(len(schedule.slices)))
        return
    norms_at = {each.slice: i for i, each in enumerate(schedule.operations) if each.kind is OperationKind.NORMS}
    norms_of = {k: norms_at[first] for first, slices in covered_slices(schedule).items() for k in slices}
    for k, each in enumerate(schedule.slices):
        moving = [(i, operation) for i, operation in enumerate(schedule.operations) if operation.kind is not OperationKind.NORMS]
        at = {operation.kind: i for i, operation in moving if operation.slice == k}
        reduced = (OperationKind.INPUTS, OperationKind.ERRORS) if each.sufficient_factors else (OperationKind.REDUCE_SCATTER,)
        if each.compression is not None:  # here every rank is a node
            reduced = (OperationKind.SPARSE,)
        lead = layer_slices(schedule.slices, k)[0]
        first = {operation.kind: i for i, operation in moving if operation.slice == lead}
        assert set(at) == {*(reduced if lead == k else ()), OperationKind.ALLGATHER}
        assert max(first[kind] for kind in reduced) < norms_of[k] < at[OperationKind.ALLGATHER]


def test_exchanged_counts_one_allreduce_as_two_ways() -> None:
    slices = (Slice("x", 0, 10, 0, ("x",)),)
    schedule = CollectiveSchedule("x", 4, slices, (Operation(OperationKind.ALLREDUCE, 0, Stream.GRADIENTS),))
    assert [schedule.exchanged(rank, (1,) * 4)[OperationKind.ALLREDUCE] for rank in range(4)] == [14, 14, 16, 16]


COMPRESSED = tuple(
    Operation(kind, 0, stream)
    for kind, stream in (
        (OperationKind.REDUCE_SCATTER, Stream.GRADIENTS),
        (OperationKind.SPARSE, Stream.NODES),
        (OperationKind.ALLGATHER, Stream.PARAMETERS),
    )
)


def _compressed(size: int, nodes: int, per_node: int, density: float) -> CollectiveSchedule:
    slices = (Slice("x", 0, size, 0, ("x",), compression=Compression(nodes, density)),)
    return CollectiveSchedule("x", nodes * per_node, slices, COMPRESSED)


@pytest.mark.parametrize("density", [0.01, 0.3, 1.0])
@pytest.mark.parametrize(("nodes", "per_node"), [(2, 1), (2, 2), (3, 2), (2, 3)])
@pytest.mark.parametrize("size", [1, 5, 10, 1000])
def test_a_compressed_slice_exchanges_its_largest_elements_with_their_positions(
    size: int, nodes: int, per_node: int, density: float
) -> None:
    """Over all ranks: (n - 1) of the slice twice within each node, and k pairs of each part to m - 1 other nodes."""
    schedule = _compressed(size, nodes, per_node, density)
    ranks, samples = nodes * per_node, (1,) * nodes * per_node
    counts = even(size, per_node)
    pairs = [(nodes - 1) * min(count, max(1, round(density * count))) for count in counts]
    for rank in range(ranks):
        number = rank // nodes
        assert schedule.slices[0].owned_size(rank, ranks) == counts[number]
        by_kind = schedule.exchanged(rank, samples)
        within = size - counts[number]
        assert (by_kind[OperationKind.REDUCE_SCATTER], by_kind[OperationKind.ALLGATHER]) == (within, within)
        assert by_kind[OperationKind.SPARSE] == 2 * pairs[number]
        assert schedule.exchanged_by_rank(samples)[rank] == sum(by_kind.values())
        for item in (4, 8):
            assert schedule.exchanged_bytes_by_rank(samples, item)[rank] == item * 2 * within + (item + 4) * pairs[number]


def test_a_stored_schedule_names_compression_only_where_there_is_some() -> None:
    schedule = _compressed(10, 2, 2, 0.25)
    assert CollectiveSchedule.from_json(schedule.to_json()) == schedule
    assert "compression" not in _schedule("sharded").to_json()
