"""Models of a few layers, partitioned over a split group and alone: output, input gradient, parameters' gradients, compared."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hpctrain.backend.graph import Graph, GraphBuilder
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.operators import Array, KernelSet, LocalStatistics, StatisticsMerger, StepContext
from hpctrain.backend.specs import AddSpec, SoftmaxCrossEntropySpec, TensorSpec
from hpctrain.core.intervals import Box, consecutive, even_intervals, intersect, relative, whole
from hpctrain.data.loader import cut
from hpctrain.nn.compile.compiler import compile_graph
from hpctrain.nn.layers import Layer
from hpctrain.nn.network import Distribution, Shard, Undistributed, declared
from hpctrain.nn.parameter import FlatGroup, FlatStatistics, ParameterSpec
from hpctrain.nn.program import Program
from hpctrain.parallel import layout
from hpctrain.parallel.groups import RankStatistics
from hpctrain.parallel.layout import Layout
from hpctrain.parallel.moves import SplitGroup
from hpctrain.parallel.parallel_plan import ParallelPlan
from hpctrain.parallel.rank_graph import GridDistribution
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.run import run_virtual, virtual_engine


def _partition(chance: random.Random, shape: tuple[int, ...], ranks: int) -> Layout:
    """Samples unevenly, channels, or tiles of either direction."""
    kind = chance.choice(["samples", "channels", "rows"])
    if kind == "samples":
        owners = [chance.randrange(ranks) for _ in range(shape[0])]
        return layout.samples(shape, [owners.count(rank) for rank in range(ranks)])
    if kind == "channels":
        return layout.channels(shape, even_intervals(shape[-1], ranks))
    vertical = chance.choice([n for n in range(1, ranks + 1) if ranks % n == 0])
    return layout.tiles(shape, (vertical, ranks // vertical))


def _target(chance: random.Random, shape: tuple[int, ...], ranks: int) -> Layout:
    """A partition, everything, or boxes anywhere: overlapping, empty, beyond the tensor."""
    kind = chance.choice(["partition", "everything", "boxes", "boxes"])
    if kind == "partition":
        return _partition(chance, shape, ranks)
    if kind == "everything":
        return layout.everything(shape, ranks)
    boxes = []
    for _ in range(ranks):
        box: list[tuple[int, int]] = []
        for size in shape:
            start = chance.randint(-1, size)
            box.append((start, start + chance.randint(0, size + 1)))
        boxes.append(tuple(box))
    return layout.needed(shape, boxes)


def random_moves(seed: int, ranks: int, count: int) -> list[tuple[Layout, Layout]]:
    """(source, target) pairs of small tensors, empty ones among them."""
    chance = random.Random(seed)
    found = []
    for _ in range(count):
        shape = (*(chance.randint(0, 5) for _ in range(3)), chance.randint(1, 6))
        found.append((_partition(chance, shape, ranks), _target(chance, shape, ranks)))
    return found


class Double(Layer):
    """y = 2 x: works on any split, so that what comes after it must fetch what it reads."""

    def lower(self, graph: GraphBuilder, x: int, name: str) -> int:
        return graph.emit(name, AddSpec(), (x, x))


@dataclass(frozen=True)
class Trial:
    """A model on images (sum(counts), *image_shape), its plan, the samples of each rank of the split group. Data by `seed`."""

    model: Layer
    image_shape: tuple[int, int, int]
    counts: tuple[int, ...]
    plan: ParallelPlan
    seed: int = 0
    dtype: str = "float64"
    training: bool = True
    kernels: KernelSet = field(default_factory=NumpyKernelSet)

    def graph(self, batch: int) -> Graph:
        """The whole model, lowered."""
        builder = GraphBuilder(TensorSpec((batch, *self.image_shape), self.dtype))
        return builder.build(self.model.lower(builder, 0, ""))

    def images(self) -> np.ndarray:
        shape = (sum(self.counts), *self.image_shape)
        return np.random.default_rng(self.seed).standard_normal(shape).astype(self.dtype)

    def output_gradient(self) -> np.ndarray:
        graph = self.graph(sum(self.counts))
        random = np.random.default_rng(self.seed + 1)
        return random.standard_normal(graph.tensors[graph.output].shape).astype(self.dtype)

    def value(self, parameter: str, shape: tuple[int, ...]) -> np.ndarray:
        """The value of a whole parameter."""
        return np.random.default_rng([self.seed + 2, *parameter.encode()]).standard_normal(shape).astype(self.dtype)


@dataclass
class Outcome:
    """One forward and backward pass: whole tensors, or one rank's parts of them (gradients of parameters: partial sums)."""

    y: np.ndarray
    dx: np.ndarray
    gradients: dict[str, np.ndarray]
    read: Box = ()
    shards: dict[str, Shard | None] = field(default_factory=dict)


def alone(trial: Trial) -> Outcome:
    """The trial on one rank, without distribution."""
    return _run(trial, trial.graph(sum(trial.counts)), Undistributed(), {}, trial.images(), slice(None))


