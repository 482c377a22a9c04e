"""Row blocks: they are the tensor, in order, and per-channel vectors and sums fit them."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.backend.kernels.numpy.rows import RowBlocks


@settings(deadline=None)
@given(st.integers(0, 3000), st.integers(1, 40), st.sampled_from([64, 1000, 1 << 16]))
def test_blocks_cover_the_tensor_and_channels_stay_in_place(rows: int, channels: int, elements: int) -> None:
    x = np.random.default_rng(0).standard_normal((rows, channels))
    blocks = RowBlocks(x.shape, elements=elements)
    views = blocks.views(x)
    np.testing.assert_array_equal(np.concatenate([view.reshape(-1) for view in views] or [x.reshape(-1)]), x.reshape(-1))
    assert all(np.shares_memory(view, x) and view.size <= blocks.largest for view in views)
    tiled, sums = blocks.tile(np.arange(channels), "float64"), blocks.sums()
    for view in views:
        np.testing.assert_array_equal(
            np.broadcast_to(tiled[: view.shape[1]], view.shape).reshape(-1, channels)[-1], np.arange(channels)
        )
        sums[: view.shape[1]] += view.sum(axis=0)
    np.testing.assert_allclose(blocks.fold(sums), x.sum(axis=0), atol=1e-10)
