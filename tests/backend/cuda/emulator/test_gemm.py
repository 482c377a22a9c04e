"""Products of the emulated device are refused where cuBLAS has none, and rounded once."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.backend.cuda.device import Precision
from hpctrain.backend.cuda.device_array import DeviceArray
from hpctrain.backend.cuda.emulator.gemm import check_product, product
from hpctrain.backend.cuda.emulator.memory import Heap
from hpctrain.backend.cuda.emulator.rounding import read, write
from hpctrain.backend.dtypes import item_bytes

HEAP = Heap()


def _array(shape: tuple[int, ...], dtype: str, values: np.ndarray | None = None) -> DeviceArray:
    array = HEAP.allocate(int(np.prod(shape)) * item_bytes(dtype)).view(dtype).reshape(shape)
    if values is not None:
        write(array, values)
    return array


@pytest.mark.parametrize(
    ("shapes", "dtypes", "precision"),
    [
        (((4, 3), (3, 5), (4, 6)), ("float32",) * 3, "float32"),
        (((4, 3), (4, 5), (4, 5)), ("float32",) * 3, "float32"),
        (((12,), (3, 5), (4, 5)), ("float32",) * 3, "float32"),
        (((4, 3), (3, 5), (4, 5)), ("float32", "bfloat16", "float32"), "float32"),
        (((4, 3), (3, 5), (4, 5)), ("float32", "float32", "bfloat16"), "float32"),
        (((4, 3), (3, 5), (4, 5)), ("float64", "float64", "float32"), "float64"),
        (((4, 3), (3, 5), (4, 5)), ("bfloat16",) * 3, "float32"),
        (((4, 3), (3, 5), (4, 5)), ("float32",) * 3, "bfloat16"),
    ],
)
def test_what_does_not_fit_is_refused(shapes: list[tuple[int, ...]], dtypes: list[str], precision: Precision) -> None:
    arrays = [_array(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    with pytest.raises(ValueError, match="product"):
        check_product(*arrays, transpose_a=False, transpose_b=False, precision=precision)


@pytest.mark.parametrize("out", ["bfloat16", "float32"])
def test_sums_of_bfloat16_are_float32_and_rounded_once(out: str) -> None:
    random = np.random.default_rng(0)
    a, b, c = (_array((64, 64), "bfloat16", random.standard_normal((64, 64))) for _ in range(3))
    c = _array((64, 64), out, read(c))
    wanted = read(a).astype(float) @ read(b).astype(float) + read(c)
    check_product(a, b, c, transpose_a=False, transpose_b=False, precision="bfloat16")
    product(a, b, c, transpose_a=False, transpose_b=False, accumulate=True)
    digits = 2.0**-8 if out == "bfloat16" else 2.0**-20
    assert (np.abs(read(c) - wanted) <= np.abs(wanted) * digits + 1e-5).all()
