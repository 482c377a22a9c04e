"""3x3 convolutions of stride 1 with 16 multiplications instead of 36 (Winograd's F(2x2, 3x3); Lavin and Gray 2016).

oneDNN has no such kernel in float32 on x86-64, so the convolution is composed of oneDNN's primitives, which use its threads.
Strided reorders gather the image's overlapping 4x4 tiles, and products with small constant matrices transform them. Between the
transforms are 16 1x1 convolutions, oneDNN's fastest kernels. Images have blocked channels, and all primitives move whole blocks.

Kronecker products turn each two-sided transform into one product with a small constant matrix. Over tile positions:
    forward   y = (At x At) [(G x G) w . (Bt x Bt) patches]                                   section 4.1, eq. 8
    weights   dw = (Gt x Gt) sum over tiles [(A x A) dy . (Bt x Bt) patches]                  its adjoint
The input's gradient is the forward convolution of dy with the flipped and transposed kernel.

`Tiling` divides images into tiles and chunks of tiles, and `ScratchPlan` assigns scratch to their arrays. `Patches`, `Outputs`
and `OutputGradients` move a chunk of tiles between images and their transforms. `Product` and `WeightGradient` are the
convolutions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from hpctrain.backend.onednn import constants as c
from hpctrain.backend.onednn.binding import Attributes, Descriptor, Engine, Primitive
from hpctrain.backend.onednn.operator import Copy, Regions, allocate, convolution_geometry, vector
from hpctrain.backend.operators import Array
from hpctrain.backend.specs import Edges, Pair, Window

# Maximum size of the tiles of a chunk. Each chunk reads all weights and sums all their gradients: smaller chunks took longer at
# 512 channels and gained nothing elsewhere, larger ones gained nothing (measured).
_CHUNK_BYTES = 48 << 20


@dataclass(frozen=True)
class Form:
    """The shape of a chunk: tiles (images, rows, columns), and their rows of x and y.

    Primitives are created for a shape. Chunks of one form share them, and a convolution has only few forms.

    Attributes:
        above: number of rows of zeros above the first row of x.
        read: number of rows of x in each image.
        written: number of rows of y in each image.
    """

    images: int
    rows: int
    columns: int
    above: int
    read: int
    written: int

    @property
    def tiles(self) -> int:
        return self.images * self.rows * self.columns

    @property
    def padded(self) -> Pair:
        """Rows and columns that the tiles of an image read, zeros included."""
        return 2 * self.rows + 2, 2 * self.columns + 2


@dataclass(frozen=True)
class Chunk:
    """Tiles that are processed together: the first image, and the first row of x and of y in each of its images."""

    image: int
    read_row: int
    write_row: int
    form: Form


@dataclass(frozen=True)
class Tiling:
    """The tiles of a convolution: y (N, Ho, Wo, K) = conv(x (N, H, W, C)), with kernel 3x3 and stride 1.

    Attributes:
        size: (H, W) of x.
        block: number of channels in a block of the layout of x and y.
        tag: oneDNN's name of the layout.
    """

    batch: int
    size: Pair
    channels_in: int
    channels_out: int
    padding: Edges
    block: int
    tag: str  # oneDNN's name of the format

    @property
    def output_size(self) -> Pair:
        top, bottom, left, right = self.padding
        return self.size[0] + top + bottom - 2, self.size[1] + left + right - 2

    @property
    def tiles(self) -> Pair:
        """Rows and columns of tiles of 2x2 outputs. The last ones may extend beyond the edge."""
        height, width = self.output_size
        return -(-height // 2), -(-width // 2)

    @property
    def items(self) -> tuple[int, int, int]:
        """Number of floats of one tile: before and after the transform of x, and before the transform of y."""
        # The first array contains the patches of x and later the 2x2 outputs of y, never both at once.
        return max(16 * self.channels_in, 4 * self.channels_out), 16 * self.channels_in, 16 * self.channels_out

    def chunks(self) -> list[Chunk]:
        """Return chunks of all tiles.

        A chunk has as many whole images as fit. If none fits, it has as many rows of tiles of one image as fit, at least one.
        """
        # A row of tiles takes memory for its tiles before and after transforms, and for two rows of the padded images. Each
        # chunk has two more padded rows, since 4x4 patches of 2x2 outputs overlap by two.
        rows, columns = self.tiles
        edge = 4 * self.channels_in * (2 * columns + 2)
        row = 4 * columns * sum(self.items) + 2 * edge
        images, fitting = _CHUNK_BYTES // (rows * row + 2 * edge), (_CHUNK_BYTES - 2 * edge) // row
        if images:
            return [self._chunk(start, count, 0, rows) for start, count in _parts(self.batch, images)]
        cut = list(_parts(rows, max(1, fitting)))
        return [self._chunk(image, 1, start, count) for image in range(self.batch) for start, count in cut]

    def _chunk(self, image: int, images: int, row: int, rows: int) -> Chunk:
        """Return the chunk of tile rows [row, row + rows).

        Only the first rows of an image read zeros above it, and only the last rows may extend beyond its end.
        """
        # Rows of x that the patches cover. Rows outside the image are zeros in `scratch.padded`.
        begin, end = 2 * row - self.padding[0], 2 * (row + rows) + 2 - self.padding[0]
        read_row = max(0, begin)
        read = min(end, self.size[0]) - read_row
        assert read > 0, self
        written = min(2 * rows, self.output_size[0] - 2 * row)
        return Chunk(image, read_row, 2 * row, Form(images, rows, self.tiles[1], read_row - begin, read, written))

    def pays(self, direct_speed: float) -> bool:
        """Return whether Winograd is faster than a direct kernel with `direct_speed` times the speed of the 1x1 kernels.

        Compares numbers of operations. Those of a transform are weighted by their time, as measured with AVX2: 130 for each
        element of a tile of x, 40 for y and 65 for the weights. The rule is fixed rather than measured at run time, so that all
        ranks choose alike.
        """
        product = self.channels_in * self.channels_out
        transforms = 130 * self.channels_in + 40 * self.channels_out
        tiles = self.batch * math.prod(self.tiles)
        winograd = 16 * tiles * (2 * product + transforms) + 16 * 65 * product
        height, width = self.output_size
        return winograd < 18 * product * self.batch * height * width / direct_speed


def _parts(total: int, limit: int) -> Iterator[tuple[int, int]]:
    """Yield (start, count) of the fewest parts of at most `limit`. Counts differ by at most one, larger ones first."""
    number = -(-total // limit)
    start = 0
    for part in range(number):
        count = total // number + (part < total % number)
        yield start, count
        start += count


@dataclass
class WinogradScratch:
    """The float32 scratch of one convolution.

    Attributes:
        library: scratchpad of the library (uint8).
        weights: weights by tile position (16).
        bias: bias gradient of one chunk.
        taps: weights by tap (9).
        padded: images of a chunk, surrounded by zeros.
        plain: tiles before the transform of x or dy, or after the transform of y.
        left: transformed tiles of x.
        right: transformed tiles of y or dy.
    """

    library: Array
    weights: Array
    bias: Array
    taps: Array
    padded: Array
    plain: Array
    left: Array
    right: Array


class ScratchPlan:
    """The division of a buffer into the arrays of `WinogradScratch`.

    Args:
        forms: forms of the chunks. All chunks use the same scratch for tiles, one after another.
        taps_alone: whether no tiles are in scratch while `taps` is in use, so that both may share memory.
    """

    def __init__(
        self, tiling: Tiling, forms: Sequence[Form], weight_items: int, primitives: Sequence[Primitive], taps_alone: bool
    ) -> None:
        tiles = max(form.tiles for form in forms)
        padded = tiling.channels_in * max(form.images * math.prod(form.padded) for form in forms)
        regions = Regions()
        self._library = regions.add(max(primitive.scratchpad_bytes for primitive in primitives))
        self._places = [regions.add(4 * count) for count in (16 * weight_items, tiling.channels_out)]
        taps = regions.add(4 * 9 * weight_items)
        of_tiles = Regions(taps.start if taps_alone else regions.total_bytes)
        self._places += [taps, *(of_tiles.add(4 * count) for count in (padded, *(tiles * items for items in tiling.items)))]
        self.total_bytes = max(regions.total_bytes, of_tiles.total_bytes)

    def carve(self, buffer: Array) -> WinogradScratch:
        """Return the planned arrays as views of a buffer of `total_bytes`."""
        return WinogradScratch(buffer[self._library], *(buffer[place].view(np.float32) for place in self._places))


Work = Callable[[], object]

# Transforms of the input (B^T), output (A^T) and, below, weights (G): Lavin and Gray 2016, section 4.1, eq. 8.
_BT = np.array([[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1]], np.float32)
_AT = np.array([[1, 1, 1, 0], [0, 1, -1, -1]], np.float32)


class Matrix:
    """Product with a constant matrix: target (rows, items) = matrix (rows, columns) @ source (columns, items).

    Args:
        relu: whether a ReLU follows.
        add: whether the product is added to the target.
    """

    def __init__(
        self, engine: Engine, label: str, matrix: np.ndarray, items: int, *, relu: bool = False, add: bool = False
    ) -> None:
        rows, columns = matrix.shape
        self._constant = allocate(matrix.nbytes).view(np.float32).reshape(matrix.shape)
        self._constant[...] = matrix
        self._formats = [Descriptor.strided(engine, s, (s[1], 1)) for s in ((rows, columns), (columns, items), (rows, items))]
        left, source, target = self._formats
        attributes = Attributes(engine, relu=relu, kept=float(add))
        self.primitive = Primitive(engine, "matmul", f"{label}, transform", left, source, None, target, attributes)

    def bind(self, source: Array, target: Array, library: Array) -> Work:
        arrays = (self._constant, source, target)
        arguments = zip((c.ARG_SRC, c.ARG_WEIGHTS, c.ARG_DST), self._formats, arrays, strict=True)
        return self.primitive.bind({kind: (form, array) for kind, form, array in arguments}, library)


class _Grid:
    """Strided copies between the tiles of one form and the pixels of their images, both as (images, channels, rows, columns)."""

    def __init__(self, engine: Engine, label: str, tiling: Tiling, form: Form, channels: int) -> None:
        self._engine, self._label, self._form, self._channels = engine, f"{label}, tiles", form, channels
        self.block = tiling.block

    @property
    def by_tile(self) -> tuple[int, ...]:
        """Strides in elements of (image, block, row, column), for tiles that are contiguous in memory."""
        form, block = self._form, self.block
        return form.rows * form.columns * block, form.tiles * block, form.columns * block, block

    def by_pixel(self, size: Pair, spread: int = 1) -> tuple[int, ...]:
        """Return the strides in elements of (image, block, row, column), for every `spread`-th pixel of images of `size`."""
        row = size[1] * self.block
        return self._channels * size[0] * size[1], size[0] * row, spread * row, spread * self.block

    def copy(self, size: Pair, source: Sequence[int], target: Sequence[int], *, accumulate: bool = False) -> Copy:
        """Return a reorder of `size` (rows, columns) of all images and channels, from strides `source` to strides `target`."""
        shape = (self._form.images, self._channels // self.block, *size, self.block)
        forms = [Descriptor.strided(self._engine, shape, (*strides, 1)) for strides in (source, target)]
        return Copy(self._engine, self._label, forms[0], forms[1], accumulate=accumulate)


class Patches:
    """Transform of x for the chunks of one form: scratch.left = (Bt x Bt) of the overlapping 4x4 patches of x.

    A reorder gathers one of the 16 positions of all patches, with stride 2 between tiles. It cannot skip the parts of patches
    outside an image, so the chunk's part of x is first copied to `scratch.padded`, surrounded by zeros, where every patch is
    complete.
    """

    def __init__(self, engine: Engine, label: str, tiling: Tiling, form: Form) -> None:
        channels = tiling.channels_in
        grid = _Grid(engine, label, tiling, form, channels)
        height, width = form.padded
        image, padded = grid.by_pixel(tiling.size), grid.by_pixel(form.padded)
        _, _, row, column = padded
        self._image, self._row = image[0], image[2]
        self._inside = grid.copy((form.read, tiling.size[1]), image, padded)
        self._gather = grid.copy((form.rows, form.columns), grid.by_pixel(form.padded, 2), grid.by_tile)
        self._begin = form.above * row + tiling.padding[2] * column
        self._items, self._all = channels * form.tiles, form.images * channels * height * width
        self._corners = [position // 4 * row + position % 4 * column for position in range(16)]
        self._transform = Matrix(engine, label, np.kron(_BT, _BT), self._items)
        self.primitives = [self._transform.primitive]

    def load(self, chunk: Chunk, x: Array, scratch: WinogradScratch) -> list[Work]:
        """Return the calls that write the chunk's part of x, surrounded by zeros, to scratch.padded."""
        # Scratch is not zeroed, and other chunks and operators write to it.
        first = x.reshape(-1)[chunk.image * self._image + chunk.read_row * self._row :]
        return [partial(scratch.padded[: self._all].fill, 0.0), self._inside.bind(first, scratch.padded[self._begin :])]

    def transform(self, scratch: WinogradScratch) -> list[Work]:
        """Return the calls that follow `load`. All chunks of the form share them."""
        gathers = [
            self._gather.bind(scratch.padded[corner:], scratch.plain[position * self._items :])
            for position, corner in enumerate(self._corners)
        ]
        return [*gathers, self._transform.bind(scratch.plain, scratch.left, scratch.library)]


