"""Random windowed layers over 2 to 8 ranks equal one rank: output, input gradient, parameters' gradients, in float64.

Each layer runs on two numbers of ranks, and meets any two of them in one of ten layers. One in four has no
samples, one in five is an evaluation, and memory is full of NaN before it is written.
"""

import itertools
import random

import pytest

from hpctrain.errors import ShapeError
from hpctrain.nn.layer import Layer
from hpctrain.nn.layers.average_pool import AveragePool
from hpctrain.nn.layers.conv2d import Conv2d
from hpctrain.nn.layers.max_pool import MaxPool
from hpctrain.nn.layers.sequential import Sequential
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from tests.support.distributed import Double, Trial, alone, largest_difference, on_virtual_ranks

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


def _counts(chance: random.Random, ranks: int, samples: int) -> tuple[int, ...]:
    """Samples of each rank: anywhere."""
    owners = [chance.randrange(ranks) for _ in range(samples)]
    return tuple(owners.count(rank) for rank in range(ranks))


def _plan(chance: random.Random, ranks: int, model: Layer) -> ParallelPlan:
    vertical = chance.choice([ranks, ranks, *(n for n in range(1, ranks + 1) if ranks % n == 0)])
    second = chance.choice([Parallelism.DOMAIN, Parallelism.DOMAIN, Parallelism.MODEL, Parallelism.BATCH])
    use = {"second": second} if "second" in model.children() else {}
    overlapped = frozenset(name for name in model.children() if chance.random() < 0.5)
    return ParallelPlan(ranks, 1, Parallelism.DOMAIN, use, (vertical, ranks // vertical), overlapped, hides=chance.random() < 0.9)


def _trial(seed: int) -> tuple[random.Random, Layer, tuple[int, int, int]]:
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


@pytest.mark.slow
@pytest.mark.parametrize("part", range(TESTS))
def test_random_layers_equal_one_rank(part: int) -> None:
    seeds = range(part * LAYERS_PER_TEST, (part + 1) * LAYERS_PER_TEST)
    drawn = {seed: _trial(seed) for seed in seeds}
    expected = {
        seed: alone(Trial(model, shape, (seed % 4,), ParallelPlan(), seed, training=seed % 5 > 0))
        for seed, (_, model, shape) in drawn.items()
    }
    for ranks in sorted(set(itertools.chain(*RANKS))):
        chosen = [seed for seed in seeds if ranks in RANKS[seed // 20 % len(RANKS)]]
        trials = []
        for seed in chosen:
            chance, model, shape = drawn[seed]
            counts, plan = _counts(chance, ranks, seed % 4), _plan(chance, ranks, model)
            trials.append(Trial(model, shape, counts, plan, seed, training=seed % 5 > 0))
        for seed, found in zip(chosen, on_virtual_ranks(ranks, trials), strict=True):
            assert largest_difference(found, expected[seed]) < TOLERANCE, f"layer {seed} on {ranks} ranks"
