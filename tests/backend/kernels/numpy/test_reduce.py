"""Column sums: exact where float32 would not be."""

import numpy as np
import pytest

from hpctrain.backend.kernels.numpy.reduce import column_sums


@pytest.mark.parametrize("rows", [0, 1, 7, 1024, 1025, 5001])
def test_sums(rows: int) -> None:
    x = np.random.default_rng(0).standard_normal((rows, 9))
    out = np.full(9, np.nan)
    column_sums(x, out)
    np.testing.assert_allclose(out, x.sum(axis=0), atol=1e-11)


def test_float32_does_not_lose_small_terms() -> None:
    """A running float32 sum of 2**25 ones stops at 2**24."""
    out = np.empty(1, np.float32)
    column_sums(np.broadcast_to(np.float32(1), (1 << 25, 1)), out)
    assert out[0] == 1 << 25
