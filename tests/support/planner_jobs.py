"""Jobs and machines for tests of the planner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpctrain.backend.kernels.base import KernelSet
from hpctrain.backend.kernels.graph import Graph, GraphBuilder
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.kernels.specs import TensorSpec
from hpctrain.experiment.averager import make_strategy
from hpctrain.models import catalogue
from hpctrain.nn.compile.plan import Action, PlannedStep, StepMemory
from hpctrain.nn.layer import Layer
from hpctrain.nn.network import declared
from hpctrain.optim.base import NormsNeeded
from hpctrain.planner.factor_products import FactorProduct
from hpctrain.planner.job import Job
from hpctrain.planner.machine import Link, LinkSegment, Machine, OperatorClass, OperatorRate


class NoCompute:
    """`ComputeCosts` of ranks that compute in no time."""

    def seconds(self, step: PlannedStep, action: Action, memory: StepMemory | None = None) -> float:
        return 0.0

    def product_seconds(self, product: FactorProduct) -> float:
        return 0.0

    def update_seconds(self, elements: int) -> float:
        return 0.0

    def step_seconds(self, input_bytes: int, operators: int) -> float:
        return 0.0

    def measured_share(self) -> float:
        return 0.0


def job_of(
    model: Layer | str,
    image_shape: tuple[int, int, int],
    batch: int,
    options: Mapping[str, Any] | None = None,
    kernels: KernelSet | None = None,
) -> Job:
    """A job. model: a layer, or a name of the catalogue with options."""
    layer = catalogue.build(model, options or {}) if isinstance(model, str) else model

    def graph_of(samples: int) -> Graph:
        builder = GraphBuilder(TensorSpec((samples, *image_shape)))
        return builder.build(layer.lower(builder, 0, ""))

    return Job(
        model=model if isinstance(model, str) else "net",
        graph_of=graph_of,
        specs=declared(layer, graph_of(1))[0],
        kernels=kernels or NumpyKernelSet(),
        dtype="float32",
        image_shape=image_shape,
        batch=batch,
        norms_needed=NormsNeeded.NONE,
        strategy=make_strategy,
    )


def machine_of(
    *,
    alpha_seconds: float = 1e-6,
    bytes_per_second: float = 1e9,
    ranks_per_node: int = 1,
    memory_bytes: int = 1 << 34,
    flops_per_second: float = 1e10,
    within: Link | None = None,
) -> Machine:
    """A machine of equal links with no cost of a core's time."""
    link = Link((LinkSegment(0, alpha_seconds, 1.0 / bytes_per_second),))
    rate = OperatorRate(flops_per_second, flops_per_second, 1e-6)
    return Machine(
        name="test",
        nodes=1 << 14,
        ranks_per_node=ranks_per_node,
        cores_per_rank=1.0,
        memory_bytes=memory_bytes,
        within=within or link,
        between=link,
        ranks_per_card=ranks_per_node,
        rates=dict.fromkeys(OperatorClass, rate),
    )
