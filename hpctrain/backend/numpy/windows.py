"""Index arithmetic of windows, and layouts of images in which windows read long contiguous runs.

A `Tap` has the range of outputs to which one kernel element contributes, and the positions of the inputs that they read.
`OutputBlock`s divide the output, so that the data in use fits a cache.

im2col (`Columns`): windows are the rows of a matrix, for a chunk of output pixels at a time. A chunk's matrix is a few MB, so
that the product reads it from a near cache. This is several times faster than one matrix of the whole batch, and needs little
memory.

`Planes` serve windows with strides: rows are padded, and columns are sorted by their remainder modulo the stride, one plane per
remainder. Output o reads, through column tap s, column o * stride + s * dilation, which is element o + (s * dilation) // stride
of plane (s * dilation) % stride. NumPy's loops have a cost per contiguous run. One strided copy to the planes therefore pays for
all the taps that read them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from hpctrain.backend.operators import Request
from hpctrain.backend.specs import Pair, Shape, Window


@dataclass(frozen=True)
class TapRange:
    """The outputs [first, stop) of one dim that read inside the image through one tap, and the inputs that they read, as a slice.

    It is the converse of a receptive field (`hpctrain.parallel.layout`), which is the range of inputs that some outputs read
    through all taps.
    """

    first: int
    stop: int
    inputs: slice

    @property
    def outputs(self) -> slice:
        return slice(self.first, self.stop)

    @property
    def empty(self) -> bool:
        """Whether no output reads an input."""
        return self.first == self.stop

    def within(self, low: int, high: int) -> TapRange:
        """Return the part for outputs [low, high); its outputs are counted from `low`."""
        first, stop = max(self.first, low), min(self.stop, high)
        if stop <= first:
            return TapRange(0, 0, slice(0, 0, self.inputs.step))
        step = self.inputs.step
        start = self.inputs.start + (first - self.first) * step
        return TapRange(first - low, stop - low, slice(start, start + (stop - first - 1) * step + 1, step))


def tap_range(tap: int, size: int, outputs: int, stride: int, padding: int, dilation: int) -> TapRange:
    """Return the range of a tap: output o reads input o * stride - padding + tap * dilation, if that lies in [0, size)."""
    offset = tap * dilation - padding
    first = max(0, -(offset // stride))
    stop = max(first, min(outputs, (size - 1 - offset) // stride + 1))
    if stop == first:
        return TapRange(first, first, slice(0, 0, stride))
    start = first * stride + offset
    return TapRange(first, stop, slice(start, start + (stop - first - 1) * stride + 1, stride))


@dataclass(frozen=True)
class Tap:
    """One tap (r, s) of a window.

    Attributes:
        number: r * S + s.
        rows: range of the tap along rows.
        columns: range of the tap along columns.
    """

    number: int
    rows: TapRange
    columns: TapRange

    @property
    def empty(self) -> bool:
        """Whether no output reads an input through this tap."""
        return self.rows.empty or self.columns.empty


def taps(window: Window, size: Pair, outputs: Pair) -> Iterator[Tap]:
    """Yield the taps of `window` on images of `size`, in row-major order, without taps that read only padding."""
    for r in range(window.kernel[0]):
        rows = tap_range(r, size[0], outputs[0], window.stride[0], window.padding[0], window.dilation[0])
        for s in range(window.kernel[1]):
            columns = tap_range(s, size[1], outputs[1], window.stride[1], window.padding[2], window.dilation[1])
            tap = Tap(r * window.kernel[1] + s, rows, columns)
            if not tap.empty:
                yield tap


@dataclass(frozen=True)
class Span:
    """The `size` positions that a block reads in one dim, of which [before, after) are the image's positions [start, stop)."""

    size: int
    before: int
    after: int
    start: int
    stop: int

    @property
    def padded(self) -> bool:
        return self.after - self.before != self.size


def span(first: int, size: int, image: int) -> Span:
    """Return the span of positions [first, first + size) of an image of `image` positions, with zeros outside the image."""
    start = min(max(first, 0), image)
    stop = max(start, min(first + size, image))
    before = min(max(start - first, 0), size)
    return Span(size, before, before + stop - start, start, stop)


