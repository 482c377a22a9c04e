"""Priority-scheduled averaging: slices in a planned order, front layers first, a few in flight at a time.

Jayarajan, Wei, Gibson, Fedorova and Pekhimenko, "Priority-based parameter propagation for distributed DNN training", MLSys 2019,
with the credit window of ByteScheduler (Peng et al., SOSP 2019), over sharded averaging. The order is fixed by simulating the
link once with times measured on all ranks, so it is the same on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpctrain.averaging import slicing
from hpctrain.averaging.base import StrategyCosts, check_at_least_one, check_sizes, words_of_sizes
from hpctrain.averaging.collective_schedule import CollectiveSchedule
from hpctrain.averaging.link_simulation import SliceTraffic, Times, Urgency, front_first, two_stream_order
from hpctrain.averaging.reduce_scatter_strategy import ReduceScatterStrategy
from hpctrain.averaging.sixteen_bits import check_wire
from hpctrain.averaging.slicing import Sizes, Slice
from hpctrain.averaging.sufficient_factors import FcExchange
from hpctrain.comm.link import LinkModel
from hpctrain.comm.sums import Wire

_LEAST_PARAMETERS = 50_000
# Between two polls of the messages, where it has not been measured: a large operator of a network for images.
_OPERATOR_SECONDS = 0.02
_LEAST_WINDOW = 4
# A message needs several polls on both sides, for its handshake and its end.
_POLLS = 3


@dataclass(frozen=True)
class PriorityOptions:
    """Options of `priority`.

    Args:
        slice_parameters: Most parameters of a slice; smaller neighbours are fused up to half of it. Null takes 50,000 as in the
            paper, or more if that many messages would take too much of a core.
        sizes: Rule for sizes that are not given: "rule" takes the same ones in every run on the same number of ranks, so that
            runs repeat bit by bit; "measured" follows the link and a message's time of a core, both measured at the start.
        window: Most slices in flight, of gradients and of parameters each. Null takes what the measured link sends between two
            polls: a smaller window lets the link idle, a larger one lets urgent slices wait longer.
        fc_exchange: Linear layers exchange inputs and errors instead of gradients: "auto" (on CPUs, where that moves less),
            "always" or "never".
        two_level: On nodes with several ranks each, make sums within a node first, and gather parameters across nodes first.
        replan: Plan the order of the slices again after a few steps, by measured times.
        wire: How gradients travel: "float32" as they are computed; "bfloat16" and "float16" rounded to 16 bits, and added up in
            full precision.
        wire_parameters: How updated parameters travel. Every rank computes with the rounded ones; their owner keeps the
            rounding errors for the next update.

    Raises:
        OptionError: a size or window below 1, sizes given and to be measured, or an unknown value of a wire.
    """

    slice_parameters: int | None = None
    sizes: Sizes = "rule"
    window: int | None = None
    fc_exchange: FcExchange = "auto"
    two_level: bool = True
    replan: bool = True
    wire: Wire = "float32"
    wire_parameters: Wire = "float32"

    def __post_init__(self) -> None:
        check_at_least_one(slice_parameters=self.slice_parameters, window=self.window)
        check_sizes(self.sizes, slice_parameters=self.slice_parameters)
        check_wire(wire=self.wire, wire_parameters=self.wire_parameters)


class Priority(ReduceScatterStrategy):
    """Sharded averaging in small slices, front layers first: early layers' slices overtake late layers'.

    Reduce-scatters and allgathers have a communicator each, whose queue keeps them in the planned order: a front layer's gradient
    passes those of late layers that still wait, and its allgather then passes them, too.
    """

    Options = PriorityOptions
    options: PriorityOptions

    @classmethod
    def costs(cls, options: PriorityOptions) -> StrategyCosts:
        return replace(super().costs(options), slice_bytes=_typical_bytes)

    def words(self) -> str:
        options = self.options
        sizes = words_of_sizes(options.sizes)
        return f"priority, slice_parameters {options.slice_parameters}, replan {options.replan}, window {options.window}{sizes}"

    def slice_elements(self, link: LinkModel | None) -> tuple[int, int]:
        most = self.options.slice_parameters
        if most is None:
            item_bytes = self.group.layout.item_bytes
            least, total_bytes = _LEAST_PARAMETERS * item_bytes, self.group.total_bytes
            most = slicing.slice_bytes(least, total_bytes, self.group.ranks, link) // item_bytes
        return max(1, most // 2), most

    @property
    def urgency(self) -> Urgency:
        return front_first

    def order(self, traffic: SliceTraffic, times: Times, link: LinkModel) -> list[tuple[int, bool]]:
        return two_stream_order(traffic, times, link, self.urgency)

    def window(self, slices: Sequence[Slice], link: LinkModel | None, times: Times | None) -> int | None:
        if self.options.window is not None or not slices:
            return self.options.window
        return credit_window(self.group.total_bytes // len(slices), self.group.ranks, link, times)

    def needs_link(self, usable: CollectiveSchedule | None) -> bool:
        """Return whether a measured link is needed, also for the window."""
        return super().needs_link(usable) or (usable is None and self.options.window is None)

    def needs_operation_seconds(self, usable: CollectiveSchedule | None) -> bool:
        """Return whether operations are to be measured: for sizes that are measured."""
        return usable is None and self.options.sizes == "measured"


def _typical_bytes(total_bytes: int, ranks: int) -> int:
    """Return the size of slices by rule, of float32, for `StrategyCosts`."""
    return slicing.slice_bytes(4 * _LEAST_PARAMETERS, total_bytes, ranks, slicing.RULE_LINK)


def credit_window(size_bytes: int, ranks: int, link: LinkModel | None, times: Times | None) -> int | None:
    """Return how many slices of `size_bytes` in flight keep the link busy between polls; None: no limit.

    Args:
        times: measured ones; polls are at most as far apart as gradients are that become ready one after the other.
    """
    if link is None or ranks == 1:
        return None
    seconds = link.allgather_seconds(size_bytes, ranks)
    if seconds == 0.0:
        return None
    apart = _OPERATOR_SECONDS if times is None else times.longest_gap()
    return max(_LEAST_WINDOW, 1 + math.ceil(_POLLS * apart / seconds))
