"""What a plan means: who owns what, what travels, what it takes of memory. Pure arithmetic; the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from hpctrain.backend.kernels.base import KernelSet
from hpctrain.backend.kernels.graph import Graph, Node
from hpctrain.backend.kernels.specs import BatchNormSpec, Shape
from hpctrain.boxes import Interval, intersect, shape_of, size_of, whole
from hpctrain.comm.progress import ProgressEngine
from hpctrain.comm.single import SingleCommunicator
from hpctrain.nn.arena import arrange
from hpctrain.nn.plan import plan as plan_memory
from hpctrain.parallel.layout import Layout, LayoutKind
from hpctrain.parallel.parallel_plan import ParallelPlan
from hpctrain.parallel.partition_graph import PartitionedGraph, PartitionStep, partition_graph
from hpctrain.parallel.plan_report import (
    GroupReport,
    LayerReport,
    MemoryReport,
    PlanReport,
    RedistributionReport,
    Traffic,
    Words,
    add_words,
    nothing,
)
from hpctrain.parallel.split_group import SplitGroup
from hpctrain.parallel.transfer import moved, moved_back


def report_plan(
    graph_of: Callable[[int], Graph],
    plan: ParallelPlan,
    counts: Sequence[int],
    parameters: Mapping[str, Shape],
    kernels: KernelSet | None = None,
) -> PlanReport:
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
    entries = _in_a_row([column.entries for column in ordered], plan.rows)
    memory = None if kernels is None else tuple(one for column in ordered for one in column.memory)
    item_bytes = sample.tensors[0].item_bytes
    groups = _groups(plan, ordered, parameters)
    return PlanReport(plan, tuple(counts), sample.tensors[0].dtype, item_bytes, entries, groups, memory)


_Key = tuple[str, str]  # the step's name and that of its input's producer: the same in every column


class _Column:
    """The entries of one column by key, over its Pr ranks."""

    def __init__(
        self,
        graph: Graph,
        plan: ParallelPlan,
        counts: tuple[int, ...],
        parameters: Mapping[str, Shape],
        kernels: KernelSet | None,
    ) -> None:
        self._plan, self._parameters, self.ranks = plan, parameters, len(counts)
        self._graph = graph
        self._found: PartitionedGraph = partition_graph(graph, plan, counts)
        self._needs_gradient = _needs_gradient(self._found)
        self._readers = _readers(self._found)
        self.shards = self._found.shards()
        self.entries = dict(self._entries())
        self.memory = tuple(self._memory(rank, kernels) for rank in range(self.ranks)) if kernels is not None else ()

    def _entries(self) -> Iterator[tuple[_Key, LayerReport | RedistributionReport]]:
        halos: dict[str, list[PartitionStep]] = {}
        producers = {step.output: step.name for step in self._found.steps}
        for step in self._found.steps:
            if step.move is not None:
                reader = self._readers.get(step.output, "output")
                if step.summed or not _is_halo(step):
                    yield (step.name, producers.get(step.inputs[0], "input")), self._redistribution(step, reader)
                else:
                    halos.setdefault(reader, []).append(step)
            elif step.node is not None and step.placement is not None:
                yield (step.node.name, ""), self._layer(step.node, step, halos.get(step.node.name, []))

    def _redistribution(self, step: PartitionStep, reader: str) -> RedistributionReport:
        assert step.move is not None
        source, target = step.move
        traffic = self._traffic(step)
        boxes = self._found.layouts[step.output].boxes
        words = tuple(size_of(box) for box in boxes)
        if step.summed:
            return RedistributionReport(step.name, reader, "parts of a sum", source.kind.value, traffic, words)
        return RedistributionReport(step.name, reader, source.kind.value, _kind(target), traffic, words)

    def _layer(self, node: Node, step: PartitionStep, halos: Sequence[PartitionStep]) -> LayerReport:
        placement = step.placement
        assert placement is not None
        assert step.use is not None
        traffic = self._statistics(node, step)
        extra: Words = (0,) * self.ranks
        for halo in halos:
            traffic = traffic + self._traffic(halo)
            assert halo.move is not None
            extra = add_words(extra, tuple(size_of(box) for box in halo.move[1].boxes))
        held = [self._held(node, rank) for rank in range(self.ranks)]
        return LayerReport(
            name=node.name,
            operation=_operation(node),
            use=step.use,
            kind=placement.writes.kind,
            shape=placement.writes.shape,
            owns=placement.writes.boxes,
            halo=tuple(self._halo(halos, rank) for rank in range(self.ranks)),
            traffic=traffic,
            parameters=tuple(held),
            activations=add_words(tuple(size_of(box) for box in placement.writes.boxes), extra),
        )

    def _traffic(self, step: PartitionStep) -> Traffic:
        """A move's words, or its adjoint's first where it is a sum; none in backward where nobody wants the gradient."""
        assert step.move is not None
        there, back = moved(*step.move), moved_back(*step.move)
        forward, backward = (back, there) if step.summed else (there, back)
        zeros = (0,) * self.ranks
        return Traffic(forward, backward if self._needs_gradient[step.inputs[0]] else zeros, zeros, zeros)

    def _statistics(self, node: Node, step: PartitionStep) -> Traffic:
        """Count, mean and M2 of every other rank forward, two sums backward, per channel; see `batch_norm.RankStatistics`.

        The sums are those that the input's gradient needs: a batch norm of the images themselves sends none.
        """
        none = nothing(self.ranks)
        assert step.placement is not None
        passes_back = any(self._needs_gradient[tensor] for tensor in step.inputs)
        sizes = {"all": self._plan.rows * self._plan.cols, "data": self._plan.cols, "split": self._plan.rows}
        forward, backward = [], []
        for spec in step.placement.specs:
            others = channels = 0
            if isinstance(spec, BatchNormSpec) and spec.synchronised:
                others, channels = sizes[spec.merge] - 1, spec.channels
            forward.append(others * (2 * channels + 1))
            backward.append(others * 2 * channels if passes_back else 0)
        return replace(none, statistics_forward=tuple(forward), statistics_backward=tuple(backward))

    def _halo(self, halos: Sequence[PartitionStep], rank: int) -> tuple[int, int]:
        """Rows and columns of the image that this rank reads and does not own, in one or two pieces."""
        rows = columns = 0
        for step in halos:
            assert step.move is not None
            source, target = step.move
            own, wanted = source.boxes[rank], target.boxes[rank]
            if intersect(wanted, whole(source.shape)) is None:
                continue
            rows += _beyond(wanted[1], own[1], source.shape[1])
            columns += _beyond(wanted[2], own[2], source.shape[2])
        return rows, columns

    def _held(self, node: Node, rank: int) -> int:
        return sum(held(self._parameters[name], self.shards.get(name), rank) for name in node.parameters.values())

    def _memory(self, rank: int, kernels: KernelSet) -> MemoryReport:
        graph = self._found.local(rank, _nobody())
        item = graph.tensors[0].item_bytes
        arena = arrange(plan_memory(graph, kernels, training=True)).total_bytes
        parameters = sum(held(shape, self.shards.get(name), rank) for name, shape in self._parameters.items())
        return MemoryReport(arena, self._messages(rank) * item, parameters * item)

    def _messages(self, rank: int) -> int:
        """Words of message buffers: one that all moves share, and one of its own for each that travels under computation."""
        shared, own = 0, 0
        for step in self._found.steps:
            if step.move is None:
                continue
            size = moved(*step.move)[rank] + moved_back(*step.move)[rank]
            if step.early:
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


def _groups(plan: ParallelPlan, columns: Sequence[_Column], parameters: Mapping[str, Shape]) -> tuple[GroupReport, ...]:
    """Whole parameters are averaged over all ranks, split ones over those that hold the same part."""
    everywhere, split = [], []
    for column in columns:
        for rank in range(plan.rows):
            sizes = {name: held(shape, column.shards.get(name), rank) for name, shape in parameters.items()}
            split.append(sum(size for name, size in sizes.items() if name in column.shards))
            everywhere.append(sum(sizes.values()) - split[-1])
    parts = (GroupReport("all", plan.rows * plan.cols, tuple(everywhere)), GroupReport("model", plan.cols, tuple(split)))
    return tuple(part for part in parts if any(part.elements))


def _in_a_row(
    columns: Sequence[Mapping[_Key, LayerReport | RedistributionReport]], rows: int
) -> tuple[LayerReport | RedistributionReport, ...]:
    """The entries of all columns, each with what goes by position put in a row.

    A column without samples has fewer moves than the others: its empty tensors lie the same in layouts that differ elsewhere.
    """
    fullest = max(columns, key=len)
    assert all(column.keys() <= fullest.keys() for column in columns)
    return tuple(_join([column.get(key, _unmoved(entry, rows)) for column in columns]) for key, entry in fullest.items())


def _unmoved(entry: LayerReport | RedistributionReport, rows: int) -> LayerReport | RedistributionReport:
    """The same move in a column where it moves nothing."""
    return replace(entry, traffic=nothing(rows), activations=(0,) * rows)


def _join(parts: Sequence[LayerReport | RedistributionReport]) -> LayerReport | RedistributionReport:
    """One entry of all columns: what goes by position is put in a row."""
    first = parts[0]
    traffic = Traffic(
        _chain(part.traffic.forward for part in parts),
        _chain(part.traffic.backward for part in parts),
        _chain(part.traffic.statistics_forward for part in parts),
        _chain(part.traffic.statistics_backward for part in parts),
    )
    activations = _chain(part.activations for part in parts)
    if isinstance(first, RedistributionReport):
        return replace(first, traffic=traffic, activations=activations)
    layers = [part for part in parts if isinstance(part, LayerReport)]
    return replace(
        first,
        owns=tuple(box for layer in layers for box in layer.owns),
        halo=tuple(halo for layer in layers for halo in layer.halo),
        traffic=traffic,
        parameters=_chain(layer.parameters for layer in layers),
        activations=activations,
    )


def _needs_gradient(graph: PartitionedGraph) -> list[bool]:
    """By tensor: backward computes its gradient. The images' own is not."""
    needs = [False] * len(graph.layouts)
    for step in graph.steps:
        trained = step.node is not None and bool(step.node.parameters)
        needs[step.output] = trained or any(needs[i] for i in step.inputs)
    return needs


def _readers(graph: PartitionedGraph) -> dict[int, str]:
    """The first layer that reads each tensor."""
    readers: dict[int, str] = {}
    for step in graph.steps:
        if step.node is not None:
            for tensor in step.inputs:
                readers.setdefault(tensor, step.node.name)
    return readers


def _is_halo(step: PartitionStep) -> bool:
    assert step.move is not None
    source, target = step.move
    return source.kind is LayoutKind.TILES and not target.is_partition and _kind(target) != "everything"


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


def _nobody() -> SplitGroup:
    """An axis for graphs that are planned and never run."""
    return SplitGroup(SingleCommunicator("split"), ProgressEngine(rank=0, deadline_seconds=1.0, abort=lambda code: None))


def _chain(parts: Iterator[Words]) -> Words:
    return tuple(word for part in parts for word in part)
