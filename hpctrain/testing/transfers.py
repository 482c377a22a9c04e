"""Copies of arrays of the host to a kernel set's memory and back, and bytes that nobody may read, for benches of operators."""

from __future__ import annotations

import numpy as np

from hpctrain.backend.dtypes import item_bytes
from hpctrain.backend.operators import Array, KernelSet


def empty(kernels: KernelSet, shape: tuple[int, ...], dtype: str) -> Array:
    """A poisoned array in the set's memory."""
    array = kernels.allocate(int(np.prod(shape)) * item_bytes(dtype)).view(dtype).reshape(shape)
    poison(kernels, array)
    return array


def poison(kernels: KernelSet, array: Array) -> None:
    """Fill with bytes 0xFF: NaN in every float dtype, True-ish rubbish in masks."""
    raw = array.reshape(-1).view("uint8")
    kernels.arithmetic.from_host(raw, np.full(raw.size, 0xFF, np.uint8))


def put(kernels: KernelSet, array: Array, values: np.ndarray) -> None:
    """array := values, rounded to the array's dtype."""
    kernels.arithmetic.from_host(array, values)


def take(kernels: KernelSet, array: Array) -> np.ndarray:
    """The elements, a copy; bfloat16 as float32."""
    return np.array(kernels.arithmetic.to_host(array))
