"""First values of parameters: each drawn from a generator of its own, keyed by (seed, name).

So a parameter's values depend on nothing but the seed, its name and its shape: neither on the order of the layers, nor on the
rank or the partition that holds it. They are drawn in float32 and then cast, so that a float64 run starts at the same point.
The functions that return an `Initializer` are named by the distribution.
"""

from __future__ import annotations

import math

import numpy as np

from hpctrain.backend.counter_random import key
from hpctrain.nn.parameter import Initializer, ParameterSpec


def generator(seed: int, name: str) -> np.random.Generator:
    """Return the counter-based generator (Philox 4x64) of one parameter."""
    low, high = key("parameter", seed, name)
    return np.random.Generator(np.random.Philox(key=low | high << 32))


def first_value(spec: ParameterSpec, name: str, seed: int, dtype: str = "float32") -> np.ndarray:
    """Return the first value of the parameter `name`, of `spec.shape`: drawn in float32, cast to `dtype`."""
    return spec.initialise(generator(seed, name), spec.shape).astype(dtype, copy=False)


def constant(value: float) -> Initializer:
    """Set every element to `value`."""

    def draw(_: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return np.full(shape, value, np.float32)

    return draw


def normal(deviation: float) -> Initializer:
    """Draw from N(0, deviation^2)."""

    def draw(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        values = random.standard_normal(shape, np.float32)
        values *= np.float32(deviation)
        return values

    return draw


def uniform(bound: float) -> Initializer:
    """Draw uniformly from [-bound, bound)."""

    def draw(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        values = random.random(shape, np.float32)
        values *= np.float32(2 * bound)
        values -= np.float32(bound)
        return values

    return draw


def kaiming_normal(fan: int) -> Initializer:
    """Draw from N(0, 2 / fan), which keeps the variance through ReLU layers.

    He et al. 2015, eq. 10 for fan in, eq. 14 for fan out.
    """
    return normal(math.sqrt(2.0 / fan))