class _Corners:
    """The four outputs of each tile in y, or in its gradient."""

    def __init__(self, engine: Engine, label: str, tiling: Tiling, form: Form) -> None:
        self._form, (self._height, self._width) = form, tiling.output_size
        self._grid = _Grid(engine, label, tiling, form, tiling.channels_out)
        self._by_pixel = self._grid.by_pixel(tiling.output_size, 2)
        self._items = tiling.channels_out * form.tiles

    @property
    def overhang(self) -> bool:
        """Whether some tiles extend beyond the edge."""
        return bool(self._form.written % 2 or self._width % 2)

    def _places(self) -> Iterator[tuple[int, int, Pair]]:
        """Yield (offset from the tiles' start, offset from the chunk's first element in an image, (rows, columns)).

        Offsets are in elements. oneDNN treats a row as long as its stride. The last row of an image, unless another row follows,
        would therefore end outside of the image, and is copied separately. The same holds for the last pixel of an image of one
        row.
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
        """Return (copy to tiles, offset from the chunk's first element in an image, offset from the tiles' start)."""
        return [(self._grid.copy(size, self._by_pixel, self._grid.by_tile), start, at) for at, start, size in self._places()]

    def scattering(self, accumulate: bool) -> list[tuple[Copy, int, int]]:
        """Return the tuples of `gathering`, but with copies from tiles to pixels."""
        by_tile = self._grid.by_tile
        return [
            (self._grid.copy(size, by_tile, self._by_pixel, accumulate=accumulate), start, at)
            for at, start, size in self._places()
        ]

    def first(self, chunk: Chunk, y: Array) -> Array:
        """Return y as a flat view that begins at the chunk's first output."""
        return y.reshape(-1)[chunk.image * self._by_pixel[0] + chunk.write_row * self._width * self._grid.block :]


