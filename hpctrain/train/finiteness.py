"""Whether all that a rank trains is finite: cheap to ask in every step; where it is not, the first layer and the ranks.

A loss alone is not enough: some kernels pass NaN on as a number (oneDNN's ReLU and max pooling), so that a network of NaN
weights has the loss of one that has learned nothing. So parameters are checked: what is not finite in a gradient is not finite
in the parameter that it updates, whatever the optimiser.
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

#: a value on every rank -> those of all ranks; collective
Gather = Callable[[Any], list[Any]]


class Held(IntEnum):
    """The kinds of values of a layer, in the order in which they are to blame."""

    PARAMETERS = 0
    GRADIENTS = 1
    STATISTICS = 2

    def __str__(self) -> str:
        return "batch statistics" if self is Held.STATISTICS else self.name.lower()


@dataclass(frozen=True, order=True)
class LayerFault:
    """A layer that holds something that is not finite. order: its place in forward order."""

    order: int
    held: Held
    layer: str


@dataclass(frozen=True)
class Finding:
    """The first step in which one rank saw something that is not finite, and where.

    rank: in the world. step: steps done before. loss: the loss was not finite. fault: the first layer, if any.
    """

    rank: int
    step: int
    loss: bool
    fault: LayerFault | None


@dataclass(frozen=True)
class FiniteCheck:
    """A check of arrays that has begun. holders: what each array is, and the parameter's name. flags: whether each is finite."""

    holders: Sequence[tuple[Held, str]]
    flags: Fetch

    def faults(self) -> list[tuple[Held, str]]:
        """Return those that are not finite. Waits."""
        return [holder for holder, finite in zip(self.holders, self.flags.result(), strict=True) if not finite]


@dataclass(frozen=True)
class Cause:
    """The first that any rank saw of a step that is not finite: the same on every rank.

    fault: the first layer, if any is to blame; else only losses are not finite. ranks: that saw it, of `world` ranks.
    sources: the ranks whose own loss or batch statistics were not finite, before anything was summed over ranks.
    """

    step: int
    fault: LayerFault | None
    ranks: tuple[int, ...]
    world: int
    sources: tuple[int, ...]

    @property
    def blamed(self) -> tuple[int, ...]:
        """The ranks at which it began, where that is certain, and not all of them."""
        return _some(self.sources, self.world)

    def facts(self) -> dict[str, Any]:
        """Return the cause for programs: layer (null if only losses tell), what is not finite, ranks that saw it, and sources."""
        layer, held = (None, "loss") if self.fault is None else (self.fault.layer, str(self.fault.held))
        return {"layer": layer, "held": held, "ranks": list(self.ranks), "sources": list(self.sources)}

    def __str__(self) -> str:
        if self.fault is None:
            return f"the loss of step {self.step} is not finite{on_ranks(self.ranks, self.world)}"
        after = self.fault.held is Held.PARAMETERS
        sentence = _sentence(self.fault, f"{'after' if after else 'in'} step {self.step}", self.ranks, self.world)
        if len(self.sources) in (0, self.world):
            return sentence
        return f"{sentence}; losses or batch statistics were so before they were summed{on_ranks(self.sources, self.world)}"


