"""Reports of a plan over a model, in integers: owners of all elements, communicated words, and memory.

The reports are pure arithmetic, with the same result on every rank. Rank r of split group c has position c * Pr + r, counted
over all split groups or over some of them. Words are elements of the run's dtype that a rank sends to others in one training
step; statistics are float64 and counted separately.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from operator import add

from hpctrain.backend import specs
from hpctrain.backend.graph import Graph, Node
from hpctrain.backend.operators import KernelSet
from hpctrain.backend.specs import BatchNormSpec, Shape
from hpctrain.core.intervals import Box, Interval, intersect, shape_of, size_of, whole
from hpctrain.parallel.layout import Layout, LayoutKind
from hpctrain.parallel.moves import moved, moved_back
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.parallel.partition_graph import PartitionedGraph, PartitionStep, partition_graph
from hpctrain.parallel.rank_graph import LocalGraph, local_graphs, training_plan

STATISTIC_BYTES = 8

Words = tuple[int, ...]


@dataclass(frozen=True)
class Traffic:
    """Words that each position sends.

    Attributes:
        forward, backward: words of each pass, in the run's dtype.
        statistics_forward, statistics_backward: float64 words of batch statistics.
    """

    forward: Words
    backward: Words
    statistics_forward: Words
    statistics_backward: Words

    def bytes_forward(self, item_bytes: int) -> Words:
        return _bytes(self.forward, self.statistics_forward, item_bytes)

    def bytes_backward(self, item_bytes: int) -> Words:
        return _bytes(self.backward, self.statistics_backward, item_bytes)

    @classmethod
    def zero(cls, ranks: int) -> Traffic:
        """Return a traffic of zero words for `ranks` positions."""
        return cls(*(((0,) * ranks,) * len(fields(cls))))

    @classmethod
    def concatenated(cls, parts: Sequence[Traffic]) -> Traffic:
        """Return the words of the positions of all parts, one after another."""
        return cls(*(_chain(getattr(part, field.name) for part in parts) for field in fields(cls)))

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(add_words(getattr(self, field.name), getattr(other, field.name)) for field in fields(self)))


@dataclass(frozen=True)
class LayerReport:
    """Report of one layer of the model on the grid.

    Attributes:
        operation: kind of operation and its window.
        kind: kind of the output's layout.
        shape: shape of the output for the samples of the first split group.
        owns: each position's box of its group's output.
        halo: (rows, columns) of input images that each position receives for its windows.
        traffic: words of halos and statistics.
        parameters: number of elements that each position holds.
        activations: words of each position's output, plus those of its input with the halo if there is one.
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
    """Report of a move of a tensor to the layout that the layer `reader` needs, or of a sum of partial tensors.

    Attributes:
        source, target: split of the tensor before and after. "everything": every rank receives the whole tensor. "parts of a
            sum": every rank has a summand.
        activations: words of each position's result.
    """

    name: str
    reader: str
    source: str
    target: str
    traffic: Traffic
    activations: Words


@dataclass(frozen=True)
class MemoryReport:
    """Report of one position's memory in bytes.

    Attributes:
        activations: arena of a training step, including gradients of activations.
        messages: buffers of the split group.
        parameters: values of the parameters; their gradients need the same size again.
    """

    activations: int
    messages: int
    parameters: int


@dataclass(frozen=True)
class GroupReport:
    """Report of a group of parameters that are averaged together.

    Attributes:
        ranks: number of ranks that average them.
        elements: number of elements that each position holds.
    """

    name: str
    ranks: int
    elements: Words


@dataclass(frozen=True)
class PlanReport:
    """Report of a plan over a model, for the ranks of all split groups or of some of them.

    Attributes:
        counts: number of samples of each reported position.
        entries: layers and moves in forward order.
        groups: groups of parameters.
        memory: memory of each position; None without kernels.
    """

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
        """Words of a whole step, without the averaging of gradients."""
        total = Traffic.zero(len(self.counts))
        for entry in self.entries:
            total = total + entry.traffic
        return total

    @property
    def parameters(self) -> Words:
        """Number of elements of all parameters that each position holds."""
        total: Words = (0,) * len(self.counts)
        for layer in self.layers:
            total = add_words(total, layer.parameters)
        return total


