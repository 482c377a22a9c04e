"""Seconds of averaging gradients, layer by layer, before any schedule is planned: bytes times what a byte of a slice costs.

Hidden and exposed time of averagers follow Lee et al., MLHPC 2018: what is sent under backward alone is exposed as far as it
takes longer than that, what is also sent under the next forward as far as it takes longer than both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hpctrain.averaging import slicing
from hpctrain.averaging.collective_schedule import OperationKind
from hpctrain.averaging.sixteen_bits import Rounding
from hpctrain.averaging.slicing import Compression
from hpctrain.averaging.sufficient_factors import moves_less
from hpctrain.comm.groups import Levels, levels
from hpctrain.planner.collective_costs import MessageCosts, unhindered_seconds
from hpctrain.planner.compute_costs import ComputeCosts
from hpctrain.planner.machine import Machine
from hpctrain.planner.tasks import GridPlacements, GroupPlacement

_LARGEST_BYTES = 1 << 24  # of a slice, as averagers cut them
_SLICE_BYTES = 200_000  # of `priority`: 50,000 parameters
_DENSITY = 0.01  # of `sparse`, by default
# Backward computes two gradients for what forward computes once.
_FORWARD_SHARE = 1 / 3


@dataclass(frozen=True)
class AveragerChoice:
    """An averager and its options, as a configuration names them."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def owners_update(self) -> bool:
        """Each rank updates a part, and parameters are gathered."""
        return self.name in ("sharded", "priority", "lazy", "sparse")

    @property
    def sums_in_levels(self) -> bool:
        """Sums are made within nodes first, where these have several ranks each."""
        able = self.owners_update or (self.name == "bucketed" and self.options.get("wire", "float32") != "float32")
        return able and bool(self.options.get("two_level", True))

    @property
    def exchanges(self) -> bool:
        """Linear layers may exchange inputs and errors."""
        return self.owners_update and self.name != "sparse" and self.options.get("fc_exchange", "auto") != "never"

    @property
    def density(self) -> float | None:
        """The share of the elements that cross between nodes, where a choice of them does; else None."""
        return float(self.options.get("density", _DENSITY)) if self.name == "sparse" else None

    def rounding(self, per_node: int) -> Rounding | None:
        """The rounding of its messages; None: they are whole. per_node: ranks of a node that sum in full precision first."""
        gradients, parameters = (self.options.get(name, "float32") for name in ("wire", "wire_parameters"))
        return None if gradients == parameters == "float32" else Rounding(gradients, parameters, per_node)

    @property
    def note(self) -> str | None:
        """A sentence about steps that move less, or more, than the one that is predicted; None where all are alike."""
        if self.name == "lazy" and self.options.get("max_interval") != 1:
            return "The steps of lazy differ: this is one that averages all layers, without the check of the interval."
        if self.density is not None and self.options.get("warmup_steps"):
            return "Steps of sparse are taken to have warmed up: those before send more."
        return None

    def step_seconds(self, program_seconds: float, averaging_seconds: float) -> float:
        """A lower bound of a step from the time of the program and that of the averaging's messages."""
        if self.name == "blocking":
            return program_seconds + averaging_seconds
        if self.owners_update:
            return max(program_seconds, averaging_seconds)
        return max(program_seconds, averaging_seconds + _FORWARD_SHARE * program_seconds)

    def hidden_seconds(self, program_seconds: float) -> float:
        """The time of messages that adds nothing to a program of so many seconds."""
        if self.name == "blocking":
            return 0.0
        return program_seconds if self.owners_update else (1 - _FORWARD_SHARE) * program_seconds


@dataclass(frozen=True)
class LinearSize:
    """A linear layer's weight as a rank's group averages it. inputs, outputs: K and M, of the part that the rank holds."""

    inputs: int
    outputs: int


@dataclass(frozen=True)
class AveragedParts:
    """Parameters of a stretch of a network that one rank averages. linear: its linear weights, which count in elements too.

    elements: of parameters. messages: parameters of several elements each.
    """

    elements: int = 0
    messages: int = 0
    linear: tuple[LinearSize, ...] = ()

    def __add__(self, other: AveragedParts) -> AveragedParts:
        return AveragedParts(self.elements + other.elements, self.messages + other.messages, self.linear + other.linear)


@dataclass(frozen=True)
class AveragingSeconds:
    """program: of the rank's core, for messages and updates. wire: until its messages have moved, one after the other."""

    program: float
    wire: float

    def __add__(self, other: AveragingSeconds) -> AveragingSeconds:
        return AveragingSeconds(self.program + other.program, self.wire + other.wire)


