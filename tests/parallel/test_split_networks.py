"""Layers and networks, random ones too, split over ranks in every way, against one rank."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.operators import Array, StepContext
from hpctrain.backend.specs import Shape, TensorSpec, Window
from hpctrain.comm.base import Communicator
from hpctrain.comm.groups import ProcessGrid
from hpctrain.core.errors import ShapeError
from hpctrain.core.intervals import consecutive, even_intervals
from hpctrain.data.loader import cut
from hpctrain.nn.custom import ArrayLayer
from hpctrain.nn.initialise import constant
from hpctrain.nn.layers import (
    AdaptiveAveragePool,
    AveragePool,
    BatchNorm,
    Conv2d,
    Dropout,
    Flatten,
    Layer,
    Linear,
    MaxPool,
    PadChannels,
    ReLU,
    Residual,
    Sequential,
    StochasticDepth,
)
from hpctrain.nn.network import Network
from hpctrain.nn.parameter import ParameterSpec
from hpctrain.parallel.groups import GridGroups, RankStatistics, merge_moments
from hpctrain.parallel.moves import moved
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.parallel.partition_graph import partition_graph
from hpctrain.parallel.rank_graph import GridDistribution
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.run import run_virtual, virtual_engine
from tests.support import nets
from tests.support.distributed import Double, Trial, alone, largest_difference, on_virtual_ranks


def _check(ranks: int, trials: list[Trial], tolerance: float = 1e-12) -> None:
    for number, (trial, found) in enumerate(zip(trials, on_virtual_ranks(ranks, trials), strict=True)):
        assert largest_difference(found, alone(trial)) < tolerance, f"trial {number}: {trial.plan}"


def _counts(samples: int, ranks: int) -> tuple[int, ...]:
    """All but one on the last rank, one on the first."""
    return (min(1, samples), *(0,) * (ranks - 2), max(0, samples - 1))


def _all_uses(
    model: Layer, shape: tuple[int, int, int], ranks: int, tiles: tuple[int, int] | None = None, samples: int = 3
) -> list[Trial]:
    plans = [ParallelPlan(ranks, 1, use) for use in Parallelism]
    plans += [] if tiles is None else [ParallelPlan(ranks, 1, Parallelism.DOMAIN, tiles=tiles)]
    return [Trial(model, shape, _counts(samples, ranks), plan) for plan in plans]


@pytest.mark.slow
def test_the_stem_of_a_residual_network_on_odd_images_over_three_ranks() -> None:
    """7x7/2 padding 3, then 3x3/2 pooling padding 1, on 225 x 225."""
    stem: dict[str, Layer] = {
        "conv1": Conv2d(3, 4, 7, 2, padding=3, bias=False),
        "bn1": BatchNorm(4, synchronised=True),
        "relu": ReLU(),
        "maxpool": MaxPool(3, 2, padding=1),
        "next": Conv2d(4, 4, 1),
    }
    for model in (Sequential(stem), Sequential({"double": Double(), **stem})):
        _check(3, _all_uses(model, (225, 225, 3), 3, (1, 3), samples=1), 1e-11)


class Blur(ArrayLayer):
    """y[o] = gain * sum of x over k rows and 1 column, padding p of zeros: a layer that says no more than its window."""

    def __init__(self, kernel: int, stride: int, padding: int) -> None:
        self.window = Window((kernel, 1), (stride, 1), (padding, padding, 0, 0))

    def parameters(self) -> Mapping[str, ParameterSpec]:
        return {"gain": ParameterSpec((), constant(1.5))}

    def output_shape(self, shape: Shape) -> Shape:
        assert self.window is not None
        return (shape[0], *self.window.output_size((shape[1], shape[2])), shape[3])

    def _rows(self, shape: Shape) -> list[slice]:
        assert self.window is not None
        stride, (top, *_) = self.window.stride[0], self.window.padding
        starts = [o * stride - top for o in range(self.output_shape(shape)[1])]
        return [slice(max(0, start), max(0, start + self.window.kernel[0])) for start in starts]

    def forward(self, x: Array, parameters: Mapping[str, Array], context: StepContext, saved: dict[str, Any]) -> Array:
        y = np.zeros(self.output_shape(x.shape), x.dtype)
        for o, rows in enumerate(self._rows(x.shape)):
            y[:, o] = x[:, rows].sum(axis=1)
        saved["y"] = y
        return parameters["gain"] * y

    def backward(
        self, x: Array, dy: Array, parameters: Mapping[str, Array], saved: dict[str, Any]
    ) -> tuple[Array, Mapping[str, Array]]:
        dx = np.zeros_like(x)
        for o, rows in enumerate(self._rows(x.shape)):
            dx[:, rows] += parameters["gain"] * dy[:, o : o + 1]
        return dx, {"gain": (dy * saved["y"]).sum()}


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_layer_of_ones_own_is_split_by_its_window_alone(ranks: int) -> None:
    for kernel, stride, padding in ((3, 1, 1), (4, 3, 2), (5, 2, 0), (2, 3, 4)):
        model = Sequential({"double": Double(), "mine": Blur(kernel, stride, padding), "conv": Conv2d(2, 2, 3, padding=1)})
        _check(ranks, _all_uses(model, (13, 3, 2), ranks))


def test_its_halo_is_what_the_window_needs() -> None:
    trial = Trial(
        Sequential({"double": Double(), "mine": Blur(3, 1, 1)}), (12, 5, 2), (2, 0, 0), ParallelPlan(3, 1, Parallelism.DOMAIN)
    )
    graph = partition_graph(trial.graph(2), trial.plan, trial.counts)
    (halo,) = [step.move for step in graph.steps if step.name == "mine.halo"]
    assert moved(*halo) == (20, 40, 20)


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_adaptive_pools_flatten_and_narrow_shortcuts(ranks: int) -> None:
    conv = Conv2d(2, 5, 3, padding=1)
    models: list[Layer] = [
        Sequential({"conv": conv, "pool": AdaptiveAveragePool((1, 1)), "flatten": Flatten(), "fc": Linear(5, 7)}),
        Sequential({"conv": conv, "pool": AdaptiveAveragePool((3, 2)), "flatten": Flatten(), "fc": Linear(30, 4)}),
        Sequential({"conv": conv, "pool": AdaptiveAveragePool((7, 9)), "flatten": Flatten(), "fc": Linear(315, 4)}),
        Sequential({"conv": conv, "flatten": Flatten(), "relu": ReLU(), "drop": Dropout(0.4), "fc": Linear(175, 4)}),
        Sequential({"conv": conv, "flatten": Flatten(), "relu": ReLU(), "fc": Linear(175, 4)}),
        Sequential({"conv": conv, "pad": PadChannels(2, 3), "pool": AveragePool(2, 2)}),
        Residual(
            {"conv1": Conv2d(2, 6, 3, 2, padding=1), "bn": BatchNorm(6, synchronised=True)},
            Sequential({"pool": MaxPool(1, 2), "pad": PadChannels(2, 2)}),
            activation=ReLU(),
        ),
    ]
    for model in models:
        _check(ranks, _all_uses(model, (7, 5, 2), ranks, (1, ranks)))


@pytest.mark.parametrize("ranks", [3, 8])
def test_more_ranks_than_channels_rows_and_features(ranks: int) -> None:
    model = Sequential(
        {
            "conv1": Conv2d(2, 2, 3, padding=1),
            "bn1": BatchNorm(2, synchronised=True),
            "relu1": ReLU(),
            "drop": Dropout(0.5),
            "pool": MaxPool(2, 2),
            "conv2": Conv2d(2, 1, (2, 1)),
            "flatten": Flatten(),
            "fc1": Linear(2, 2),
            "fc2": Linear(2, 3),
        }
    )
    _check(ranks, _all_uses(model, (4, 4, 2), ranks))
    mixed = ParallelPlan(
        ranks, 1, Parallelism.DOMAIN, {"pool": Parallelism.MODEL, "fc1": Parallelism.MODEL, "bn1": Parallelism.MODEL}
    )
    _check(ranks, [Trial(model, (4, 4, 2), _counts(samples, ranks), mixed) for samples in (0, 1, 2)])


@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_depthwise_grouped_and_dilated_convolutions(ranks: int) -> None:
    model = Sequential(
        {
            "wide": Conv2d(3, 12, 3, padding=2, dilation=2),
            "depthwise": Conv2d(12, 12, (5, 4), padding=2, groups=12),
            "doubled": Conv2d(12, 24, 3, padding=1, groups=12, stride=2),
            "grouped": Conv2d(24, 8, 3, padding=3, dilation=3, groups=4),
            "narrow": Conv2d(8, 4, 1, groups=2),
        }
    )
    plans = [
        ParallelPlan(ranks, 1, Parallelism.DOMAIN, {"doubled": Parallelism.MODEL}),
        ParallelPlan(ranks, 1, Parallelism.MODEL, {"depthwise": Parallelism.DOMAIN, "narrow": Parallelism.BATCH}),
    ]
    _check(ranks, _all_uses(model, (11, 6, 3), ranks) + [Trial(model, (11, 6, 3), _counts(2, ranks), plan) for plan in plans])


@pytest.mark.parametrize("synchronised", [False, True])
def test_batch_norm_of_images_that_are_split(synchronised: bool) -> None:
    """Statistics of whole images even where batch norm is not synchronised: all samples lie on one rank, or on all of them."""
    model = Sequential({"double": Double(), "bn": BatchNorm(3, synchronised=synchronised), "conv": Conv2d(3, 2, 3, padding=1)})
    for use in (Parallelism.DOMAIN, Parallelism.MODEL):
        _check(3, [Trial(model, (5, 4, 3), counts, ParallelPlan(3, 1, use)) for counts in ((4, 0, 0), (1, 2, 1), (0, 0, 1))])


LAYERS_PER_TEST, TESTS = 60, 9
RANKS = tuple(itertools.combinations((2, 3, 4, 6, 8), 2))
TOLERANCE = 1e-12


def _conv(chance: random.Random, channels: int) -> tuple[Layer, int]:
    groups = chance.choice([n for n in (1, 1, 2, channels) if channels % n == 0])
    outside = groups * chance.randint(1, 2)
    dilation = (chance.choice([1, 1, 2, 3]), chance.choice([1, 1, 2]))
    kernel = (chance.randint(1, 7), chance.randint(1, 5))
    most = max((k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)) + 2  # so far that windows lie in the padding
    padding = tuple(chance.choice([0, 1, kernel[0] // 2, chance.randint(0, most)]) for _ in range(4))
    stride = (chance.randint(1, 3), chance.randint(1, 3))
    return Conv2d(channels, outside, kernel, stride, padding, dilation, groups=groups, bias=chance.random() < 0.5), outside


def _pool(chance: random.Random, channels: int) -> tuple[Layer, int]:
    kernel = (chance.randint(1, 7), chance.randint(1, 5))
    padding = tuple(chance.randint(0, kernel[edge // 2] // 2) for edge in range(4))
    stride = (chance.randint(1, 3), chance.randint(1, 3))
    ceil_mode = chance.random() < 0.5
    if chance.random() < 0.5:
        return MaxPool(kernel, stride, padding, ceil_mode=ceil_mode), channels
    return AveragePool(kernel, stride, padding, ceil_mode=ceil_mode, count_include_pad=chance.random() < 0.5), channels


def _drawn_counts(chance: random.Random, ranks: int, samples: int) -> tuple[int, ...]:
    """Samples of each rank: anywhere."""
    owners = [chance.randrange(ranks) for _ in range(samples)]
    return tuple(owners.count(rank) for rank in range(ranks))


def _drawn_plan(chance: random.Random, ranks: int, model: Layer) -> ParallelPlan:
    vertical = chance.choice([ranks, ranks, *(n for n in range(1, ranks + 1) if ranks % n == 0)])
    second = chance.choice([Parallelism.DOMAIN, Parallelism.DOMAIN, Parallelism.MODEL, Parallelism.BATCH])
    use = {"second": second} if "second" in model.children() else {}
    return ParallelPlan(ranks, 1, Parallelism.DOMAIN, use, (vertical, ranks // vertical))


def _layer_trial(seed: int) -> tuple[random.Random, Layer, tuple[int, int, int]]:
    """A random layer, now and then two, on an image that it fits; `Double` keeps the image split before it."""
    chance = random.Random(seed)
    while True:
        channels = chance.choice([2, 4])
        shape = (chance.randint(1, 40), chance.choice([1, 2, 5, 9, chance.randint(1, 40)]), channels)
        layers: dict[str, Layer] = {"double": Double()}
        for name in ("first", "second")[: chance.choice([1, 1, 2])]:
            layers[name], channels = chance.choice([_conv, _pool])(chance, channels)
        model = Sequential(layers)
        try:
            Trial(model, shape, (1,), ParallelPlan()).graph(1)
        except ShapeError:
            continue
        return chance, model, shape


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("part", range(TESTS))
def test_random_layers_equal_one_rank(part: int) -> None:
    seeds = range(part * LAYERS_PER_TEST, (part + 1) * LAYERS_PER_TEST)
    drawn = {seed: _layer_trial(seed) for seed in seeds}
    expected = {
        seed: alone(Trial(model, shape, (seed % 4,), ParallelPlan(), seed, training=seed % 5 > 0))
        for seed, (_, model, shape) in drawn.items()
    }
    for ranks in sorted(set(itertools.chain(*RANKS))):
        chosen = [seed for seed in seeds if ranks in RANKS[seed // 20 % len(RANKS)]]
        trials = []
        for seed in chosen:
            chance, model, shape = drawn[seed]
            counts, plan = _drawn_counts(chance, ranks, seed % 4), _drawn_plan(chance, ranks, model)
            trials.append(Trial(model, shape, counts, plan, seed, training=seed % 5 > 0))
        for seed, found in zip(chosen, on_virtual_ranks(ranks, trials), strict=True):
            assert largest_difference(found, expected[seed]) < TOLERANCE, f"layer {seed} on {ranks} ranks"


NETWORKS_PER_TEST, NETWORK_TESTS = 24, 5


def _image_layer(chance: random.Random, channels: int, synchronised: bool) -> Layer:
    kernel = chance.randint(1, 5)
    kinds = ["conv", "conv", "conv", "pool", "average", "norm", "relu", "drop", "depth", "pad", "double", "block", "adaptive"]
    kind = chance.choice(kinds)
    padding, stride = chance.randint(0, kernel // 2), chance.randint(1, 2)
    if kind == "conv":
        groups = chance.choice([n for n in (1, 1, 2, channels) if channels % n == 0])
        return Conv2d(channels, groups * chance.randint(1, 3), kernel, stride, padding, groups=groups)
    if kind == "block":
        out = chance.choice([channels, channels + 2])
        norm = BatchNorm(out, synchronised=synchronised or chance.random() < 0.5)
        body = {"conv": Conv2d(channels, out, 3, padding=1), "bn": norm}
        shortcut = None if out == channels else Sequential({"pad": PadChannels(1, 1)})
        return Residual(body, shortcut, activation=ReLU())
    made: dict[str, Layer] = {
        "pool": MaxPool(kernel, stride, padding, ceil_mode=chance.random() < 0.5),
        "average": AveragePool(kernel, stride, padding, chance.random() < 0.5, chance.random() < 0.5),
        "norm": BatchNorm(channels, synchronised=synchronised or chance.random() < 0.7),
        "relu": ReLU(),
        "drop": Dropout(0.3, seed=chance.randint(0, 9)),
        "depth": StochasticDepth(0.4, seed=3),
        "pad": PadChannels(chance.randint(0, 2), 1),
        "double": Double(),
        "adaptive": AdaptiveAveragePool(chance.choice([1, 2, (3, 1)])),
    }
    return made[kind]


def random_network(
    chance: random.Random, *, classes: int | None = None, synchronised: bool = True
) -> tuple[Layer, tuple[int, int, int]]:
    """A network and the shape of its images. classes: of a linear layer at its end. synchronised: all its batch norms."""
    shape = (chance.randint(1, 14), chance.randint(1, 9), chance.randint(1, 4))
    layers: dict[str, Layer] = {}
    x = TensorSpec((1, *shape), "float64")
    while len(layers) < chance.randint(2, 7):
        layer = _image_layer(chance, x.shape[3], synchronised)
        try:
            x = layer.output(x)
        except ShapeError:
            continue
        layers[f"layer{len(layers)}"] = layer
    features = x.shape[1] * x.shape[2] * x.shape[3]
    if classes is not None:
        wide = {"fc1": Linear(features, 6), "relu": ReLU(), "fc": Linear(6, classes)}
        layers |= {"flatten": Flatten(), **(wide if chance.random() < 0.5 else {"fc": Linear(features, classes)})}
    elif chance.random() < 0.6:
        head = {"flatten": Flatten(), "fc1": Linear(features, 5), "relu": ReLU(), "drop": Dropout(0.2), "fc2": Linear(5, 3)}
        layers |= dict(list(head.items())[: chance.randint(1, 5)])
    return Sequential(layers), shape


def _network_trial(seed: int, ranks: int) -> Trial:
    chance = random.Random(seed)
    model, shape = random_network(chance)
    # Batch norm amplifies the rounding of few values.
    owners = [chance.randrange(ranks) for _ in range(chance.choice([0, 1, 3, 5]))]
    uses = {name: chance.choice(list(Parallelism)) for name in model.children()}
    use = {f"{name}.*" if isinstance(model.children()[name], Residual) else name: each for name, each in uses.items()}
    vertical = chance.choice([n for n in range(1, ranks + 1) if ranks % n == 0] + [ranks])
    plan = ParallelPlan(ranks, 1, chance.choice(list(Parallelism)), use, (vertical, ranks // vertical))
    counts = tuple(owners.count(rank) for rank in range(ranks))
    return Trial(model, shape, counts, plan, seed, training=chance.random() < 0.9)


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("part", range(NETWORK_TESTS))
def test_random_networks_equal_one_rank(part: int) -> None:
    for ranks in (2, 3, 4, 6):
        seeds = [1000 * ranks + part * NETWORKS_PER_TEST + number for number in range(NETWORKS_PER_TEST)]
        trials = [_network_trial(seed, ranks) for seed in seeds]
        for seed, trial, found in zip(seeds, trials, on_virtual_ranks(ranks, trials), strict=True):
            assert largest_difference(found, alone(trial)) < 1e-9, f"network {seed} on {ranks} ranks: {trial.plan}"


SHAPE = (9, 7, 3)
_D, _M = Parallelism.DOMAIN, Parallelism.MODEL


def _network_on(comm: ThreadCommunicator, model: Layer, plan: ParallelPlan) -> tuple[Network, GridGroups, GridDistribution]:
    engine = virtual_engine(comm)
    groups = GridGroups(ProcessGrid(comm, plan.rows, plan.cols))
    group = groups.split_group(engine)
    assert group is not None
    distribution = GridDistribution(plan, group)
    mergers = groups.mergers(engine)
    network = Network(model, SHAPE, NumpyKernelSet(), dtype="float64", seed=2, mergers=mergers, distribution=distribution)
    return network, groups, distribution


@pytest.mark.parametrize("rows", [2, 3, 5])
def test_parts_of_parameters_are_those_of_the_whole_network(rows: int) -> None:
    """The first values do not depend on the split; every element of a split parameter lies on one rank."""
    whole = Network(nets.plain(), SHAPE, NumpyKernelSet(), dtype="float64", seed=2)
    plan = ParallelPlan(rows, 1, Parallelism.BATCH, {"conv1": _M, "conv2": _M, "fc1": _M})

    def program(comm: ThreadCommunicator) -> tuple[dict[str, np.ndarray], dict[str, int | None], set[str], set[str]]:
        network, _, _ = _network_on(comm, nets.plain(), plan)
        dims = {name: None if shard is None else shard.dim for name, shard in network.shards.items()}
        values = {name: parameter.data.copy() for name, parameter in network.parameters.items()}
        return values, dims, set(network.groups["all"].parameters), set(network.groups["model"].parameters)

    results = run_virtual(rows, program)
    _, dims, every, split = results[0]
    assert split == {f"{layer}.{role}" for layer in ("conv1", "conv2", "fc1") for role in ("weight", "bias")}
    assert every == {"fc2.weight", "fc2.bias"}
    for name, parameter in whole.parameters.items():
        parts = [values[name] for values, *_ in results]
        dim = dims[name]
        assert dim == (None if name in every else 1 if name == "fc1.weight" else 0)
        joined = parts[0] if dim is None else np.concatenate(parts, axis=dim)
        np.testing.assert_array_equal(joined, parameter.data, err_msg=name)


@pytest.mark.parametrize("use", [_D, _M])
@pytest.mark.parametrize("rows", [2, 3])
def test_memory_of_a_program_is_the_arena_and_its_messages(rows: int, use: Parallelism) -> None:
    """The plan determines the memory before the program is made; all moves share one buffer."""
    plan = ParallelPlan(rows, 1, use)

    def program(comm: ThreadCommunicator) -> None:
        network, _, distribution = _network_on(comm, nets.residual(), plan)
        needed = network.arena_bytes(2, training=True)
        assert distribution.group.buffer_bytes == 0
        made = network.program((2,) * rows, training=True)
        assert needed == made.plan.arena_bytes + distribution.group.buffer_bytes
        assert distribution.group.buffer_bytes > 0

    run_virtual(rows, program)


def test_optimiser_state_and_gradients_are_a_share() -> None:
    plan = ParallelPlan(3, 1, _M)
    sizes = run_virtual(3, lambda comm: _network_on(comm, nets.plain(), plan)[0].groups["model"].size)
    whole = Network(nets.plain(), SHAPE, NumpyKernelSet(), dtype="float64").groups["all"].size
    assert sum(sizes) == whole
    assert max(sizes) < 0.4 * whole


@pytest.mark.parametrize("use", Parallelism)
def test_every_statistic_is_spoken_for_once_per_sample(use: Parallelism) -> None:
    counts = (2, 0, 3)

    def program(comm: ThreadCommunicator) -> np.ndarray:
        network, _, _ = _network_on(comm, nets.residual(), ParallelPlan(3, 1, use))
        network.statistics.batch[...] = 1.0
        return network.statistics.weighted(counts[comm.rank], sum(counts), network.statistics.batch)

    assert (np.sum(run_virtual(3, program), axis=0) == sum(counts)).all()


@pytest.mark.parametrize("use", [_D, _M])
def test_what_must_be_read_is_what_the_program_takes(use: Parallelism) -> None:
    plan = ParallelPlan(2, 2, use)

    def program(comm: ThreadCommunicator) -> None:
        network, groups, distribution = _network_on(comm, nets.residual(), plan)
        boxes = distribution.tiles_by_counts(network.graph)
        for counts in ((2, 1), (0, 1), (0, 0)):
            box = boxes(counts)[groups.split_rank]
            assert network.program(counts, training=True).x.shape == tuple(stop - start for start, stop in box)
            whole_height = box[1] == (0, SHAPE[0])
            assert whole_height == (use is _M)

    run_virtual(4, program)


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("net", ["plain", "residual"])
@pytest.mark.parametrize("use", Parallelism)
@pytest.mark.parametrize("rows", [2, 4])
def test_evaluation_equals_one_rank(net: str, use: Parallelism, rows: int) -> None:
    """With running statistics, after which training goes on in the same memory."""
    make = nets.plain if net == "plain" else nets.residual
    images = np.random.default_rng(0).standard_normal((5, *SHAPE))
    counts = tuple(stop - start for start, stop in even_intervals(5, rows))

    def fill(network: Network) -> None:
        for name, view in network.statistics.views.items():
            view[...] = np.random.default_rng(len(name)).random(view.shape) + 0.5

    alone = Network(make(), SHAPE, NumpyKernelSet(), dtype="float64", seed=2)
    fill(alone)
    expected = alone.program(5, training=False)
    expected.x[...] = images
    logits = expected.forward(StepContext(training=False)).copy()

    def program(comm: ThreadCommunicator) -> np.ndarray:
        network, _, distribution = _network_on(comm, make(), ParallelPlan(rows, 1, use))
        fill(network)
        training = network.program(counts, training=True)
        training.x[...] = 1.0
        training.forward(StepContext(sample_ids=np.arange(5)))
        evaluation = network.program(counts, training=False)
        evaluation.x[...] = cut(images, distribution.partitioned(network.graph(5), counts).layouts[0].boxes[comm.rank])
        return evaluation.forward(StepContext(training=False)).copy()

    for part, found in zip(consecutive(counts), run_virtual(rows, program), strict=True):
        np.testing.assert_allclose(found, logits[slice(*part)], rtol=1e-11, atol=1e-13)


def _moments(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and sum of squared deviations over the samples of x (n, C); rubbish where there are none."""
    if not len(x):
        return np.full(x.shape[1], np.nan), np.full(x.shape[1], np.inf)
    mean = x.mean(axis=0)
    return mean, ((x - mean) ** 2).sum(axis=0)