class Outputs:
    """Inverse transform to y for the chunks of one form: y = (At x At) scratch.right, or y += with `accumulate`.

    The transform writes the 2x2 outputs of each tile, position by position. A reorder scatters one of the four positions to every
    second pixel, except beyond the edge.
    """

    def __init__(self, engine: Engine, label: str, tiling: Tiling, form: Form, *, relu: bool) -> None:
        self._corners = _Corners(engine, label, tiling, form)
        self._transform = Matrix(engine, label, np.kron(_AT, _AT), tiling.channels_out * form.tiles, relu=relu)
        self._copies: dict[bool, list[tuple[Copy, int, int]]] = {}
        self.primitives = [self._transform.primitive]

    def transform(self, scratch: WinogradScratch) -> list[Work]:
        """Return the call of the transform, which precedes `store`. All chunks of the form share it."""
        return [self._transform.bind(scratch.right, scratch.plain, scratch.library)]

    def store(self, chunk: Chunk, y: Array, scratch: WinogradScratch, *, accumulate: bool) -> list[Work]:
        """Return the calls that write the chunk's part of y."""
        if accumulate not in self._copies:
            self._copies[accumulate] = self._corners.scattering(accumulate)
        first = self._corners.first(chunk, y)
        return [copy.bind(scratch.plain[at:], first[start:]) for copy, start, at in self._copies[accumulate]]