def add_words(a: Words, b: Words) -> Words:
    """Return the sums of `a` and `b`, position by position."""
    return tuple(map(add, a, b))


def _bytes(words: Words, statistics: Words, item_bytes: int) -> Words:
    return tuple(item_bytes * n + STATISTIC_BYTES * s for n, s in zip(words, statistics, strict=True))


def report_plan(
    graph_of: Callable[[int], Graph],
    plan: ParallelPlan,
    counts: Sequence[int],
    parameters: Mapping[str, Shape],
    kernels: KernelSet | None = None,
    reported: Sequence[int] | None = None,
) -> PlanReport:
    """Return the report of `plan` over a model.

    Args:
        graph_of: function that returns the model lowered for a number of samples.
        counts: number of samples of each position in a step.
        parameters: whole shapes of the parameters by full name.
        kernels: kernel set whose memory is planned as in a program; None: the report has no memory.
        reported: indices c of the split groups whose positions the report contains, in order; None: all.

    Raises:
        ConfigError: a pattern of the plan matches no layer.
    """
    assert len(counts) == plan.rows * plan.cols
    columns = range(plan.cols) if reported is None else reported
    shares = [tuple(counts[c * plan.rows : (c + 1) * plan.rows]) for c in columns]
    sample = graph_of(1)
    plan.check([node.name for node in sample.nodes])
    # Split groups with equal samples have equal reports; a batch has at most two sizes of groups.
    by_share = {share: _GroupReporter(graph_of(sum(share)), plan, share, parameters, kernels) for share in dict.fromkeys(shares)}
    split_groups = [by_share[share] for share in shares]
    entries = _by_position([group.entries for group in split_groups], plan.rows)
    memory = None if kernels is None else tuple(report for group in split_groups for report in group.memory)
    item_bytes = sample.tensors[0].item_bytes
    groups = _parameter_groups(plan, split_groups, parameters)
    reported_counts = tuple(count for share in shares for count in share)
    return PlanReport(plan, reported_counts, sample.tensors[0].dtype, item_bytes, entries, groups, memory)


_Entry = LayerReport | RedistributionReport
_Key = tuple[str, str]  # name of the step and of its input's producer, the same in every split group


