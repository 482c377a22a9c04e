"""Price the averaging of gradients layer by layer, before any schedule exists, in proportion to the bytes of a layer.

The costs follow from the messages that the strategy declares (`StrategyCosts`). This includes a user's own strategy.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hpctrain.averaging.averagers import AveragerChoice
from hpctrain.averaging.base import StrategyCosts
from hpctrain.averaging.collective_schedule import OperationKind
from hpctrain.averaging.slicing import Compression
from hpctrain.averaging.sufficient_factors import moves_less
from hpctrain.comm.groups import Levels, levels
from hpctrain.planner.costs.collective_costs import GridPlacements, GroupPlacement, MessageCosts, unhindered_seconds
from hpctrain.planner.costs.machine import Machine


@dataclass(frozen=True)
class LinearSize:
    """Size of the part of a linear layer's weight that a rank holds and averages."""

    inputs: int
    outputs: int


@dataclass(frozen=True)
class AveragedParts:
    """Parameters of a part of a network that one rank averages.

    Attributes:
        messages: number of parameters, each of which some averagers send by itself.
        linear: sizes of the weights of linear layers, which also count in `elements`.
    """

    elements: int = 0
    messages: int = 0
    linear: tuple[LinearSize, ...] = ()

    def __add__(self, other: AveragedParts) -> AveragedParts:
        return AveragedParts(self.elements + other.elements, self.messages + other.messages, self.linear + other.linear)


@dataclass(frozen=True)
class AveragingSeconds:
    """Time to average gradients, in seconds.

    Attributes:
        program: time of the rank's core for messages and updates.
        wire: time of the rank's messages, one after another.
    """

    program: float
    wire: float

    def __add__(self, other: AveragingSeconds) -> AveragingSeconds:
        return AveragingSeconds(self.program + other.program, self.wire + other.wire)


