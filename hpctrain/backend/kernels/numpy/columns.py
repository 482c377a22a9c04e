"""im2col: convolution windows as the rows of a matrix, some output pixels at a time.

The matrix of a chunk stays a few MB, so that the product reads it from a near cache: several times faster than one matrix of
the whole batch, and it needs little memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from hpctrain.backend.kernels.numpy.memory import Request, Shape
from hpctrain.backend.numpy.windows import OutputBlock, Span, blocks, span
from hpctrain.backend.specs import Pair, Window

# Measured: 2-4 MB is the best or near it for 3x3 kernels at 7 to 112 pixels, with 0.5 MB as with 1 MB of L2.
COLUMN_BYTES = 4 << 20
# Below this many contiguous elements per window row, copying tap by tap is faster than window by window.
_SHORT_RUN = 16


@dataclass
class ColumnChunk:
    """Output pixels [start, stop) of N * Ho * Wo. `fill` writes their windows to `matrix` (groups, pixels, R * S * C / groups).

    The matrix of a plain 1x1 convolution is the image itself: nothing is copied.
    """

    start: int
    stop: int
    matrix: np.ndarray
    zeros: list[np.ndarray]
    copies: list[tuple[np.ndarray, np.ndarray]]

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

    `window.padding` may be negative (the image is cropped), and only its top and left count. `scratch` is what `bind` needs:
    the columns and, where windows reach beyond the image, a padded copy of a chunk's rows.
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
        """The chunks, in order, covering all pixels; none where there are no pixels. They share the buffers."""
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
        """Windows (n, o, Wo, R, S, groups, C / groups) as a view of (n, rows, columns, C)."""
        (stride_h, stride_w), (dilation_h, dilation_w) = self._window.stride, self._window.dilation
        view = sliding_window_view(source, self._window.extent, axis=(1, 2))
        view = view[:, ::stride_h, ::stride_w, :, ::dilation_h, ::dilation_w].transpose(0, 1, 2, 4, 5, 3)
        return view.reshape(*view.shape[:5], self._groups, -1, copy=False)

    def _matrix(self, block: OutputBlock, buffer: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A chunk's column buffer, as windows to be written and as the matrix to be multiplied."""
        r, s = self._window.kernel
        groups, channels = self._groups, self._image[3] // self._groups
        n, o, pixels = block.n1 - block.n0, block.o1 - block.o0, self._pixels(block)
        buffer = buffer[: pixels * self._depth * groups]
        if self._tap_major:
            target = buffer.reshape(groups, r, s, channels, n, o, self._outputs[1]).transpose(4, 5, 6, 1, 2, 0, 3)
            return target, buffer.reshape(groups, self._depth, pixels).transpose(0, 2, 1)
        target = buffer.reshape(groups, n, o, self._outputs[1], r, s, channels).transpose(1, 2, 3, 4, 5, 0, 6)
        return target, buffer.reshape(groups, pixels, self._depth)