def _share(counts: list[int], channels: int, offset: float, seed: int) -> list[np.ndarray]:
    chance = np.random.default_rng(seed)
    return [offset + chance.standard_normal((count, channels)) for count in counts]


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=7), st.integers(1, 5), st.sampled_from([0.0, -3.0, 1e6]), st.integers(0, 99)
)
def test_merged_moments_are_those_of_all_samples(counts: list[int], channels: int, offset: float, seed: int) -> None:
    parts = _share(counts, channels, offset, seed)
    means, m2s = zip(*map(_moments, parts), strict=True)
    total, mean, m2 = merge_moments(np.array(counts, np.float64), np.array(means), np.array(m2s))
    assert total == sum(counts)
    if total == 0:
        assert not mean.any()
        assert not m2.any()
        return
    expected_mean, expected_m2 = _moments(np.concatenate(parts))
    np.testing.assert_allclose(mean, expected_mean, rtol=1e-12, atol=1e-14)  # a mean near 0 is a difference of values near 1
    np.testing.assert_allclose(m2, expected_m2, rtol=1e-8, atol=1e-8)


def test_a_large_offset_does_not_cancel() -> None:
    """At an offset of 1e8 a float64 sum of squares has no digit of the variance left; the merged moments have ten."""
    parts = [np.array([[1.0], [2.0]]), np.array([[4.0]])]
    means, m2s = zip(*(_moments(part + 1e8) for part in parts), strict=True)
    _, mean, m2 = merge_moments(np.array([2.0, 1.0]), np.array(means), np.array(m2s))
    assert mean[0] - 1e8 == pytest.approx(7 / 3, rel=1e-7)
    assert m2[0] == pytest.approx(14 / 3, rel=1e-10)