class AveragingCosts:
    """Costs of averaging on a grid with one averager.

    Args:
        total_bytes: of all gradients. batch: samples of a step over all ranks. item_bytes: of a parameter.
        exchange: micro-batches and options allow linear layers to exchange inputs and errors.
    """

    def __init__(
        self,
        machine: Machine,
        costs: ComputeCosts,
        placements: GridPlacements,
        choice: AveragerChoice,
        *,
        total_bytes: int,
        batch: int,
        item_bytes: int,
        exchange: bool,
    ) -> None:
        self._machine, self._choice, self._batch, self._item_bytes = machine, choice, batch, item_bytes
        self._exchange = exchange and choice.exchanges
        self._always = choice.options.get("fc_exchange") == "always"
        self._update_seconds = costs.update_seconds(1 << 20) / (1 << 20)
        self._groups = {
            split: _GroupCosts(machine, group, choice, total_bytes // (placements.split.ranks if split else 1), item_bytes)
            for split, group in ((False, placements.all_ranks), (True, placements.data))
        }

    def seconds(self, parts: AveragedParts, *, split: bool) -> AveragingSeconds:
        """The costs of parts that all ranks hold, or (split) those of a data group."""
        group, item = self._groups[split], self._item_bytes
        exchanging = [size for size in parts.linear if self._exchanged(size, group)]
        elements = parts.elements - sum(size.inputs * size.outputs for size in exchanging)
        owners = group.ranks if self._choice.owners_update else 1
        total = AveragingSeconds(self._update_seconds * parts.elements / owners, 0.0) + group.averaged(elements * item)
        if self._choice.name == "overlap":
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
        return self._always or moves_less(size.inputs, size.outputs, self._batch, group.links, group.sent_share)


class _GroupCosts:
    """Costs of the operations of a parameter group. links: ranks that cross a link: nodes, where sums are made in two levels."""

    def __init__(
        self, machine: Machine, placement: GroupPlacement, choice: AveragerChoice, total_bytes: int, item_bytes: int
    ) -> None:
        self.ranks, self._item_bytes = placement.ranks, item_bytes
        in_levels = _levels(placement) if choice.sums_in_levels else None
        self.links = placement.ranks if in_levels is None else in_levels.nodes
        rounding = choice.rounding(1 if in_levels is None else in_levels.per_node)
        self.sent_share = 1.0 if rounding is None else rounding.sent_share(item_bytes)
        self._costs = MessageCosts(machine, placement, in_levels, item_bytes, rounding)
        self._kinds = (
            (OperationKind.REDUCE_SCATTER, OperationKind.ALLGATHER) if choice.owners_update else (OperationKind.ALLREDUCE,)
        )
        self._slice_bytes = max(1, _slice_bytes(choice, total_bytes, placement.ranks))
        self._of_slice = _sum(self.operation(kind, self._slice_bytes) for kind in self._kinds)
        if choice.density is not None and self.links > 1:
            self._of_slice = _less(self._of_slice, self._compressed(Compression(self.links, choice.density)))

    def _compressed(self, compression: Compression) -> AveragingSeconds:
        """Seconds of a slice of which the largest elements cross between nodes."""
        kinds = (OperationKind.REDUCE_SCATTER, OperationKind.SPARSE, OperationKind.ALLGATHER)
        chosen = _sum(self.operation(kind, self._slice_bytes, compression) for kind in kinds)
        elements = self._slice_bytes / self._item_bytes / (self.ranks // compression.nodes)
        return chosen + AveragingSeconds(self._costs.choice_seconds(elements, compression), 0.0)

    def averaged(self, n_bytes: float) -> AveragingSeconds:
        """Seconds of so many bytes of gradients, as a share of slices."""
        share = n_bytes / self._slice_bytes
        return AveragingSeconds(self._of_slice.program * share, self._of_slice.wire * share)

    def latency(self, messages: int) -> AveragingSeconds:
        """Seconds of messages that carry next to nothing."""
        small = _sum(self.operation(kind, 64) for kind in self._kinds)
        return AveragingSeconds(small.program * messages, small.wire * messages)

    def operation(self, kind: OperationKind, n_bytes: float, compression: Compression | None = None) -> AveragingSeconds:
        """Seconds of one operation."""
        priced = self._costs.stages(kind, n_bytes, compression)
        return AveragingSeconds(sum(stage.cpu_seconds for stage in priced), unhindered_seconds(priced))


def _sum(several: Iterable[AveragingSeconds]) -> AveragingSeconds:
    return sum(several, AveragingSeconds(0.0, 0.0))


def _less(one: AveragingSeconds, other: AveragingSeconds) -> AveragingSeconds:
    """The lesser of both kinds of seconds: small parameters go whole, large ones as it pays."""
    return AveragingSeconds(min(one.program, other.program), min(one.wire, other.wire))


def _levels(placement: GroupPlacement) -> Levels | None:
    """Those of `two_level.levels`; without them where nodes hold unlike numbers of ranks."""
    if placement.nodes * placement.per_node != placement.ranks:
        return None
    return levels([rank // placement.per_node for rank in range(placement.ranks)])


def _slice_bytes(choice: AveragerChoice, total_bytes: int, ranks: int) -> int:
    """A typical operation of the averager."""
    if choice.name == "blocking":
        return total_bytes
    if choice.name == "priority":
        return slicing.slice_bytes(_SLICE_BYTES, total_bytes, ranks, slicing.RULE_LINK)
    if choice.name == "overlap":
        return min(total_bytes, _LARGEST_BYTES)
    bucket = choice.options.get("bucket_bytes") or slicing.bucket_bytes(total_bytes, ranks, slicing.RULE_LINK)
    return min(total_bytes, slicing.largest_bytes(bucket))
