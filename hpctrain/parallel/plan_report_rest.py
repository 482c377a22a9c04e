"""The report of a plan over a model, in integers, as `hpctrain.parallel.plan_report` makes it.

Ranks are counted by position, c * Pr + r. Words are elements of the run's dtype that a rank hands to the communicator for others
in one training step; statistics are float64 and counted apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import add

from hpctrain.backend.specs import Shape
from hpctrain.core.intervals import Box
from hpctrain.parallel.layout import LayoutKind
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan

STATISTIC_BYTES = 8

Words = tuple[int, ...]


@dataclass(frozen=True)
class Traffic:
    """Words by position. statistics_*: float64 words of batch statistics."""

    forward: Words
    backward: Words
    statistics_forward: Words
    statistics_backward: Words

    def bytes_forward(self, item_bytes: int) -> Words:
        return _bytes(self.forward, self.statistics_forward, item_bytes)

    def bytes_backward(self, item_bytes: int) -> Words:
        return _bytes(self.backward, self.statistics_backward, item_bytes)

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            add_words(self.forward, other.forward),
            add_words(self.backward, other.backward),
            add_words(self.statistics_forward, other.statistics_forward),
            add_words(self.statistics_backward, other.statistics_backward),
        )


@dataclass(frozen=True)
class LayerReport:
    """One layer of the model on the grid.

    operation: a word and the window. kind: how its output is split. shape: of the output of the first split group's
    samples. owns: each position's box of its group's output. halo: (rows, columns) of input images that each position gets from
    others, for its windows. traffic: halos and statistics. parameters: elements held by each position. activations: words of
    each position's output, and of its input with the halo where there is one.
    """

    name: str
    operation: str
    use: Parallelism
    kind: LayoutKind
    shape: Shape
    owns: tuple[Box, ...]
    halo: tuple[tuple[int, int], ...]
    traffic: Traffic
    parameters: Words
    activations: Words


@dataclass(frozen=True)
class RedistributionReport:
    """A move between layers whose layouts differ, before `reader`; or a sum, after the layer that left its summands.

    source, target: how the tensor is split, "everything" where every rank gets all of it, "parts of a sum".
    activations: words that each position's result takes.
    """

    name: str
    reader: str
    source: str
    target: str
    traffic: Traffic
    activations: Words


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of one position.

    activations: the arena of a training step, gradients of activations included. messages: the buffers of the split group.
    parameters: their values; their gradients take the same again.
    """

    activations: int
    messages: int
    parameters: int


@dataclass(frozen=True)
class GroupReport:
    """A group of parameters that are averaged together: elements that each position holds, over how many ranks."""

    name: str
    ranks: int
    elements: Words


@dataclass(frozen=True)
class PlanReport:
    """A plan over a model. counts: samples of each position. entries: in forward order. memory: None without kernels."""

    plan: ParallelPlan
    counts: tuple[int, ...]
    dtype: str
    item_bytes: int
    entries: tuple[LayerReport | RedistributionReport, ...]
    groups: tuple[GroupReport, ...]
    memory: tuple[MemoryReport, ...] | None

    @property
    def layers(self) -> tuple[LayerReport, ...]:
        return tuple(entry for entry in self.entries if isinstance(entry, LayerReport))

    @property
    def redistributions(self) -> tuple[RedistributionReport, ...]:
        return tuple(entry for entry in self.entries if isinstance(entry, RedistributionReport))

    @property
    def traffic(self) -> Traffic:
        """The words of a whole step; the averaging of gradients is left out."""
        total = nothing(len(self.counts))
        for entry in self.entries:
            total = total + entry.traffic
        return total

    @property
    def parameters(self) -> Words:
        """Elements of all parameters that each position holds."""
        total: Words = (0,) * len(self.counts)
        for layer in self.layers:
            total = add_words(total, layer.parameters)
        return total


def nothing(ranks: int) -> Traffic:
    """No words of so many ranks."""
    zeros = (0,) * ranks
    return Traffic(zeros, zeros, zeros, zeros)


def add_words(a: Words, b: Words) -> Words:
    """Position by position."""
    return tuple(map(add, a, b))


def _bytes(words: Words, statistics: Words, item_bytes: int) -> Words:
    return tuple(item_bytes * n + STATISTIC_BYTES * s for n, s in zip(words, statistics, strict=True))
