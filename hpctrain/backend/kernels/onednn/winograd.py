"""3x3 convolutions of stride 1 with 16 multiplications where 36 are usual (Winograd's F(2x2, 3x3); Lavin and Gray 2016).

oneDNN has no such kernel in float32 on x86-64, but it has the parts: an image's overlapping 4x4 tiles are gathered by strided
reorders, the transforms are products with small constant matrices, and between them stand 16 convolutions of 1x1, its fastest
kernels. All of it runs on oneDNN's threads. With images in blocks of channels everything moves whole blocks.

Written over tile positions (Kronecker products make the two-sided transforms one product):
    forward   y = (At x At) [(G x G) w . (Bt x Bt) patches]                                   section 4.1, eq. 8
    weights   dw = (Gt x Gt) sum over tiles [(A x A) dy . (Bt x Bt) patches]                  its adjoint
The input's gradient is the forward convolution of dy with the turned and transposed kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from hpctrain.backend.kernels.base import Array
from hpctrain.backend.kernels.onednn import constants as c
from hpctrain.backend.kernels.onednn.binding import Attributes, Descriptor, Engine, Primitive
from hpctrain.backend.kernels.onednn.geometry import convolution_geometry
from hpctrain.backend.kernels.onednn.layouts import vector
from hpctrain.backend.kernels.onednn.memory import allocate
from hpctrain.backend.kernels.onednn.reorder import Copy
from hpctrain.backend.kernels.onednn.tiling import Room, Scratch, Tiling
from hpctrain.backend.kernels.specs import Pair, Window

Work = Callable[[], object]

_BT = np.array([[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]], np.float32)
_G = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]], np.float32)
_AT = np.array([[1, 1, 1, 0], [0, 1, -1, -1]], np.float32)

_BIAS_POSITION = 5  # tile position (1, 1): adds to all four outputs alike, and is the sum of all four of dy


class Works:
    """Prepared calls, one after another."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = tuple(works)

    def __call__(self) -> None:
        for work in self._works:
            work()


class _Matrix:
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


