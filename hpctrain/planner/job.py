"""The job that is planned, and a candidate for how to run it. Pure data and functions; no configuration, no ranks, no arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hpctrain.averaging.base import PlannedGroup, Strategy
from hpctrain.backend.graph import Graph
from hpctrain.backend.operators import KernelSet
from hpctrain.nn.parameter import ParameterSpec
from hpctrain.optim.base import NormsNeeded
from hpctrain.parallel.parallel_plan import ParallelPlan


@dataclass(frozen=True)
class PlannedJob:
    """A training whose grid, plan and averager may still be open.

    Attributes:
        model: its name. graph_of: gives the model lowered for a number of samples, batch norms as the training has them.
        specs: all parameters by full name. kernels: the set that computes. dtype: of activations and parameters.
        image_shape: (H, W, C). batch: samples of a step over all ranks.
        norms_needed, momentum: of the optimiser: for LARS and clipping; 0 where it has none.
        state_arrays: numbers that the optimiser, and the average of the weights where there is one, keep for each element.
        strategy: (name, options, group) -> the averaging strategy; raises ConfigError where they do not fit.
    """

    model: str
    graph_of: Callable[[int], Graph]
    specs: Mapping[str, ParameterSpec]
    kernels: KernelSet
    dtype: str
    image_shape: tuple[int, int, int]
    batch: int
    norms_needed: NormsNeeded
    strategy: Callable[[str, Mapping[str, Any], PlannedGroup], Strategy]
    momentum: float = 0.0
    state_arrays: int = 1

    @cached_property
    def trained_specs(self) -> Mapping[str, ParameterSpec]:
        """The parameters that are trained, by full name, in forward order."""
        trained = {name for node in self.graph_of(1).nodes if node.trains for name in node.parameters.values()}
        return {name: spec for name, spec in self.specs.items() if name in trained}


Job = PlannedJob  # beside a candidate; the one of the public interface, which runs, is another


@dataclass(frozen=True)
class Candidate:
    """A way to run a job, on the ranks of the grid of its plan."""

    plan: ParallelPlan
    averager: str = "sharded"
    options: Mapping[str, Any] = field(default_factory=dict)
    micro_batches: int = 1

    @property
    def ranks(self) -> int:
        return self.plan.rows * self.plan.cols