def split(size: int, limit: int) -> Iterator[tuple[int, int]]:
    """Split [0, size) into parts of nearly equal size, at most `limit` each."""
    parts = -(-size // max(1, limit))
    for i in range(parts):
        yield i * size // parts, (i + 1) * size // parts


@dataclass(frozen=True)
class OutputBlock:
    """Output rows [o0, o1) of the images [n0, n1), contiguous in the memory of (N, Ho, Wo, ...)."""

    n0: int
    n1: int
    o0: int
    o1: int

    @property
    def images(self) -> slice:
        return slice(self.n0, self.n1)

    @property
    def rows(self) -> slice:
        return slice(self.o0, self.o1)


def blocks(images: int, outputs: Pair, limit: int) -> Iterator[OutputBlock]:
    """Yield all output pixels in blocks of about `limit` pixels: whole images, or rows of one image."""
    ho, wo = outputs
    if 0 in (images, ho, wo):
        return
    if ho * wo <= limit:
        for n0, n1 in split(images, limit // (ho * wo)):
            yield OutputBlock(n0, n1, 0, ho)
        return
    for n in range(images):
        for o0, o1 in split(ho, limit // wo):
            yield OutputBlock(n, n + 1, o0, o1)


# Measured: 2-4 MB are at or near the optimum for 3x3 kernels on images of 7 to 112 pixels, with 0.5 MB and with 1 MB of L2.
COLUMN_BYTES = 4 << 20
# If a window row has fewer contiguous elements, copying tap by tap is faster than window by window.
_SHORT_RUN = 16


@dataclass
class ColumnChunk:
    """Output pixels [start, stop) of N * Ho * Wo. `fill` writes their windows to `matrix` (groups, pixels, R * S * C / groups).

    For a 1x1 convolution of stride 1 without padding, the matrix is the image itself, and nothing is copied.
    """

    start: int
    stop: int
    matrix: np.ndarray
    zeros: list[np.ndarray]  # parts of the padded rows outside the image
    copies: list[tuple[np.ndarray, np.ndarray]]  # (target, source) of each copy, in order

    @property
    def pixels(self) -> slice:
        return slice(self.start, self.stop)

    def fill(self) -> None:
        """Copy the windows from the image."""
        for border in self.zeros:
            border.fill(0)
        for target, source in self.copies:
            np.copyto(target, source)


class Columns:
    """The plan of im2col for images (N, H, W, C) and `outputs` (Ho, Wo).

    `window.padding` may be negative, which crops the image; only its top and left values are used.

    Attributes:
        scratch: arrays that `bind` needs: the columns and, if windows reach beyond the image, a padded copy of a chunk's rows.
        pixels, largest, count: number of output pixels, of those of the largest chunk, and of chunks.
    """

    def __init__(
        self, image: Shape, dtype: str, window: Window, outputs: Pair, *, groups: int = 1, column_bytes: int = COLUMN_BYTES
    ) -> None:
        self._image, self._window, self._outputs, self._groups = image, window, outputs, groups
        self._depth = window.kernel[0] * window.kernel[1] * image[3] // groups
        self._direct = (
            window.kernel == (1, 1)
            and window.stride == (1, 1)
            and window.padding[0] == window.padding[2] == 0
            and outputs == image[1:3]
        )
        run = image[3] // groups * (window.kernel[1] if window.dilation[1] == 1 and groups == 1 else 1)
        self._tap_major = run < _SHORT_RUN
        pixel_bytes = self._depth * groups * np.dtype(dtype).itemsize
        self._blocks = [] if self._direct else list(blocks(image[0], outputs, column_bytes // pixel_bytes))
        column_size = max((self._pixels(block) * self._depth * groups for block in self._blocks), default=0)
        padded_size = max((self._padded_size(block) for block in self._blocks), default=0)
        self.scratch: list[Request] = [((column_size,), dtype), ((padded_size,), dtype)]
        self.pixels = image[0] * outputs[0] * outputs[1]
        self.largest = self.pixels if self._direct else max((self._pixels(block) for block in self._blocks), default=0)
        self.count = len(self._blocks) if not self._direct else min(1, self.pixels)

    def bind(self, image: np.ndarray, column_buffer: np.ndarray, padded_buffer: np.ndarray) -> list[ColumnChunk]:
        """Return the chunks of all pixels, in order. They share the buffers."""
        if self.pixels == 0:
            return []
        if self._direct:
            matrix = image.reshape(self.pixels, self._groups, self._depth).transpose(1, 0, 2)
            return [ColumnChunk(0, self.pixels, matrix, [], [])]
        return [self._chunk(block, image, column_buffer, padded_buffer) for block in self._blocks]

    def _pixels(self, block: OutputBlock) -> int:
        return (block.n1 - block.n0) * (block.o1 - block.o0) * self._outputs[1]

    def _spans(self, block: OutputBlock) -> tuple[Span, Span]:
        window = self._window
        first = block.o0 * window.stride[0] - window.padding[0]
        rows = span(first, (block.o1 - block.o0 - 1) * window.stride[0] + window.extent[0], self._image[1])
        columns = span(-window.padding[2], (self._outputs[1] - 1) * window.stride[1] + window.extent[1], self._image[2])
        return rows, columns

    def _padded_size(self, block: OutputBlock) -> int:
        rows, columns = self._spans(block)
        if not (rows.padded or columns.padded):
            return 0
        return (block.n1 - block.n0) * rows.size * columns.size * self._image[3]

    def _chunk(self, block: OutputBlock, image: np.ndarray, column_buffer: np.ndarray, padded_buffer: np.ndarray) -> ColumnChunk:
        rows, columns = self._spans(block)
        source = image[block.images, rows.start : rows.stop, columns.start : columns.stop]
        zeros: list[np.ndarray] = []
        copies: list[tuple[np.ndarray, np.ndarray]] = []
        if rows.padded or columns.padded:
            shape = (block.n1 - block.n0, rows.size, columns.size, self._image[3])
            padded = padded_buffer[: self._padded_size(block)].reshape(shape)
            inner = padded[:, rows.before : rows.after]
            above, below = padded[:, : rows.before], padded[:, rows.after :]
            left, right = inner[:, :, : columns.before], inner[:, :, columns.after :]
            zeros = [border for border in (above, below, left, right) if border.size]
            copies = [(inner[:, :, columns.before : columns.after], source)]
            source = padded
        target, matrix = self._matrix(block, column_buffer)
        copies.append((target, self._windows(source)))
        start = (block.n0 * self._outputs[0] + block.o0) * self._outputs[1]
        return ColumnChunk(start, start + self._pixels(block), matrix, zeros, copies)

    def _windows(self, source: np.ndarray) -> np.ndarray:
        """Return windows (n, o, Wo, R, S, groups, C / groups) as a view of (n, rows, columns, C)."""
        (stride_h, stride_w), (dilation_h, dilation_w) = self._window.stride, self._window.dilation
        view = sliding_window_view(source, self._window.extent, axis=(1, 2))
        view = view[:, ::stride_h, ::stride_w, :, ::dilation_h, ::dilation_w].transpose(0, 1, 2, 4, 5, 3)
        return view.reshape(*view.shape[:5], self._groups, -1, copy=False)

    def _matrix(self, block: OutputBlock, buffer: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return a chunk's column buffer twice: as windows to write, and as the matrix to multiply."""
        r, s = self._window.kernel
        groups, channels = self._groups, self._image[3] // self._groups
        n, o, pixels = block.n1 - block.n0, block.o1 - block.o0, self._pixels(block)
        buffer = buffer[: pixels * self._depth * groups]
        if self._tap_major:
            target = buffer.reshape(groups, r, s, channels, n, o, self._outputs[1]).transpose(4, 5, 6, 1, 2, 0, 3)
            return target, buffer.reshape(groups, self._depth, pixels).transpose(0, 2, 1)
        target = buffer.reshape(groups, n, o, self._outputs[1], r, s, channels).transpose(1, 2, 3, 4, 5, 0, 6)
        return target, buffer.reshape(groups, pixels, self._depth)


@dataclass
class PlaneBlock:
    """The planes of one block of output rows.

    Attributes:
        all: memory of all planes.
        padded: whether some elements of the planes lie outside the image.
        moves: pairs of a part of a plane and the same pixels of the image; the parts do not overlap.
        taps: for each tap (r, s), in row-major order, the elements (n, o, Wo, C) that the outputs read through it.
    """

    all: np.ndarray
    padded: bool
    moves: list[tuple[np.ndarray, np.ndarray]]
    taps: list[np.ndarray]

    def load(self, padding: float) -> None:
        """Copy the image's pixels into the planes, and write `padding` to the elements that lie outside the image."""
        if self.padded:
            self.all.fill(padding)
        for plane, image in self.moves:
            np.copyto(plane, image)

    def add_to_image(self) -> None:
        """Add the planes to the image: the adjoint of `load`."""
        for plane, image in self.moves:
            np.add(image, plane, out=image)

    def store(self) -> None:
        """Write the planes to the image: the adjoint of `load` if no two blocks read the same pixel."""
        for plane, image in self.moves:
            np.copyto(image, plane)


class Planes:
    """The plan of the planes of images (N, H, W, C), for blocks of `outputs` (Ho, Wo).

    Attributes:
        scratch: array that `bind` needs.
    """

    def __init__(self, image: Shape, dtype: str, window: Window, outputs: Pair, blocks: list[OutputBlock]) -> None:
        self._image, self._window, self._outputs, self._blocks = image, window, outputs, blocks
        stride, dilation = window.stride[1], window.dilation[1]
        self._columns = [divmod(s * dilation, stride) for s in range(window.kernel[1])]
        self._length = outputs[1] + max(first for first, _ in self._columns)
        self._phases = sorted({phase for _, phase in self._columns})
        size = max((math.prod(self._shape(block)) for block in blocks), default=0)
        self.scratch: Request = ((size,), dtype)

    def bind(self, image: np.ndarray, buffer: np.ndarray) -> list[PlaneBlock]:
        """Return the planes of each block. They share the buffer."""
        return [self._block(block, image, buffer) for block in self._blocks]

    def _shape(self, block: OutputBlock) -> Shape:
        rows = (block.o1 - block.o0 - 1) * self._window.stride[0] + self._window.extent[0]
        return len(self._phases), block.n1 - block.n0, rows, self._length, self._image[3]

    def _block(self, block: OutputBlock, image: np.ndarray, buffer: np.ndarray) -> PlaneBlock:
        window, shape = self._window, self._shape(block)
        planes = buffer[: math.prod(shape)].reshape(shape)
        (stride_h, stride_w), (dilation_h, _) = window.stride, window.dilation
        rows = span(block.o0 * stride_h - window.padding[0], shape[2], self._image[1])
        moves = []
        for plane, phase in zip(planes, self._phases, strict=True):
            # Element i of this plane is column i * stride + phase - padding of the image.
            offset = phase - window.padding[2]
            first = max(0, -(offset // stride_w))
            stop = max(first, min(self._length, (self._image[2] - 1 - offset) // stride_w + 1))
            if stop > first and rows.stop > rows.start:
                start = first * stride_w + offset
                columns = slice(start, start + (stop - first - 1) * stride_w + 1, stride_w)
                pixels = image[block.images, rows.start : rows.stop, columns]
                moves.append((plane[:, rows.before : rows.after, first:stop], pixels))
        taps = []
        for r in range(window.kernel[0]):
            top = r * dilation_h
            read = slice(top, top + (block.o1 - block.o0 - 1) * stride_h + 1, stride_h)
            for first, phase in self._columns:
                taps.append(planes[self._phases.index(phase)][:, read, first : first + self._outputs[1]])
        padded = sum(plane.size for plane, _ in moves) < planes.size
        return PlaneBlock(planes, padded, moves, taps)
