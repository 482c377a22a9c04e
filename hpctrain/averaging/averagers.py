"""Creation of strategies by their configured names, and of the averagers that run them.

`AveragerChoice` finds the strategy of a name and makes its `Options` once. It creates the strategy of each parameter group, for a
run or for a plan without ranks, and returns the costs that a planner uses.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

from hpctrain.averaging.base import Agreement, AveragerSetup, GradientAverager, PlannedGroup, Strategy, StrategyCosts
from hpctrain.averaging.collective_schedule import CollectiveSchedule, OperationKind, Stream
from hpctrain.averaging.sixteen_bits import caster
from hpctrain.comm import transports
from hpctrain.comm.base import Communicator, GradientSums
from hpctrain.comm.groups import across_nodes, in_levels
from hpctrain.comm.link import calibrate
from hpctrain.comm.sums import sums_over, tree_sums_over
from hpctrain.comm.waiting import guard
from hpctrain.core.errors import CollectiveMismatchError, ConfigError, OptionError
from hpctrain.core.registry import Registry, check_options

#: keywords set by the program; none of them is an option
_GIVEN = ("group", "optimizer", "comm", "progress", "norms", "nodes", "nominal_batch", "micro_batches")
AVERAGERS: Registry[Strategy] = Registry("hpctrain.averaging.strategies", "averager", Strategy, _GIVEN)


@dataclass(frozen=True)
class AveragerChoice:
    """Averager, built-in or user-defined, and its options, as in a configuration.

    Its properties and methods raise a ConfigError if the name is unknown or an option is invalid.
    """

    name: str = "sharded"
    options: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def kind(self) -> type[Strategy]:
        """Class of the strategy."""
        return cast(type[Strategy], AVERAGERS.find(self.name))

    @cached_property
    def _keywords(self) -> dict[str, Any]:
        """Keywords of the strategy's constructor: an instance of `Strategy.Options`, or the checked options one by one."""
        kind = self.kind
        with AVERAGERS.refusals(self.name):
            return check_options(kind, f'averager "{self.name}"', self.options, AVERAGERS.given)

    @cached_property
    def costs(self) -> StrategyCosts:
        """Costs that the strategy declares, for a planner."""
        keywords = self._keywords
        return self.kind.costs(keywords["options"] if "options" in keywords else self.kind.Options())

    def strategy(self, group: PlannedGroup) -> Strategy:
        """Return the strategy of one group of parameters, as a pure function.

        Raises:
            ConfigError: an option does not fit the group, or the strategy does not compute the required norms or cannot keep the
                required order of sums.
        """
        keywords = self._keywords
        with AVERAGERS.refusals(self.name):
            strategy = self.kind(group=group, **keywords)
        self._check_sums(group, strategy, strategy.options)
        return strategy

    def check(self, group: PlannedGroup) -> None:
        """Raise the error that `strategy` would raise for the group.

        Only a user's strategy is made: its constructor may have rules of its own.
        """
        if not self.kind.__module__.startswith("hpctrain."):
            self.strategy(group)
            return
        options = self._keywords["options"]
        self.kind.check(group, options)
        self._check_sums(group, self.kind, options)

    def _check_sums(self, group: PlannedGroup, strategy: Strategy | type[Strategy], options: Any) -> None:
        """Raise unless the strategy with these options computes the required norms and keeps the required order of shards.

        The option two_level is accepted: with shards, it is ignored and sums have one level.
        """
        if group.needs_norms and not strategy.adds_norms:
            raise ConfigError(
                f"The averager {self.name} computes no norms (its class does not set adds_norms), which optimizer.clip_norm, "
                f"lars and lamb require; remove clip_norm and use sgd, adam or adamw, or use another averager."
            )
        if group.shards is None:
            return
        if not strategy.sums_shards:
            raise ConfigError(
                f"The averager {self.name} does not sum the unchanged gradients of each step, which exact.shards requires; use "
                "sharded, priority, bucketed, overlap or blocking, or remove exact."
            )
        for option in ("wire", "wire_parameters"):
            value = getattr(options, option, "float32")
            if value != "float32":
                raise OptionError(
                    f"{option} is {value}, but exact.shards requires unrounded messages, because rounding depends on the ranks; "
                    f"set {option} to float32.",
                    option,
                )
        if getattr(options, "fc_exchange", None) == "always":
            raise OptionError(
                "fc_exchange is always, but products of exchanged inputs and errors do not sum in the order of exact.shards; "
                "set fc_exchange to auto or never.",
                "fc_exchange",
            )

    def __reduce__(self) -> tuple[type[AveragerChoice], tuple[str, dict[str, Any]]]:
        return AveragerChoice, (self.name, dict(self.options))  # without what is cached, which may not be picklable

    def __str__(self) -> str:
        options = ", ".join(f"{name} {value}" for name, value in self.options.items())
        return f"{self.name} with {options}" if options else self.name