class OutputGradients:
    """Transform of dy for the chunks of one form: scratch.right = (A x A) dy."""

    def __init__(self, engine: Engine, label: str, tiling: Tiling, form: Form) -> None:
        self._corners = _Corners(engine, label, tiling, form)
        self._copies = self._corners.gathering()
        self._items = tiling.channels_out * form.tiles
        self._transform = Matrix(engine, label, np.kron(_AT.T, _AT.T), self._items)
        self.primitives = [self._transform.primitive]

    def load(self, chunk: Chunk, dy: Array, scratch: WinogradScratch) -> list[Work]:
        """Return the calls that copy the chunk's part of dy to scratch.plain."""
        works: list[Work] = []
        if self._corners.overhang:  # outputs over the edge do not exist, so their gradients are zero
            works.append(partial(scratch.plain[: 4 * self._items].fill, 0.0))
        first = self._corners.first(chunk, dy)
        return [*works, *(copy.bind(first[start:], scratch.plain[at:]) for copy, start, at in self._copies)]

    def transform(self, scratch: WinogradScratch) -> list[Work]:
        """Return the calls that follow `load`. All chunks of the form share them."""
        return [self._transform.bind(scratch.plain, scratch.right, scratch.library)]


_G = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]], np.float32)

# Tile position (1, 1) has the coefficient 1 in all four outputs. A bias added there reaches each of them once, and (A x A) dy
# there is the sum of the four gradients, so the product of that position also computes the bias gradient.
_BIAS_POSITION = 5


