"""What a plan means, in integers: who owns what, what travels, what it takes of memory. Pure; the same on every rank.

Ranks are counted by position, c * Pr + r. Words are elements of the run's dtype that a rank hands to the communicator for others
in one training step; statistics are float64 and counted apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import add

from hpctrain.backend.kernels.base import KernelSet
from hpctrain.backend.kernels.graph import Graph, Node
from hpctrain.backend.kernels.specs import BatchNormSpec, Shape
from hpctrain.comm.progress import ProgressEngine
from hpctrain.comm.single import SingleCommunicator
from hpctrain.nn.arena import arrange
from hpctrain.nn.plan import plan as plan_memory
from hpctrain.parallel.boxes import Box, Interval, intersect, shape_of, size_of
from hpctrain.parallel.distribute import DistributedGraph, Step, distribute
from hpctrain.parallel.exchange import moved, moved_back
from hpctrain.parallel.layout import Kind, Layout
from hpctrain.parallel.moves import NothingSpec
from hpctrain.parallel.plan import GridPlan, RowUse
from hpctrain.parallel.row_axis import RowAxis

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
            _sum(self.forward, other.forward),
            _sum(self.backward, other.backward),
            _sum(self.statistics_forward, other.statistics_forward),
            _sum(self.statistics_backward, other.statistics_backward),
        )


@dataclass(frozen=True)
class LayerPart:
    """One layer of the model on the grid.

    operation: what it computes, in a word. kind: how its output is split. shape: of the output of the first column's samples.
    owns: each position's box of its column's output. halo: (rows, columns) of the input that each position gets from others
    because its windows reach there. traffic: halos and statistics. parameters: elements held by each position.
    activations: words that each position's output takes, and its input with the halo where there is one.
    """

    name: str
    operation: str
    use: RowUse
    kind: Kind
    shape: Shape
    owns: tuple[Box, ...]
    halo: tuple[tuple[int, int], ...]
    traffic: Traffic
    parameters: Words
    activations: Words


@dataclass(frozen=True)
class Redistribution:
    """A move between layers whose layouts differ, before `reader`; of a sum, after the layer that left parts of it.

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
class Memory:
    """Bytes of one position. activations: the arena of a training step, gradients of activations included; messages: the
    buffers of the ROW axis; parameters: their values; as many bytes again hold their gradients."""

    activations: int
    messages: int
    parameters: int


@dataclass(frozen=True)
class GroupPart:
    """A group of parameters that are averaged together: elements that each position holds, over how many ranks."""

    name: str
    ranks: int
    elements: Words


@dataclass(frozen=True)
class Description:
    """A plan over a model. counts: samples of each position; entries: in forward order. memory: None where nobody asked."""

    plan: GridPlan
    counts: tuple[int, ...]
    dtype: str
    item_bytes: int
    entries: tuple[LayerPart | Redistribution, ...]
    groups: tuple[GroupPart, ...]
    memory: tuple[Memory, ...] | None

    @property
    def layers(self) -> tuple[LayerPart, ...]:
        return tuple(entry for entry in self.entries if isinstance(entry, LayerPart))

    @property
    def redistributions(self) -> tuple[Redistribution, ...]:
        return tuple(entry for entry in self.entries if isinstance(entry, Redistribution))

    @property
    def traffic(self) -> Traffic:
        """Of a whole step, gradients' averaging left out."""
        total = _nothing(len(self.counts))
        for entry in self.entries:
            total = total + entry.traffic
        return total

    @property
    def parameters(self) -> Words:
        """Elements of all parameters that each position holds."""
        total: Words = (0,) * len(self.counts)
        for layer in self.layers:
            total = _sum(total, layer.parameters)
        return total


def describe(
    graph_of: Callable[[int], Graph],
    plan: GridPlan,
    counts: Sequence[int],
    parameters: Mapping[str, Shape],
    kernels: KernelSet | None = None,
) -> Description:
    """`plan` over a model.

    Args:
        graph_of: the model lowered for so many samples. counts: samples of a step by position. parameters: whole shapes by full
            name. kernels: who would compute; given, memory is planned as a program plans it.

    Raises:
        ConfigError: a pattern of the plan that matches no layer.
    """
    assert len(counts) == plan.rows * plan.cols
    shares = [tuple(counts[first : first + plan.rows]) for first in range(0, len(counts), plan.rows)]
    sample = graph_of(1)
    plan.check([node.name for node in sample.nodes])
    columns = {share: _Column(graph_of(sum(share)), plan, share, parameters, kernels) for share in dict.fromkeys(shares)}
    ordered = [columns[share] for share in shares]
    entries = tuple(_join(parts) for parts in zip(*(column.entries for column in ordered), strict=True))
    memory = None if kernels is None else tuple(one for column in ordered for one in column.memory)
    item_bytes = sample.tensors[0].item_bytes
    groups = _groups(plan, ordered, parameters)
    return Description(plan, tuple(counts), sample.tensors[0].dtype, item_bytes, entries, groups, memory)