class _GroupReporter:
    """Reporter of one split group of Pr ranks: its entries by key, and its memory."""

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
        self._partitioned: PartitionedGraph = partition_graph(graph, plan, counts)
        self._needs_gradient = _needs_gradient(self._partitioned)
        self._readers = _readers(self._partitioned)
        self.shards = self._partitioned.shards()
        self.entries = dict(self._entries())
        self.memory: tuple[MemoryReport, ...] = ()
        if kernels is not None:
            graphs = local_graphs(self._partitioned, range(self.ranks))
            self.memory = tuple(self._memory(rank, graph, kernels) for rank, graph in enumerate(graphs))

    def _entries(self) -> Iterator[tuple[_Key, _Entry]]:
        halos: dict[str, list[PartitionStep]] = {}
        producers = {step.output: step.name for step in self._partitioned.steps}
        for step in self._partitioned.steps:
            if step.move is not None:
                reader = self._readers.get(step.output, "output")
                # A halo is a part of its reader's entry; a redistribution is a separate entry.
                if step.summed or not _is_halo(step):
                    yield (step.name, producers.get(step.inputs[0], "input")), self._redistribution(step, reader)
                else:
                    halos.setdefault(reader, []).append(step)
            elif step.node is not None and step.sharding is not None:
                yield (step.node.name, ""), self._layer(step.node, step, halos.get(step.node.name, []))

    def _redistribution(self, step: PartitionStep, reader: str) -> RedistributionReport:
        assert step.move is not None
        source, target = step.move
        traffic = self._traffic(step)
        boxes = self._partitioned.layouts[step.output].boxes
        words = tuple(size_of(box) for box in boxes)
        if step.summed:
            return RedistributionReport(step.name, reader, "parts of a sum", source.kind.value, traffic, words)
        return RedistributionReport(step.name, reader, source.kind.value, _kind(target), traffic, words)

    def _layer(self, node: Node, step: PartitionStep, halos: Sequence[PartitionStep]) -> LayerReport:
        sharding = step.sharding
        assert sharding is not None
        assert step.use is not None
        traffic = self._statistics(node, step)
        extra: Words = (0,) * self.ranks
        for halo in halos:
            traffic = traffic + self._traffic(halo)
            assert halo.move is not None
            extra = add_words(extra, tuple(size_of(box) for box in halo.move[1].boxes))
        shards = {name: (self._parameters[name], self.shards.get(name)) for name in node.parameters.values()}
        return LayerReport(
            name=node.name,
            operation=_operation(node),
            use=step.use,
            kind=sharding.writes.kind,
            shape=sharding.writes.shape,
            owns=sharding.writes.boxes,
            halo=tuple(self._halo(halos, rank) for rank in range(self.ranks)),
            traffic=traffic,
            parameters=tuple(sum(held(*shard, rank) for shard in shards.values()) for rank in range(self.ranks)),
            activations=add_words(tuple(size_of(box) for box in sharding.writes.boxes), extra),
        )

    def _traffic(self, step: PartitionStep) -> Traffic:
        """Return the words of a move, or of a sum, which is the adjoint of a move.

        There are none in backward if the input needs no gradient.
        """
        assert step.move is not None
        sent, returned = moved(*step.move), moved_back(*step.move)
        forward, backward = (returned, sent) if step.summed else (sent, returned)
        zeros = (0,) * self.ranks
        return Traffic(forward, backward if self._needs_gradient[step.inputs[0]] else zeros, zeros, zeros)

    def _statistics(self, node: Node, step: PartitionStep) -> Traffic:
        """Return the words of `RankStatistics` that each rank sends to all other ranks together.

        These are count, mean and M2 in forward, and two sums per channel in backward. Only the input's gradient needs the sums,
        so a batch norm of the images themselves sends none.
        """
        assert step.sharding is not None
        passes_back = any(self._needs_gradient[tensor] for tensor in step.inputs)
        sizes = {"all": self._plan.rows * self._plan.cols, "data": self._plan.cols, "split": self._plan.rows}
        forward, backward = [], []
        for spec in step.sharding.specs:
            others = channels = 0
            if isinstance(spec, BatchNormSpec) and spec.synchronised:
                others, channels = sizes[spec.merge] - 1, spec.channels
            forward.append(others * (2 * channels + 1))
            backward.append(others * 2 * channels if passes_back else 0)
        return replace(Traffic.zero(self.ranks), statistics_forward=tuple(forward), statistics_backward=tuple(backward))

    def _halo(self, halos: Sequence[PartitionStep], rank: int) -> tuple[int, int]:
        """Return the rows and columns of the image that this rank reads but does not own, summed over the moves `halos`.

        A layer has one such move, or two if it is computed in parts (one for each edge).
        """
        rows = columns = 0
        for step in halos:
            assert step.move is not None
            source, target = step.move
            owned, wanted = source.boxes[rank], target.boxes[rank]
            if intersect(wanted, whole(source.shape)) is None:  # only padding
                continue
            rows += _beyond(wanted[1], owned[1], source.shape[1])
            columns += _beyond(wanted[2], owned[2], source.shape[2])
        return rows, columns

    def _memory(self, rank: int, local: LocalGraph, kernels: KernelSet) -> MemoryReport:
        item = local.graph.tensors[0].item_bytes
        arena = training_plan(local, kernels).arena_bytes
        parameters = sum(held(shape, self.shards.get(name), rank) for name, shape in self._parameters.items())
        parameter_bytes = specs.item_bytes(specs.parameter_dtype(local.graph.tensors[0].dtype))
        return MemoryReport(arena, message_words(local) * item, parameters * parameter_bytes)


