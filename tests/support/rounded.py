"""Numbers that every dtype of the cuda set holds, benches of its operators, and how near results have to be."""

from __future__ import annotations

import numpy as np

from hpctrain.backend.cuda.device import bfloat16_bits, bfloat16_values
from hpctrain.backend.cuda.kernel_set import CudaKernelSet
from hpctrain.backend.specs import Spec, parameter_dtype
from hpctrain.testing.operators import OperatorBench
from hpctrain_testing.emulator.device import EmulatedDevice
from tests.support.emulated import kernels_on

DTYPES = ["float64", "float32", "bfloat16"]

#: of float64 NumPy, relative to the element: sums of the dtype, then (bfloat16) one rounding
TOLERANCE = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 1.01 * 2.0**-8}


def dyadic(*shape: int, seed: int = 0) -> np.ndarray:
    """Numbers that every dtype holds exactly, and whose sums float32 holds."""
    return np.random.default_rng(seed).integers(-63, 64, shape) / 32


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """The nearest numbers of a dtype; those of bfloat16 as float32."""
    return bfloat16_values(bfloat16_bits(values)) if dtype == "bfloat16" else values.astype(dtype)


def assert_rounded(actual: np.ndarray, expected: np.ndarray, dtype: str) -> None:
    """Equal within the accuracy of a dtype, infinities and NaN included."""
    np.testing.assert_allclose(actual, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * 1e-2)


def emulated_kernels(precision: str, seed: int = 0) -> CudaKernelSet:
    """The cuda set on a new device, for tests that draw the seed, which a fixture cannot."""
    device = EmulatedDevice(seed)
    return kernels_on(device, precision)


def device_bench(
    kernels: CudaKernelSet, spec: Spec, x: np.ndarray, parameters: dict[str, np.ndarray] | None = None, **options: object
) -> OperatorBench:
    """A bench of an operator with one input, in the dtype of the set's activations."""
    dtype = kernels.runtime.dtype
    host = parameter_dtype(dtype)
    roles = {role: value.astype(host) for role, value in (parameters or {}).items()}
    return OperatorBench(kernels, spec, [x.astype(host)], parameters=roles, dtype=dtype, **options)


def assert_same_bits(results: list[list[np.ndarray]]) -> None:
    """All results are those of the first."""
    for other in results[1:]:
        for first, second in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(first, second)
