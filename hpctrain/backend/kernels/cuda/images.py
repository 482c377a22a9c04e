"""Launches of the kernels that go over images row by row (kernels/images.cuh)."""

from __future__ import annotations

from hpctrain.backend.cuda.device import Extent
from hpctrain.backend.specs import Shape
from hpctrain.core.errors import BackendError

_THREADS = 256
_WARP = 32
# Far more than fit at once, so that the last blocks of a launch are few among many.
_WAVES = 256
_LIMIT = 1 << 30  # and a step beyond is still a number of 32 bits


def row_launch(rows: int, packs: int, multiprocessors: int) -> tuple[Extent, Extent]:
    """Return grid and block for `rows` rows of `packs` packs each.

    A block is as wide as a row, between 32 and 256 threads, and processes as many rows at a time as then fit. The grid is
    empty if there are no packs.
    """
    width = min(_THREADS, max(_WARP, 1 << (packs - 1).bit_length())) if packs else _WARP
    height = _THREADS // width
    blocks = min(-(-rows // height), _WAVES * multiprocessors) if packs else 0
    return (blocks,), (width, height)


def check_images(name: str, *shapes: Shape) -> None:
    """Raise unless a kernel can count rows, and elements of a row, with 32 bits.

    Raises:
        BackendError: images (N, H, W, C) whose rows, or elements of a row, a kernel cannot count with 32 bits.
    """
    for images, height, width, channels in shapes:
        if max(images * height, width * channels) >= _LIMIT:
            raise BackendError(
                f"The cuda kernel set's {name} takes batches of fewer than {_LIMIT} rows of fewer than {_LIMIT} elements each, "
                f"not {images} images of {height} rows of {width} x {channels}; train with smaller micro-batches or images."
            )
