"""Schedules are data: they survive JSON, differ by digest, and a rank with another one is named. No ranks needed to count."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from hpctrain.averaging.collective_schedule import CollectiveSchedule, Operation, OperationKind, Stream, agree
from hpctrain.averaging.slices import Slice, layer_slices
from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.backend.kernels.graph import GraphBuilder
from hpctrain.backend.kernels.specs import TensorSpec
from hpctrain.comm.base import Communicator
from hpctrain.comm.progress import ProgressEngine
from hpctrain.comm.single import SingleCommunicator
from hpctrain.errors import CheckpointError, CollectiveMismatchError
from hpctrain.models.families import vgg
from hpctrain.nn.network import declared
from hpctrain.nn.parameter import FlatGroup
from hpctrain.optim.optimizers.sgd import Sgd
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
    with pytest.raises(CheckpointError, match="measured anew"):
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
        reduced = (OperationKind.INPUTS, OperationKind.ERRORS) if each.factors else (OperationKind.REDUCE_SCATTER,)
        lead = layer_slices(schedule.slices, k)[0]
        first = {operation.kind: i for i, operation in enumerate(schedule.operations) if operation.slice == lead}
        assert set(at) == {*(reduced if lead == k else ()), OperationKind.ALLGATHER}
        assert max(first[kind] for kind in reduced) < norms < at[OperationKind.ALLGATHER]


def test_another_order_on_one_rank_is_named_on_every_rank() -> None:
    schedule = _schedule("sharded")
    operations = list(schedule.operations)
    operations[1], operations[2] = operations[2], operations[1]
    wrong = replace(schedule, operations=tuple(operations))
    first = schedule.slices[schedule.operations[1].slice].name

    def program(comm: Communicator) -> str:
        with pytest.raises(CollectiveMismatchError) as caught:
            agree(comm, wrong if comm.rank == 2 else schedule)
        return str(caught.value)

    for message in run_virtual(4, program):
        assert f"operation 1: rank 0 has reduce-scatter of {first}" in message
        assert "but rank 2 has" in message


def test_other_options_and_other_slices_on_one_rank_are_named_too() -> None:
    schedule = _schedule("bucketed")
    moved = list(schedule.slices)
    moved[-1] = replace(moved[-1], order=99)
    for wrong, words in (
        (replace(schedule, request="other"), "the request"),
        (replace(schedule, operations=schedule.operations[:-1]), "nothing more"),
        (replace(schedule, slices=tuple(moved)), "slices"),
    ):

        def program(comm: Communicator, wrong: CollectiveSchedule = wrong) -> str:
            with pytest.raises(CollectiveMismatchError) as caught:
                agree(comm, schedule if comm.rank else wrong)
            return str(caught.value)

        assert all(words in message for message in run_virtual(3, program))


def test_a_model_that_differs_on_one_rank_is_refused_when_averagers_agree() -> None:
    def program(comm: Communicator) -> None:
        engine = virtual_engine(comm)  # type: ignore[arg-type]
        options = {"bucket_bytes": 100 if comm.rank else 300, "replan": False}
        averager = Sharded(make("blocking", "sgd", comm, engine).group, Sgd(), comm, engine, **options)  # type: ignore[arg-type]
        with pytest.raises(CollectiveMismatchError, match=r"bucket_bytes 300.*bucket_bytes 100"):
            averager.agree()

    run_virtual(3, program)


def test_a_stored_schedule_is_used_for_the_same_request_only() -> None:
    comm = SingleCommunicator()
    engine = ProgressEngine(rank=0, deadline_seconds=5, abort=comm.abort)

    def averager(**options: object) -> Sharded:
        return Sharded(make("blocking", "sgd", comm, engine).group, Sgd(), comm, engine, replan=False, **options)  # type: ignore[arg-type]

    first = averager(bucket_bytes=100)
    first.agree()
    assert first.schedule is not None
    stored = replace(first.schedule, operations=first.schedule.operations[::-1])
    for options, used in (({"bucket_bytes": 100}, True), ({"bucket_bytes": 400}, False)):
        second = averager(**options)
        second.agree(stored)
        assert (second.schedule == stored) is used


# -- VGG-16 by the schedule alone ----------------------------------------------------------------------------------------------


@cache
def _vgg16() -> FlatGroup:
    model = vgg.build()
    builder = GraphBuilder(TensorSpec((1, *vgg.IMAGE_SHAPE), "float32"))
    specs, _ = declared(model, builder.build(model.lower(builder, 0, "")))
    # The schedule needs sizes only: memory that nobody touches costs nothing.
    return FlatGroup(specs, "float32", zeros=lambda size, dtype: np.broadcast_to(np.zeros(1, dtype), (size,)))


class _Sized(SingleCommunicator):
    """Says that it has many ranks; enough for whoever only counts."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size


def _vgg16_schedule(ranks: int, fc_exchange: str) -> CollectiveSchedule:
    comm = _Sized(ranks)
    engine = ProgressEngine(rank=0, deadline_seconds=5, abort=comm.abort)
    averager = Sharded(
        _vgg16(),
        Sgd(),
        comm,
        engine,
        fc_exchange=fc_exchange,
        nominal_batch=256,
        bucket_bytes=1 << 22,
        replan=False,  # type: ignore[arg-type]
    )
    return averager.plan(None)


@pytest.mark.parametrize("ranks", [64, 256])
def test_vgg16_moves_what_an_allreduce_moves(ranks: int) -> None:
    schedule, n = _vgg16_schedule(ranks, "never"), 138_357_544
    samples = (256 // ranks,) * ranks
    moved = [schedule.exchanged(rank, samples) for rank in range(ranks)]
    assert sum(sum(each.values()) for each in moved) == 2 * (ranks - 1) * n
    own = [sum(end - begin for begin, end in (each.part(rank, ranks) for each in schedule.slices)) for rank in range(ranks)]
    for rank, each in enumerate(moved):
        assert each == {OperationKind.REDUCE_SCATTER: n - own[rank], OperationKind.ALLGATHER: n - own[rank]}
    assert max(own) - min(own) <= len(schedule.slices)


@pytest.mark.parametrize("ranks", [64, 256])
def test_vgg16_moves_less_where_linear_layers_exchange_inputs_and_errors(ranks: int) -> None:
    """(P - 1) / P (K b + M B + K M) a linear layer, its bias for nothing; 2 (P - 1) / P n all others."""
    schedule, batch = _vgg16_schedule(ranks, "auto"), 256
    b = batch // ranks
    linear = ((25088, 4096), (4096, 4096), (4096, 1000))
    n = 138_357_544 - sum(k * m + m for k, m in linear)
    moved = [sum(schedule.exchanged(rank, (b,) * ranks).values()) for rank in range(ranks)]
    # Over all ranks, in integers: the inputs' term needs no rounding, as P divides every K.
    expected = (ranks - 1) * (2 * n + sum(k * b + m * batch + k * m for k, m in linear))
    assert sum(moved) == expected
    if ranks == 256:
        assert round(expected / ranks / 1e6, 2) == 154.84


def test_exchanged_counts_one_allreduce_as_two_ways() -> None:
    slices = (Slice("x", 0, 10, 0, ("x",)),)
    schedule = CollectiveSchedule("x", 4, slices, (Operation(OperationKind.ALLREDUCE, 0, Stream.GRADIENTS),))
    assert [schedule.exchanged(rank, (1,) * 4)[OperationKind.ALLREDUCE] for rank in range(4)] == [14, 14, 16, 16]