class _Column:
    """The entries of one column, over its Pr ranks."""

    def __init__(
        self, graph: Graph, plan: GridPlan, counts: tuple[int, ...], parameters: Mapping[str, Shape], kernels: KernelSet | None
    ) -> None:
        self._plan, self._parameters, self.ranks = plan, parameters, len(counts)
        self._graph = graph
        self._found: DistributedGraph = distribute(graph, plan, counts)
        self._needs_gradient = _needs_gradient(self._found)
        self._readers = _readers(self._found)
        self.shards = self._found.shards()
        self.entries = tuple(self._entries())
        self.memory = tuple(self._memory(rank, kernels) for rank in range(self.ranks)) if kernels is not None else ()

    def _entries(self) -> Iterator[LayerPart | Redistribution]:
        halos: dict[str, list[Step]] = {}
        for step in self._found.steps:
            if step.move is not None:
                reader = self._readers.get(step.output, "output")
                if step.summed or not _is_halo(step):
                    yield self._redistribution(step, reader)
                else:
                    halos.setdefault(reader, []).append(step)
            elif step.node is not None and step.placement is not None:
                yield self._layer(step.node, step, halos.get(step.node.name, []))

    def _redistribution(self, step: Step, reader: str) -> Redistribution:
        assert step.move is not None
        source, target = step.move
        traffic = self._traffic(step)
        boxes = self._found.layouts[step.output].boxes
        words = tuple(size_of(box) for box in boxes)
        if step.summed:
            return Redistribution(step.name, reader, "parts of a sum", source.kind.value, traffic, words)
        return Redistribution(step.name, reader, source.kind.value, _kind(target), traffic, words)

    def _layer(self, node: Node, step: Step, halos: Sequence[Step]) -> LayerPart:
        placement = step.placement
        assert placement is not None
        assert step.use is not None
        traffic = self._statistics(node, step)
        extra: Words = (0,) * self.ranks
        for halo in halos:
            traffic = traffic + self._traffic(halo)
            assert halo.move is not None
            extra = _sum(extra, tuple(size_of(box) for box in halo.move[1].boxes))
        held = [self._held(node, rank) for rank in range(self.ranks)]
        return LayerPart(
            name=node.name,
            operation=_operation(node),
            use=step.use,
            kind=placement.writes.kind,
            shape=placement.writes.shape,
            owns=placement.writes.boxes,
            halo=tuple(self._halo(halos, rank) for rank in range(self.ranks)),
            traffic=traffic,
            parameters=tuple(held),
            activations=_sum(tuple(size_of(box) for box in placement.writes.boxes), extra),
        )

    def _traffic(self, step: Step) -> Traffic:
        """A move's words, or its adjoint's first where it is a sum; none in backward where nobody wants the gradient."""
        assert step.move is not None
        there, back = moved(*step.move), moved_back(*step.move)
        forward, backward = (back, there) if step.summed else (there, back)
        zeros = (0,) * self.ranks
        return Traffic(forward, backward if self._needs_gradient[step.inputs[0]] else zeros, zeros, zeros)

    def _statistics(self, node: Node, step: Step) -> Traffic:
        """Count, mean and M2 of every other rank forward, two sums backward, per channel; see `batch_norm.RankStatistics`."""
        none = _nothing(self.ranks)
        assert step.placement is not None
        if not isinstance(node.spec, BatchNormSpec):
            return none
        sizes = {"world": self._plan.rows * self._plan.cols, "column": self._plan.cols, "row": self._plan.rows}
        forward, backward = [], []
        for spec in step.placement.specs:
            merges = isinstance(spec, BatchNormSpec) and spec.synchronised
            assert isinstance(spec, BatchNormSpec | NothingSpec)
            others = sizes[spec.merge] - 1 if merges and isinstance(spec, BatchNormSpec) else 0
            channels = spec.channels if isinstance(spec, BatchNormSpec) else 0
            forward.append(others * (2 * channels + 1))
            backward.append(others * 2 * channels)
        return Traffic(none.forward, none.backward, tuple(forward), tuple(backward))

    def _halo(self, halos: Sequence[Step], rank: int) -> tuple[int, int]:
        """Rows and columns of the image that this rank reads and does not own, in one or two pieces."""
        rows = columns = 0
        for step in halos:
            assert step.move is not None
            source, target = step.move
            own, wanted = source.boxes[rank], target.boxes[rank]
            inside = tuple(intersect((wanted[dim],), ((0, source.shape[dim]),)) for dim in (1, 2))
            if any(part is None for part in inside) or not size_of(wanted):
                continue
            rows += _beyond(wanted[1], own[1], source.shape[1])
            columns += _beyond(wanted[2], own[2], source.shape[2])
        return rows, columns

    def _held(self, node: Node, rank: int) -> int:
        return sum(held(self._parameters[name], self.shards.get(name), rank) for name in node.parameters.values())

    def _memory(self, rank: int, kernels: KernelSet) -> Memory:
        graph = self._found.local(rank, _nobody())
        item = graph.tensors[0].item_bytes
        arena = arrange(plan_memory(graph, kernels, training=True)).total_bytes
        parameters = sum(held(shape, self.shards.get(name), rank) for name, shape in self._parameters.items())
        return Memory(arena, self._messages(rank) * item, parameters * item)

    def _messages(self, rank: int) -> int:
        """Words of message buffers: one that all moves share, and one of its own for each that travels under computation."""
        shared, own = 0, 0
        for step in self._found.steps:
            if step.move is None:
                continue
            size = moved(*step.move)[rank] + moved_back(*step.move)[rank]
            if getattr(step, "early", False):
                own += size
            else:
                shared = max(shared, size)
        return shared + own


