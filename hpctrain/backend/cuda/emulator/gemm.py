"""Matrix products of the emulated device: sums in float32, or float64 of float64, rounded where they are written."""

from __future__ import annotations

from hpctrain.backend.cuda.device import Precision
from hpctrain.backend.cuda.device_array import DeviceArray
from hpctrain.backend.cuda.emulator.rounding import read, write

#: the dtype of arrays by the precision of products
DTYPES: dict[Precision, str] = {"float64": "float64", "float32": "float32", "tf32": "float32", "bfloat16": "bfloat16"}


def check_product(
    a: DeviceArray, b: DeviceArray, c: DeviceArray, *, transpose_a: bool, transpose_b: bool, precision: Precision
) -> None:
    """Raise unless shapes and dtypes of the operands match.

    Raises:
        ValueError: shapes or dtypes for which there is no product.
    """
    if (a.ndim, b.ndim, c.ndim) != (2, 2, 2):
        raise ValueError(f"A product takes matrices, not shapes {a.shape}, {b.shape} and {c.shape}.")
    left = a.shape[::-1] if transpose_a else a.shape
    right = b.shape[::-1] if transpose_b else b.shape
    if left[1] != right[0] or c.shape != (left[0], right[1]):
        raise ValueError(f"The product of {left} and {right} has the shape ({left[0]}, {right[1]}), not {c.shape}.")
    if not a.dtype == b.dtype == DTYPES[precision] or c.dtype not in (a.dtype, "float32"):
        raise ValueError(f"A product in {precision} is not of {a.dtype} and {b.dtype} to {c.dtype}.")
    if c.dtype == "float32" and a.dtype == "float64":
        raise ValueError("A product of float64 is float64, not float32.")


def product(a: DeviceArray, b: DeviceArray, c: DeviceArray, *, transpose_a: bool, transpose_b: bool, accumulate: bool) -> None:
    """c := op(a) op(b), plus c where `accumulate`."""
    left, right = read(a), read(b)
    total = (left.T if transpose_a else left) @ (right.T if transpose_b else right)
    write(c, total + read(c) if accumulate else total)
