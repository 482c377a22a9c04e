"""One rank's part of a model on a grid: its graph, and its network."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Protocol

from hpctrain.backend.operators import KernelSet, Operator
from hpctrain.backend.graph import Graph
from hpctrain.core.intervals import Box
from hpctrain.comm.progress import ProgressEngine
from hpctrain.nn.distribution import Shard
from hpctrain.nn.layers import Layer
from hpctrain.nn.network import ImageShape, Network
from hpctrain.parallel.groups import GridGroups
from hpctrain.parallel.layout import LayoutKind
from hpctrain.parallel.parallel_plan import ParallelPlan
from hpctrain.parallel.partition_graph import PartitionedGraph, partition_graph
from hpctrain.parallel.redistribute import RedistributeOperator, ReduceScatterOperator
from hpctrain.parallel.split_group import SplitGroup


class TilesByShape(Protocol):
    """The boxes that the ranks of a split group must be given of its images (N, H, W, C)."""

    def __call__(self, counts: Sequence[int], image_shape: ImageShape | None = None) -> tuple[Box, ...]:
        """By rank. counts: samples of the ranks. image_shape: None: that which the network was made for."""
        ...


class GridDistribution:
    """A `Distribution` by a plan over a split group. Its operators are collective over the group; making graphs is not.

    Args:
        plan: the use of each layer. group: this rank's split group.
    """

    def __init__(self, plan: ParallelPlan, group: SplitGroup) -> None:
        assert plan.rows == group.size
        self.plan, self.group, self.ranks = plan, group, group.size
        self._shards: dict[str, Shard] = {}
        self._contributes: dict[str, tuple[bool, bool]] = {}

    def prepare(self, graph: Graph) -> None:
        self.plan.check([node.name for node in graph.nodes])
        rank = self.group.rank
        # Shards depend on the plan and the layers alone, so any samples will do: all of them on the first rank.
        counts = (graph.tensors[0].shape[0], *(0,) * (self.group.size - 1))
        partitioned = partition_graph(graph, self.plan, counts)
        self._shards = partitioned.shards_of(rank)
        for step in partitioned.steps:
            node, sharding = step.node, step.sharding
            if node is None or sharding is None:
                continue
            kind = sharding.writes.kind
            for name in node.statistics.values():
                # A step's sums weight batch statistics by samples. Over whole samples each rank adds its own. Over channels each
                # rank has other channels of all the group's samples. Over tiles all ranks hold the same merged statistics, so
                # one adds them for all.
                self._contributes[name] = (
                    kind is LayoutKind.SAMPLES,
                    kind is LayoutKind.CHANNELS or (kind is LayoutKind.TILES and rank == 0),
                )

    def local(self, graph: Graph, counts: Sequence[int]) -> Graph:
        return self.partitioned(graph, counts).local(self.group.rank, self.group)

    def partitioned(self, graph: Graph, counts: Sequence[int]) -> PartitionedGraph:
        """The graph of all ranks of the split group."""
        return partition_graph(graph, self.plan, counts)

    def tiles_by_counts(self, graph_of: Callable[[int, ImageShape | None], Graph]) -> TilesByShape:
        """The box that each rank of the split group must be given of its images, by the samples of the ranks and their shape.

        graph_of: gives the model lowered for a number of samples of a shape.
        """

        def boxes(counts: Sequence[int], image_shape: ImageShape | None = None) -> tuple[Box, ...]:
            return self.partitioned(graph_of(sum(counts), image_shape), counts).layouts[0].boxes

        return functools.lru_cache(maxsize=16)(boxes)

    def message_bytes(self, operators: Sequence[Operator]) -> int:
        moves = [operator for operator in operators if isinstance(operator, RedistributeOperator | ReduceScatterOperator)]
        early = [move for move in moves if isinstance(move, RedistributeOperator) and move.begins_early]
        shared = max((move.message_bytes for move in moves if move not in early), default=0)
        return shared + sum(move.message_bytes for move in early)

    def shard(self, name: str) -> Shard | None:
        return self._shards.get(name)

    def contributes(self, name: str) -> tuple[bool, bool]:
        return self._contributes[name]


def make_network(
    model: Layer,
    image_shape: tuple[int, int, int],
    kernels: KernelSet,
    *,
    groups: GridGroups,
    progress: ProgressEngine,
    plan: ParallelPlan | None = None,
    dtype: str = "float32",
    seed: int = 0,
    smoothing: float = 0.0,
    frozen: Sequence[str] = (),
) -> Network:
    """This rank's part of a model on a grid. Not collective.

    Args:
        model: the root layer. image_shape: (H, W, C) of one sample. kernels: who computes.
        groups: this rank's place on the grid, and its communicators. progress: the process's engine.
        plan: what each layer does on the grid; needed where ranks share samples.
        dtype: "float32" or "float64". seed: of the initial values. smoothing: label smoothing of the loss.
        frozen: patterns of names of layers that are not trained.

    Raises:
        ShapeError: layers that do not fit each other or the image.
        ConfigError: patterns of frozen layers that match nothing, or all of them.
    """
    split_group = groups.split_group(progress, kernels.arithmetic)
    distribution = None
    if split_group is not None:
        assert plan is not None, "ranks that share samples need a plan of what each of them does"
        distribution = GridDistribution(plan, split_group)
    return Network(
        model,
        image_shape,
        kernels,
        dtype=dtype,
        seed=seed,
        smoothing=smoothing,
        mergers=groups.mergers(progress),
        distribution=distribution,
        frozen=frozen,
    )
