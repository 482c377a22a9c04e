"""Between images in blocks of channels and transformed tiles of Winograd's F(2x2, 3x3): chunk by chunk, by strided copies.

Written over tile positions, Kronecker products make each two-sided transform one product with a small constant matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from hpctrain.backend.operators import Array
from hpctrain.backend.onednn import constants as c
from hpctrain.backend.onednn.binding import Attributes, Descriptor, Engine, Primitive
from hpctrain.backend.kernels.onednn.memory import allocate
from hpctrain.backend.kernels.onednn.reorder import Copy
from hpctrain.backend.kernels.onednn.tiling import Chunk, Form, Room, Tiling
from hpctrain.backend.specs import Pair

Work = Callable[[], object]

_BT = np.array([[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]], np.float32)
_AT = np.array([[1, 1, 1, 0], [0, 1, -1, -1]], np.float32)


class Matrix:
    """target (rows, items) = matrix (rows, columns) @ source (columns, items), then ReLU, or added to the target."""

    def __init__(
        self, engine: Engine, what: str, matrix: np.ndarray, items: int, *, relu: bool = False, add: bool = False
    ) -> None:
        rows, columns = matrix.shape
        self._constant = allocate(matrix.nbytes).view(np.float32).reshape(matrix.shape)
        self._constant[...] = matrix
        self._formats = [Descriptor.strided(engine, s, (s[1], 1)) for s in ((rows, columns), (columns, items), (rows, items))]
        left, source, target = self._formats
        attributes = Attributes(engine, relu=relu, accumulate=add)
        self.primitive = Primitive(engine, "matmul", f"{what}, transform", left, source, None, target, attributes)

    def bind(self, source: Array, target: Array, library: Array) -> Work:
        arrays = (self._constant, source, target)
        arguments = zip((c.ARG_SRC, c.ARG_WEIGHTS, c.ARG_DST), self._formats, arrays, strict=True)
        return self.primitive.bind({kind: (form, array) for kind, form, array in arguments}, library)


class _Grid:
    """Tiles of one form or part of their images, (images, channels, rows, columns), and copies of it between memories."""

    def __init__(self, engine: Engine, what: str, tiling: Tiling, form: Form, channels: int) -> None:
        self._engine, self._what, self._form, self._channels = engine, f"{what}, tiles", form, channels
        self.block = tiling.block

    @property
    def by_tile(self) -> tuple[int, ...]:
        """Strides in elements, of (image, block, row, column), where tiles lie one behind the other."""
        form, block = self._form, self.block
        return form.rows * form.columns * block, form.tiles * block, form.columns * block, block

    def by_pixel(self, size: Pair, spread: int = 1) -> tuple[int, ...]:
        """Strides in elements in images of `size`, of every pixel or of every other one."""
        row = size[1] * self.block
        return self._channels * size[0] * size[1], size[0] * row, spread * row, spread * self.block

    def copy(self, size: Pair, source: Sequence[int], target: Sequence[int], *, accumulate: bool = False) -> Copy:
        """A copy of (rows, columns) in all images and channels, between memories with these strides."""
        shape = (self._form.images, self._channels // self.block, *size, self.block)
        forms = [Descriptor.strided(self._engine, shape, (*strides, 1)) for strides in (source, target)]
        return Copy(self._engine, self._what, forms[0], forms[1], accumulate=accumulate)


class Patches:
    """room.left = (Bt x Bt) of the overlapping 4x4 patches of x, of the chunks of one form."""

    def __init__(self, engine: Engine, what: str, tiling: Tiling, form: Form) -> None:
        channels = tiling.channels_in
        grid = _Grid(engine, what, tiling, form, channels)
        height, width = form.padded
        image, padded = grid.by_pixel(tiling.size), grid.by_pixel(form.padded)
        _, _, row, column = padded
        self._image, self._row = image[0], image[2]
        self._inside = grid.copy((form.read, tiling.size[1]), image, padded)
        self._gather = grid.copy((form.rows, form.columns), grid.by_pixel(form.padded, 2), grid.by_tile)
        self._begin = form.above * row + tiling.padding[2] * column
        self._items, self._all = channels * form.tiles, form.images * channels * height * width
        self._corners = [position // 4 * row + position % 4 * column for position in range(16)]
        self._transform = Matrix(engine, what, np.kron(_BT, _BT), self._items)
        self.primitives = [self._transform.primitive]

    def load(self, chunk: Chunk, x: Array, room: Room) -> list[Work]:
        """room.padded = the chunk's part of x among zeros."""
        first = x.reshape(-1)[chunk.image * self._image + chunk.read_row * self._row :]
        return [partial(room.padded[: self._all].fill, 0.0), self._inside.bind(first, room.padded[self._begin :])]

    def transform(self, room: Room) -> list[Work]:
        """The calls that follow, the same for each chunk."""
        gathers = [
            self._gather.bind(room.padded[corner:], room.plain[position * self._items :])
            for position, corner in enumerate(self._corners)
        ]
        return [*gathers, self._transform.bind(room.plain, room.left, room.library)]


