"""The base of the operators of the NumPy set: their memory, views of it, and blocks of rows that stay in a cache.

Buffers are page-aligned, and are divided into arrays. `View` operators (flatten, the identity) only give memory another name.

A block of a tensor with channels last is a few rows of a matrix whose width is a multiple of C: inner loops then are
thousands of elements long, however few channels there are, and element-wise NumPy runs at the speed of the cache. Per-channel
vectors are tiled to that width. Sums over the rows of tall matrices are float32 within a block, float64 among blocks.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Sequence

import numpy as np

from hpctrain.backend.operators import Accumulating, Buffers, InputView, Operator, StepContext, aligned
from hpctrain.backend.specs import Spec, TensorSpec

_HUGE_PAGE = 2 << 20

Shape = tuple[int, ...]
Request = tuple[Shape, str]  # shape, dtype


def allocate(size_bytes: int) -> np.ndarray:
    """A zeroed uint8 array on pages of its own, on huge pages where the system has them; freed with the array."""
    if size_bytes == 0:
        return np.zeros(0, np.uint8)
    pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size_bytes >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)


def _aligned_bytes(request: Request) -> int:
    shape, dtype = request
    return aligned(math.prod(shape) * np.dtype(dtype).itemsize)


def total_bytes(requests: Iterable[Request]) -> int:
    """Bytes of a buffer that `carve` divides into these arrays."""
    return sum(_aligned_bytes(request) for request in requests)


def carve(buffer: np.ndarray | None, requests: Iterable[Request]) -> list[np.ndarray]:
    """Arrays of these shapes and dtypes, one after another in `buffer` (uint8), each aligned to 64 bytes."""
    if buffer is None:
        buffer = np.empty(0, np.uint8)
    arrays = []
    start = 0
    for shape, dtype in requests:
        stop = start + math.prod(shape) * np.dtype(dtype).itemsize
        arrays.append(buffer[start:stop].view(dtype).reshape(shape))
        start += _aligned_bytes((shape, dtype))
    return arrays


class NumpyOperator(Accumulating, Operator):
    """An operator on plain memory. A subclass's constructor calls `declare` last; `bind` then gives it arrays.

    Training operators compute gradients; the others keep nothing for them and must not be asked for any.
    """

    def __init__(self, spec: Spec, inputs: tuple[TensorSpec, ...], *, training: bool) -> None:
        self.spec = spec
        self.inputs = tuple(x.plain() for x in inputs)
        self.output = spec.output(*self.inputs)
        self.dtype = self.inputs[0].dtype
        self.training = training
        self.needs_inputs = (False,) * len(inputs)
        self._saved: Sequence[Request] = ()
        self._scratch: Sequence[Request] = ()

    def declare(self, *, saved: Sequence[Request] = (), scratch: Sequence[Request] = ()) -> None:
        """Fix which arrays this operator keeps from forward to backward, and works with inside a call."""
        self._saved, self._scratch = saved, scratch
        self.saved_bytes = total_bytes(saved)
        self.scratch_bytes = total_bytes(scratch)

    def bind(self, buffers: Buffers) -> None:
        self.buffers = buffers
        self.saved = carve(buffers.saved, self._saved)
        self.scratch = carve(buffers.scratch, self._scratch)

    def input_grad(self, i: int = 0) -> np.ndarray | None:
        """The buffer of the gradient of input i, None where nobody asks for it."""
        grads = self.buffers.input_grads
        grad: np.ndarray | None = grads[i] if i < len(grads) else None
        return grad

    def accumulates(self, i: int = 0) -> bool:
        """True where the gradient of input i is added to what is there."""
        return i < len(self.buffers.accumulate) and self.buffers.accumulate[i]

    @property
    def output_grad(self) -> np.ndarray:
        """The buffer of the output's gradient."""
        grad = self.buffers.output_grad
        assert isinstance(grad, np.ndarray), f"{type(self).__name__} is bound without a gradient of its output"
        return grad


class View(InputView, Operator):
    """The output is the input's memory under the output's shape."""

    def __init__(self, spec: Spec, x: TensorSpec) -> None:
        self.spec, self.inputs = spec, (x.plain(),)
        self.output = spec.output(x.plain())

    def forward(self, context: StepContext) -> None:
        return None

    def backward_input(self) -> None:
        return None


# Broadcasting a vector over rows runs at the speed of flat arrays from this width on, and at half of it below (measured).
_WIDTH = 1 << 13
# Two such blocks of float32 lie in 0.5-1 MB of L2 together; smaller ones cost more in calls than they gain.
_BLOCK_ELEMENTS = 1 << 16


class RowBlocks:
    """The division of tensors of one shape (..., C), seen as (M, C)."""

    def __init__(self, shape: Shape, *, elements: int = _BLOCK_ELEMENTS) -> None:
        self.channels = shape[-1]
        self.rows = math.prod(shape[:-1])
        self.repeat = max(1, min(self.rows, _WIDTH // max(1, self.channels)))
        self.width = self.repeat * self.channels
        self.height = max(1, elements // max(1, self.width))

    @property
    def largest(self) -> int:
        """Elements of the largest block."""
        return min(self.height * self.width, self.rows * self.channels)

    def views(self, array: np.ndarray) -> list[np.ndarray]:
        """The blocks of `array`, 2-D views in order; the last one is a single, shorter row where the width does not divide M."""
        flat = array.reshape(-1)
        whole = flat.size - flat.size % self.width if self.width else 0
        step = self.height * self.width
        views = [flat[low : min(low + step, whole)].reshape(-1, self.width) for low in range(0, whole, step)]
        if whole < flat.size:
            views.append(flat[whole:].reshape(1, -1))
        return views

    def tile(self, vector: np.ndarray, dtype: str) -> np.ndarray:
        """A per-channel vector (C,) repeated to a block's width; a block takes as many elements of it as it is wide."""
        return np.tile(vector.astype(dtype), self.repeat)

    def sums(self) -> np.ndarray:
        """Zeros to add the blocks' column sums to, float64, as wide as a block."""
        return np.zeros(self.width, np.float64)

    def fold(self, sums: np.ndarray) -> np.ndarray:
        """Sums over the columns of blocks to sums per channel, float64 (C,)."""
        return np.asarray(sums.reshape(-1, self.channels).sum(axis=0, dtype=np.float64))


# A product with a vector of ones reads a block at the speed of the cache, three times as fast as add.reduce.
_BLOCK_ROWS = 1024


def column_sums(matrix: np.ndarray, out: np.ndarray) -> None:
    """Write the sums over the rows of `matrix` (M, C) to `out` (C,), of any float dtype; zeros where M is 0."""
    total = np.zeros(matrix.shape[1], np.float64)
    ones = np.ones(min(_BLOCK_ROWS, matrix.shape[0]), matrix.dtype)
    for start in range(0, matrix.shape[0], _BLOCK_ROWS):
        block = matrix[start : start + _BLOCK_ROWS]
        total += ones[: block.shape[0]] @ block
    out[...] = total