def on_rank(trial: Trial, group: SplitGroup, merger: StatisticsMerger) -> Outcome:
    """This rank's part. Collective over the group. merger: over its ranks, whatever group a batch norm names."""
    distribution = GridDistribution(trial.plan, group)
    distribution.prepare(trial.graph(1))
    partitioned = distribution.partitioned(trial.graph(sum(trial.counts)), trial.counts)
    box = partitioned.layouts[0].boxes[group.rank]
    own = slice(*consecutive(trial.counts)[group.rank])
    mergers = {"all": merger, "split": merger, "data": LocalStatistics()}
    outcome = _run(trial, partitioned.local(group.rank, group), distribution, mergers, cut(trial.images(), box), own)
    outcome.read = box
    return outcome


def _run(
    trial: Trial, graph: Graph, distribution: Distribution, mergers: Mapping[str, StatisticsMerger], x: np.ndarray, own: slice
) -> Outcome:
    specs, statistics = declared(trial.model, trial.graph(1))
    shards = {name: distribution.shard(name) for name in (*specs, *statistics)}
    group = _parameters(trial, specs, shards)
    intervals = {name: shard.interval for name in statistics if (shard := shards[name]) is not None}
    plan = compile_graph(graph, trial.kernels, training=trial.training, input_gradient=trial.training)
    program = Program(
        plan,
        kernels=trial.kernels,
        parameters=group.parameters,
        statistics=FlatStatistics(statistics, trial.dtype, intervals),
        memory=_poisoned(trial.kernels, plan.arena_bytes),
        loss=trial.kernels.make_loss(SoftmaxCrossEntropySpec()),
        mergers=mergers or dict.fromkeys(("all", "split", "data"), LocalStatistics()),
    )
    program.x[...] = x
    count = sum(trial.counts)
    program.forward(StepContext(training=trial.training, sample_ids=np.arange(count) * 3))
    outcome = Outcome(program.logits.copy(), np.zeros_like(x), {}, shards=shards)
    if program.d_logits is not None and program.x_grad is not None:
        program.d_logits[...] = trial.output_gradient()[own]
        program.backward()
        outcome.dx = program.x_grad.copy()
        outcome.gradients = {name: parameter.grad.copy() for name, parameter in group.parameters.items()}
    return outcome


def _poisoned(kernels: KernelSet, size_bytes: int) -> Array:
    """Memory full of NaN: what is read must have been written."""
    memory = kernels.allocate(size_bytes)
    memory[...] = 0xFF
    return memory


def _parameters(trial: Trial, specs: Mapping[str, ParameterSpec], shards: Mapping[str, Shard | None]) -> FlatGroup:
    values = {name: trial.value(name, spec.shape) for name, spec in specs.items()}
    parts = {name: value if (shard := shards[name]) is None else value[shard.index] for name, value in values.items()}
    group = FlatGroup({name: replace(specs[name], shape=part.shape) for name, part in parts.items()}, trial.dtype)
    for name, part in parts.items():
        group.parameters[name].data[...] = part
    return group


def joined(trial: Trial, parts: Sequence[Outcome]) -> Outcome:
    """All ranks' outcomes as one: samples in order, what was partial added, what was split put together."""
    dx = np.zeros((sum(trial.counts), *trial.image_shape))
    for part in parts:
        inside = intersect(part.read, whole(dx.shape))
        if inside is not None:
            dx[relative(inside, whole(dx.shape))] += part.dx[relative(inside, part.read)]
    gradients = {}
    for name in parts[0].gradients:
        shard = parts[0].shards[name]
        each = [part.gradients[name].astype(np.float64) for part in parts]
        gradients[name] = np.sum(each, axis=0) if shard is None else np.concatenate(each, axis=shard.dim)
    return Outcome(np.concatenate([part.y for part in parts]), dx, gradients)


def on_virtual_ranks(ranks: int, trials: Sequence[Trial], *, seed: int | None = None) -> list[Outcome]:
    """Run each trial on `ranks` virtual ranks, all in one world."""

    def program(comm: ThreadCommunicator) -> list[Outcome]:
        engine = virtual_engine(comm)
        statistics = comm.split(0, comm.rank, "statistics")
        assert statistics is not None
        group, merger = SplitGroup(comm, engine), RankStatistics(statistics, engine)
        return [on_rank(trial, group, merger) for trial in trials]

    found = run_virtual(ranks, program, seed=seed, deadline_seconds=300)
    return [joined(trial, [outcomes[number] for outcomes in found]) for number, trial in enumerate(trials)]


def largest_difference(a: Outcome, b: Outcome) -> float:
    """The largest difference of all elements of all tensors, relative to the tensor's largest element where that is above 1."""
    pairs = [(a.y, b.y), (a.dx, b.dx), *((a.gradients[name], b.gradients[name]) for name in b.gradients)]
    assert a.gradients.keys() == b.gradients.keys()
    assert all(x.shape == y.shape for x, y in pairs)
    return max(
        float(np.abs(x.astype(np.float64) - y).max(initial=0.0)) / max(1.0, float(np.abs(y).max(initial=0.0))) for x, y in pairs
    )
