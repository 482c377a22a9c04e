"""Whole networks on process grids against one rank.

Networks at full depth and an eighth of their width, on virtual ranks, in float64: five steps with dropout and synchronised batch
norm. Compared are the losses, every gradient of the first step, and all parameters and running statistics at the end.

In float32, on oneDNN, a result is judged by its distance to one rank's in float64, the median over tensors. It may be twice that
of one float32 rank, plus 1e-6.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np

from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.onednn.kernel_set import OnednnKernelSet
from hpctrain.backend.operators import KernelSet
from hpctrain.comm.base import Communicator
from hpctrain.comm.progress import ProgressEngine
from hpctrain.models import catalogue
from hpctrain.optim.optimizers import Sgd
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain_testing.virtual.run import lone_rank, run_virtual, virtual_engine
from tests.support.training import Result, Task, train

TOLERANCE = 1e-9
STEPS = 5
#: the gradient of a bias before a batch norm vanishes: a bias is compared to at least this share of its layer's weights
BIAS_SHARE = 1e-3

GRIDS = ((1, 2), (2, 1), (3, 1), (2, 2), (3, 2), (4, 1), (1, 4), (2, 4), (8, 1))
PLANS = ("batch", "domain", "tiles", "model", "mixed")


@dataclass(frozen=True)
class Net:
    """A network of the matrix: its catalogue name and options, the image's height, a plan of all three uses (or DOMAIN).

    batch, samples, lr: such that one rank's own result does not depend on its rounding by more than the tolerance, and uneven.
    """

    name: str
    options: Mapping[str, object]
    pixels: int
    mixed: Mapping[str, Parallelism]
    batch: int = 7
    samples: int = 19
    lr: float = 0.02

    def task(self, plan: ParallelPlan | None = None, kernels: KernelSet | None = None, dtype: str = "float64") -> Task:
        """Five steps; seven samples a step and five in the third leave some of eight ranks without any."""
        return Task(
            model=partial(catalogue.build, self.name, {"classes": 5, **self.options}),
            kernels=kernels or NumpyKernelSet(),
            optimizer=partial(Sgd, momentum=0.9, weight_decay=1e-3),
            image_shape=(self.pixels, self.pixels - 1, 3),
            classes=5,
            samples=self.samples,
            batch=self.batch,
            steps=STEPS,
            lr=self.lr,
            dtype=dtype,
            plan=plan or ParallelPlan(),
        )


_VGG = {"features.*": Parallelism.DOMAIN, "classifier.*": Parallelism.MODEL}
_RESNET = {"layer2.*": Parallelism.BATCH, "layer3.*": Parallelism.MODEL, "layer4.*": Parallelism.BATCH, "fc": Parallelism.MODEL}
_NARROW = {"width": 0.125, "synchronised": True}

NETS = {
    "vgg16": Net("vgg16", {"width": 0.125}, 37, _VGG),
    "vgg16_bn": Net("vgg16_bn", _NARROW, 64, _VGG | {"features.3*": Parallelism.MODEL}),
    "resnet18": Net("resnet18", _NARROW, 65, _RESNET),
    "resnet50": Net("resnet50", _NARROW, 49, _RESNET, batch=13, samples=37, lr=1e-3),
    "resnet20": Net("resnet20", {"synchronised": True}, 33, {"layer2.*": Parallelism.MODEL, "layer3.*": Parallelism.BATCH}),
}


def plan_of(net: Net, kind: str, rows: int, cols: int) -> ParallelPlan | None:
    """One of PLANS on a grid; None where the grid has no such plan of its own (without rows all plans are one)."""
    if rows == 1 and kind != "batch":
        return None
    if kind == "mixed":
        return ParallelPlan(rows, cols, Parallelism.DOMAIN, net.mixed)
    if kind == "tiles":
        vertical = 2 if rows % 4 == 0 else 1
        return ParallelPlan(rows, cols, Parallelism.DOMAIN, tiles=(vertical, rows // vertical))
    return ParallelPlan(rows, cols, Parallelism(kind))


@dataclass(frozen=True)
class Distances:
    """Largest relative differences from one rank: losses; over tensors, gradients of step 1, and parameters and statistics."""

    loss: float
    gradients: float
    values: float

    @property
    def largest(self) -> float:
        return max(self.loss, self.gradients, self.values)


def compare(found: Result, expected: Result) -> Distances:
    """How far a result is from one rank's."""
    losses = max(
        abs(a.loss - b.loss) / abs(b.loss) if a.count == b.count else np.inf
        for a, b in zip(found.totals, expected.totals, strict=True)
    )
    values = max(spread(found.parameters, expected.parameters), spread(found.statistics, expected.statistics))
    return Distances(losses, spread(found.gradients, expected.gradients), values)


