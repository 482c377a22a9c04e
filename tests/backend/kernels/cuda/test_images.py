"""Launches over images: every row and pack has a thread, few threads have none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.backend.kernels.cuda.images import check_images, row_launch
from hpctrain.errors import BackendError


@given(st.integers(0, 10**6), st.integers(1, 10**5), st.sampled_from([1, 2, 132]))
def test_blocks_are_as_wide_as_rows(rows: int, packs: int, multiprocessors: int) -> None:
    (blocks,), (width, height) = row_launch(rows, packs, multiprocessors)
    assert width * height == 256
    assert width in (32, 256) or width >= packs > width // 2
    assert 0 <= blocks <= rows, "no block is without a row"
    assert blocks * height >= rows or blocks == 256 * multiprocessors


def test_nothing_to_do_is_an_empty_grid() -> None:
    assert row_launch(0, 5, 2)[0] == (0,)
    assert row_launch(5, 0, 2)[0] == (0,)


def test_images_that_32_bits_cannot_count_are_refused() -> None:
    check_images("pooling", (2**10, 2**20 - 1, 1, 2**30 - 1))
    with pytest.raises(BackendError, match=r"fewer than 1073741824 rows .*; train with smaller micro-batches or images"):
        check_images("pooling", (1, 1, 1, 1), (2**10, 2**20, 1, 1))
    with pytest.raises(BackendError):
        check_images("pooling", (1, 1, 2**10, 2**20))
