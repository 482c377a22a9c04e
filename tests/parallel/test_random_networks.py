"""Random networks of all layers, each with a use of its own, on random ranks, tiles and samples, against one rank."""

import random

import pytest

from hpctrain.backend.kernels.specs import TensorSpec
from hpctrain.errors import ShapeError
from hpctrain.nn.layer import Layer
from hpctrain.nn.layers.adaptive_average_pool import AdaptiveAveragePool
from hpctrain.nn.layers.average_pool import AveragePool
from hpctrain.nn.layers.batch_norm import BatchNorm
from hpctrain.nn.layers.conv2d import Conv2d
from hpctrain.nn.layers.dropout import Dropout
from hpctrain.nn.layers.flatten import Flatten
from hpctrain.nn.layers.linear import Linear
from hpctrain.nn.layers.max_pool import MaxPool
from hpctrain.nn.layers.pad_channels import PadChannels
from hpctrain.nn.layers.relu import ReLU
from hpctrain.nn.layers.residual import Residual
from hpctrain.nn.layers.sequential import Sequential
from hpctrain.nn.layers.stochastic_depth import StochasticDepth
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from tests.support.distributed import Double, Trial, alone, largest_difference, on_virtual_ranks

NETWORKS_PER_TEST, TESTS = 24, 5


def _image_layer(chance: random.Random, channels: int) -> Layer:
    kernel = chance.randint(1, 5)
    kinds = ["conv", "conv", "conv", "pool", "average", "norm", "relu", "drop", "depth", "pad", "double", "block", "adaptive"]
    kind = chance.choice(kinds)
    padding, stride = chance.randint(0, kernel // 2), chance.randint(1, 2)
    if kind == "conv":
        groups = chance.choice([n for n in (1, 1, 2, channels) if channels % n == 0])
        return Conv2d(channels, groups * chance.randint(1, 3), kernel, stride, padding, groups=groups)
    if kind == "block":
        out = chance.choice([channels, channels + 2])
        body = {"conv": Conv2d(channels, out, 3, padding=1), "bn": BatchNorm(out, synchronised=True)}
        shortcut = None if out == channels else Sequential({"pad": PadChannels(1, 1)})
        return Residual(body, shortcut, activation=ReLU())
    made: dict[str, Layer] = {
        "pool": MaxPool(kernel, stride, padding, ceil_mode=chance.random() < 0.5),
        "average": AveragePool(kernel, stride, padding, chance.random() < 0.5, chance.random() < 0.5),
        "norm": BatchNorm(channels, synchronised=True),
        "relu": ReLU(),
        "drop": Dropout(0.3, seed=chance.randint(0, 9)),
        "depth": StochasticDepth(0.4, seed=3),
        "pad": PadChannels(chance.randint(0, 2), 1),
        "double": Double(),
        "adaptive": AdaptiveAveragePool(chance.choice([1, 2, (3, 1)])),
    }
    return made[kind]


def _network(chance: random.Random) -> tuple[Layer, tuple[int, int, int]]:
    shape = (chance.randint(1, 14), chance.randint(1, 9), chance.randint(1, 4))
    layers: dict[str, Layer] = {}
    x = TensorSpec((1, *shape), "float64")
    while len(layers) < chance.randint(2, 7):
        layer = _image_layer(chance, x.shape[3])
        try:
            x = layer.output(x)
        except ShapeError:
            continue
        layers[f"layer{len(layers)}"] = layer
    if chance.random() < 0.6:
        features = x.shape[1] * x.shape[2] * x.shape[3]
        head = {"flatten": Flatten(), "fc1": Linear(features, 5), "relu": ReLU(), "drop": Dropout(0.2), "fc2": Linear(5, 3)}
        layers |= dict(list(head.items())[: chance.randint(1, 5)])
    return Sequential(layers), shape


def _trial(seed: int, ranks: int) -> Trial:
    chance = random.Random(seed)
    model, shape = _network(chance)
    # Batch norm amplifies the rounding of few values.
    owners = [chance.randrange(ranks) for _ in range(chance.choice([0, 1, 3, 5]))]
    uses = {name: chance.choice(list(Parallelism)) for name in model.children()}
    use = {pattern: each for name, each in uses.items() for pattern in (name, f"{name}.*") if _matches(model, name, pattern)}
    vertical = chance.choice([n for n in range(1, ranks + 1) if ranks % n == 0] + [ranks])
    early = frozenset(name for name, _ in model.walk() if chance.random() < 0.5)
    plan = ParallelPlan(ranks, 1, chance.choice(list(Parallelism)), use, (vertical, ranks // vertical), early)
    counts = tuple(owners.count(rank) for rank in range(ranks))
    return Trial(model, shape, counts, plan, seed, training=chance.random() < 0.9)


def _matches(model: Layer, name: str, pattern: str) -> bool:
    return isinstance(model.children()[name], Residual) == pattern.endswith(".*")


@pytest.mark.slow
@pytest.mark.parametrize("part", range(TESTS))
def test_random_networks_equal_one_rank(part: int) -> None:
    for ranks in (2, 3, 4, 6):
        seeds = [1000 * ranks + part * NETWORKS_PER_TEST + number for number in range(NETWORKS_PER_TEST)]
        trials = [_trial(seed, ranks) for seed in seeds]
        for seed, trial, found in zip(seeds, trials, on_virtual_ranks(ranks, trials), strict=True):
            assert largest_difference(found, alone(trial)) < 1e-9, f"network {seed} on {ranks} ranks: {trial.plan}"