class CallSequence:
    """Prepared calls that are executed one after another."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = tuple(works)

    def __call__(self) -> None:
        for work in self._works:
            work()


class _Products:
    """The 16 1x1 convolutions between the tiles of one chunk, forward or for the weights' gradient."""

    def __init__(
        self, engine: Engine, label: str, tiling: Tiling, tiles: int, *, weights: Descriptor | None, bias: bool, backward: bool
    ) -> None:
        self._tiling, self._tiles = tiling, tiles
        k, channels = tiling.channels_out, tiling.channels_in
        self._left = Descriptor.tagged(engine, (1, channels, self._tiles, 1), tiling.tag)
        self._right = Descriptor.tagged(engine, (1, k, self._tiles, 1), tiling.tag)
        self._bias, self._backward = vector(engine, k), backward
        geometry, attributes = convolution_geometry(Window((1, 1), (1, 1), (0, 0, 0, 0))), Attributes(engine)

        def make(weights: Descriptor, with_bias: bool) -> Primitive:
            formats = (self._left, weights, self._bias if with_bias else None, self._right)
            head = (c.FORWARD_TRAINING, c.CONVOLUTION_DIRECT)
            if not backward:
                return Primitive(engine, "convolution_forward", label, *head, *formats, *geometry, attributes)
            # oneDNN requires a forward primitive as a hint, with a weight format that it chooses.
            free = Descriptor.tagged(engine, (k, channels, 1, 1), "any")
            hint = Primitive(
                engine, "convolution_forward", label, *head, self._left, free, formats[2], self._right, *geometry, attributes
            )
            return Primitive(engine, "convolution_backward_weights", label, head[1], *formats, *geometry, hint, attributes)

        wanted = weights if weights is not None else Descriptor.tagged(engine, (k, channels, 1, 1), "any")
        self.plain = make(wanted, False)
        self.weights = self.plain.descriptor(c.QUERY_DIFF_WEIGHTS_MD if backward else c.QUERY_WEIGHTS_MD)
        # Both primitives read the same weights, so the second must use the format that the first has chosen.
        self.biased = make(self.weights, True) if bias else None
        self.weight_items = self.weights.size_bytes // 4

    @property
    def primitives(self) -> list[Primitive]:
        return [self.plain] if self.biased is None else [self.plain, self.biased]

    def bind(self, scratch: WinogradScratch, bias: Array | None) -> list[Work]:
        tiling, works = self._tiling, list[Work]()
        names = (
            (c.ARG_SRC, c.ARG_DIFF_WEIGHTS, c.ARG_DIFF_DST, c.ARG_DIFF_BIAS)
            if self._backward
            else (c.ARG_SRC, c.ARG_WEIGHTS, c.ARG_DST, c.ARG_BIAS)
        )
        for position in range(16):
            memories = {
                names[0]: (self._left, scratch.left[position * tiling.channels_in * self._tiles :]),
                names[1]: (self.weights, scratch.weights[position * self.weight_items :]),
                names[2]: (self._right, scratch.right[position * tiling.channels_out * self._tiles :]),
            }
            primitive = self.plain
            if position == _BIAS_POSITION and self.biased is not None:
                primitive = self.biased
                memories[names[3]] = (self._bias, bias)
            works.append(primitive.bind(memories, scratch.library))
        return works