def message_words(local: LocalGraph) -> int:
    """Return the size, in words, of the message buffer that all moves of a rank share."""
    return max((words.sent + words.received for words in local.moves.values()), default=0)


def held(shape: Shape, shard: Sequence[Interval] | None, rank: int) -> int:
    """Return the number of elements of a parameter on one rank.

    Args:
        shape: shape of the whole parameter.
        shard: each rank's interval of output channels; None: the parameter is whole on every rank.
        rank: rank in the split group.
    """
    size = math.prod(shape)
    if shard is None:
        return size
    start, stop = shard[rank]
    return size // shard[-1][1] * (stop - start)


def _parameter_groups(
    plan: ParallelPlan, split_groups: Sequence[_GroupReporter], parameters: Mapping[str, Shape]
) -> tuple[GroupReport, ...]:
    """Return the reports of both parameter groups.

    Whole parameters are averaged over all ranks, split ones over the data group, whose ranks hold the same shard.
    """
    shards = split_groups[0].shards  # the same in each split group
    everywhere, split = [], []
    for rank in range(plan.rows):
        sizes = {name: held(shape, shards.get(name), rank) for name, shape in parameters.items()}
        split.append(sum(size for name, size in sizes.items() if name in shards))
        everywhere.append(sum(sizes.values()) - split[-1])
    reports = (
        GroupReport("all", plan.rows * plan.cols, tuple(everywhere) * len(split_groups)),
        GroupReport("model", plan.cols, tuple(split) * len(split_groups)),
    )
    return tuple(report for report in reports if any(report.elements))


def _by_position(groups: Sequence[Mapping[_Key, _Entry]], split_size: int) -> tuple[_Entry, ...]:
    """Return the entries of all split groups, joined so that their sequences are ordered by position.

    A group without samples has fewer moves than the others, because layouts of its empty tensors have the same boxes. The joined
    entry of a missing move counts zero words for that group.
    """
    fullest, zero = max(groups, key=len), Traffic.zero(split_size)
    assert all(entries.keys() <= fullest.keys() for entries in groups)
    return tuple(
        _join([entries.get(key, replace(entry, traffic=zero, activations=zero.forward)) for entries in groups])
        for key, entry in fullest.items()
    )


def _join(entries: Sequence[_Entry]) -> _Entry:
    """Return one entry for all split groups. Its sequences by position are those of the groups, one after another."""
    first = entries[0]
    traffic = Traffic.concatenated([entry.traffic for entry in entries])
    activations = _chain(entry.activations for entry in entries)
    if isinstance(first, RedistributionReport):
        return replace(first, traffic=traffic, activations=activations)
    layers = [entry for entry in entries if isinstance(entry, LayerReport)]
    return replace(
        first,
        owns=tuple(box for layer in layers for box in layer.owns),
        halo=tuple(halo for layer in layers for halo in layer.halo),
        traffic=traffic,
        parameters=_chain(layer.parameters for layer in layers),
        activations=activations,
    )


def _needs_gradient(graph: PartitionedGraph) -> list[bool]:
    """Return, for each tensor, whether backward computes its gradient.

    The images and the tensors before the first parameter need no gradient.
    """
    needs = [False] * len(graph.layouts)
    for step in graph.steps:
        trained = step.node is not None and step.node.trains
        needs[step.output] = trained or any(needs[i] for i in step.inputs)
    return needs


def _readers(graph: PartitionedGraph) -> dict[int, str]:
    """Return the first layer that reads each tensor."""
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


def _beyond(wanted: Interval, owned: Interval, size: int) -> int:
    """Return the number of elements of `wanted` inside [0, size) that are not in `owned`."""
    start, stop = max(0, wanted[0]), min(size, wanted[1])
    return max(0, stop - start) - max(0, min(stop, owned[1]) - max(start, owned[0]))


def _chain(parts: Iterator[Words]) -> Words:
    return tuple(chain.from_iterable(parts))
