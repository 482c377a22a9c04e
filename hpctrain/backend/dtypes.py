"""The dtypes that kernels compute in and keep, by name: bfloat16 is one of them, though NumPy does not know it."""

from __future__ import annotations

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "int64": 8, "int32": 4, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1}


def item_bytes(dtype: str) -> int:
    """Bytes of one element."""
    return ITEM_BYTES[dtype]


def parameter_dtype(dtype: str) -> str:
    """The dtype of parameters, gradients and statistics beside activations of `dtype`: never below float32."""
    return "float32" if dtype == "bfloat16" else dtype