class _Winograd:
    """Base of `Product` and `WeightGradient`: kernels for each form of chunk, scratch, and the offsets of the weights by tap.

    Args:
        strides: strides of the weights along (out, in), in elements.
        first: offset of tap (0, 0) in the weights, in elements.
        step: distance from each tap to the next in row order, in elements.
    """

    def __init__(
        self, engine: Engine, label: str, tiling: Tiling, strides: Pair, first: int, step: int, *, bias: bool, backward: bool
    ) -> None:
        self._engine, self._label, self._tiling = engine, f"{label} by Winograd", tiling
        self._taps = [first + tap * step for tap in range(9)]
        self._chunks = tiling.chunks()
        self._forms: list[Form] = list(dict.fromkeys(chunk.form for chunk in self._chunks))
        self._patches = {form: Patches(engine, self._label, tiling, form) for form in self._forms}
        self._products: dict[int, _Products] = {}
        weights: Descriptor | None = None
        # All chunks share the weights in scratch, so all products use the format of the first.
        for tiles in dict.fromkeys(form.tiles for form in self._forms):
            made = _Products(engine, self._label, tiling, tiles, weights=weights, bias=bias, backward=backward)
            self._products[tiles], weights = made, made.weights
        assert weights is not None
        self._weights, self._items = weights, weights.size_bytes // 4
        # A dim of one element may have any stride that is at least as large as the others.
        shape = (tiling.channels_out, tiling.channels_in, 1, 1)
        self._plain_weights = Descriptor.strided(engine, shape, (*strides, max(strides), max(strides)))

    def _place(self, primitives: Sequence[Primitive], *, taps_alone: bool) -> None:
        """Plan the scratch.

        Args:
            primitives: primitives of the subclass, in addition to those of this class.
        """
        shared = [each for parts in (self._products, self._patches) for part in parts.values() for each in part.primitives]
        self._scratch_plan = ScratchPlan(self._tiling, self._forms, self._items, [*shared, *primitives], taps_alone)
        self.scratch_bytes = self._scratch_plan.total_bytes