class _Blocks:
    """Images (count, channels, rows, columns) in blocks: strides in elements, and copies between such grids."""

    def __init__(self, engine: Engine, what: str, shape: Sequence[int], block: int) -> None:
        self._engine, self._what = engine, what
        count, channels, rows, columns = shape
        self._shape = (count, channels // block, rows, columns, block)

    def copy(self, source: Sequence[int], target: Sequence[int], *, accumulate: bool = False) -> Copy:
        """Between memories with these strides of (image, block, row, column)."""
        forms = [Descriptor.strided(self._engine, self._shape, (*strides, 1)) for strides in (source, target)]
        return Copy(self._engine, f"{self._what}, tiles", forms[0], forms[1], accumulate=accumulate)


class _Chunk:
    """What is done to the tiles of `count` images."""

    def __init__(self, engine: Engine, what: str, tiling: Tiling, count: int) -> None:
        self._engine, self._what, self._tiling, self.count = engine, what, tiling, count
        (self._rows, self._columns), self.tiles = tiling.tiles, tiling.count(count)
        block = tiling.block
        image = self._rows * self._columns * block
        self._by_tile = (image, self.tiles * block, self._columns * block, block)

    def _image_strides(self, channels: int, size: Pair, spread: int = 1) -> tuple[int, ...]:
        block = self._tiling.block
        row = size[1] * block
        return channels * math.prod(size), size[0] * row, spread * row, spread * block

    def read(self, x: Array, room: Room) -> list[Work]:
        """room.left = (Bt x Bt) patches of these images."""
        tiling, count, channels = self._tiling, self.count, self._tiling.channels_in
        height, width = tiling.padded
        room_of_all = room.padded[: count * channels * height * width]
        inside = _Blocks(self._engine, self._what, (count, channels, *tiling.size), tiling.block)
        padded = self._image_strides(channels, tiling.padded)
        copy = inside.copy(self._image_strides(channels, tiling.size), padded)
        corner = tiling.padding[0] * padded[2] + tiling.padding[2] * padded[3]
        works: list[Work] = [partial(room_of_all.fill, 0.0), copy.bind(x, room.padded[corner:])]
        grid = _Blocks(self._engine, self._what, (count, channels, *tiling.tiles), tiling.block)
        gather = grid.copy(self._image_strides(channels, tiling.padded, 2), self._by_tile)
        for position in range(16):
            start = position // 4 * padded[2] + position % 4 * padded[3]
            works.append(gather.bind(room.padded[start:], room.plain[position * channels * self.tiles :]))
        transform = _Matrix(self._engine, self._what, np.kron(_BT, _BT), channels * self.tiles)
        return [*works, transform.bind(room.plain, room.left, room.library)]

    def _corners(self) -> Iterator[tuple[int, int, Pair]]:
        """(elements from the tiles' start, elements from an image's start, rows and columns) of the four outputs of each tile.

        oneDNN counts a row's whole stride as its own, so where the last row has no follower it goes by itself.
        """
        (height, width), block = self._tiling.output_size, self._tiling.block
        for number in range(4):
            down, right = number // 2, number % 2
            rows, columns = (height + 1 - down) // 2, (width + 1 - right) // 2
            together = rows if 2 * rows <= height else rows - 1
            for first, count in ((0, together), (together, rows - together)):
                if count and columns:
                    tile = number * self._tiling.channels_out * self.tiles + first * self._columns * block
                    yield tile, ((2 * first + down) * width + right) * block, (count, columns)

    def write(self, y: Array, room: Room, *, relu: bool, accumulate: bool) -> list[Work]:
        """y = (At x At) room.right."""
        k = self._tiling.channels_out
        transform = _Matrix(self._engine, self._what, np.kron(_AT, _AT), k * self.tiles, relu=relu)
        works: list[Work] = [transform.bind(room.right, room.plain, room.library)]
        strides = self._image_strides(k, self._tiling.output_size, 2)
        for tile, start, size in self._corners():
            grid = _Blocks(self._engine, self._what, (self.count, k, *size), self._tiling.block)
            scatter = grid.copy(self._by_tile, strides, accumulate=accumulate)
            works.append(scatter.bind(room.plain[tile:], y[start:]))
        return works

    def read_gradient(self, dy: Array, room: Room) -> list[Work]:
        """room.right = (A x A) dy."""
        k = self._tiling.channels_out
        strides = self._image_strides(k, self._tiling.output_size, 2)
        works: list[Work] = []
        if any(size % 2 for size in self._tiling.output_size):
            works.append(partial(room.plain[: 4 * k * self.tiles].fill, 0.0))
        for tile, start, size in self._corners():
            gather = _Blocks(self._engine, self._what, (self.count, k, *size), self._tiling.block).copy(strides, self._by_tile)
            works.append(gather.bind(dy[start:], room.plain[tile:]))
        transform = _Matrix(self._engine, self._what, np.kron(_AT.T, _AT.T), k * self.tiles)
        return [*works, transform.bind(room.plain, room.right, room.library)]


class _Products:
    """The 16 convolutions of 1x1 between the tiles of one chunk, forward or for the weights' gradient."""

    def __init__(
        self, engine: Engine, what: str, tiling: Tiling, count: int, *, weights: Descriptor | None, bias: bool, backward: bool
    ) -> None:
        self._tiling, self._tiles = tiling, tiling.count(count)
        k, channels = tiling.channels_out, tiling.channels_in
        self._left = Descriptor.tagged(engine, (1, channels, self._tiles, 1), tiling.tag)
        self._right = Descriptor.tagged(engine, (1, k, self._tiles, 1), tiling.tag)
        self._bias, self._backward = vector(engine, k), backward
        geometry, own = convolution_geometry(Window((1, 1), (1, 1), (0, 0, 0, 0))), Attributes(engine)

        def make(weights: Descriptor, with_bias: bool) -> Primitive:
            formats = (self._left, weights, self._bias if with_bias else None, self._right)
            head = (c.FORWARD_TRAINING, c.CONVOLUTION_DIRECT)
            if not backward:
                return Primitive(engine, "convolution_forward", what, *head, *formats, *geometry, own)
            free = Descriptor.tagged(engine, (k, channels, 1, 1), "any")
            hint = Primitive(
                engine, "convolution_forward", what, *head, self._left, free, formats[2], self._right, *geometry, own
            )
            return Primitive(engine, "convolution_backward_weights", what, head[1], *formats, *geometry, hint, own)

        wanted = weights if weights is not None else Descriptor.tagged(engine, (k, channels, 1, 1), "any")
        self.plain = make(wanted, False)
        self.weights = self.plain.descriptor(c.QUERY_DIFF_WEIGHTS_MD if backward else c.QUERY_WEIGHTS_MD)
        self.biased = make(self.weights, True) if bias else None
        self.weight_items = self.weights.size_bytes // 4

    @property
    def primitives(self) -> list[Primitive]:
        return [self.plain] if self.biased is None else [self.plain, self.biased]

    def bind(self, room: Room, bias: Array | None) -> list[Work]:
        tiling, works = self._tiling, list[Work]()
        names = (
            (c.ARG_SRC, c.ARG_DIFF_WEIGHTS, c.ARG_DIFF_DST, c.ARG_DIFF_BIAS)
            if self._backward
            else (c.ARG_SRC, c.ARG_WEIGHTS, c.ARG_DST, c.ARG_BIAS)
        )
        for position in range(16):
            memories = {
                names[0]: (self._left, room.left[position * tiling.channels_in * self._tiles :]),
                names[1]: (self.weights, room.weights[position * self.weight_items :]),
                names[2]: (self._right, room.right[position * tiling.channels_out * self._tiles :]),
            }
            primitive = self.plain
            if position == _BIAS_POSITION and self.biased is not None:
                primitive = self.biased
                memories[names[3]] = (self._bias, bias)
            works.append(primitive.bind(memories, room.library))
        return works


class _Winograd:
    """What both directions have: primitives for each size of chunk, places in the scratch, the weights tap by tap.

    Args:
        strides: of the weights' (out, in) in elements. first, step: elements from the weights' start to tap (0, 0), and from
            each tap to the next in row order.
    """

    def __init__(
        self, engine: Engine, what: str, tiling: Tiling, strides: Pair, first: int, step: int, *, bias: bool, backward: bool
    ) -> None:
        self._engine, self._what, self._tiling = engine, f"{what} by Winograd", tiling
        self._taps = [first + tap * step for tap in range(9)]
        self._chunks = {count: _Chunk(engine, self._what, tiling, count) for _, count in tiling.chunks()}
        self._products: dict[int, _Products] = {}
        weights: Descriptor | None = None
        for count in self._chunks:
            made = _Products(engine, self._what, tiling, count, weights=weights, bias=bias, backward=backward)
            self._products[count], weights = made, made.weights
        assert weights is not None
        self._weights, self._items = weights, weights.size_bytes // 4
        shape = (tiling.channels_out, tiling.channels_in, 1, 1)
        self._plain_weights = Descriptor.strided(engine, shape, (*strides, max(strides), max(strides)))
        primitives = [each for products in self._products.values() for each in products.primitives]
        taps_alone = not backward or tiling.chunk == tiling.batch  # gradients of several chunks add up while tiles come and go
        self._scratch = Scratch(tiling, self._items, [*primitives, *self._transforms()], taps_alone)
        self.scratch_bytes = self._scratch.total_bytes

    def _transforms(self) -> list[Primitive]:
        """Stand-ins that tell how much of the library's scratch the transforms need."""
        tiling, tiles = self._tiling, self._tiling.count(self._tiling.chunk)
        items = (tiles * tiling.channels_in, tiles * tiling.channels_out, self._items)
        shapes = [(16, 16), (4, 16), (16, 4), (16, 9), (9, 16)]
        return [_Matrix(self._engine, self._what, np.zeros(shape, np.float32), n).primitive for shape in shapes for n in items]

    def _images(self, array: Array, start: int, channels: int, size: Pair) -> Array:
        """A flat view from image `start` on."""
        return array.reshape(-1)[start * channels * math.prod(size) :]


class Product(_Winograd):
    """y = conv(x, w) + bias, then ReLU; or y += conv(x, w)."""

    def __init__(
        self,
        engine: Engine,
        what: str,
        tiling: Tiling,
        strides: Pair,
        first: int,
        step: int,
        *,
        bias: bool = False,
        relu: bool = False,
    ) -> None:
        super().__init__(engine, what, tiling, strides, first, step, bias=bias, backward=False)
        self._relu = relu

    def bind(self, x: Array, weight: Array, bias: Array | None, y: Array, scratch: Array, *, accumulate: bool = False) -> Work:
        """The convolution on fixed memory, weights included."""
        room, tiling, plain = self._scratch.room(scratch), self._tiling, weight.reshape(-1)
        load = Copy(self._engine, f"{self._what} weights", self._plain_weights, self._weights)
        works: list[Work] = [load.bind(plain[at:], room.taps[tap * self._items :]) for tap, at in enumerate(self._taps)]
        transform = _Matrix(self._engine, self._what, np.kron(_G, _G), self._items)
        works.append(transform.bind(room.taps, room.weights, room.library))
        for start, count in tiling.chunks():
            chunk = self._chunks[count]
            works += chunk.read(self._images(x, start, tiling.channels_in, tiling.size), room)
            works += self._products[count].bind(room, bias)
            target = self._images(y, start, tiling.channels_out, tiling.output_size)
            works += chunk.write(target, room, relu=self._relu, accumulate=accumulate)
        return Works(works)


class WeightGradient(_Winograd):
    """dw, and db where there is a bias, from x and dy."""

    def __init__(
        self, engine: Engine, what: str, tiling: Tiling, strides: Pair, first: int, step: int, *, bias: bool = False
    ) -> None:
        super().__init__(engine, f"{what} backward weights", tiling, strides, first, step, bias=bias, backward=True)

    def bind(self, x: Array, dy: Array, weight: Array, bias: Array | None, scratch: Array) -> Work:
        """The gradients on fixed memory."""
        room, tiling, plain = self._scratch.room(scratch), self._tiling, weight.reshape(-1)
        works: list[Work] = []
        for start, count in tiling.chunks():
            chunk = self._chunks[count]
            works += chunk.read(self._images(x, start, tiling.channels_in, tiling.size), room)
            works += chunk.read_gradient(self._images(dy, start, tiling.channels_out, tiling.output_size), room)
            works += self._products[count].bind(room, bias if start == 0 else room.bias)
            if start and bias is not None:
                works.append(partial(np.add, bias, room.bias, bias))
            transform = _Matrix(self._engine, self._what, np.kron(_G.T, _G.T), self._items, add=start > 0)
            works.append(transform.bind(room.weights, room.taps, room.library))
        store = Copy(self._engine, f"{self._what} weights", self._weights, self._plain_weights)
        works += [store.bind(room.taps[tap * self._items :], plain[at:]) for tap, at in enumerate(self._taps)]
        return Works(works)
