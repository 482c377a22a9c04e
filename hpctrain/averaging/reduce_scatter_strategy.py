"""Base of the strategies in which each rank updates its own part of every slice.

`ReduceScatterStrategy` plans the slices of the parameters and the operations of a step. `reduce_scatter.py` runs the plan.

`ReduceScatterStrategy.order` orders the operations by `link_simulation.best_order`, or by `two_stream_order` for `priority`, with
estimated times. All ranks compare the resulting schedule before the first step (`averagers.check_same_schedule`). If the order
has not been measured yet (`replans`), `ReduceScatterAverager.begin_step` calls `replan` after step 5 with times measured on all
ranks, and every rank takes rank 0's result.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from hpctrain.averaging import slicing
from hpctrain.averaging.base import (
    Agreement,
    AveragerSetup,
    GradientAverager,
    PlannedGroup,
    Strategy,
    StrategyCosts,
    words_of_shards,
)
from hpctrain.averaging.collective_schedule import (
    ALL_SLICES,
    CollectiveSchedule,
    Operation,
    OperationKind,
    Stream,
    norm_groups,
    slices_of_groups,
)
from hpctrain.averaging.group_sums import NORM_BLOCK
from hpctrain.averaging.link_simulation import SliceTraffic, Times, Urgency, best_order, reductions_first
from hpctrain.averaging.reduce_scatter import ReduceScatterAverager
from hpctrain.averaging.sixteen_bits import Rounding, words_of_rounding
from hpctrain.averaging.slicing import Slice, cut, fingerprint, fused, layer_slices, sufficient_factor_slices
from hpctrain.averaging.sufficient_factors import FcExchange, exchanging_layers
from hpctrain.comm.groups import Levels, levels
from hpctrain.comm.link import LinkModel
from hpctrain.optim.base import NormsNeeded


class ReduceScatterStrategy(Strategy):
    """Base of strategies that reduce-scatter gradients, update owned parts and allgather parameters.

    Linear layers may exchange sufficient factors instead of gradients.

    A subclass must define `words`. It may override `streams`, sizes (`slice_elements`), `urgency` or `order`, `window`, `slices`,
    `operations` and `averager`, which passes `averager_arguments` to a `ReduceScatterAverager`. Its options must include
    `fc_exchange`, `two_level` and `replan`, as `ShardedOptions` does.

    Attributes:
        streams: streams of the operations. On one stream, gathers and reductions follow each other in one order; on two, they may
            overtake each other.
        exchanging: weight -> biases of the linear layers that exchange inputs and errors.
        apart: parameters that share no slice with other parameters.

    Raises:
        OptionError: fc_exchange is "always" with several micro-batches, which would require keeping the inputs of all of them.
    """

    adds_norms = True
    sums_shards = True
    streams: ClassVar[tuple[Stream, ...]] = (Stream.GRADIENTS, Stream.PARAMETERS)

    def __init__(self, group: PlannedGroup, options: Any = None) -> None:
        super().__init__(group, options)
        self.apart: frozenset[str] = frozenset()
        options = self.options
        two_level = options.two_level and group.shards is None  # the order of shards is independent of nodes
        self._levels = levels(group.nodes) if two_level and group.nodes is not None else None
        # With two levels a node counts as one rank, because the rule concerns traffic on its link.
        links = group.ranks if self._levels is None else self._levels.nodes
        sent_share = 1.0 if self.rounding is None else self.rounding.sent_share(group.layout.item_bytes)
        exchange: FcExchange = "never" if options.fc_exchange == "auto" and not group.on_host else options.fc_exchange
        exchange = exchange if group.shards is None else "never"  # products of inputs and errors are summed in another order
        self.exchanging = exchanging_layers(group.layout, links, exchange, group.nominal_batch, group.micro_batches, sent_share)

    @classmethod
    def costs(cls, options: Any) -> StrategyCosts:
        return StrategyCosts(
            (OperationKind.REDUCE_SCATTER, OperationKind.ALLGATHER),
            partial(slicing.fused_bytes, getattr(options, "bucket_bytes", None)),
            0.0,
            in_levels=options.two_level,
            fc_exchange=options.fc_exchange,
            gradients=getattr(options, "wire", "float32"),
            parameters=getattr(options, "wire_parameters", "float32"),
        )

    # -- hooks of a strategy ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def words(self) -> str:
        """Return the name and the options of the strategy as text, which is part of a stored schedule's request."""

    def slice_elements(self, link: LinkModel | None) -> tuple[int, int]:
        """Return the minimum and the maximum number of elements of a slice.

        Neighbouring parameters are fused until a slice has the minimum; larger slices are cut at the maximum. The option
        `bucket_bytes` sets the minimum. If it is missing or None, `slicing.slice_elements` chooses the minimum by rule.

        Args:
            link: link for which the sizes are best, `slicing.RULE_LINK` in a plan.
        """
        return slicing.slice_elements(getattr(self.options, "bucket_bytes", None), self.group.layout, self.group.ranks, link)

    @property
    def urgency(self) -> Urgency:
        """Function that returns the key of a transfer; the smallest key is sent next. By default, reductions go first."""
        return reductions_first

    def order(self, traffic: SliceTraffic, times: Times, link: LinkModel) -> list[tuple[int, bool]]:
        """Return pairs (slice, whether this is its gather) in the order in which they are sent."""
        if self.streams[-1] is Stream.GRADIENTS:  # an operation that is not ready delays all others of a single queue
            times = times.late()
        return best_order(traffic, times, link, self.urgency)

    def window(self, slices: Sequence[Slice], link: LinkModel | None, times: Times | None) -> int | None:
        """Return the maximum number of operations in flight per stream, by default the option `window`; None if unlimited."""
        limit: int | None = getattr(self.options, "window", None)
        return limit

    # -- the plan --------------------------------------------------------------------------------------------------------------

    @property
    def levels(self) -> Levels | None:
        return self._levels

    @property
    def posted_streams(self) -> tuple[Stream, ...]:
        """Streams of this group's schedules.

        Norms of groups of slices have a separate stream, so that no other operation waits for them.
        """
        return (*self.streams, Stream.NORMS) if self._layer_norms else self.streams

    @property
    def _layer_norms(self) -> bool:
        """Whether an update waits only for the norms of its layers.

        This is not the case with several parameter groups, whose norms travel together, nor on one rank, which sends nothing and
        for which a single wait for a device is cheaper.
        """
        return self.group.norms_needed is NormsNeeded.LAYER and self.group.ranks > 1 and not self.group.several_groups

    def request(self) -> str:
        nodes = "" if self._levels is None else self._levels.words
        words = f"{self.words()}{words_of_shards(self.group.shards)}{words_of_rounding(self.rounding)}"
        return f"{words}; {fingerprint(self.group.layout, self.exchanging)}{nodes}"

    def accepts(self, stored: CollectiveSchedule | None) -> bool:
        """Return whether a stored schedule fits, with norms if and only if the optimiser needs them.

        The optimiser's options, on which norms depend, are not part of the request and may have changed.
        """
        if stored is None or not super().accepts(stored):
            return False
        norms = [operation.slice for operation in stored.operations if operation.kind is OperationKind.NORMS]
        if self._layer_norms:
            return bool(norms) or not stored.slices
        return norms == ([ALL_SLICES] if self.group.needs_norms else [])

    def needs_link(self, usable: CollectiveSchedule | None) -> bool:
        """Return whether a measured link is needed, for an order that has not been planned from measured times."""
        return self.replans(usable)

    def replans(self, schedule: CollectiveSchedule | None) -> bool:
        """Return whether the operations of a schedule have not been ordered by measured times yet but should be."""
        return self.options.replan and not (schedule is not None and schedule.timed)

    def plan(self, link: LinkModel | None) -> CollectiveSchedule:
        slices = self.slices(slicing.RULE_LINK)
        operations = self.operations(slices, Times.unknown(tuple(self.group.layout.specs)), link)
        window = self.window(slices, link, None)
        return CollectiveSchedule(self.request(), self.group.ranks, slices, operations, window, rounding=self.rounding)

    def replan(self, schedule: CollectiveSchedule, times: Times, link: LinkModel | None) -> CollectiveSchedule:
        """Return the schedule with the same slices in the order that follows from measured times. No bit of any sum changes."""
        operations = self.operations(schedule.slices, times, link)
        window = self.window(schedule.slices, link, times)
        return replace(schedule, operations=operations, window=window, timed=True)

    def averager(self, setup: AveragerSetup, agreement: Agreement) -> GradientAverager:
        return ReduceScatterAverager(setup, agreement, **self.averager_arguments(agreement))

    def averager_arguments(self, agreement: Agreement) -> dict[str, Any]:
        """Return the keyword arguments for a `ReduceScatterAverager` that runs the plan."""
        return {
            "exchanging": self.exchanging,
            "nominal_batch": self.group.nominal_batch or 0,
            "order": None if self._levels is None else self._levels.order,
            "replan": partial(self.replan, link=agreement.link) if self.replans(agreement.schedule) else None,
        }

    def slices(self, link: LinkModel | None) -> tuple[Slice, ...]:
        """Return slices of all parameters, in forward order.

        Args:
            link: link that determines the sizes.
        """
        layout, (least, most) = self.group.layout, self.slice_elements(link)
        exchanging = {name for weight, biases in self.exchanging.items() for name in (weight, *biases)}
        block = NORM_BLOCK if self.group.shards is not None and self.group.needs_norms else 1
        slices = list(cut(layout, fused(layout, least, exchanging, self.apart), most, block))
        for weight, biases in self.exchanging.items():
            slices += sufficient_factor_slices(layout, weight, biases, self.group.ranks, most)
        return tuple(sorted(slices, key=lambda piece: piece.start))

    def operations(self, slices: Sequence[Slice], times: Times, link: LinkModel | None) -> tuple[Operation, ...]:
        """Return the operations of a step on these slices, in posting order."""
        norms: tuple[int, ...] = ()  # slice index of each norms operation, ascending
        if self.group.needs_norms:
            norms = norm_groups(self.group.layout, slices) if self._layer_norms else (ALL_SLICES,)
        gathered_together = () if ALL_SLICES in norms else tuple(slices_of_groups(norms, len(slices)).values())
        group, rounding = self.group, self.rounding or Rounding()
        traffic = SliceTraffic(
            slices, group.ranks, group.layout.item_bytes, group.nominal_batch or 0, rounding, gathered_together
        )
        sent = self.order(traffic, times, link or LinkModel(0.0, 0.0))
        return operations_in_order(slices, sent, self.streams[-1], norms)