class Product(_Winograd):
    """Forward convolution by Winograd: y = conv(x, w) + bias, then ReLU; or y += conv(x, w)."""

    def __init__(
        self,
        engine: Engine,
        label: str,
        tiling: Tiling,
        strides: Pair,
        first: int,
        step: int,
        *,
        bias: bool = False,
        relu: bool = False,
    ) -> None:
        super().__init__(engine, label, tiling, strides, first, step, bias=bias, backward=False)
        self._outputs = {form: Outputs(engine, self._label, tiling, form, relu=relu) for form in self._forms}
        self._transform = Matrix(engine, self._label, np.kron(_G, _G), self._items)
        primitives = [primitive for outputs in self._outputs.values() for primitive in outputs.primitives]
        self._place([*primitives, self._transform.primitive], taps_alone=True)

    def bind(
        self,
        x: Array,
        weight: Array,
        bias: Array | None,
        y: Array,
        buffer: Array,
        *,
        accumulate: bool = False,
        leader: tuple[Product, Array] | None = None,
    ) -> Work:
        """Return the convolution, including the transform of the weights, as a call on fixed memory.

        Args:
            leader: another convolution and its buffer. It has the same weights and always runs just before this one, which reads
                its transformed weights if their format is the same.
        """
        scratch, works = self._scratch_plan.carve(buffer), list[Work]()
        if leader is not None and self._weights.equals(leader[0]._weights):
            scratch = replace(scratch, weights=leader[0]._scratch_plan.carve(leader[1]).weights)
        else:
            works += self._load(weight.reshape(-1), scratch)
        between = {form: self._between(form, bias, scratch) for form in self._forms}
        for chunk in self._chunks:
            works += self._patches[chunk.form].load(chunk, x, scratch)
            works += between[chunk.form]
            works += self._outputs[chunk.form].store(chunk, y, scratch, accumulate=accumulate)
        return CallSequence(works)

    def _load(self, plain: Array, scratch: WinogradScratch) -> list[Work]:
        """Return the calls that compute scratch.weights = (G x G) weights."""
        copy = Copy(self._engine, f"{self._label} weights", self._plain_weights, self._weights)
        works: list[Work] = [copy.bind(plain[at:], scratch.taps[tap * self._items :]) for tap, at in enumerate(self._taps)]
        return [*works, self._transform.bind(scratch.taps, scratch.weights, scratch.library)]

    def _between(self, form: Form, bias: Array | None, scratch: WinogradScratch) -> list[Work]:
        """Return the calls between `load` and `store` of a chunk. All chunks of one form share them."""
        transforms, products = self._patches[form].transform(scratch), self._products[form.tiles].bind(scratch, bias)
        return [*transforms, *products, *self._outputs[form].transform(scratch)]


class WeightGradient(_Winograd):
    """Gradients of the weights, and of the bias if there is one, by Winograd from x and dy."""

    def __init__(
        self, engine: Engine, label: str, tiling: Tiling, strides: Pair, first: int, step: int, *, bias: bool = False
    ) -> None:
        super().__init__(engine, f"{label} backward weights", tiling, strides, first, step, bias=bias, backward=True)
        self._gradients = {form: OutputGradients(engine, self._label, tiling, form) for form in self._forms}
        primitives = [primitive for gradients in self._gradients.values() for primitive in gradients.primitives]
        back = np.kron(_G.T, _G.T)
        self._write, self._add = (Matrix(engine, self._label, back, self._items, add=add) for add in (False, True))
        # With several chunks, the gradients in `taps` are kept while tiles are written and read.
        self._place([*primitives, self._write.primitive, self._add.primitive], taps_alone=len(self._chunks) == 1)

    def bind(self, x: Array, dy: Array, weight: Array, bias: Array | None, buffer: Array) -> Work:
        """Return the gradients as a call on fixed memory."""
        scratch, plain = self._scratch_plan.carve(buffer), weight.reshape(-1)
        patches = {form: self._patches[form].transform(scratch) for form in self._forms}
        adding = {form: self._gradients_of(form, bias, scratch, add=True) for form in {chunk.form for chunk in self._chunks[1:]}}
        works: list[Work] = []
        for number, chunk in enumerate(self._chunks):
            works += [*self._patches[chunk.form].load(chunk, x, scratch), *patches[chunk.form]]
            works += self._gradients[chunk.form].load(chunk, dy, scratch)
            works += adding[chunk.form] if number else self._gradients_of(chunk.form, bias, scratch, add=False)
        store = Copy(self._engine, f"{self._label} weights", self._weights, self._plain_weights)
        works += [store.bind(scratch.taps[tap * self._items :], plain[at:]) for tap, at in enumerate(self._taps)]
        return CallSequence(works)

    def _gradients_of(self, form: Form, bias: Array | None, scratch: WinogradScratch, *, add: bool) -> list[Work]:
        """Return the calls after a chunk is loaded, which write the gradients, or add them to the gradients of earlier chunks."""
        products = self._products[form.tiles].bind(scratch, scratch.bias if add else bias)
        works = [*self._gradients[form].transform(scratch), *products]
        if add and bias is not None:
            works.append(partial(np.add, bias, scratch.bias, bias))
        transform = self._add if add else self._write
        return [*works, transform.bind(scratch.weights, scratch.taps, scratch.library)]
