"""Images of a file through memory, as one rank has them."""

from __future__ import annotations

import numpy as np

from hpctrain.comm.shared_memory import SharedMemory
from hpctrain.data.format import ImageArray, ImageFile
from hpctrain.data.read_counts import CountedImages, ReadCounts
from hpctrain.data.sample_memory import SampleMemory, bytes_for, held_in


def in_memory(file: ImageFile, limit_bytes: int = 1 << 20) -> SampleMemory:
    """The images of a file, as many of them in memory as fit into a limit."""
    image_bytes = int(np.prod(file.shape))
    held = held_in(limit_bytes, len(file), image_bytes)
    memory, counts = SharedMemory(np.zeros(bytes_for(held, image_bytes), np.uint8)), ReadCounts()
    return SampleMemory(CountedImages(file.pixels, counts), memory, held, counts)


def cached(file: ImageFile, *, cache: bool) -> ImageArray | None:
    """The images in memory, or None: as the loader reads them by itself."""
    return in_memory(file) if cache else None
