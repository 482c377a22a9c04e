"""Spare buffers: never one to two operations at once, and the same ones again."""

from __future__ import annotations

import numpy as np

from hpctrain.comm.spare_buffers import SpareBuffers


def test_buffers_are_used_again_and_by_one_at_a_time() -> None:
    spare, like = SpareBuffers(), np.ones(3, np.float32)
    first, second = spare.take(5, like), spare.take(5, like)
    assert not np.shares_memory(first, second)
    spare.give_back(first, second)
    assert len(spare) == 2
    again = {id(spare.take(5, like)), id(spare.take(5, like))}
    assert again == {id(first), id(second)}
    assert len(spare) == 0


def test_sizes_and_dtypes_have_their_own() -> None:
    spare = SpareBuffers()
    buffer = spare.take(4, np.ones(1, np.float32))
    assert (buffer.shape, buffer.dtype) == ((4,), np.float32)
    spare.give_back(buffer)
    for size, dtype in ((4, np.float64), (3, np.float32), (0, np.uint8)):
        other = spare.take(size, np.ones((2, 2), dtype))
        assert (other.shape, other.dtype) == ((size,), dtype)
        assert not np.shares_memory(other, buffer)
    assert spare.take(4, np.zeros(9, np.float32)) is buffer
