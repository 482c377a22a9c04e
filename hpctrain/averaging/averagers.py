"""From a configured name to a strategy, and from a strategy to the averager that runs it.

`make_strategy` makes the strategy of a parameter group for a run or for a plan without ranks. `strategy_costs` returns the costs
that a planner uses. `make_averager` creates the communicators of a group's ranks, checks that all ranks have the same schedule,
and creates the averager.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from hpctrain.averaging.base import Agreement, AveragerSetup, GradientAverager, PlannedGroup, Strategy, StrategyCosts
from hpctrain.averaging.collective_schedule import CollectiveSchedule, OperationKind, Stream
from hpctrain.averaging.sixteen_bits import caster
from hpctrain.comm import transports
from hpctrain.comm.base import Communicator, GradientSums
from hpctrain.comm.groups import across_nodes, in_levels
from hpctrain.comm.link import calibrate, measure_operation_seconds
from hpctrain.comm.sums import sums_over, tree_sums_over
from hpctrain.core.errors import CollectiveMismatchError, ConfigError, OptionError
from hpctrain.core.registry import Registry, check_options

#: keywords that the program gives, or knows by itself from other keys: none of them is an option
_GIVEN = ("group", "optimizer", "comm", "progress", "norms", "nodes", "nominal_batch", "micro_batches")
AVERAGERS: Registry[Strategy] = Registry("hpctrain.averaging.strategies", "averager", Strategy, _GIVEN)


def strategy_costs(name: str, options: Mapping[str, Any]) -> StrategyCosts:
    """Return what a planner prices the strategy of that name by, the user's own included. Pure.

    Raises:
        ConfigError: an unknown name, or an option that is wrong.
    """
    strategy = cast(type[Strategy], AVERAGERS.find(name))
    with AVERAGERS.refusals(name):
        checked = check_options(strategy, f'averager "{name}"', options, AVERAGERS.given)
    return strategy.costs(checked["options"] if "options" in checked else strategy.Options())


def make_strategy(name: str, options: Mapping[str, Any], group: PlannedGroup) -> Strategy:
    """Make the strategy of that name for one group of parameters. Pure.

    Raises:
        ConfigError: an unknown name, an option that is wrong or does not fit the group, norms that the strategy does not add up,
            or an order of sums that it cannot keep.
    """
    strategy = AVERAGERS.create(name, options, group=group)
    check_order(name, strategy)
    if group.needs_norms and not strategy.adds_norms:
        raise ConfigError(
            f"The averager {name} adds up no norms (its class does not set adds_norms), which optimizer.clip_norm and lars need; "
            f"leave clip_norm out and use sgd, or use another averager."
        )
    return strategy


def check_order(name: str, strategy: Strategy) -> None:
    """Raise unless a strategy can add gradients up in the order of shards, or is asked for no order.

    Two levels are no fault: with shards, sums have one level.

    Args:
        name: of the strategy, for messages.

    Raises:
        ConfigError: it adds up something else. OptionError: an option that does not go with such an order.
    """
    group, options = strategy.group, strategy.options
    if group.shards is None:
        return
    if not strategy.sums_shards:
        raise ConfigError(
            f"The averager {name} does not add up the gradients of each step as they are, which exact.shards needs; use sharded, "
            "priority, bucketed, overlap or blocking, or leave exact out."
        )
    for option in ("wire", "wire_parameters"):
        value = getattr(options, option, "float32")
        if value != "float32":
            raise OptionError(
                f"{option} is {value}, whose rounding follows the ranks, but exact.shards needs numbers as they are computed; "
                f"set {option} to float32.",
                option,
            )
    if getattr(options, "fc_exchange", None) == "always":
        raise OptionError(
            "fc_exchange is always, but products of exchanged inputs and errors add up samples in an order of their own, and "
            "exact.shards has another; set fc_exchange to auto or never.",
            "fc_exchange",
        )


def make_averager(strategy: Strategy, setup: AveragerSetup, stored: CollectiveSchedule | None = None) -> GradientAverager:
    """Make the averager that runs the strategy's schedule, the same on every rank. Collective over `setup.comm`.

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
        reaching, sums = _reaching(setup, {Stream.GRADIENTS: setup.comm}, sums)
        return strategy.averager(replace(setup, comm=reaching[Stream.GRADIENTS]), Agreement(streams=streams, sums=sums))
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
    reaching, sums = _reaching(setup, streams, sums)
    return strategy.averager(setup, Agreement(schedule, reaching, link, sums))


#: streams of all ranks of a group whose operations are on arrays of its parameters
_OF_ARRAYS = (Stream.GRADIENTS, Stream.PARAMETERS)


def _reaching(
    setup: AveragerSetup, streams: Mapping[Stream, Communicator], sums: GradientSums | None
) -> tuple[Mapping[Stream, Communicator], GradientSums | None]:
    """Return the streams' communicators, and the sums, that take the arrays of the group, wherever these lie. Collective.

    Sums in 16 bits are rounded on the host: these go by way of it, and so does all else on their communicator, as both have one
    order. By NCCL all arrays go on one communicator, and so in the one order of the schedule: of operations on several ones, two
    could be enqueued in another order on another rank, where each then waits for the other.
    """
    arithmetic = setup.group.arithmetic
    if arithmetic.mirrors() is None or setup.comm.size == 1:
        return streams, sums
    by_device = [stream for stream in _OF_ARRAYS if stream in streams and (stream is not Stream.GRADIENTS or sums is None)]
    if setup.transport == "staged" or (setup.transport == "nccl" and Stream.NODES in streams):
        by_device.clear()  # what compresses on the host posts in stages, whose order on several communicators follows from timing
    reached: dict[Stream, Communicator] = {}
    for stream in by_device:
        shared = setup.transport == "nccl" and reached
        comm = next(iter(reached.values())) if shared else transports.reaching(setup.transport, streams[stream], arithmetic)
        reached[stream] = comm
    by_host = {stream: transports.staged(comm, arithmetic) for stream, comm in streams.items() if stream not in reached}
    if sums is not None:
        sums = by_host[Stream.GRADIENTS].sums_of(sums)
    return reached | by_host, sums


def _sums(strategy: Strategy, setup: AveragerSetup, comm: Communicator, *, allreduces: bool) -> GradientSums | None:
    """Return sums that travel in 16 bits, or keep the order of shards; None: the stream's own. Collective."""
    if setup.gradients is not None:
        return tree_sums_over(comm, setup.gradients.shards, allreduces=allreduces)
    if strategy.rounding is None:
        return None
    return sums_over(comm, caster(strategy.rounding.gradients), allreduces=allreduces)


def _communicator(comm: Communicator, strategy: Strategy, stream: Stream) -> Communicator:
    """Return the communicator of a stream. Collective."""
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