class Finiteness:
    """Looks at this rank's parameters, as far as it updates them, and at its loss and batch statistics.

    Args:
        rank: of this process in the world, for messages.

    Attributes:
        finding: the first non-finite values that this rank has seen; None if all were finite.
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
        """Begin to check parameters, and gradients that are held back, as they are at this point of the work. Never waits.

        In a step: between forward and backward, when parameters hold all of the step before and nothing of this one.
        """
        held = [entry for averager in self._averagers.values() for entry in averager.held_gradients().items()]
        holders, arrays = [(Held.GRADIENTS, name) for name, _ in held], [array for _, array in held]
        # On the host fewer and larger arrays are checked at once; only if they are not all finite, each parameter is.
        if not (self._arithmetic.on_host and self._arithmetic.fetch_finite(self._runs).result().all()):
            holders, arrays = [*self._holders, *holders], [*self._arrays, *arrays]
        return FiniteCheck(holders, self._arithmetic.fetch_finite(arrays))

    def end(self, step: int, check: FiniteCheck | None, *, loss: float = 0.0, statistics: Iterable[str] = ()) -> bool:
        """Return whether everything is finite; the first finding is kept for `error`. Waits for what has begun.

        Args:
            step: steps done. check: of this rank's parameters; None: this micro-batch has none.
            loss: of this rank's samples. statistics: names of those that are not finite.
        """
        faults = [self._fault(Held.STATISTICS, name) for name in statistics]
        if check is not None:
            faults += [self._fault(held, name) for held, name in check.faults()]
        bad_loss = not math.isfinite(loss)
        if (faults or bad_loss) and self.finding is None:
            self.finding = Finding(self._rank, step, bad_loss, min(faults, default=None))
        return not faults and not bad_loss

    def cause(self, step: int, seen: Sequence[tuple[Held, str]], *, finite: bool, gather: Gather) -> Cause:
        """Return the cause of a step that is to be left out, from gradients if they show it. Collective, after a drain.

        Args:
            step: that has just been done, counted from 1. seen: by a check after its update.
            finite: this rank's loss and batch statistics.
        """
        finding, self.finding = self.finding, None
        faults = [*self._gradient_faults(), *(self._fault(held, name) for held, name in seen if held is not Held.PARAMETERS)]
        if not finite and finding is not None and finding.fault is not None:
            faults.append(finding.fault)
        if not faults:  # what updates have made of finite gradients
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
        """Return the error about what any rank saw first, the same on every rank; None if none has. Collective; after a drain.

        Args:
            advice: ends the sentence.
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
        # Only a loss: the gradients that it led to tell where it began.
        losses = sorted(finding.rank for finding in first)
        gathered = gather((self._rank, min(self._gradient_faults(), default=None)))
        faults = {rank: fault for rank, fault in gathered if fault is not None}
        where = f", and {_first_layer(faults, step, len(findings))}" if faults else ""
        sentence = f"The loss of step {step + 1} is not finite{on_ranks(losses, len(findings))}{where}; {advice}"
        return DivergedError(sentence, ranks=self._origin(first, len(findings)))

    def _origin(self, first: Sequence[Finding], world: int) -> tuple[int, ...]:
        """Return the ranks at which it began; empty if that is uncertain, or if they are all ranks.

        An owner's parameters hold what the gradients of any rank have brought. Where every rank makes the same update, one
        whose parameters alone are not finite has not got that from others.
        """
        held = sorted(seen.rank for seen in first if seen.fault is not None and seen.fault.held is Held.PARAMETERS)
        if held:
            averagers = self._averagers.values()
            alike = all(type(one).owned is GradientAverager.owned and one.comm.size == world for one in averagers)
            return _some(held, world) if alike else ()
        statistics = {seen.rank for seen in first if seen.fault is not None and seen.fault.held is Held.STATISTICS}
        return _some(sorted(statistics | {seen.rank for seen in first if seen.loss}), world)

    def _gradient_faults(self) -> list[LayerFault]:
        """Return faults in gradients, as far as this rank updates their parameters."""
        check = FiniteCheck(self._holders, self._arithmetic.fetch_finite(self._owned(lambda group: group.grad)))
        return [self._fault(Held.GRADIENTS, name) for _, name in check.faults()]

    def _owned(self, flat_of: Callable[[FlatGroup], Array]) -> list[Array]:
        """Return parts of flat buffers, one for each of the holders."""
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
    """Return the ranks, or none if they are all of them."""
    return tuple(ranks) if len(ranks) < world else ()


def _first_layer(by_rank: Mapping[int, LayerFault], step: int, ranks: int) -> str:
    """Return the words on the first layer of all, and the ranks that saw it."""
    fault = min(by_rank.values())
    holders = sorted(rank for rank, other in by_rank.items() if other == fault)
    when = f"in step {step + 1}"
    if fault.held is Held.PARAMETERS:
        when = f"after step {step}" if step else "before the first step"
    return _sentence(fault, when, holders, ranks)


def _sentence(fault: LayerFault, when: str, holders: Sequence[int], ranks: int) -> str:
    """Return the words on a layer, and the ranks that saw it."""
    return (
        f"layer {fault.layer} is the first, in forward order, whose {fault.held} are not finite {when}{on_ranks(holders, ranks)}"
    )
