"""Shared parts of all operators on the library's primitives: base class, memory, layouts, windows and reorders.

A layout is a value of `TensorSpec.layout` for which oneDNN has a memory format. "nChw8c" and "nChw16c" have blocks of 8 or 16
channels innermost, padded with zeros to whole blocks. "nchw" is the plain order that the first layer's kernels read. oneDNN keeps
the padding zero.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hpctrain.backend.onednn import constants as c
from hpctrain.backend.onednn.binding import Attributes, Call, Descriptor, Engine, Primitive, dims
from hpctrain.backend.operators import ALIGNMENT_BYTES, Accumulating, Array, Buffers, Operator, StepContext, aligned
from hpctrain.backend.specs import NHWC, Pair, TensorSpec, Window

FORWARD, BACKWARD, BACKWARD_DATA, BACKWARD_WEIGHTS = "forward", "backward", "backward data", "backward weights"


class LibraryOperator(Operator):
    """Base of operators that are computed by primitives.

    Attributes:
        primitives: primitives by the phase that they compute; None if the phase is not wanted, or computed by other means.
    """

    primitives: Mapping[str, Primitive | None]

    @property
    def plain_loops(self) -> tuple[str, ...]:
        """Phases for which the library has only its slow plain loops."""
        return tuple(phase for phase, primitive in self.primitives.items() if primitive is not None and primitive.is_plain)


_HUGE_PAGE_BYTES = 2 << 20


def allocate(size_bytes: int) -> np.ndarray:
    """Return a zeroed uint8 array, aligned to 64 bytes. Arrays of 2 MiB or more are aligned to 2 MiB and may use huge pages.

    The zeros are those of fresh pages, which take memory only when they are first touched.
    """
    if size_bytes < _HUGE_PAGE_BYTES:
        return _aligned(np.zeros(size_bytes + ALIGNMENT_BYTES, np.uint8), size_bytes, ALIGNMENT_BYTES)
    room = mmap.mmap(-1, size_bytes + 2 * _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages uses ordinary ones
            room.madvise(mmap.MADV_HUGEPAGE)
    return _aligned(np.frombuffer(room, np.uint8), size_bytes, _HUGE_PAGE_BYTES)


def _aligned(room: np.ndarray, size_bytes: int, alignment_bytes: int) -> np.ndarray:
    start = -room.ctypes.data % alignment_bytes
    return room[start : start + size_bytes]


class Regions:
    """Parts of a buffer that is allocated later.

    Args:
        begin: offset of the first part in bytes, a multiple of 64.

    Attributes:
        total_bytes: size of the buffer.
    """

    def __init__(self, begin: int = 0) -> None:
        self.total_bytes = begin

    def add(self, size_bytes: int) -> slice:
        """Append a part, and return its slice of the buffer."""
        start = self.total_bytes
        self.total_bytes = start + aligned(size_bytes)
        return slice(start, start + size_bytes)


def part(buffer: Array | None, place: slice) -> Array:
    """Return the bytes at `place`; None if there is no buffer, which is allowed if the place is empty."""
    if buffer is None:
        assert place.start == place.stop
        return None
    return buffer[place]


def convolution_geometry(window: Window) -> tuple[Any, Any, Any, Any]:
    """Return strides, dilations (0 is dense), leading and trailing padding."""
    top, bottom, left, right = window.padding
    return dims(window.stride), dims([d - 1 for d in window.dilation]), dims((top, left)), dims((bottom, right))


def adjoint(window: Window) -> Window | None:
    """Return the window of the convolution of dy with the flipped kernel, which computes dx.

    The result is None if there is no such convolution: a stride exceeds 1, or the padding exceeds the window's extent minus 1.
    """
    if window.stride != (1, 1):
        return None
    height, width = window.extent
    top, bottom, left, right = window.padding
    padding = (height - 1 - top, height - 1 - bottom, width - 1 - left, width - 1 - right)
    if min(padding) < 0:
        return None
    return Window(window.kernel, (1, 1), padding, window.dilation)


def pooling_geometry(window: Window, size: Sequence[int], output: Sequence[int]) -> tuple[tuple[Any, ...], Pair]:
    """Return (arguments of the window, trailing padding that ceil mode adds).

    The arguments are strides, kernel, dilations, and leading and trailing padding.
    """
    (top, bottom, left, right), stride, extent = window.padding, window.stride, window.extent
    reach = [(output[dim] - 1) * stride[dim] + extent[dim] for dim in (0, 1)]
    extra = (max(0, reach[0] - size[0] - top - bottom), max(0, reach[1] - size[1] - left - right))
    trailing = (bottom + extra[0], right + extra[1])
    geometry = (dims(stride), dims(window.kernel), dims([d - 1 for d in window.dilation]), dims((top, left)), dims(trailing))
    return geometry, extra


NCHW = "nchw"
TAGS = {NHWC: "acdb", NCHW: "abcd", "nChw8c": "aBcd8b", "nChw16c": "aBcd16b"}
BLOCKS = {"nChw8c": 8, "nChw16c": 16}


def blocked_layout(engine: Engine) -> str:
    """Return the token of the blocked layout that this processor's kernels prefer."""
    return f"nChw{engine.block}c"


