"""Device arrays as numbers of the host and back, rounded as kernels round."""

from __future__ import annotations

import numpy as np

from hpctrain.backend.cuda.device_array import DeviceArray
from hpctrain_testing.emulator.memory import on_host
from hpctrain.backend.cuda.half import bfloat16_bits, bfloat16_values


def read(array: DeviceArray) -> np.ndarray:
    """The elements; bfloat16 as float32."""
    values = on_host(array)
    return bfloat16_values(values) if array.dtype == "bfloat16" else values


def write(array: DeviceArray, values: np.ndarray) -> None:
    """Round to the array's dtype, to nearest even."""
    on_host(array)[...] = bfloat16_bits(values) if array.dtype == "bfloat16" else values
