"""Initial values of parameters, each drawn from its own generator, keyed by (seed, name).

The values of a parameter depend only on the seed, its name and its shape. They do not depend on the order of the layers, the rank
or the partition. They are drawn in float32 and then cast, so a float64 run starts at the same point. The functions that return an
`Initializer` are named after the distribution.
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
    """Return the initial value of the parameter `name`, with shape `spec.shape`, drawn in float32 and cast to `dtype`."""
    return spec.initialise(generator(seed, name), spec.shape).astype(dtype, copy=False)


def constant(value: float) -> Initializer:
    """Return an initializer that sets every element to `value`."""

    def draw(_: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return np.full(shape, value, np.float32)

    return draw


def normal(deviation: float) -> Initializer:
    """Return an initializer that draws from N(0, deviation^2)."""

    def draw(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        values = random.standard_normal(shape, np.float32)
        values *= np.float32(deviation)
        return values

    return draw


def uniform(bound: float) -> Initializer:
    """Return an initializer that draws uniformly from [-bound, bound)."""

    def draw(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        values = random.random(shape, np.float32)
        values *= np.float32(2 * bound)
        values -= np.float32(bound)
        return values

    return draw


def identity(others: Initializer) -> Initializer:
    """Return an initializer of a convolution (K, R, S, C) whose first C filters copy its input; `others` draws the other ones."""

    def draw(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        values = others(random, shape)
        filters, rows, columns, channels = shape
        copied = range(min(filters, channels))
        values[: len(copied)] = 0.0
        values[copied, rows // 2, columns // 2, copied] = 1.0
        return values

    return draw


def kaiming_normal(fan: int) -> Initializer:
    """Return an initializer that draws from N(0, 2 / fan), which preserves the variance through ReLU layers.

    He et al. 2015, eq. 10 for fan in, eq. 14 for fan out.
    """
    return normal(math.sqrt(2.0 / fan))
