"""Base of the strategies in which each rank updates its own part of every slice.

`ReduceScatterStrategy` plans the slices of the parameters and the operations of a step. `reduce_scatter.py` runs the plan.
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
from hpctrain.core.errors import OptionError
from hpctrain.optim.base import NormsNeeded


class ReduceScatterStrategy(Strategy):
    """The base of strategies of reduce-scatter, update by the owner and allgather.

    Linear layers may exchange sufficient factors instead of gradients.

    A strategy defines `words`. It may choose `streams`, sizes (`slice_elements`), an `urgency` or an `order`, a `window`, other
    `slices` and `operations`, and an averager that takes `averager_arguments`. Besides its own, its options have `fc_exchange`,
    `sizes`, `two_level` and `replan`, as those of `Sharded` do.

    Attributes:
        streams: with one stream, gathers and reductions follow each other in one order; with two, they may overtake each other.
        exchanging: weight -> biases of the linear layers that exchange inputs and errors.
        apart: parameters that share no slice with others.

    Raises:
        OptionError: fc_exchange "always" with several micro-batches: their inputs would have to be kept.
    """

    adds_norms = True
    sums_shards = True
    streams: ClassVar[tuple[Stream, ...]] = (Stream.GRADIENTS, Stream.PARAMETERS)

    def __init__(self, group: PlannedGroup, options: Any = None) -> None:
        super().__init__(group, options)
        self.apart: frozenset[str] = frozenset()
        options = self.options
        if options.fc_exchange == "always" and group.micro_batches > 1:
            raise OptionError(
                f"fc_exchange is always, but micro_batches is {group.micro_batches}; the exchange needs micro_batches 1, "
                f"or set fc_exchange to auto or never.",
                "fc_exchange",
            )
        two_level = options.two_level and group.shards is None  # the order of shards is independent of nodes
        self._levels = levels(group.nodes) if two_level and group.nodes is not None else None
        # In two levels a node counts as one rank: the rule is about what crosses its link.
        links = group.ranks if self._levels is None else self._levels.nodes
        sent_share = 1.0 if self.rounding is None else self.rounding.sent_share(group.layout.item_bytes)
        exchange: FcExchange = "never" if options.fc_exchange == "auto" and not group.on_host else options.fc_exchange
        exchange = exchange if group.shards is None else "never"  # products of inputs and errors add up in another order
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
        """Return the strategy and its options, as a stored schedule names what it was made for: other words, another schedule."""

    def slice_elements(self, link: LinkModel | None) -> tuple[int, int]:
        """Return the elements of a slice, least and most.

        Neighbours are fused until they have the first number; what has more than the second is cut. By default by the option
        `bucket_bytes`, if there is one; else by rule.

        link: the measured one or, by default, that of the rule.
        """
        return slicing.slice_elements(getattr(self.options, "bucket_bytes", None), self.group.layout, self.group.ranks, link)

    @property
    def urgency(self) -> Urgency:
        """The key by which a link chooses among what it could send: the least goes first. By default reductions go first."""
        return reductions_first

    def order(self, traffic: SliceTraffic, times: Times, link: LinkModel) -> list[tuple[int, bool]]:
        """Return (slice, whether it is its gather) in the order in which they are to be sent."""
        if self.streams[-1] is Stream.GRADIENTS:  # one queue: what is sent next must be ready, or all after it waits
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
        """The streams of schedules; norms of some parameters have one of their own, so that nothing else waits for them."""
        return (*self.streams, Stream.NORMS) if self._layer_norms else self.streams

    @property
    def _layer_norms(self) -> bool:
        """Whether an update waits for the norms of its own layers only.

        Norms of several groups of parameters travel together. On one rank nothing travels, and a device is waited for once.
        """
        return self.group.norms_needed is NormsNeeded.LAYER and self.group.ranks > 1 and not self.group.several_groups

    def request(self) -> str:
        nodes = "" if self._levels is None else self._levels.words
        words = f"{self.words()}{words_of_shards(self.group.shards)}{words_of_rounding(self.rounding)}"
        return f"{words}; {fingerprint(self.group.layout, self.exchanging)}{nodes}"

    def accepts(self, stored: CollectiveSchedule | None) -> bool:
        """Return whether a stored schedule fits, and has the norms that the optimiser needs: an option may have changed."""
        if stored is None or not super().accepts(stored):
            return False
        norms = [operation.slice for operation in stored.operations if operation.kind is OperationKind.NORMS]
        if self._layer_norms:
            return bool(norms) or not stored.slices
        return norms == ([ALL_SLICES] if self.group.needs_norms else [])

    def needs_link(self, usable: CollectiveSchedule | None) -> bool:
        """Return whether a measured link is needed, also for an order that is still to be planned by measured times."""
        return self.replans(usable) or (usable is None and self.options.sizes == "measured")

    def replans(self, schedule: CollectiveSchedule | None) -> bool:
        """Return whether the operations of a schedule are still to be ordered by measured times."""
        return self.options.replan and not (schedule is not None and schedule.timed)

    def plan(self, link: LinkModel | None) -> CollectiveSchedule:
        slices = self.slices(link if self.options.sizes == "measured" else slicing.RULE_LINK)
        operations = self.operations(slices, Times.unknown(tuple(self.group.layout.specs)), link)
        window = self.window(slices, link, None)
        return CollectiveSchedule(self.request(), self.group.ranks, slices, operations, window, rounding=self.rounding)

    def replan(self, schedule: CollectiveSchedule, times: Times, link: LinkModel | None) -> CollectiveSchedule:
        """Return the same slices in the order that follows from measured times. No bit of any sum changes."""
        operations = self.operations(schedule.slices, times, link)
        window = self.window(schedule.slices, link, times)
        return replace(schedule, operations=operations, window=window, timed=True)

    def averager(self, setup: AveragerSetup, agreement: Agreement) -> GradientAverager:
        return ReduceScatterAverager(setup, agreement, **self.averager_arguments(agreement))

    def averager_arguments(self, agreement: Agreement) -> dict[str, Any]:
        """Return the keywords of a `ReduceScatterAverager` that runs the plan."""
        return {
            "exchanging": self.exchanging,
            "nominal_batch": self.group.nominal_batch or 0,
            "order": None if self._levels is None else self._levels.order,
            "replan": partial(self.replan, link=agreement.link) if self.replans(agreement.schedule) else None,
        }

    def slices(self, link: LinkModel | None) -> tuple[Slice, ...]:
        """Return slices of all parameters, in forward order. link: that sizes follow from."""
        layout, (least, most) = self.group.layout, self.slice_elements(link)
        exchanging = {name for weight, biases in self.exchanging.items() for name in (weight, *biases)}
        block = NORM_BLOCK if self.group.shards is not None and self.group.needs_norms else 1
        slices = list(cut(layout, fused(layout, least, exchanging, self.apart), most, block))
        for weight, biases in self.exchanging.items():
            slices += sufficient_factor_slices(layout, weight, biases, self.group.ranks, most)
        return tuple(sorted(slices, key=lambda piece: piece.start))

    def operations(self, slices: Sequence[Slice], times: Times, link: LinkModel | None) -> tuple[Operation, ...]:
        """Return the operations of a step on these slices, in the order in which they are posted."""
        norms: tuple[int, ...] = ()  # the slices of the operations of norms, ascending
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
    """Return a step of reductions and gathers.

    Inputs in forward's order, then what a link sends, norms between the two where needed.

    Args:
        sent: (slice, whether it is its gather) in order. gathers: the stream of these; all else is on that of the gradients,
            but norms of some slices only, which have their own.
        norms: slices of the operations of norms, ascending. `ALL_SLICES`: norms of everything, after the last reduction. Else
            every gather in `sent` must stand after the last reduction of those whose norms travel with its own.
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
    # Updates wait for the norms, and these for all sums: no gather can go under backward, so front layers go first.
    late = sorted(gathered, key=lambda operation: slices[operation.slice].order)
    reductions = (operation for operation in order if operation.kind is not OperationKind.ALLGATHER)
    return (*inputs, *reductions, Operation(OperationKind.NORMS, ALL_SLICES, Stream.GRADIENTS), *late)


def _with_norms(slices: Sequence[Slice], order: Sequence[Operation], starts: Sequence[int]) -> list[Operation]:
    """Return the operations, and norms of each group of slices right after the last of its reductions."""
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