def test_groups_of_equal_values_have_no_spread() -> None:
    _, mean, m2 = merge_moments(np.array([3.0, 5.0, 1.0]), np.full((3, 2), 0.1), np.zeros((3, 2)))
    assert (mean == 0.1).all()
    assert (m2 == 0.0).all()


@pytest.mark.parametrize("counts", [[7], [4, 3], [0, 9, 2], [1, 0, 0, 6, 2], [0, 0, 0]])
def test_ranks_agree_bit_by_bit_and_with_one_process(counts: list[int]) -> None:
    parts = _share(counts, 3, 5.0, seed=len(counts))

    def program(comm: Communicator) -> tuple[int, bytes, bytes]:
        merger = RankStatistics(comm, virtual_engine(comm))  # type: ignore[arg-type]
        totals = []
        for _ in range(2):  # buffers are used again
            mean, m2 = _moments(parts[comm.rank])
            totals.append((merger.merge(len(parts[comm.rank]), mean, m2), mean.tobytes(), m2.tobytes()))
        assert totals[0] == totals[1]
        return totals[0]

    results = run_virtual(len(counts), program, seed=1)
    assert len(set(results)) == 1
    total, mean, m2 = results[0]
    assert total == sum(counts)
    if total:
        expected = _moments(np.concatenate(parts))
        np.testing.assert_allclose(np.frombuffer(mean), expected[0], rtol=1e-13)
        np.testing.assert_allclose(np.frombuffer(m2), expected[1], rtol=1e-12)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_sums_go_over_the_ranks_and_agree_bit_by_bit(ranks: int) -> None:
    values = [np.random.default_rng(rank).standard_normal((2, 7)) * 10.0**rank for rank in range(ranks)]

    def program(comm: Communicator) -> bytes:
        mine = values[comm.rank].copy()
        RankStatistics(comm, virtual_engine(comm)).sum(mine)  # type: ignore[arg-type]
        return mine.tobytes()

    results = run_virtual(ranks, program, seed=2)
    assert len(set(results)) == 1
    np.testing.assert_allclose(np.frombuffer(results[0]).reshape(2, 7), sum(values), rtol=1e-13)


def test_statistics_wait_for_what_their_queue_holds() -> None:
    """The order on one communicator is that of posting, so a merge never overtakes a gradient that stands before it."""

    def program(comm: Communicator) -> float:
        engine = virtual_engine(comm)  # type: ignore[arg-type]
        gradient, values = np.full(4, comm.rank + 1.0), np.array([float(comm.rank)])
        ticket = engine.queue(comm).post(lambda: comm.iallreduce(gradient), "gradient")
        RankStatistics(comm, engine).sum(values)
        engine.wait(ticket)
        assert (gradient == 6.0).all()
        return float(values[0])

    assert run_virtual(3, program, seed=3) == [3.0, 3.0, 3.0]