class _Corners:
    """The four outputs of each tile in y, or in its gradient."""

    def __init__(self, engine: Engine, what: str, tiling: Tiling, form: Form) -> None:
        self._form, (self._height, self._width) = form, tiling.output_size
        self._grid = _Grid(engine, what, tiling, form, tiling.channels_out)
        self._by_pixel = self._grid.by_pixel(tiling.output_size, 2)
        self._items = tiling.channels_out * form.tiles

    @property
    def overhang(self) -> bool:
        """Some tiles lie over the edge."""
        return bool(self._form.written % 2 or self._width % 2)

    def _places(self) -> Iterator[tuple[int, int, Pair]]:
        """(elements from the tiles' start, elements from the chunk's first in an image, rows and columns).

        oneDNN counts a row's whole stride as its own, so where the last row has no follower it goes by itself; so does the last
        pixel of an image that is one row.
        """
        height, width, block = self._form.written, self._width, self._grid.block
        for number in range(4):
            down, right = number // 2, number % 2
            rows, columns = (height + 1 - down) // 2, (width + 1 - right) // 2
            together = rows if 2 * rows <= height else rows - 1
            near = columns if 2 * columns <= width or self._height > 1 else columns - 1
            for first, count in ((0, together), (together, rows - together)):
                for left, many in ((0, near), (near, columns - near)):
                    if count and many:
                        tile = number * self._items + (first * self._form.columns + left) * block
                        yield tile, ((2 * first + down) * width + 2 * left + right) * block, (count, many)

    def gathering(self) -> list[tuple[Copy, int, int]]:
        """(copy to tiles, elements from the chunk's first in an image, elements from the tiles' start)."""
        return [(self._grid.copy(size, self._by_pixel, self._grid.by_tile), start, at) for at, start, size in self._places()]

    def scattering(self, accumulate: bool) -> list[tuple[Copy, int, int]]:
        """The same from tiles."""
        by_tile = self._grid.by_tile
        return [
            (self._grid.copy(size, by_tile, self._by_pixel, accumulate=accumulate), start, at)
            for at, start, size in self._places()
        ]

    def first(self, chunk: Chunk, y: Array) -> Array:
        """y flat from the chunk's first output on."""
        return y.reshape(-1)[chunk.image * self._by_pixel[0] + chunk.write_row * self._width * self._grid.block :]


class Outputs:
    """y = (At x At) room.right, or added to y, of the chunks of one form."""

    def __init__(self, engine: Engine, what: str, tiling: Tiling, form: Form, *, relu: bool) -> None:
        self._corners = _Corners(engine, what, tiling, form)
        self._transform = Matrix(engine, what, np.kron(_AT, _AT), tiling.channels_out * form.tiles, relu=relu)
        self._copies: dict[bool, list[tuple[Copy, int, int]]] = {}
        self.primitives = [self._transform.primitive]

    def transform(self, room: Room) -> list[Work]:
        """Comes first, the same for each chunk."""
        return [self._transform.bind(room.right, room.plain, room.library)]

    def store(self, chunk: Chunk, y: Array, room: Room, *, accumulate: bool) -> list[Work]:
        """Writes the chunk's part of y."""
        if accumulate not in self._copies:
            self._copies[accumulate] = self._corners.scattering(accumulate)
        first = self._corners.first(chunk, y)
        return [copy.bind(room.plain[at:], first[start:]) for copy, start, at in self._copies[accumulate]]


class OutputGradients:
    """room.right = (A x A) dy, of the chunks of one form."""

    def __init__(self, engine: Engine, what: str, tiling: Tiling, form: Form) -> None:
        self._corners = _Corners(engine, what, tiling, form)
        self._copies = self._corners.gathering()
        self._items = tiling.channels_out * form.tiles
        self._transform = Matrix(engine, what, np.kron(_AT.T, _AT.T), self._items)
        self.primitives = [self._transform.primitive]

    def load(self, chunk: Chunk, dy: Array, room: Room) -> list[Work]:
        """Reads the chunk's part of dy."""
        works: list[Work] = []
        if self._corners.overhang:
            works.append(partial(room.plain[: 4 * self._items].fill, 0.0))
        first = self._corners.first(chunk, dy)
        return [*works, *(copy.bind(first[start:], room.plain[at:]) for copy, start, at in self._copies)]

    def transform(self, room: Room) -> list[Work]:
        """The calls that follow, the same for each chunk."""
        return [self._transform.bind(room.plain, room.right, room.library)]
