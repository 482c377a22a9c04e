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
from hpctrain.averaging.base import StrategyCosts, check_at_least_one
from hpctrain.averaging.collective_schedule import CollectiveSchedule
from hpctrain.averaging.link_simulation import SliceTraffic, Times, Urgency, front_first, two_stream_order
from hpctrain.averaging.reduce_scatter_strategy import ReduceScatterStrategy
from hpctrain.averaging.sixteen_bits import check_wire
from hpctrain.averaging.slicing import Slice
from hpctrain.averaging.sufficient_factors import FcExchange
from hpctrain.comm.link import LinkModel
from hpctrain.comm.sums import Wire

_LEAST_PARAMETERS = 50_000
# Time between two polls if it has not been measured: a large operator of a network for images.
_OPERATOR_SECONDS = 0.02
_LEAST_WINDOW = 4
# Polls that a message needs on both sides, for its handshake and its end.
_POLLS = 3


@dataclass(frozen=True)
class PriorityOptions:
    """Options of `priority`.

    Args:
        slice_parameters: Maximum number of parameters in a slice; smaller neighbours are fused up to half of it. Null uses 50,000
            as in the paper, or more if that many messages would take too much processor time.
        window: Maximum number of slices in flight, of gradients and of parameters each. Null computes it from the measured link
            and the time of an operator: with a smaller window the link idles, with a larger one urgent slices wait longer.
        fc_exchange: Whether linear layers exchange inputs and errors instead of gradients: "auto" (on CPUs, if that moves less
            data), "always" or "never".
        two_level: Whether nodes with several ranks each sum gradients within the node before they sum them across nodes, and
            gather parameters in the reverse order.
        replan: Whether to plan the order of the slices again after a few steps, from measured times.
        wire: Number format in which gradients travel: "float32" sends them unchanged; "bfloat16" rounds them to 16 bits,
            and sums are still computed in full precision.
        wire_parameters: Number format in which updated parameters travel. Every rank computes with the rounded parameters; the
            owner of a part adds its rounding errors back before the next update.

    Raises:
        OptionError: a size or window is below 1, or a wire is unknown.
    """

    slice_parameters: int | None = None
    window: int | None = None
    fc_exchange: FcExchange = "auto"
    two_level: bool = True
    replan: bool = True
    wire: Wire = "float32"
    wire_parameters: Wire = "float32"

    def __post_init__(self) -> None:
        check_at_least_one(slice_parameters=self.slice_parameters, window=self.window)
        check_wire(wire=self.wire, wire_parameters=self.wire_parameters)


class Priority(ReduceScatterStrategy):
    """Sharded averaging in small slices, front layers first: slices of early layers overtake those of late layers.

    Reduce-scatters and allgathers have separate communicators, whose queues keep them in the planned order. A front layer's
    gradient overtakes waiting gradients of late layers, and then its allgather overtakes the allgathers of late layers.
    """

    Options = PriorityOptions
    options: PriorityOptions

    @classmethod
    def costs(cls, options: PriorityOptions) -> StrategyCosts:
        return replace(super().costs(options), slice_bytes=_typical_bytes)

    def words(self) -> str:
        options = self.options
        return f"priority, slice_parameters {options.slice_parameters}, replan {options.replan}, window {options.window}"

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
        """Return whether a measured link is needed, for the order or for the window."""
        return super().needs_link(usable) or (usable is None and self.options.window is None)


def _typical_bytes(total_bytes: int, ranks: int) -> int:
    """Return the size of slices that the rule chooses for float32, for `StrategyCosts`."""
    return slicing.slice_bytes(4 * _LEAST_PARAMETERS, total_bytes, ranks, slicing.RULE_LINK)


def credit_window(size_bytes: int, ranks: int, link: LinkModel | None, times: Times | None) -> int | None:
    """Return the number of slices of `size_bytes` in flight that keeps the link busy between polls; None: no limit.

    Args:
        size_bytes: bytes of a slice.
        times: measured times of a step; None: unknown. The time between polls is at most the longest gap between gradients.
    """
    if link is None or ranks == 1:
        return None
    seconds = link.allgather_seconds(size_bytes, ranks)
    if seconds == 0.0:
        return None
    apart = _OPERATOR_SECONDS if times is None else times.longest_gap()
    return max(_LEAST_WINDOW, 1 + math.ceil(_POLLS * apart / seconds))