def in_layout(spec: TensorSpec, layout: str) -> TensorSpec:
    """Return the spec of images (N, H, W, C) in `layout`, or in plain memory if the bytes of both layouts are equal."""
    n, h, w, channels = spec.shape
    if layout == NHWC or (layout == NCHW and (channels == 1 or h * w == 1)):
        return spec.plain()
    block = BLOCKS.get(layout, 1)
    if h * w == 1 and channels % block == 0:
        return spec.plain()
    padded = -(-channels // block) * block
    return replace(spec, layout=layout, padded_size=n * h * w * padded)


def images(engine: Engine, spec: TensorSpec, layout: str | None = None) -> Descriptor:
    """Return the descriptor of images (N, H, W, C) in `spec.layout`, or in `layout`, which must have the same bytes."""
    n, h, w, channels = spec.shape
    return Descriptor.tagged(engine, (n, channels, h, w), TAGS[spec.layout if layout is None else layout], spec.dtype)


def rows(engine: Engine, spec: TensorSpec) -> Descriptor:
    """Return the descriptor of plain memory as pixels, with the last dim as channels: (M, C, 1, 1)."""
    channels = spec.shape[-1]
    return Descriptor.tagged(engine, (math.prod(spec.shape[:-1]), channels, 1, 1), TAGS[NHWC], spec.dtype)


def elements(engine: Engine, spec: TensorSpec) -> Descriptor:
    """Return the descriptor of a tensor for element-wise operations: its elements in memory order, padding included."""
    return Descriptor.tagged(engine, (spec.size,), "a", spec.dtype)


def vector(engine: Engine, size: int) -> Descriptor:
    """Return the descriptor of a float32 vector (size,) in plain memory."""
    return Descriptor.tagged(engine, (size,), "a")


class Copy:
    """Reorder of a tensor from one format to another, not yet bound to memory.

    Args:
        accumulate: whether the source is added to the target instead of overwriting it.
    """

    def __init__(self, engine: Engine, label: str, source: Descriptor, target: Descriptor, *, accumulate: bool = False) -> None:
        self.source, self.target = source, target
        attributes = Attributes(engine, kept=float(accumulate))
        self._primitive = Primitive(engine, "reorder", label, source, engine, target, engine, attributes)

    @property
    def scratchpad_bytes(self) -> int:
        return self._primitive.scratchpad_bytes

    def bind(self, source: Array, target: Array, scratch: Array | None = None) -> Call:
        """Return the call on fixed memory."""
        return self._primitive.bind({c.ARG_SRC: (self.source, source), c.ARG_DST: (self.target, target)}, scratch)


class ReorderOperator(Accumulating, Operator):
    """Change of layout: y = x in another layout; backward copies the gradient back."""

    def __init__(self, engine: Engine, source: TensorSpec, target: TensorSpec) -> None:
        self.inputs, self.output = (source,), target
        label = f"reorder {source.shape} {source.layout} -> {target.layout}"
        x, y = images(engine, source), images(engine, target)
        self._forward_copy = Copy(engine, label, x, y)
        self._backward_copies = {
            accumulate: Copy(engine, f"{label} backward", y, x, accumulate=accumulate) for accumulate in (False, True)
        }
        self.scratch_bytes = max(copy.scratchpad_bytes for copy in (self._forward_copy, *self._backward_copies.values()))

    def bind(self, buffers: Buffers) -> None:
        super().bind(buffers)
        self._forward = self._forward_copy.bind(buffers.inputs[0], buffers.output, buffers.scratch)
        self._backward: Call | None = None
        if buffers.input_grads and buffers.input_grads[0] is not None:
            copy = self._backward_copies[buffers.accumulate[0]]
            self._backward = copy.bind(buffers.output_grad, buffers.input_grads[0], buffers.scratch)

    def forward(self, context: StepContext) -> None:
        self._forward()

    def backward_input(self) -> None:
        if self._backward is not None:
            self._backward()
