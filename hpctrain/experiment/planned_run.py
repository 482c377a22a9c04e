"""A configuration on a grid, with everything that plans of it follow from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hpctrain.backend.operators import KernelSet
from hpctrain.backend.graph import Graph
from hpctrain.config.schema import Config
from hpctrain.nn.parameter import ParameterSpec
from hpctrain.parallel.parallel_plan import ParallelPlan

Image = tuple[int, int, int]


@dataclass(frozen=True)
class PlannedRun:
    """A configuration on a grid. image_shape: (H, W, C) as the network sees it. counts: samples of a step by position.

    assumption: a sentence that says what the plan assumes because the data are not there; empty where it assumes nothing.
    """

    config: Config
    plan: ParallelPlan
    image_shape: Image
    counts: tuple[int, ...]
    graph_of: Callable[[int], Graph]
    specs: Mapping[str, ParameterSpec]
    kernels: KernelSet
    assumption: str = ""