def make_averager(strategy: Strategy, setup: AveragerSetup, stored: CollectiveSchedule | None = None) -> GradientAverager:
    """Create the averager that runs the strategy's schedule, which is the same on every rank. Collective over `setup.comm`.

    Args:
        stored: schedule of an earlier run; used if `Strategy.accepts` returns True for it. The order of operations, which changes
            no bit, is measured unless the stored schedule contains a measured one.

    Raises:
        CollectiveMismatchError: the ranks have different schedules. Raised on every rank; the message names the first difference.
    """
    assert strategy.group.ranks == setup.comm.size, "the strategy is planned for another number of ranks"
    streams = {stream: _communicator(setup.comm, strategy, stream) for stream in strategy.posted_streams}
    if strategy.request() is None:
        sums = _sums(strategy, setup, setup.comm, allreduces=True)
        reaching, sums = _group_streams(setup, {Stream.GRADIENTS: setup.comm}, sums)
        return strategy.averager(replace(setup, comm=reaching[Stream.GRADIENTS]), Agreement(streams=streams, sums=sums))
    comm = streams[Stream.GRADIENTS]
    usable = stored if strategy.accepts(stored) else None
    measures = any(comm.allgather_object(strategy.needs_link(usable)))  # agreed on, because measuring is collective
    link = calibrate(comm, setup.progress) if measures else None
    schedule = strategy.plan(link) if usable is None else usable
    assert schedule is not None
    check_same_schedule(comm, schedule)
    allreduces = any(operation.kind is OperationKind.ALLREDUCE for operation in schedule.operations)
    sums = _sums(strategy, setup, comm, allreduces=allreduces)
    reaching, sums = _group_streams(setup, streams, sums)
    return strategy.averager(setup, Agreement(schedule, reaching, link, sums))


#: minimum deadline for the start of NCCL, which searches for networks
_LEAST_NCCL_SECONDS = 60.0
#: streams of all ranks of a group whose operations use arrays of its parameters
_ARRAY_STREAMS = (Stream.GRADIENTS, Stream.PARAMETERS)


def _group_streams(
    setup: AveragerSetup, streams: Mapping[Stream, Communicator], sums: GradientSums | None
) -> tuple[Mapping[Stream, Communicator], GradientSums | None]:
    """Return the communicators by stream, and the sums, that can access the group's arrays on host or device. Collective.

    Sums in 16 bits and sums in a fixed order are computed on the host, so their arrays are copied to the host. The other
    operations on the same communicator also use the host, because all operations of a communicator share one order. With NCCL,
    all arrays use one communicator, in the order of the schedule. On several communicators, ranks could enqueue two operations in
    different orders, and each would wait for the other.
    """
    arithmetic = setup.group.arithmetic
    if arithmetic.mirrors() is None or setup.comm.size == 1:
        return streams, sums
    by_device = [stream for stream in _ARRAY_STREAMS if stream in streams and (stream is not Stream.GRADIENTS or sums is None)]
    if setup.transport == "staged" or (setup.transport == "nccl" and Stream.NODES in streams):
        by_device.clear()  # stages of compression are posted by the host, in an order across communicators that depends on timing
    reached: dict[Stream, Communicator] = {}
    seconds = max(setup.progress.deadline_seconds, _LEAST_NCCL_SECONDS)
    with guard("The start of NCCL", seconds, rank=setup.progress.rank) if setup.transport == "nccl" else nullcontext():
        for stream in by_device:
            shared = setup.transport == "nccl" and reached
            comm = next(iter(reached.values())) if shared else transports.reaching(setup.transport, streams[stream], arithmetic)
            reached[stream] = comm
    by_host = {stream: transports.staged(comm, arithmetic) for stream, comm in streams.items() if stream not in reached}
    if sums is not None:
        sums = by_host[Stream.GRADIENTS].sums_of(sums)
    return reached | by_host, sums


def _sums(strategy: Strategy, setup: AveragerSetup, comm: Communicator, *, allreduces: bool) -> GradientSums | None:
    """Return sums in 16 bits or in the order of shards; None to use the stream's own sums. Collective."""
    if setup.gradients is not None:
        return tree_sums_over(comm, setup.gradients.shards, allreduces=allreduces)
    if strategy.rounding is None:
        return None
    return sums_over(comm, caster(strategy.rounding.gradients), allreduces=allreduces)


def _communicator(comm: Communicator, strategy: Strategy, stream: Stream) -> Communicator:
    """Return the communicator of a stream. Collective."""
    name = f"{comm.name} {stream}"
    if stream is Stream.NORMS:  # has only allreduces, which have one level
        return in_levels(comm, None, name)
    return (across_nodes if stream is Stream.NODES else in_levels)(comm, strategy.levels, name)


def check_same_schedule(comm: Communicator, schedule: CollectiveSchedule) -> None:
    """Check that all ranks have the same schedule. Collective; call it at set-up only.

    Raises:
        CollectiveMismatchError: the schedules differ. Raised on every rank; the message contains both versions of the first
            operation that differs.
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
