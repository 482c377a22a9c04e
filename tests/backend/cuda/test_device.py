"""Shapes of launches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.backend.cuda.device import grid_for, pack_width
from hpctrain.backend.cuda.device_array import DeviceArray


@given(items=st.integers(0, 1 << 40), block=st.sampled_from([32, 256, 1024]), multiprocessors=st.integers(1, 200))
def test_a_grid_has_a_thread_for_each_item_or_fills_the_device(items: int, block: int, multiprocessors: int) -> None:
    (blocks,) = grid_for(items, block, multiprocessors, waves=8)
    if blocks < 8 * multiprocessors:
        assert 0 <= blocks * block - items < block
    else:
        assert blocks == 8 * multiprocessors
        assert items > (blocks - 1) * block


@pytest.mark.parametrize(
    ("dtype_bytes", "channels", "pointers", "width"),
    [
        (4, 64, (0, 256), 4),
        (2, 64, (0,), 8),
        (8, 2, (), 2),
        (4, 63, (), 1),
        (2, 4, (), 1),
        (4, 64, (256, 8), 1),
        (4, 64, (None, 256), 4),
        (4, 0, (), 4),
    ],
)
def test_the_width_of_a_pack(dtype_bytes: int, channels: int, pointers: tuple[int | None, ...], width: int) -> None:
    arrays = [None if pointer is None else DeviceArray(pointer, (channels,), "uint8", None) for pointer in pointers]
    assert pack_width(dtype_bytes, channels, arrays) == width
