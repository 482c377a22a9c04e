"""Matrix products by cuBLAS, through ctypes: CuPy's own calls set the stream each time, which takes the workspace away again.

With a workspace of its own a handle allocates nothing when a step is captured, and gives the same bits in every run.
"""

from __future__ import annotations

import ctypes
from typing import Any

from hpctrain.backend.cuda.device import Precision
from hpctrain.backend.cuda.device_array import DeviceArray
from hpctrain.core.errors import BackendError

#: what NVIDIA recommends for its GPUs since 2022
WORKSPACE_BYTES = 32 << 20

Library = Any  # libcublas, loaded by ctypes

_OPERATION = {False: 0, True: 1}  # CUBLAS_OP_N, CUBLAS_OP_T
_DATA_TYPE = {"float32": 0, "bfloat16": 14}  # CUDA_R_32F, CUDA_R_16BF
# CUBLAS_COMPUTE_32F, _32F_PEDANTIC (no tensor cores), _32F_FAST_TF32
_COMPUTE_TYPE: dict[Precision, int] = {"bfloat16": 68, "float32": 69, "tf32": 77}
_MOST_ROWS = 2**31 - 1  # cuBLAS takes sizes as 32-bit integers
_DEFAULT_ALGORITHM = -1  # CUBLAS_GEMM_DEFAULT
# CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION: sums of bfloat16 products that are split are float32 to the end
_MATH_MODE = 16


class MatrixProducts:
    """Products that are enqueued on one stream.

    Args:
        library: libcublas. stream: its address. workspace: memory of the device, kept for as long as this lives.

    Raises:
        BackendError: cuBLAS cannot be started.
    """

    def __init__(self, library: Library, stream: int, workspace: DeviceArray) -> None:
        self._library, self._workspace = library, workspace
        self._handle = ctypes.c_void_p()
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        self._check("cublasCreate", library.cublasCreate_v2(ctypes.byref(self._handle)))
        self._check("cublasSetStream", library.cublasSetStream_v2(self._handle, ctypes.c_void_p(stream)))  # before the workspace
        place = (ctypes.c_void_p(workspace.pointer), ctypes.c_size_t(workspace.nbytes))
        self._check("cublasSetWorkspace", library.cublasSetWorkspace_v2(self._handle, *place))
        self._check("cublasSetMathMode", library.cublasSetMathMode(self._handle, ctypes.c_int(_MATH_MODE)))

    def run(
        self,
        a: DeviceArray,
        b: DeviceArray,
        c: DeviceArray,
        *,
        transpose_a: bool,
        transpose_b: bool,
        accumulate: bool,
        precision: Precision,
    ) -> None:
        """Enqueue c := op(a) op(b), plus c where `accumulate`. Row-major c is column-major c^T = op(b)^T op(a)^T.

        Raises:
            ValueError: matrices that do not fit each other. BackendError: a dtype or precision that GPUs do not compute in, or
                more than 2**31 - 1 rows or columns.
        """
        rows, inner = a.shape[::-1] if transpose_a else a.shape
        inner_b, cols = b.shape[::-1] if transpose_b else b.shape
        if inner != inner_b or c.shape != (rows, cols):
            raise ValueError(f"{a!r} and {b!r} have no product like {c!r}.")
        types = [_number(_DATA_TYPE, array.dtype) for array in (b, a, c)]
        compute = _number(_COMPUTE_TYPE, precision)
        if not rows or not cols or not inner:
            assert accumulate or not c.size, "sums over nothing are the caller's"
            return
        if max(rows, cols, inner) > _MOST_ROWS:
            raise BackendError(
                f"cuBLAS multiplies matrices of at most {_MOST_ROWS} rows and columns, not {rows} x {inner} by {inner} x {cols}; "
                "train with smaller micro-batches."
            )
        status = self._library.cublasGemmEx(
            self._handle,
            ctypes.c_int(_OPERATION[transpose_b]),
            ctypes.c_int(_OPERATION[transpose_a]),
            *map(ctypes.c_int, (cols, rows, inner)),
            ctypes.byref(self._one),
            *(ctypes.c_void_p(b.pointer), ctypes.c_int(types[0]), ctypes.c_int(max(1, b.shape[1]))),
            *(ctypes.c_void_p(a.pointer), ctypes.c_int(types[1]), ctypes.c_int(max(1, a.shape[1]))),
            ctypes.byref(self._one if accumulate else self._zero),
            *(ctypes.c_void_p(c.pointer), ctypes.c_int(types[2]), ctypes.c_int(cols)),
            ctypes.c_int(compute),
            ctypes.c_int(_DEFAULT_ALGORITHM),
        )
        self._check("cublasGemmEx", status)

    @staticmethod
    def _check(function: str, status: int) -> None:
        if status:
            raise BackendError(f"{function} failed with status {status} of cuBLAS; see cublasStatus_t in its documentation.")


def _number(known: Any, name: str) -> int:
    """cuBLAS's number of a dtype or precision."""
    if name not in known:
        raise BackendError(f"GPUs multiply matrices in {' or '.join(known)} here, not in {name}.")
    number: int = known[name]
    return number
