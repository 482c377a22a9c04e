"""How images are cut into the tiles of Winograd's F(2x2, 3x3), how many are in work at once, and where these lie in scratch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hpctrain.backend.kernels.base import Array
from hpctrain.backend.kernels.onednn.binding import Primitive
from hpctrain.backend.kernels.onednn.regions import Regions
from hpctrain.backend.kernels.specs import Edges, Pair

_CHUNK_BYTES = 32 << 20  # of tiles in work at once: enough to keep the kernels busy, few enough to stay in the last cache


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
    def padded(self) -> Pair:
        """Rows and columns that the tiles read."""
        return 2 * self.tiles[0] + 2, 2 * self.tiles[1] + 2

    def count(self, images: int) -> int:
        """Tiles of so many images."""
        return images * self.tiles[0] * self.tiles[1]

    @property
    def chunk(self) -> int:
        """Images in work at once."""
        per_image = 4 * 16 * self.count(1) * (2 * self.channels_in + self.channels_out)
        return max(1, min(self.batch, _CHUNK_BYTES // per_image))

    def chunks(self) -> Iterator[tuple[int, int]]:
        """(first image, images), the last one perhaps smaller."""
        for start in range(0, self.batch, self.chunk):
            yield start, min(self.chunk, self.batch - start)

    def pays(self, direct_speed: float) -> bool:
        """Whether this beats a direct kernel that runs at the given share of the 1x1 kernels' speed.

        In operations that take the same time: the transforms cost 130 for each element of a tile of x, 40 of y, 65 of the
        weights, measured with AVX2. A rule rather than a timing, so that every rank takes the same way.
        """
        product = self.channels_in * self.channels_out
        transforms = 130 * self.channels_in + 40 * self.channels_out
        winograd = 16 * self.count(self.batch) * (2 * product + transforms) + 16 * 65 * product
        height, width = self.output_size
        return winograd < 18 * product * self.batch * height * width / direct_speed


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
        taps_alone: there are no tiles while the weights lie tap by tap, so both take the same place.
    """

    def __init__(self, tiling: Tiling, weight_items: int, primitives: Sequence[Primitive], taps_alone: bool) -> None:
        tiles, channels, k = tiling.count(tiling.chunk), tiling.channels_in, tiling.channels_out
        padded, plain = tiling.chunk * channels * math.prod(tiling.padded), tiles * max(16 * channels, 4 * k)
        regions = Regions()
        self._library = regions.add(max(primitive.scratchpad_bytes for primitive in primitives))
        self._places = [regions.add(4 * count) for count in (16 * weight_items, k)]
        taps = regions.add(4 * 9 * weight_items)
        of_tiles = Regions(taps.start if taps_alone else regions.total_bytes)
        self._places += [taps, *(of_tiles.add(4 * count) for count in (padded, plain, 16 * tiles * channels, 16 * tiles * k))]
        self.total_bytes = max(regions.total_bytes, of_tiles.total_bytes)

    def room(self, scratch: Array) -> Room:
        return Room(scratch[self._library], *(scratch[place].view(np.float32) for place in self._places))
