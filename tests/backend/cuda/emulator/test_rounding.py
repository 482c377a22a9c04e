"""Elements of device arrays as numbers, and back."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.backend.cuda.emulator.memory import Heap
from hpctrain.backend.cuda.emulator.rounding import read, write
from hpctrain.backend.dtypes import item_bytes


@pytest.mark.parametrize(("dtype", "digits"), [("float64", 53), ("float32", 24), ("bfloat16", 8)])
def test_values_are_rounded_once(dtype: str, digits: int) -> None:
    values = np.random.default_rng(0).standard_normal((5, 7))
    array = Heap().allocate(values.size * item_bytes(dtype)).view(dtype).reshape(values.shape)
    write(array, values)
    error = np.abs(read(array) - values) / np.abs(values)
    assert error.max() <= 2.0**-digits
    assert (error.max() == 0) == (dtype == "float64")
