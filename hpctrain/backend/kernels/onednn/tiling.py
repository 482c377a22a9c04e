"""How images are cut into the tiles of Winograd's F(2x2, 3x3), which are in work at once, and where these lie in scratch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hpctrain.backend.operators import Array
from hpctrain.backend.onednn.binding import Primitive
from hpctrain.backend.kernels.onednn.regions import Regions
from hpctrain.backend.specs import Edges, Pair

# Of tiles in work at once. Each chunk reads all weights, and adds up all of their gradients: smaller ones took longer at 512
# channels and gained nothing elsewhere, larger ones gained nothing.
_CHUNK_BYTES = 48 << 20


@dataclass(frozen=True)
class Form:
    """The shape of chunks that have the same kernels: tiles (images, rows, columns) and how much of x and y is theirs.

    Attributes:
        above: rows of zeros above the first row of x. read: rows of x, of each image. written: rows of y, of each image.
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
    """Tiles in work at once: the first image, and the first row of x and of y in each of its images."""

    image: int
    read_row: int
    write_row: int
    form: Form


@dataclass(frozen=True)
class Tiling:
    """y (N, Ho, Wo, K) from x (N, H, W, C), both in blocks of `block` channels, kernel 3x3, stride 1."""

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
        """Rows and columns of 2x2 outputs, the last ones perhaps over the edge."""
        height, width = self.output_size
        return -(-height // 2), -(-width // 2)

    @property
    def items(self) -> tuple[int, int, int]:
        """Floats of one tile before and after the transform of x, and after that of y."""
        return max(16 * self.channels_in, 4 * self.channels_out), 16 * self.channels_in, 16 * self.channels_out

    def chunks(self) -> list[Chunk]:
        """Every tile once: whole images as many as fit at a time or, where one is too large, rows of its tiles, one at least."""
        rows, columns = self.tiles
        edge = 4 * self.channels_in * (2 * columns + 2)  # a row of padded images
        row = 4 * columns * sum(self.items) + 2 * edge
        images, fitting = _CHUNK_BYTES // (rows * row + 2 * edge), (_CHUNK_BYTES - 2 * edge) // row
        if images:
            return [self._chunk(start, count, 0, rows) for start, count in _parts(self.batch, images)]
        cut = list(_parts(rows, max(1, fitting)))
        return [self._chunk(image, 1, start, count) for image in range(self.batch) for start, count in cut]

    def _chunk(self, image: int, images: int, row: int, rows: int) -> Chunk:
        """Tile rows [row, row + rows): only those at an image's edges see zeros above it, or lie over its end."""
        begin, end = 2 * row - self.padding[0], 2 * (row + rows) + 2 - self.padding[0]
        read_row = max(0, begin)
        read = min(end, self.size[0]) - read_row
        assert read > 0, self
        written = min(2 * rows, self.output_size[0] - 2 * row)
        return Chunk(image, read_row, 2 * row, Form(images, rows, self.tiles[1], read_row - begin, read, written))

    def pays(self, direct_speed: float) -> bool:
        """Whether this beats a direct kernel that runs at the given share of the 1x1 kernels' speed.

        In operations that take the same time: the transforms cost 130 for each element of a tile of x, 40 of y, 65 of the
        weights, measured with AVX2. A rule rather than a timing, so that every rank takes the same way.
        """
        product = self.channels_in * self.channels_out
        transforms = 130 * self.channels_in + 40 * self.channels_out
        tiles = self.batch * math.prod(self.tiles)
        winograd = 16 * tiles * (2 * product + transforms) + 16 * 65 * product
        height, width = self.output_size
        return winograd < 18 * product * self.batch * height * width / direct_speed


def _parts(total: int, limit: int) -> Iterator[tuple[int, int]]:
    """(start, count) of the fewest parts of at most `limit`; counts differ by one at most, the larger ones come first."""
    number = -(-total // limit)
    start = 0
    for part in range(number):
        count = total // number + (part < total % number)
        yield start, count
        start += count


@dataclass
class Room:
    """float32 scratch: weights by tile position and by tap, the padded images, tiles before and after their transform."""

    library: Array
    weights: Array
    bias: Array
    taps: Array
    padded: Array
    plain: Array
    left: Array
    right: Array


class Scratch:
    """Divides the scratch. `left` holds the transformed tiles of x, `right` those of y or dy.

    Args:
        forms: of the chunks, each of which has all the room for tiles.
        taps_alone: there are no tiles while the weights lie tap by tap, so both take the same place.
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

    def room(self, scratch: Array) -> Room:
        return Room(scratch[self._library], *(scratch[place].view(np.float32) for place in self._places))