def operations_in_order(
    slices: Sequence[Slice], sent: Sequence[tuple[int, bool]], gathers: Stream, norms: Sequence[int] = ()
) -> tuple[Operation, ...]:
    """Return the operations of a step, reductions and gathers, in posting order.

    All-to-alls of inputs come first, in the order of forward. The other operations follow in the order of `sent`, with norms of
    groups after their last reduction. Norms of all parameters come after all reductions and before all gathers, front layers
    first.

    Args:
        sent: pairs (slice, whether this is its gather) in order.
        gathers: stream of the gathers. All other operations are on the stream of gradients, except norms of some slices, which
            have a separate stream.
        norms: slice index of each norms operation, ascending; empty: no norms. `ALL_SLICES`: norms of all parameters. Otherwise a
            gather in `sent` must come after the last reduction of all slices whose norms travel with those of its own slice.
    """
    first = [layer_slices(slices, k)[0] == k for k in range(len(slices))]
    exchanged = (k for k, piece in enumerate(slices) if piece.sufficient_factors and first[k])
    inputs = [Operation(OperationKind.INPUTS, k, Stream.GRADIENTS) for k in exchanged]
    reduction = [OperationKind.ERRORS if piece.sufficient_factors else OperationKind.REDUCE_SCATTER for piece in slices]
    order = [
        Operation(OperationKind.ALLGATHER, k, gathers) if gather else Operation(reduction[k], k, Stream.GRADIENTS)
        for k, gather in sent
    ]
    if not norms:
        return (*inputs, *order)
    if ALL_SLICES not in norms:
        return (*inputs, *_with_norms(slices, order, norms))
    gathered = (operation for operation in order if operation.kind is OperationKind.ALLGATHER)
    # Updates wait for the norms, and the norms for all sums. No gather can run during backward, so front layers go first.
    late = sorted(gathered, key=lambda operation: slices[operation.slice].order)
    reductions = (operation for operation in order if operation.kind is not OperationKind.ALLGATHER)
    return (*inputs, *reductions, Operation(OperationKind.NORMS, ALL_SLICES, Stream.GRADIENTS), *late)


def _with_norms(slices: Sequence[Slice], order: Sequence[Operation], starts: Sequence[int]) -> list[Operation]:
    """Return the operations, with the norms of each group of slices right after the last reduction of the group."""
    groups = slices_of_groups(starts, len(slices))
    start_of = {k: start for start, group in groups.items() for k in group}
    unsummed = {start: len(group) for start, group in groups.items()}
    operations: list[Operation] = []
    for operation in order:
        operations.append(operation)
        summed = () if operation.kind is OperationKind.ALLGATHER else layer_slices(slices, operation.slice)
        for k in summed:
            unsummed[start_of[k]] -= 1
        for start in dict.fromkeys(start_of[k] for k in summed):
            if unsummed[start] == 0:
                operations.append(Operation(OperationKind.NORMS, start, Stream.NORMS))
    return operations
