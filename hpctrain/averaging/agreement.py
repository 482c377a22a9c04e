"""From a strategy to an averager: the ranks of a group make its communicators and agree on one schedule."""

from __future__ import annotations

from dataclasses import replace

from hpctrain.averaging.base import Agreement, AveragerSetup, GradientAverager
from hpctrain.averaging.collective_schedule import CollectiveSchedule, OperationKind, Stream
from hpctrain.averaging.rounding import caster
from hpctrain.averaging.strategy import Strategy
from hpctrain.comm.base import Communicator, GradientSums
from hpctrain.comm.link import calibrate, measure_operation_seconds
from hpctrain.comm.sixteen_bit import sums_over
from hpctrain.comm.staged import StagedCommunicator
from hpctrain.comm.tree_sums import tree_sums_over
from hpctrain.comm.two_level import across_nodes, in_levels
from hpctrain.errors import CollectiveMismatchError
from hpctrain.nn.parameter import FlatGroup


def make_averager(strategy: Strategy, setup: AveragerSetup, stored: CollectiveSchedule | None = None) -> GradientAverager:
    """The averager that runs the strategy's schedule, the same on every rank. Collective over `setup.comm`.

    Args:
        stored: of an earlier run; used where it was made for the same strategy, options, parameters and ranks (`accepts`).
            Sizes of slices decide which numbers are added first: where they are measured, only this repeats a run bit by bit.
            The order of operations, which changes no bit, is measured where it had not been.

    Raises:
        CollectiveMismatchError: ranks with different schedules, on every rank; the message names the first difference.
    """
    assert strategy.group.ranks == setup.comm.size, "a strategy is planned for as many ranks as run it"
    streams = {stream: _communicator(setup.comm, strategy, stream) for stream in strategy.posted_streams}
    if strategy.request() is None:
        sums = _sums(strategy, setup, setup.comm, allreduces=True)
        comm, sums = _reaching(setup.group, setup.comm, sums)
        return strategy.averager(replace(setup, comm=comm), Agreement(streams=streams, sums=sums))
    comm = streams[Stream.GRADIENTS]
    usable = stored if strategy.accepts(stored) else None
    measures = any(comm.allgather_object(strategy.needs_link(usable)))  # the same on every rank, as measuring is collective
    link = calibrate(comm, setup.progress) if measures else None
    if link is not None and any(comm.allgather_object(strategy.needs_operation_seconds(usable))):
        link = replace(link, operation_seconds=measure_operation_seconds(comm, setup.progress))
    schedule = strategy.plan(link) if usable is None else usable
    assert schedule is not None
    check_same_schedule(comm, schedule)
    allreduces = any(operation.kind is OperationKind.ALLREDUCE for operation in schedule.operations)
    sums = _sums(strategy, setup, comm, allreduces=allreduces)
    reaching = {stream: _reaching(setup.group, posted_on)[0] for stream, posted_on in streams.items()}
    reaching[Stream.GRADIENTS], sums = _reaching(setup.group, comm, sums)
    return strategy.averager(setup, Agreement(schedule, reaching, link, sums))


def _reaching(group: FlatGroup, comm: Communicator, sums: GradientSums | None = None) -> tuple[Communicator, GradientSums | None]:
    """A communicator, and sums over its ranks, that take the arrays of the group, wherever these lie."""
    mirrors = group.arithmetic.mirrors()
    if mirrors is None or comm.size == 1:
        return comm, sums
    staged = StagedCommunicator(comm, mirrors)
    return staged, None if sums is None else staged.sums_of(sums)


def _sums(strategy: Strategy, setup: AveragerSetup, comm: Communicator, *, allreduces: bool) -> GradientSums | None:
    """The sums of gradients over `comm` where they travel in 16 bits, or are made in the order of shards. Collective."""
    if setup.gradients is not None:
        return tree_sums_over(comm, setup.gradients.shards, allreduces=allreduces)
    if strategy.rounding is None:
        return None
    return sums_over(comm, caster(strategy.rounding.gradients), allreduces=allreduces)


def _communicator(comm: Communicator, strategy: Strategy, stream: Stream) -> Communicator:
    """The communicator of a stream. Collective."""
    name = f"{comm.name} {stream}"
    if stream is Stream.NORMS:  # nothing but allreduces, which have one level
        return in_levels(comm, None, name)
    return (across_nodes if stream is Stream.NODES else in_levels)(comm, strategy.levels, name)


def check_same_schedule(comm: Communicator, schedule: CollectiveSchedule) -> None:
    """Make sure that all ranks hold the same schedule. Collective; set-up only.

    Raises:
        CollectiveMismatchError: on every rank, with the first operation that differs and who has what.
    """
    if len(set(comm.allgather_object(schedule.digest()))) == 1:
        return
    texts = comm.allgather_object(schedule.lines())
    for position in range(max(map(len, texts))):
        by_rank = [lines[position] if position < len(lines) else "nothing more" for lines in texts]
        if len(set(by_rank)) > 1:
            other = next(rank for rank, line in enumerate(by_rank) if line != by_rank[0])
            where = f"operation {position - 1}" if position else "the request"
            raise CollectiveMismatchError(
                f"The ranks' schedules differ, first in {where}: rank 0 has {by_rank[0]}, but rank {other} has {by_rank[other]}; "
                f"every rank must have the same model, options and posting order."
            )
    raise CollectiveMismatchError("The ranks' schedules differ in their slices; every rank must have the same model and options.")
