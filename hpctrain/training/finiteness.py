"""Check in every step that all values that a rank trains are finite; if not, find the first faulty layer and the ranks.

Checking the loss alone is not enough. Some kernels turn NaN into a number (oneDNN's ReLU and max pooling), so a network of NaN
weights can have the loss of an untrained network. Therefore parameters are checked: a gradient that is not finite makes the
updated parameter not finite, with any optimiser.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from hpctrain.averaging.base import GradientAverager
from hpctrain.backend.arithmetic import Array, Fetch
from hpctrain.comm.base import on_ranks
from hpctrain.core.errors import DivergedError
from hpctrain.nn.network import Network
from hpctrain.nn.parameter import FlatGroup, whole

#: function from this rank's value to the values of all ranks; collective
Gather = Callable[[Any], list[Any]]


class Held(IntEnum):
    """Kinds of values of a layer. If several kinds are not finite in one layer, errors name the first."""

    PARAMETERS = 0
    GRADIENTS = 1
    STATISTICS = 2

    def __str__(self) -> str:
        return "batch statistics" if self is Held.STATISTICS else self.name.lower()


@dataclass(frozen=True, order=True)
class LayerFault:
    """Layer that holds a non-finite value.

    Attributes:
        order: index of the layer in forward order.
        held: kind of the value.
    """

    order: int
    held: Held
    layer: str


@dataclass(frozen=True)
class Finding:
    """First non-finite values that one rank has found.

    Attributes:
        rank: rank in the world.
        step: number of steps done before the values were found.
        loss: whether the loss was not finite.
        fault: first layer with a non-finite value; None if only the loss is not finite.
    """

    rank: int
    step: int
    loss: bool
    fault: LayerFault | None


@dataclass(frozen=True)
class FiniteCheck:
    """Pending check whether arrays are finite.

    Attributes:
        holders: kind of each array and name of its parameter.
        flags: pending result of the check for each array: whether it is finite.
    """

    holders: Sequence[tuple[Held, str]]
    flags: Fetch

    def faults(self) -> list[tuple[Held, str]]:
        """Wait for the check, and return the holders of arrays that are not finite."""
        return [holder for holder, finite in zip(self.holders, self.flags.result(), strict=True) if not finite]


@dataclass(frozen=True)
class Cause:
    """Origin of the non-finite values of a step, the same on every rank.

    Attributes:
        step: number of the step, counted from 1.
        fault: first layer with a non-finite value; None if only losses are not finite.
        ranks: ranks that found the fault, or whose loss is not finite if there is no fault.
        world: number of ranks in the world.
        sources: ranks whose local loss or batch statistics were not finite, before any sum over ranks.
    """

    step: int
    fault: LayerFault | None
    ranks: tuple[int, ...]
    world: int
    sources: tuple[int, ...]

    @property
    def blamed(self) -> tuple[int, ...]:
        """Ranks at which the fault certainly began; empty if that is unknown or applies to all ranks."""
        return _some(self.sources, self.world)

    def facts(self) -> dict[str, Any]:
        """Return the cause as plain values.

        They are the layer (None if only losses are not finite), the kind of value, the ranks that found it, and the sources.
        """
        layer, held = (None, "loss") if self.fault is None else (self.fault.layer, str(self.fault.held))
        return {"layer": layer, "held": held, "ranks": list(self.ranks), "sources": list(self.sources)}

    def __str__(self) -> str:
        if self.fault is None:
            return f"the loss of step {self.step} is not finite{on_ranks(self.ranks, self.world)}"
        after = self.fault.held is Held.PARAMETERS
        sentence = _sentence(self.fault, f"{'after' if after else 'in'} step {self.step}", self.ranks, self.world)
        if len(self.sources) in (0, self.world):
            return sentence
        return (
            f"{sentence}; losses or batch statistics were not finite before they were summed{on_ranks(self.sources, self.world)}"
        )


class Finiteness:
    """Check of the parameters that this rank updates, and of its loss and batch statistics.

    Args:
        rank: rank of this process in the world, for messages.

    Attributes:
        finding: first non-finite values that this rank has found; None if there are none, or `cause` or `forget` was called.
    """

    def __init__(self, network: Network, averagers: Mapping[str, GradientAverager], rank: int) -> None:
        self._network, self._averagers, self._rank = network, averagers, rank
        self._arithmetic = network.kernels.arithmetic
        self._holders = [
            (Held.PARAMETERS, segment.parameter)
            for averager in averagers.values()
            for segment in averager.owned()
            if segment.size
        ]
        self._arrays = self._owned(lambda group: group.data)
        self._runs = [
            averager.group.data[start:stop]
            for averager in averagers.values()
            for start, stop in whole(sorted(averager.owned(), key=lambda segment: segment.start))
            if start < stop
        ]
        self.finding: Finding | None = None
        layers = (_layer(name) for name in (*network.parameter_specs, *network.statistics.names))
        self._order = {layer: order for order, layer in enumerate(dict.fromkeys(layers))}

    def begin(self) -> FiniteCheck:
        """Start a check of the current parameters and of gradients that averagers keep back, without waiting for the result.

        In a step, call it between forward and backward, when the parameters hold all updates of the previous step and none of
        this one.
        """
        held = [entry for averager in self._averagers.values() for entry in averager.held_gradients().items()]
        holders, arrays = [(Held.GRADIENTS, name) for name, _ in held], [array for _, array in held]
        # On the host it is faster to check few large arrays. Single parameters are checked only if one of these is not finite.
        if not (self._arithmetic.on_host and all(self._arithmetic.fetch_finite(self._runs).result().tolist())):
            holders, arrays = [*self._holders, *holders], [*self._arrays, *arrays]
        return FiniteCheck(holders, self._arithmetic.fetch_finite(arrays))

    def end(self, step: int, check: FiniteCheck | None, *, loss: float = 0.0, statistics: Iterable[str] = ()) -> bool:
        """Wait for the check and return whether everything is finite. The first finding is kept for `error`.

        Args:
            step: number of steps done.
            check: check of this rank's parameters; None: only loss and statistics are checked.
            loss: loss of this rank's samples.
            statistics: names of the statistics that are not finite.
        """
        faults = [self._fault(Held.STATISTICS, name) for name in statistics]
        if check is not None:
            faults += [self._fault(held, name) for held, name in check.faults()]
        bad_loss = not math.isfinite(loss)
        if (faults or bad_loss) and self.finding is None:
            self.finding = Finding(self._rank, step, bad_loss, min(faults, default=None))
        return not faults and not bad_loss

    def cause(self, step: int, seen: Sequence[tuple[Held, str]], *, finite: bool, gather: Gather) -> Cause:
        """Return the cause of a step that is to be skipped. Collective; call it after a drain.

        Updated parameters count only if all gradients are finite, because then the update itself has overflowed.

        Args:
            step: number of the step just done, counted from 1.
            seen: holders of non-finite values found by a check after the update.
            finite: whether this rank's loss and batch statistics are finite.
            gather: function that gathers a value from all ranks.
        """
        finding, self.finding = self.finding, None
        faults = [*self._gradient_faults(), *(self._fault(held, name) for held, name in seen if held is not Held.PARAMETERS)]
        if not finite and finding is not None and finding.fault is not None:
            faults.append(finding.fault)
        if not faults:  # the updates of finite gradients have overflowed
            faults = [self._fault(held, name) for held, name in seen]
        gathered = gather((self._rank, min(faults, default=None), not finite))
        by_rank = {rank: fault for rank, fault, _ in gathered if fault is not None}
        first = min(by_rank.values(), default=None)
        ranks = [rank for rank, fault, bad in gathered if (bad if first is None else fault == first)]
        sources = sorted(rank for rank, _, bad in gathered if bad)
        return Cause(step, first, tuple(sorted(ranks)), len(gathered), tuple(sources))

    def forget(self) -> None:
        """Forget the finding, because its step was undone or other values were loaded."""
        self.finding = None

    def error(self, gather: Gather, advice: str) -> DivergedError | None:
        """Return the error about the earliest finding of all ranks; None if there is none.

        The error is the same on every rank. Collective; call it after a drain.

        Args:
            gather: function that gathers a value from all ranks.
            advice: end of the message.
        """
        findings = gather(self.finding)
        seen = [finding for finding in findings if finding is not None]
        if not seen:
            return None
        step = min(finding.step for finding in seen)
        first = [finding for finding in seen if finding.step == step]
        faults = {finding.rank: finding.fault for finding in first if finding.fault is not None}
        if faults:
            text = _first_layer(faults, step, len(findings))
            return DivergedError(f"{text[0].upper()}{text[1:]}; {advice}", ranks=self._origin(first, len(findings)))
        # Only the loss is not finite. Its gradients show in which layer the fault began.
        losses = sorted(finding.rank for finding in first)
        gathered = gather((self._rank, min(self._gradient_faults(), default=None)))
        faults = {rank: fault for rank, fault in gathered if fault is not None}
        where = f", and {_first_layer(faults, step, len(findings))}" if faults else ""
        sentence = f"The loss of step {step + 1} is not finite{on_ranks(losses, len(findings))}{where}; {advice}"
        return DivergedError(sentence, ranks=self._origin(first, len(findings)))

    def _origin(self, first: Sequence[Finding], world: int) -> tuple[int, ...]:
        """Return the ranks at which the fault began; empty if that is uncertain, or if it applies to all ranks.

        An owner's parameters depend on the gradients of all ranks. If every rank makes the same update, a rank whose parameters
        alone are not finite did not receive the fault from another rank.
        """
        held = sorted(seen.rank for seen in first if seen.fault is not None and seen.fault.held is Held.PARAMETERS)
        if held:
            averagers = self._averagers.values()
            alike = all(type(one).owned is GradientAverager.owned and one.comm.size == world for one in averagers)
            return _some(held, world) if alike else ()
        statistics = {seen.rank for seen in first if seen.fault is not None and seen.fault.held is Held.STATISTICS}
        return _some(sorted(statistics | {seen.rank for seen in first if seen.loss}), world)

    def _gradient_faults(self) -> list[LayerFault]:
        """Return the faults in the gradients of parameters that this rank updates."""
        check = FiniteCheck(self._holders, self._arithmetic.fetch_finite(self._owned(lambda group: group.grad)))
        return [self._fault(Held.GRADIENTS, name) for _, name in check.faults()]

    def _owned(self, flat_of: Callable[[FlatGroup], Array]) -> list[Array]:
        """Return the parts of flat buffers that this rank updates, in the order of the holders."""
        return [
            flat_of(averager.group)[segment.start : segment.stop]
            for averager in self._averagers.values()
            for segment in averager.owned()
            if segment.size
        ]

    def _fault(self, held: Held, name: str) -> LayerFault:
        layer = _layer(name)
        return LayerFault(self._order[layer], held, layer)


def _layer(name: str) -> str:
    """Return the layer of a parameter or statistic."""
    return name.rpartition(".")[0] or name


def _some(ranks: Sequence[int], world: int) -> tuple[int, ...]:
    """Return `ranks`, or an empty tuple if they are all ranks."""
    return tuple(ranks) if len(ranks) < world else ()


def _first_layer(by_rank: Mapping[int, LayerFault], step: int, ranks: int) -> str:
    """Return text that names the first faulty layer and the ranks that found it."""
    fault = min(by_rank.values())
    holders = sorted(rank for rank, other in by_rank.items() if other == fault)
    when = f"in step {step + 1}"
    if fault.held is Held.PARAMETERS:
        when = f"after step {step}" if step else "before the first step"
    return _sentence(fault, when, holders, ranks)


def _sentence(fault: LayerFault, when: str, holders: Sequence[int], ranks: int) -> str:
    """Return text that names a layer and the ranks that found it."""
    return (
        f"layer {fault.layer} is the first, in forward order, whose {fault.held} are not finite {when}{on_ranks(holders, ranks)}"
    )