class AveragingCosts:
    """Costs of averaging on a grid with one averager.

    Args:
        element_seconds: seconds to update one element.
        total_bytes, item_bytes: bytes of all gradients, and of one element.
        batch: samples of a step over all ranks.
        exchange: whether micro-batches and options allow linear layers to exchange inputs and errors.
    """

    def __init__(
        self,
        machine: Machine,
        element_seconds: float,
        placements: GridPlacements,
        choice: AveragerChoice,
        *,
        total_bytes: int,
        batch: int,
        item_bytes: int,
        exchange: bool,
    ) -> None:
        self._machine, self._strategy, self._batch, self._item_bytes = machine, choice.costs, batch, item_bytes
        self._exchange = exchange and self._strategy.fc_exchange != "never"
        self._element_seconds = element_seconds
        self._groups = {
            split: _GroupCosts(machine, group, choice.costs, total_bytes // (placements.split.ranks if split else 1), item_bytes)
            for split, group in ((False, placements.all_ranks), (True, placements.data))
        }

    def seconds(self, parts: AveragedParts, *, split: bool) -> AveragingSeconds:
        """Return the time to average the gradients of `parts` over all ranks, or a data group if `split`, and to update them."""
        group, item = self._groups[split], self._item_bytes
        exchanging = [size for size in parts.linear if self._exchanged(size, group)]
        elements = parts.elements - sum(size.inputs * size.outputs for size in exchanging)
        owners = group.ranks if self._strategy.owners_update else 1
        total = AveragingSeconds(self._element_seconds * parts.elements / owners, 0.0) + group.averaged(elements * item)
        if self._strategy.per_parameter:
            total = total + group.latency(parts.messages)
        for size in exchanging:
            inputs = self._batch * size.inputs * item / group.ranks
            errors, gathered = self._batch * size.outputs * item, size.inputs * size.outputs * item
            total = total + group.operation(OperationKind.INPUTS, inputs) + group.operation(OperationKind.ERRORS, errors)
            total = total + group.operation(OperationKind.ALLGATHER, gathered)
        return total

    def _exchanged(self, size: LinearSize, group: _GroupCosts) -> bool:
        if not self._exchange or group.ranks == 1 or not size.inputs * size.outputs:
            return False
        less = moves_less(size.inputs, size.outputs, self._batch, group.links, group.sent_share)
        return less or self._strategy.fc_exchange == "always"


class _GroupCosts:
    """Costs of the operations of a parameter group.

    Attributes:
        links: number of ranks that exchange on the highest level: all ranks with one level, one rank per node with two levels.
        sent_share: bytes on the wire per byte of a gradient in memory; below 1 if messages are rounded.
    """

    def __init__(
        self, machine: Machine, placement: GroupPlacement, strategy: StrategyCosts, total_bytes: int, item_bytes: int
    ) -> None:
        self.ranks, self._item_bytes = placement.ranks, item_bytes
        in_levels = _levels(placement) if strategy.in_levels else None
        self.links = placement.ranks if in_levels is None else in_levels.nodes
        rounding = strategy.rounding(1 if in_levels is None else in_levels.per_node)
        self.sent_share = 1.0 if rounding is None else rounding.sent_share(item_bytes)
        self._costs = MessageCosts(machine, placement, in_levels, item_bytes, rounding)
        self._kinds = strategy.kinds
        self._slice_bytes = max(1, strategy.slice_bytes(total_bytes, placement.ranks))
        self._of_slice = _sum(self.operation(kind, self._slice_bytes) for kind in self._kinds)
        if strategy.density is not None and self.links > 1:
            self._of_slice = _less(self._of_slice, self._compressed(Compression(self.links, strategy.density)))

    def _compressed(self, compression: Compression) -> AveragingSeconds:
        """Return the time to average a slice if only its largest elements cross between nodes."""
        kinds = (OperationKind.REDUCE_SCATTER, OperationKind.SPARSE, OperationKind.ALLGATHER)
        chosen = _sum(self.operation(kind, self._slice_bytes, compression) for kind in kinds)
        elements = self._slice_bytes / self._item_bytes / (self.ranks // compression.nodes)
        core_seconds = self._costs.selection_seconds(elements) + self._costs.scatter_seconds(elements, compression)
        return chosen + AveragingSeconds(core_seconds, 0.0)

    def averaged(self, n_bytes: float) -> AveragingSeconds:
        """Return the time to average `n_bytes` bytes of gradients, in proportion to the time of a slice."""
        share = n_bytes / self._slice_bytes
        return AveragingSeconds(self._of_slice.program * share, self._of_slice.wire * share)

    def latency(self, messages: int) -> AveragingSeconds:
        """Return the time to average `messages` very small parameters, which is mostly latency."""
        small = _sum(self.operation(kind, 64) for kind in self._kinds)
        return AveragingSeconds(small.program * messages, small.wire * messages)

    def operation(self, kind: OperationKind, n_bytes: float, compression: Compression | None = None) -> AveragingSeconds:
        """Return the time of one operation on a buffer of `n_bytes` bytes."""
        priced = self._costs.stages(kind, n_bytes, compression)
        return AveragingSeconds(sum(stage.cpu_seconds for stage in priced), unhindered_seconds(priced))


def _sum(several: Iterable[AveragingSeconds]) -> AveragingSeconds:
    return sum(several, AveragingSeconds(0.0, 0.0))


def _less(one: AveragingSeconds, other: AveragingSeconds) -> AveragingSeconds:
    """Return the smaller program time and the smaller wire time.

    The strategy sends each slice in the cheaper form: whole or compressed.
    """
    return AveragingSeconds(min(one.program, other.program), min(one.wire, other.wire))


def _levels(placement: GroupPlacement) -> Levels | None:
    """Return the levels of the group, by `comm.groups.levels`; None if nodes hold different numbers of ranks."""
    if placement.nodes * placement.per_node != placement.ranks:
        return None
    return levels([rank // placement.per_node for rank in range(placement.ranks)])
