"""3x3 convolutions of stride 1 with 16 multiplications instead of 36 (Winograd's F(2x2, 3x3); Lavin and Gray 2016).

oneDNN has no such kernel in float32 on x86-64, so the convolution is composed of oneDNN's primitives, which use its threads.
Strided reorders gather the image's overlapping 4x4 tiles, and products with small constant matrices transform them. Between the
transforms runs one batch of 16 matrix products. Images have blocked channels, and all reorders of images move whole blocks.

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
from hpctrain.backend.onednn.operator import Copy, Regions, allocate
from hpctrain.backend.operators import Array
from hpctrain.backend.specs import Edges, Pair

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
    """

    batch: int  # N
    size: Pair
    channels_in: int  # C
    channels_out: int  # K
    padding: Edges
    block: int

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

    @property
    def operation_share(self) -> float:
        """Number of operations relative to that of a direct kernel.

        Operations of a transform are weighted by their time, as measured with AVX2: 130 for each element of a tile of x, 40 for y
        and 65 for the weights.
        """
        product = self.channels_in * self.channels_out
        transforms = 130 * self.channels_in + 40 * self.channels_out
        tiles = self.batch * math.prod(self.tiles)
        direct = 18 * product * self.batch * math.prod(self.output_size)
        return (16 * tiles * (2 * product + transforms) + 16 * 65 * product) / max(1, direct)

    def pays(self, direct_speed: float) -> bool:
        """Return whether Winograd is faster than a direct kernel with `direct_speed` times the speed of Winograd's products.

        The rule is fixed rather than measured at run time, so that all ranks choose alike.
        """
        return self.operation_share * direct_speed < 1


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
        taps: weights by tap (9).
        padded: images of a chunk, surrounded by zeros.
        plain: tiles before the transform of x or dy, or after the transform of y.
        left: transformed tiles of x.
        right: transformed tiles of y or dy.
    """

    library: Array
    weights: Array
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
        self._places = [regions.add(4 * 16 * weight_items)]
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
    """Strided copies between the tiles of one form and the pixels of their images.

    Tiles are an array (positions, tiles, channels): a matrix for each position in a tile. Images have blocked channels. Copies
    see both as (images, channel blocks, rows, columns, channels of a block).
    """

    def __init__(self, engine: Engine, label: str, tiling: Tiling, form: Form, channels: int) -> None:
        self._engine, self._label, self._form, self._channels = engine, f"{label}, tiles", form, channels
        self.block = tiling.block

    @property
    def by_tile(self) -> tuple[int, ...]:
        """Strides in elements of (image, block, row of tiles, column of tiles), within the matrix of one position."""
        form, channels = self._form, self._channels
        return form.rows * form.columns * channels, self.block, form.columns * channels, channels

    def by_pixel(self, size: Pair, spread: int = 1) -> tuple[int, ...]:
        """Return the strides in elements of (image, block, row, column), for every `spread`-th pixel of images of `size`."""
        row = size[1] * self.block
        return self._channels * size[0] * size[1], size[0] * row, spread * row, spread * self.block

    def copy(self, size: Sequence[int], source: Sequence[int], target: Sequence[int], *, accumulate: bool = False) -> Copy:
        """Return a reorder of all images and channels from strides `source` to strides `target`.

        Args:
            size: number of rows and of columns, then the sizes of any further dims.
            source: strides in elements of (image, block, row, column), then of the further dims.
            target: strides in the same order.
        """
        shape = (self._form.images, self._channels // self.block, *size, self.block)
        forms = [Descriptor.strided(self._engine, shape, (*strides, 1)) for strides in (source, target)]
        return Copy(self._engine, self._label, forms[0], forms[1], accumulate=accumulate)


class Patches:
    """Transform of x for the chunks of one form: scratch.left = (Bt x Bt) of the overlapping 4x4 patches of x.

    Four reorders each gather 2x2 of the 16 positions of all patches. One reorder of all 16 would read neighbouring patches, which
    overlap, as one strided array. A reorder cannot skip the parts of patches outside an image, so the chunk's part of x is first
    copied to `scratch.padded`, surrounded by zeros, where every patch is complete.
    """

    def __init__(self, engine: Engine, label: str, tiling: Tiling, form: Form) -> None:
        channels = tiling.channels_in
        grid = _Grid(engine, label, tiling, form, channels)
        height, width = form.padded
        image, padded = grid.by_pixel(tiling.size), grid.by_pixel(form.padded)
        _, _, row, column = padded
        self._image, self._row = image[0], image[2]
        self._inside = grid.copy((form.read, tiling.size[1]), image, padded)
        self._begin = form.above * row + tiling.padding[2] * column
        self._items, self._padded = channels * form.tiles, (form.images, channels // tiling.block, height, width, tiling.block)
        top, left, right = form.above, tiling.padding[2], tiling.padding[2] + tiling.size[1]
        inside = slice(top, top + form.read)
        every = slice(None)
        rows, columns = (slice(0, top), slice(inside.stop, None)), (slice(0, left), slice(right, None))
        self._borders = [*((outside, every) for outside in rows), *((inside, outside) for outside in columns)]
        source, target = (*grid.by_pixel(form.padded, 2), row, column), (*grid.by_tile, 4 * self._items, self._items)
        self._gather = grid.copy((form.rows, form.columns, 2, 2), source, target)
        quarters = [(down, right) for down in (0, 2) for right in (0, 2)]
        self._corners = [(down * row + right * column, (4 * down + right) * self._items) for down, right in quarters]
        self._transform = Matrix(engine, label, np.kron(_BT, _BT), self._items)
        self.primitives = [self._transform.primitive]

    def load(self, chunk: Chunk, x: Array, scratch: WinogradScratch) -> list[Work]:
        """Return the calls that write the chunk's part of x, surrounded by zeros, to scratch.padded."""
        first = x.reshape(-1)[chunk.image * self._image + chunk.read_row * self._row :]
        padded = scratch.padded[: math.prod(self._padded)].reshape(self._padded)
        borders = [padded[:, :, rows, columns] for rows, columns in self._borders]
        # Scratch is not zeroed, and other chunks and operators write to it.
        zeros = [partial(border.fill, 0.0) for border in borders if border.size]
        return [*zeros, self._inside.bind(first, scratch.padded[self._begin :])]

    def transform(self, scratch: WinogradScratch) -> list[Work]:
        """Return the calls that follow `load`. All chunks of the form share them."""
        gathers = [self._gather.bind(scratch.padded[corner:], scratch.plain[place:]) for corner, place in self._corners]
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

    def _copies(self, gathering: bool, accumulate: bool = False) -> Iterator[tuple[Copy, int, int]]:
        """Yield (copy, offset from the chunk's first element in an image, offset from the tiles' start), in elements.

        One copy moves all four outputs of every tile, unless some tiles extend beyond the edge. Otherwise, each of the four
        outputs has its own copies. oneDNN treats a row as long as its stride. The last row of an image, unless another row
        follows, would therefore end outside of the image, and is copied separately. The same holds for the last pixel of an image
        of one row.

        Args:
            gathering: whether pixels are copied to tiles; otherwise tiles to pixels.
            accumulate: whether values are added to the target.
        """
        height, width, block, by_tile, by_pixel = (
            self._form.written,
            self._width,
            self._grid.block,
            self._grid.by_tile,
            self._by_pixel,
        )
        if not self.overhang:
            by_tile, by_pixel = (*by_tile, 2 * self._items, self._items), (*by_pixel, width * block, block)
            source, target = (by_pixel, by_tile) if gathering else (by_tile, by_pixel)
            yield self._grid.copy((height // 2, width // 2, 2, 2), source, target, accumulate=accumulate), 0, 0
            return
        source, target = (by_pixel, by_tile) if gathering else (by_tile, by_pixel)
        for number in range(4):
            down, right = number // 2, number % 2
            rows, columns = (height + 1 - down) // 2, (width + 1 - right) // 2
            together = rows if 2 * rows <= height else rows - 1
            near = columns if 2 * columns <= width or self._height > 1 else columns - 1
            for first, count in ((0, together), (together, rows - together)):
                for left, many in ((0, near), (near, columns - near)):
                    if count and many:
                        tile = number * self._items + first * by_tile[2] + left * by_tile[3]
                        copy = self._grid.copy((count, many), source, target, accumulate=accumulate)
                        yield copy, ((2 * first + down) * width + 2 * left + right) * block, tile

    def gathering(self) -> list[tuple[Copy, int, int]]:
        """Return (copy to tiles, offset from the chunk's first element in an image, offset from the tiles' start)."""
        return list(self._copies(True))

    def scattering(self, accumulate: bool) -> list[tuple[Copy, int, int]]:
        """Return the tuples of `gathering`, but with copies from tiles to pixels."""
        return list(self._copies(False, accumulate))

    def first(self, chunk: Chunk, y: Array) -> Array:
        """Return y as a flat view that begins at the chunk's first output."""
        return y.reshape(-1)[chunk.image * self._by_pixel[0] + chunk.write_row * self._width * self._grid.block :]


class Outputs:
    """Inverse transform to y for the chunks of one form: y = (At x At) scratch.right, or y += with `accumulate`.

    The transform writes the 2x2 outputs of each tile, position by position. Reorders scatter them to the pixels, but not beyond
    the edge.
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
        """Return the calls that write the chunk's part of y, or add to it."""
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
# there is the sum of the four gradients, so the bias gradient is its sum over the tiles.
_BIAS_POSITION = 5


class CallSequence:
    """Prepared calls that are executed one after another."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = tuple(works)

    def __call__(self) -> None:
        for work in self._works:
            work()


class _Products:
    """The batch of 16 matrix products of one chunk, one for each position in a tile, forward or for the weights' gradient.

    Forward: right (16, tiles, K) = left (16, tiles, C) @ weights (16, C, K), plus the bias. Backward: weights (16, K, C) =
    transposed right (16, K, tiles) @ left (16, tiles, C), and the gradient of the bias.
    """

    def __init__(
        self, engine: Engine, label: str, tiling: Tiling, tiles: int, *, weights: Descriptor | None, bias: bool, backward: bool
    ) -> None:
        k, channels = tiling.channels_out, tiling.channels_in
        self._tiles_out = tiles * k
        self._backward, self._bias = backward, None
        strided, label = partial(Descriptor.strided, engine), f"{label}, products"
        if backward:
            right = strided((16, k, tiles), (tiles * k, 1, k))
            self._formats = right, strided((16, tiles, channels), (tiles * channels, channels, 1))
            self._target = strided((16, k, channels), (k * channels, channels, 1))
        else:
            free = Descriptor.tagged(engine, (16, channels, k), "any") if weights is None else weights
            self._formats = strided((16, tiles, channels), (tiles * channels, channels, 1)), free
            self._target = strided((16, tiles, k), (tiles * k, k, 1))
        self._product = Primitive(engine, "matmul", label, *self._formats, None, self._target, Attributes(engine))
        self.weights = self._target if backward else self._product.descriptor(c.QUERY_WEIGHTS_MD)
        self.primitives = [self._product]
        if bias and backward:
            self._sums = [Matrix(engine, label, np.ones((1, tiles), np.float32), k, add=add) for add in (False, True)]
            self.primitives += [one.primitive for one in self._sums]
        elif bias:
            self._rows, self._row = strided((tiles, k), (k, 1)), strided((1, k), (k, 1))
            self._bias = Primitive(engine, "binary", label, c.BINARY_ADD, self._rows, self._row, self._rows, Attributes(engine))
            self.primitives.append(self._bias)

    def bind(self, scratch: WinogradScratch, bias: Array | None, *, add: bool = False) -> list[Work]:
        """Return the calls on fixed memory.

        Args:
            bias: bias forward, or its gradient backward; None: there is none.
            add: whether the gradient of the bias is added to that of earlier chunks.
        """
        position = scratch.right[_BIAS_POSITION * self._tiles_out :]
        first, second, target = scratch.left, scratch.weights, scratch.right
        if self._backward:
            first, second, target = scratch.right, scratch.left, scratch.weights
        weights = self._formats[1] if self._backward else self.weights
        memories = {c.ARG_SRC: (self._formats[0], first), c.ARG_WEIGHTS: (weights, second), c.ARG_DST: (self._target, target)}
        works: list[Work] = [self._product.bind(memories, scratch.library)]
        if bias is not None and self._backward:
            works.append(self._sums[add].bind(position, bias, scratch.library))
        elif bias is not None:
            assert self._bias is not None
            rows = (self._rows, position)
            arguments = {c.ARG_SRC: rows, c.ARG_SRC_1: (self._row, bias), c.ARG_DST: rows}
            works.append(self._bias.bind(arguments, scratch.library))
        return works


class _Winograd:
    """Base of `Product` and `WeightGradient`: kernels for each form of chunk, scratch, and formats of the weights.

    Args:
        strides: strides of the weights along (tap, out, in), in elements.

    Attributes:
        operation_share: number of operations relative to that of a direct kernel.
    """

    def __init__(
        self, engine: Engine, label: str, tiling: Tiling, strides: tuple[int, int, int], *, bias: bool, backward: bool
    ) -> None:
        self._engine, self._label, self._tiling = engine, f"{label} by Winograd", tiling
        self.operation_share = tiling.operation_share
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
        self._weights, self._items = weights, weights.size_bytes // 64
        tap, out, channel = strides
        shape, order = (9, tiling.channels_in, tiling.channels_out), (tap, channel, out)
        if backward:
            shape, order = (9, tiling.channels_out, tiling.channels_in), strides
        self._plain_weights = Descriptor.strided(engine, shape, order)
        self._taps = weights.part(shape)  # the transform requires the same order of elements for 9 taps and for 16 positions

    def _place(self, primitives: Sequence[Primitive], *, taps_alone: bool) -> None:
        """Plan the scratch.

        Args:
            primitives: primitives of the subclass, in addition to those of this class.
        """
        shared = [each for parts in (self._products, self._patches) for part in parts.values() for each in part.primitives]
        self._scratch_plan = ScratchPlan(self._tiling, self._forms, self._items, [*shared, *primitives], taps_alone)
        self.scratch_bytes = self._scratch_plan.total_bytes


class Product(_Winograd):
    """Forward convolution by Winograd: y = conv(x, w) + bias, then ReLU; or y += conv(x, w).

    Args:
        flipped: whether the kernel is flipped along both dims, as for the input's gradient.
    """

    def __init__(
        self,
        engine: Engine,
        label: str,
        tiling: Tiling,
        strides: tuple[int, int, int],
        *,
        flipped: bool = False,
        bias: bool = False,
        relu: bool = False,
    ) -> None:
        super().__init__(engine, label, tiling, strides, bias=bias, backward=False)
        self._outputs = {form: Outputs(engine, self._label, tiling, form, relu=relu) for form in self._forms}
        transform = np.kron(_G, _G)
        self._transform = Matrix(engine, self._label, transform[:, ::-1] if flipped else transform, self._items)
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
        copy = Copy(self._engine, f"{self._label} weights", self._plain_weights, self._taps)
        return [copy.bind(plain, scratch.taps), self._transform.bind(scratch.taps, scratch.weights, scratch.library)]

    def _between(self, form: Form, bias: Array | None, scratch: WinogradScratch) -> list[Work]:
        """Return the calls between `load` and `store` of a chunk. All chunks of one form share them."""
        transforms, products = self._patches[form].transform(scratch), self._products[form.tiles].bind(scratch, bias)
        return [*transforms, *products, *self._outputs[form].transform(scratch)]


class WeightGradient(_Winograd):
    """Gradients of the weights, and of the bias if there is one, by Winograd from x and dy."""

    def __init__(self, engine: Engine, label: str, tiling: Tiling, strides: tuple[int, int, int], *, bias: bool = False) -> None:
        super().__init__(engine, f"{label} backward weights", tiling, strides, bias=bias, backward=True)
        self._gradients = {form: OutputGradients(engine, self._label, tiling, form) for form in self._forms}
        primitives = [primitive for gradients in self._gradients.values() for primitive in gradients.primitives]
        back = np.kron(_G.T, _G.T)
        self._write, self._add = (Matrix(engine, self._label, back, self._items, add=add) for add in (False, True))
        # With several chunks, the gradients in `taps` are kept while tiles are written and read.
        self._place([*primitives, self._write.primitive, self._add.primitive], taps_alone=len(self._chunks) == 1)

    def bind(self, x: Array, dy: Array, weight: Array, bias: Array | None, buffer: Array) -> Work:
        """Return the call that writes the gradients to `weight` and `bias` (None: no bias), with `buffer` as scratch."""
        scratch, plain = self._scratch_plan.carve(buffer), weight.reshape(-1)
        patches = {form: self._patches[form].transform(scratch) for form in self._forms}
        adding = {form: self._gradients_of(form, bias, scratch, add=True) for form in {chunk.form for chunk in self._chunks[1:]}}
        works: list[Work] = []
        for number, chunk in enumerate(self._chunks):
            works += [*self._patches[chunk.form].load(chunk, x, scratch), *patches[chunk.form]]
            works += self._gradients[chunk.form].load(chunk, dy, scratch)
            works += adding[chunk.form] if number else self._gradients_of(chunk.form, bias, scratch, add=False)
        store = Copy(self._engine, f"{self._label} weights", self._taps, self._plain_weights)
        return CallSequence([*works, store.bind(scratch.taps, plain)])

    def _gradients_of(self, form: Form, bias: Array | None, scratch: WinogradScratch, *, add: bool) -> list[Work]:
        """Return the calls after a chunk is loaded, which write the gradients, or add them to the gradients of earlier chunks."""
        products = self._products[form.tiles].bind(scratch, bias, add=add)
        works = [*self._gradients[form].transform(scratch), *products]
        transform = self._add if add else self._write
        return [*works, transform.bind(scratch.weights, scratch.taps, scratch.library)]
