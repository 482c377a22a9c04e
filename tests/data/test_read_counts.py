"""Counts of what was read: every sample and byte, by where it came from."""

from __future__ import annotations

import numpy as np

from hpctrain.data.read_counts import CountedImages, Origin, ReadCounts, summed

PIXELS = np.arange(4 * 2 * 3 * 1, dtype=np.uint8).reshape(4, 2, 3, 1)


def test_reads_are_counted_and_give_what_the_images_give() -> None:
    counts = ReadCounts()
    images = CountedImages(PIXELS, counts)
    out = np.empty((2, 2, 3, 1), np.uint8)
    assert np.array_equal(images.take(np.array([3, 0]), out), PIXELS[[3, 0]])
    assert np.array_equal(images[1, slice(0, 1), slice(1, 3)], PIXELS[1, :1, 1:])
    assert np.array_equal(images[1:3], PIXELS[1:3])
    assert (images.shape, images.replaced) == ((4, 2, 3, 1), {})
    values = counts.values()
    assert (values["file_samples"], values["file_bytes"]) == (5, 26)
    assert sum(values.values()) == 31


def test_counts_of_ranks_are_added_up() -> None:
    first, second = ReadCounts(), ReadCounts()
    first.add(Origin.MEMORY, 2, 10)
    second.add(Origin.MEMORY, 1, 5)
    second.add(Origin.NODES, 1, 5)
    total = summed([first.values(), second.values()])
    assert (total["memory_samples"], total["memory_bytes"], total["nodes_bytes"], total["file_bytes"]) == (3, 15, 5, 0)
    assert summed([]) == {}
