"""Matrix products by a cuBLAS that is what its documentation says, on memory of the host."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hpctrain.backend.cuda.device import Precision
from hpctrain.backend.cuda.emulator.device import EmulatedDevice
from hpctrain.backend.cuda.emulator.rounding import read, write
from hpctrain.backend.cuda.matrix_products import WORKSPACE_BYTES, MatrixProducts
from hpctrain.backend.dtypes import item_bytes
from hpctrain.errors import BackendError
from tests.support.fake_cupy import FakeCublas

STREAM = 4096


class Bench:
    """Matrices of small whole numbers, whose products every dtype holds."""

    def __init__(self) -> None:
        self.cublas, self.device = FakeCublas(), EmulatedDevice()
        self.workspace = self.device.allocate(256)
        self.products = MatrixProducts(self.cublas, STREAM, self.workspace)
        self.random = np.random.default_rng(3)

    def place(self, values: np.ndarray, dtype: str):
        array = self.device.allocate(values.size * item_bytes(dtype)).view(dtype).reshape(values.shape)
        write(array, values)
        return array

    def whole(self, *shape: int) -> np.ndarray:
        return self.random.integers(-3, 4, shape).astype(np.float32)


@pytest.mark.parametrize(("transpose_a", "transpose_b", "accumulate"), list(itertools.product([False, True], repeat=3)))
@pytest.mark.parametrize(
    ("dtype", "c_dtype", "precision", "compute_type"),
    [
        ("float32", "float32", "float32", 69),
        ("float32", "float32", "tf32", 77),
        ("bfloat16", "bfloat16", "bfloat16", 68),
        ("bfloat16", "float32", "bfloat16", 68),
    ],
)
@pytest.mark.parametrize("shape", [(4, 3, 5), (1, 7, 2), (6, 1, 1)])
def test_products(
    shape: tuple[int, int, int],
    dtype: str,
    c_dtype: str,
    precision: Precision,
    compute_type: int,
    transpose_a: bool,
    transpose_b: bool,
    accumulate: bool,
) -> None:
    bench, (m, k, n) = Bench(), shape
    a, b, c = bench.whole(m, k), bench.whole(k, n), bench.whole(m, n)
    left, right = bench.place(a.T if transpose_a else a, dtype), bench.place(b.T if transpose_b else b, dtype)
    out = bench.place(c, c_dtype)
    bench.products.run(
        left, right, out, transpose_a=transpose_a, transpose_b=transpose_b, accumulate=accumulate, precision=precision
    )
    np.testing.assert_array_equal(read(out), a @ b + accumulate * c)
    assert bench.cublas.compute_type == compute_type


def test_the_workspace_is_set_behind_the_stream_and_stays() -> None:
    """Setting the stream takes it away."""
    bench = Bench()
    a = bench.place(bench.whole(2, 2), "float32")
    for _ in range(2):
        bench.products.run(a, a, a, transpose_a=False, transpose_b=False, accumulate=False, precision="float32")
    assert bench.cublas.calls == ["create", "setStream", "setWorkspace", "setMathMode", "gemmEx", "gemmEx"]
    assert bench.cublas.stream == STREAM
    assert bench.cublas.workspace == (bench.workspace.pointer, 256)
    assert bench.cublas.mode == 16
    assert WORKSPACE_BYTES % 256 == 0


@pytest.mark.parametrize("shape", [(0, 3, 2), (2, 3, 0), (2, 0, 2)])
def test_nothing_is_asked_of_cublas_without_elements(shape: tuple[int, int, int]) -> None:
    bench, (m, k, n) = Bench(), shape
    a, b, c = (bench.place(bench.whole(*two), "float32") for two in ((m, k), (k, n), (m, n)))
    before = read(c).copy()
    bench.products.run(a, b, c, transpose_a=False, transpose_b=False, accumulate=True, precision="float32")
    np.testing.assert_array_equal(read(c), before)
    assert "gemmEx" not in bench.cublas.calls


def test_what_does_not_fit_is_refused() -> None:
    bench = Bench()
    a, b, c = (bench.place(bench.whole(*two), "float32") for two in ((2, 3), (2, 3), (2, 2)))
    bench.products.run(a, b, c, transpose_a=False, transpose_b=True, accumulate=False, precision="float32")
    with pytest.raises(ValueError, match="no product like"):
        bench.products.run(a, b, c, transpose_a=False, transpose_b=False, accumulate=False, precision="float32")
    with pytest.raises(BackendError, match="bfloat16 or float32 or tf32 here, not in float64"):
        bench.products.run(a, b, c, transpose_a=False, transpose_b=True, accumulate=False, precision="float64")


@pytest.mark.parametrize("function", ["create", "setStream", "setWorkspace", "setMathMode", "gemmEx"])
def test_every_failure_is_told(function: str) -> None:
    bench = Bench()
    bench.cublas.failing = function
    a = bench.place(bench.whole(2, 2), "float32")
    with pytest.raises(BackendError, match=rf"cublas{function[0].upper()}{function[1:]} failed with status 13"):
        MatrixProducts(bench.cublas, STREAM, bench.workspace).run(
            a, a, a, transpose_a=False, transpose_b=False, accumulate=False, precision="float32"
        )