def spread(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> float:
    """The largest of `relative_distances`."""
    return max(relative_distances(found, expected), default=0.0)


def relative_distances(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> list[float]:
    """Relative L2 distance of each tensor to the expected one, in float64; a bias's to no less than BIAS_SHARE of its weight."""
    assert found.keys() == expected.keys()
    norms = {name: float(np.linalg.norm(tensor.astype(np.float64))) for name, tensor in expected.items()}
    distances = []
    for name, tensor in expected.items():
        weight = norms[name.removesuffix("bias") + "weight"] if name.endswith("bias") else 0.0
        scale = max(norms[name], BIAS_SHARE * weight) or 1.0
        distances.append(float(np.linalg.norm(found[name].astype(np.float64) - tensor)) / scale)
    return distances


def alone(task: Task) -> Result:
    """The task on one rank."""
    return train(replace(task, plan=ParallelPlan()), *lone_rank(), Blocking, keep_gradients=True)


@lru_cache(maxsize=2)
def expected_of(name: str) -> Result:
    """One rank's result of a network, the last two kept."""
    return alone(NETS[name].task())


def on_ranks(task: Task, comm: Communicator, progress: ProgressEngine) -> Result:
    """The task on the ranks of `comm`. Collective."""
    return train(task, comm, progress, Blocking, keep_gradients=True)


def on_virtual_ranks(task: Task, *, seed: int | None = None, deadline_seconds: float = 600) -> list[Result]:
    """The task on virtual ranks: every rank's result."""
    ranks = task.plan.rows * task.plan.cols
    return run_virtual(
        ranks, lambda comm: on_ranks(task, comm, virtual_engine(comm)), seed=seed, deadline_seconds=deadline_seconds
    )


def cell(name: str, plan: ParallelPlan) -> Distances:
    """One cell of the matrix: the largest distances over all ranks."""
    return largest(on_virtual_ranks(NETS[name].task(plan)), expected_of(name))


def largest(results: Sequence[Result], expected: Result) -> Distances:
    """Over all ranks."""
    found = [compare(result, expected) for result in results]
    return Distances(*(max(getattr(each, field) for each in found) for field in ("loss", "gradients", "values")))


FIELDS = ("gradients", "parameters")


@dataclass(frozen=True)
class Medians:
    """Distances of one float32 rank and of the farthest of many, for one of FIELDS."""

    one: float
    many: float

    @property
    def near(self) -> bool:
        return self.many <= 2 * self.one + 1e-6


def float32_cell(name: str, plan: ParallelPlan) -> Mapping[str, Medians]:
    """By field: how far one float32 rank and the ranks of a grid are from float64."""
    task, exact = _float32(name), expected_of(name)
    one, many = _float32_alone(name), on_virtual_ranks(replace(task, plan=plan))

    def median(found: Result, field: str) -> float:
        return float(np.median(relative_distances(getattr(found, field), getattr(exact, field))))

    return {field: Medians(median(one, field), max(median(each, field) for each in many)) for field in FIELDS}


def _float32(name: str) -> Task:
    return NETS[name].task(kernels=OnednnKernelSet(), dtype="float32")


@lru_cache(maxsize=2)
def _float32_alone(name: str) -> Result:
    return alone(_float32(name))
