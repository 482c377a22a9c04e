"""Short trainings on made-up data, for comparing one number of ranks, kernel set or averager with another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from hpctrain.averaging.base import GradientAverager
from hpctrain.averaging.norms import JointNorms
from hpctrain.backend.kernels.base import KernelSet
from hpctrain.boxes import Box
from hpctrain.comm.base import Communicator
from hpctrain.comm.grid import ProcessGrid
from hpctrain.comm.progress import ProgressEngine
from hpctrain.data.loader import Batch, Share, cut
from hpctrain.data.sampler import Sampler, counts, share_of
from hpctrain.nn.layer import Layer
from hpctrain.nn.network import MODEL, Network
from hpctrain.optim.base import Optimizer
from hpctrain.parallel.groups import GridGroups
from hpctrain.parallel.parallel_plan import ParallelPlan
from hpctrain.parallel.rank_graph import GridDistribution
from hpctrain.train.step import TrainingStep
from hpctrain.train.step_reduction import StepReduction, StepTotals

TileOfRank = Callable[[tuple[int, ...]], Sequence[Box]]
AveragerFactory = Callable[..., GradientAverager]


@dataclass(frozen=True)
class Task:
    """What to train: the same on every rank. `samples` need not be a multiple of `batch`, nor `batch` of the ranks."""

    model: Callable[[], Layer]
    kernels: KernelSet
    optimizer: Callable[[], Optimizer]
    image_shape: tuple[int, int, int] = (9, 7, 3)
    classes: int = 5
    samples: int = 37
    batch: int = 8
    steps: int = 20
    lr: float = 0.05
    dtype: str = "float64"
    seed: int = 3
    micro_batches: int = 1
    smoothing: float = 0.1
    synchronised: bool = True
    plan: ParallelPlan = field(default_factory=ParallelPlan)


@dataclass
class Result:
    """Where a training ended, by name."""

    parameters: dict[str, np.ndarray]
    statistics: dict[str, np.ndarray]
    totals: list[StepTotals] = field(default_factory=list)
    gradients: dict[str, np.ndarray] = field(default_factory=dict)


def made_up(task: Task) -> tuple[np.ndarray, np.ndarray, Sampler]:
    """Images (samples, H, W, C), labels (samples,), and the order in which steps take them."""
    random = np.random.default_rng(task.seed)
    images = random.standard_normal((task.samples, *task.image_shape)).astype(task.dtype)
    labels = random.integers(0, task.classes, task.samples)
    return images, labels, Sampler(task.samples, task.batch, seed=task.seed, shuffle=True)


def batches(task: Task, position: int, positions: int, tiles: TileOfRank | None = None) -> Iterator[Batch]:
    """The shares of one position: made-up images that depend on the sample alone.

    tiles: the box that each rank of a split group reads of the group's images, by their samples; None: its own samples.
    """
    images, labels, sampler = made_up(task)
    split_size = task.plan.rows
    for step in range(task.steps):
        epoch, inside = divmod(step, sampler.steps_per_epoch)
        total = sampler.global_count(inside)
        ids = sampler.ids(epoch, inside)
        every = counts(total, positions, split_size)
        first = position - position % split_size
        share = Share(tuple(every[first:][:split_size]), position % split_size)
        own = share_of(ids, position, positions, split_size)
        shared = np.concatenate([share_of(ids, first + rank, positions, split_size) for rank in range(split_size)])
        x = images[own] if tiles is None else cut(images[shared], tiles(share.counts)[share.split_rank])
        yield Batch(x, labels[own], shared, every, total, epoch, inside, share)


def train(
    task: Task,
    comm: Communicator,
    progress: ProgressEngine,
    averager: AveragerFactory,
    *,
    keep_gradients: bool = False,
    tell_nodes: bool = False,
    **options: Any,
) -> Result:
    """Train for `task.steps` on the ranks of `comm`, on the grid of the task's plan. Collective.

    Args:
        averager: the class; it gets `options` beside what every averager gets. keep_gradients: of the first step, summed over
            all ranks; only where the averager leaves the sums in the gradients' buffers, as `Blocking` does. tell_nodes: it also
            gets `nodes`, those of its group's ranks.
    """
    rows = task.plan.rows
    groups = GridGroups(ProcessGrid(comm, rows, comm.size // rows))
    axis = groups.split_group(progress)
    distribution = None if axis is None else GridDistribution(task.plan, axis)
    network = Network(
        task.model(),
        task.image_shape,
        task.kernels,
        dtype=task.dtype,
        seed=task.seed,
        smoothing=task.smoothing,
        mergers=groups.mergers(progress),
        distribution=distribution,
    )
    if MODEL in network.groups:
        options = {**options, "norms": JointNorms(comm, progress)}
    averagers = _averagers(task, network, groups, partial(averager, progress=progress, **options), tell_nodes)
    for each in averagers.values():
        each.agree()
    message = StepReduction(groups.messages, progress, network.statistics.size)
    step = TrainingStep(network, averagers, progress, message, task.micro_batches, groups.counts_of)
    totals: list[StepTotals] = []
    gradients: dict[str, np.ndarray] = {}
    boxes = None if distribution is None else distribution.tiles_by_counts(network.graph)
    for number, batch in enumerate(batches(task, groups.position, comm.size, boxes)):
        step.run(batch, number, task.lr)
        if keep_gradients and number == 0:
            gradients = {name: assemble(network, name, own.grad, comm, groups) for name, own in network.parameters.items()}
        message.post(stop=False)
        found = message.read()
        assert found is not None
        network.statistics.blend(found.statistics, found.count)
        totals.append(found)
    for each in averagers.values():
        each.drain()
    return Result(
        {name: assemble(network, name, own.data, comm, groups) for name, own in network.parameters.items()},
        {name: view.copy() for name, view in network.statistics.views.items()},
        totals,
        gradients,
    )


def _averagers(
    task: Task, network: Network, groups: GridGroups, make: AveragerFactory, tell_nodes: bool
) -> dict[str, GradientAverager]:
    """One for each group of parameters."""
    averagers = {}
    for name, group in network.groups.items():
        nodes = {"nodes": groups.nodes[name]} if tell_nodes else {}
        averagers[name] = make(group=group, optimizer=task.optimizer(), comm=groups.gradients[name], **nodes)
    return averagers


def assemble(network: Network, name: str, own: np.ndarray, comm: Communicator, groups: GridGroups) -> np.ndarray:
    """A whole parameter, or gradient, of which each rank has its own part; on every rank. Collective where it is split."""
    shard = network.shards[name]
    if shard is None:
        return own.copy()
    parts = comm.allgather_object((groups.split_rank, own.copy()))
    by_row = dict(sorted(parts, key=lambda part: part[0]))
    return np.concatenate([by_row[row] for row in range(groups.split_size)], axis=shard.dim)


def distance(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    """Largest relative L2 distance |a - b| / |b| over the tensors (|b| = 0: |a|)."""
    assert a.keys() == b.keys()
    worst = 0.0
    for name in a:
        scale = float(np.linalg.norm(b[name].astype(np.float64))) or 1.0
        worst = max(worst, float(np.linalg.norm(a[name].astype(np.float64) - b[name])) / scale)
    return worst
