"""One rank's part of a distributed model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from hpctrain.backend.kernels.graph import Graph
from hpctrain.backend.kernels.specs import LinearSpec
from hpctrain.boxes import Box
from hpctrain.nn.distribution import Shard
from hpctrain.parallel.layout import LayoutKind
from hpctrain.parallel.parallel_plan import ParallelPlan
from hpctrain.parallel.partition_graph import PartitionedGraph, partition_graph
from hpctrain.parallel.split_group import SplitGroup


class GridDistribution:
    """A `Distribution` by a plan over the ROW axis. Its operators are collective over it; making graphs is not.

    Args:
        plan: what each layer does. axis: this rank's group.
    """

    def __init__(self, plan: ParallelPlan, axis: SplitGroup) -> None:
        assert plan.rows == axis.size
        self.plan, self.axis = plan, axis
        self._shards: dict[str, Shard] = {}
        self._speaks: dict[str, tuple[bool, bool]] = {}

    def prepare(self, graph: Graph) -> None:
        self.plan.check([node.name for node in graph.nodes])
        rank = self.axis.rank
        found = partition_graph(graph, self.plan, (graph.tensors[0].shape[0], *(0,) * (self.axis.size - 1)))
        for step in found.steps:
            node, placement = step.node, step.placement
            if node is None or placement is None:
                continue
            kind = placement.writes.kind
            for name in node.statistics.values():
                self._speaks[name] = (
                    kind is LayoutKind.SAMPLES,
                    kind is LayoutKind.CHANNELS or (kind is LayoutKind.TILES and rank == 0),
                )
            if placement.shard is not None:
                for role, name in (*node.parameters.items(), *node.statistics.items()):
                    dim = 1 if isinstance(node.spec, LinearSpec) and role == "weight" else 0
                    self._shards[name] = Shard(dim, placement.shard[rank])

    def local(self, graph: Graph, counts: Sequence[int]) -> Graph:
        return self.distributed(graph, counts).local(self.axis.rank, self.axis)

    def distributed(self, graph: Graph, counts: Sequence[int]) -> PartitionedGraph:
        """The graph of all ranks of the column."""
        return partition_graph(graph, self.plan, counts)

    def tiles_by_counts(self, graph_of: Callable[[int], Graph]) -> Callable[[Sequence[int]], tuple[Box, ...]]:
        """What each rank of the column must be given of its images (N, H, W, C), for any samples of the ranks.

        graph_of: the model lowered for so many samples.
        """

        def boxes(counts: Sequence[int]) -> tuple[Box, ...]:
            return self.distributed(graph_of(sum(counts)), counts).layouts[0].boxes

        return functools.lru_cache(maxsize=16)(boxes)

    def shard(self, name: str) -> Shard | None:
        return self._shards.get(name)

    def contributes(self, name: str) -> tuple[bool, bool]:
        return self._speaks[name]
