"""Images laid out for windows that move in strides: every tap of a window then reads long runs of neighbours.

Rows are padded, and columns sorted by their remainder modulo the stride, one plane per remainder. Output o reads, through column
tap s, column o * stride + s * dilation: element o + (s * dilation) // stride of plane (s * dilation) % stride. NumPy's loops cost
by the run, so one strided copy to the planes pays for all the taps that read them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hpctrain.backend.kernels.numpy.memory import Request, Shape
from hpctrain.backend.numpy.windows import OutputBlock, span
from hpctrain.backend.specs import Pair, Window


@dataclass
class PlaneBlock:
    """The planes of one block of output rows.

    Attributes:
        all: the memory of all planes. padded: parts of it are not in the image.
        moves: (part of a plane, the same pixels of the image), which do not overlap.
        taps: per tap (r, s), in row-major order, what the outputs read through it: (n, o, Wo, C) each.
    """

    all: np.ndarray
    padded: bool
    moves: list[tuple[np.ndarray, np.ndarray]]
    taps: list[np.ndarray]

    def load(self, padding: float) -> None:
        """Copy from the image; `padding` everywhere else."""
        if self.padded:
            self.all.fill(padding)
        for plane, image in self.moves:
            np.copyto(plane, image)

    def add_to_image(self) -> None:
        """Add the planes to the image: the adjoint of `load`."""
        for plane, image in self.moves:
            np.add(image, plane, out=image)

    def store(self) -> None:
        """Write the planes to the image: the adjoint of `load` where no two blocks read one pixel."""
        for plane, image in self.moves:
            np.copyto(image, plane)


class Planes:
    """The plan for images (N, H, W, C) and the given blocks of `outputs` (Ho, Wo). `scratch` is what `bind` needs."""

    def __init__(self, image: Shape, dtype: str, window: Window, outputs: Pair, blocks: list[OutputBlock]) -> None:
        self._image, self._window, self._outputs, self._blocks = image, window, outputs, blocks
        stride, dilation = window.stride[1], window.dilation[1]
        self._columns = [divmod(s * dilation, stride) for s in range(window.kernel[1])]
        self._length = outputs[1] + max(first for first, _ in self._columns)
        self._phases = sorted({phase for _, phase in self._columns})
        size = max((math.prod(self._shape(block)) for block in blocks), default=0)
        self.scratch: Request = ((size,), dtype)

    def bind(self, image: np.ndarray, buffer: np.ndarray) -> list[PlaneBlock]:
        """One for each block; they share the buffer."""
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
