"""Sizes of dtypes agree with NumPy's; no parameter is below float32."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.backend.dtypes import ITEM_BYTES, item_bytes, parameter_dtype


@pytest.mark.parametrize("dtype", sorted(set(ITEM_BYTES) - {"bfloat16"}))
def test_sizes_are_those_of_numpy(dtype: str) -> None:
    assert item_bytes(dtype) == np.dtype(dtype).itemsize


def test_bfloat16_is_the_upper_half_of_a_float32() -> None:
    assert 2 * item_bytes("bfloat16") == item_bytes("float32")


@pytest.mark.parametrize(("dtype", "parameters"), [("float64", "float64"), ("float32", "float32"), ("bfloat16", "float32")])
def test_parameters_are_float32_at_least(dtype: str, parameters: str) -> None:
    assert parameter_dtype(dtype) == parameters
