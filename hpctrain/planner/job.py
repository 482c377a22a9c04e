"""The job to plan and a candidate for running it, as data, without configuration, ranks or arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from hpctrain.averaging.averagers import AveragerChoice
from hpctrain.backend.graph import Graph
from hpctrain.backend.operators import KernelSet
from hpctrain.data.sampler import counts
from hpctrain.nn.parameter import ParameterSpec
from hpctrain.optim.base import NormsNeeded
from hpctrain.parallel.parallel_plan import ParallelPlan
from hpctrain.planner.costs.compute_costs import ComputeCosts
from hpctrain.training.passes import Passes


@dataclass(frozen=True)
class PlannedJob:
    """Training whose grid, plan and averager may still be open.

    Attributes:
        graph_of: function from a number of samples to the lowered model, with batch norms as in training.
        specs: all parameters, by full name.
        image_shape: (H, W, C).
        batch: samples of a step over all ranks.
        state_arrays: number of elements of optimiser state and of averaged weights, per parameter element.
        shards: number of shards of a step whose sums have a fixed order (docs/exact.md); None: the ranks divide the samples.
        update_factor: time of the optimiser's update, without norms, relative to that of SGD with momentum and weight decay.
    """

    model: str
    graph_of: Callable[[int], Graph]
    specs: Mapping[str, ParameterSpec]
    kernels: KernelSet
    dtype: str
    image_shape: tuple[int, int, int]
    batch: int
    norms_needed: NormsNeeded
    momentum: float = 0.0
    state_arrays: int = 1
    update_factor: float = 1.0
    shards: int | None = None

    def counts(self, ranks: int, split_size: int = 1) -> tuple[int, ...]:
        """Return the number of samples of a step on each rank, by its position in the grid.

        Args:
            ranks: number of ranks; with shards, a divisor of their number.
            split_size: number of ranks that share samples, Pr.
        """
        return counts(self.batch, ranks, split_size, self.shards)

    def passes(self, candidate: Candidate) -> Passes:
        """Return the passes of each rank over its samples of a step."""
        if self.shards is None:
            return Passes(candidate.micro_batches)
        return Passes.over(self.shards // candidate.ranks, candidate.micro_batches, self.shards)

    def element_seconds(self, costs: ComputeCosts, elements: int, *, squares: bool) -> float:
        """Return the mean seconds to update one of `elements` elements, and to check the result for non-finite values.

        The number of elements matters, because the state of a small network fits in caches.

        Args:
            squares: whether to add the time of the squares for norms if the optimiser needs norms.
        """
        share = 1.0 + _UPDATE_SHARE * (self.update_factor - 1.0)
        if squares and self.norms_needed is not NormsNeeded.NONE:
            share += _SQUARES_SHARE
        return share * costs.update_seconds(max(1, elements)) / max(1, elements)

    @cached_property
    def trained_specs(self) -> Mapping[str, ParameterSpec]:
        """The trained parameters by full name, in forward order."""
        trained = {name for node in self.graph_of(1).nodes if node.trains for name in node.parameters.values()}
        return {name: spec for name, spec in self.specs.items() if name in trained}


# Shares of `ComputeCosts.update_seconds`, which counts six accesses to memory per element: five of the update and one of the
# check of its result. The squares of weight and gradient, converted to float64, take as long as eight accesses (measured).
_UPDATE_SHARE = 5 / 6
_SQUARES_SHARE = 8 / 6

Job = PlannedJob  # short name inside the planner; `Job` of `hpctrain.api` is a job that runs


@dataclass(frozen=True)
class Candidate:
    """Plan, averager and number of micro-batches with which a job can run.

    With shards, a rank computes its shards in at most as many passes as there are micro-batches.
    """

    plan: ParallelPlan
    averager: AveragerChoice = field(default_factory=AveragerChoice)
    micro_batches: int = 1

    @property
    def ranks(self) -> int:
        return self.plan.rows * self.plan.cols