def held(shape: Shape, shard: Sequence[Interval] | None, rank: int) -> int:
    """Elements of a parameter of `shape` on one rank; `shard`: each rank's interval of its output channels."""
    size = math.prod(shape)
    if shard is None:
        return size
    start, stop = shard[rank]
    return size // shard[-1][1] * (stop - start)


def _groups(plan: GridPlan, columns: Sequence[_Column], parameters: Mapping[str, Shape]) -> tuple[GroupPart, ...]:
    """Whole parameters are averaged over all ranks, split ones over those that hold the same part."""
    whole, split = [], []
    for column in columns:
        for rank in range(plan.rows):
            sizes = {name: held(shape, column.shards.get(name), rank) for name, shape in parameters.items()}
            split.append(sum(size for name, size in sizes.items() if name in column.shards))
            whole.append(sum(sizes.values()) - split[-1])
    parts = (GroupPart("all", plan.rows * plan.cols, tuple(whole)), GroupPart("model", plan.cols, tuple(split)))
    return tuple(part for part in parts if any(part.elements))


def _join(parts: Sequence[LayerPart | Redistribution]) -> LayerPart | Redistribution:
    """One entry of all columns: what goes by position is put in a row."""
    first = parts[0]
    traffic = Traffic(
        _chain(part.traffic.forward for part in parts),
        _chain(part.traffic.backward for part in parts),
        _chain(part.traffic.statistics_forward for part in parts),
        _chain(part.traffic.statistics_backward for part in parts),
    )
    activations = _chain(part.activations for part in parts)
    if isinstance(first, Redistribution):
        return Redistribution(first.name, first.reader, first.source, first.target, traffic, activations)
    layers = [part for part in parts if isinstance(part, LayerPart)]
    return LayerPart(
        first.name,
        first.operation,
        first.use,
        first.kind,
        first.shape,
        tuple(box for layer in layers for box in layer.owns),
        tuple(halo for layer in layers for halo in layer.halo),
        traffic,
        _chain(layer.parameters for layer in layers),
        activations,
    )


def _needs_gradient(graph: DistributedGraph) -> list[bool]:
    """By tensor: backward computes its gradient. The images' own is not."""
    needs = [False] * len(graph.layouts)
    for step in graph.steps:
        trained = step.node is not None and bool(step.node.parameters)
        needs[step.output] = trained or any(needs[i] for i in step.inputs)
    return needs


def _readers(graph: DistributedGraph) -> dict[int, str]:
    """The first layer that reads each tensor."""
    readers: dict[int, str] = {}
    for step in graph.steps:
        if step.node is not None:
            for tensor in step.inputs:
                readers.setdefault(tensor, step.node.name)
    return readers


def _is_halo(step: Step) -> bool:
    assert step.move is not None
    source, target = step.move
    return source.kind is Kind.ROWS and not target.is_partition and _kind(target) != "everything"


def _kind(layout: Layout) -> str:
    if layout.is_partition:
        return layout.kind.value
    everywhere = all(shape_of(box) == layout.shape for box in layout.boxes)
    return "everything" if everywhere else layout.kind.value


def _operation(node: Node) -> str:
    name = type(node.spec).__name__.removesuffix("Spec").lower()
    window = getattr(node.spec, "window", None)
    if window is None:
        return name
    kernel, stride = "x".join(map(str, window.kernel)), window.stride
    return f"{name} {kernel}" + (f"/{stride[0]}" if stride != (1, 1) else "")


def _beyond(wanted: Interval, own: Interval, size: int) -> int:
    """Elements of `wanted` inside of 0 .. size that are not in `own`."""
    start, stop = max(0, wanted[0]), min(size, wanted[1])
    return max(0, stop - start) - max(0, min(stop, own[1]) - max(start, own[0]))


def _nobody() -> RowAxis:
    """An axis for graphs that are planned and never run."""
    return RowAxis(SingleCommunicator("row"), ProgressEngine(rank=0, deadline_seconds=1.0, abort=lambda code: None))


def _nothing(ranks: int) -> Traffic:
    zeros = (0,) * ranks
    return Traffic(zeros, zeros, zeros, zeros)


def _sum(a: Words, b: Words) -> Words:
    return tuple(map(add, a, b))


def _bytes(words: Words, statistics: Words, item_bytes: int) -> Words:
    return tuple(item_bytes * n + STATISTIC_BYTES * s for n, s in zip(words, statistics, strict=True))


def _chain(parts: Iterator[Words]) -> Words:
    return tuple(word for part in parts for word in part)
