"""Matrix products and convolutions of the emulated device.

Matrix products accumulate in float32, or in float64 for float64, and round when they write results. Convolutions are those of the
NumPy kernel set.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from hpctrain.backend.cuda.device import (
    ALIGNMENT_BYTES,
    PLAN_ALIGNMENT_BYTES,
    ConvolutionKey,
    DeviceArray,
    DeviceStream,
    Precision,
)
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.operators import Buffers, StepContext
from hpctrain.backend.specs import Conv2dSpec, TensorSpec, Window, parameter_dtype
from hpctrain.core.errors import BackendError
from hpctrain_testing.emulator.kernels import Enqueue
from hpctrain_testing.emulator.memory import borrowed, bytes_of, read, write

#: dtype of arrays by the precision of products
DTYPES: dict[Precision, str] = {"float64": "float64", "float32": "float32", "tf32": "float32", "bfloat16": "bfloat16"}


def check_product(
    a: DeviceArray, b: DeviceArray, c: DeviceArray, *, transpose_a: bool, transpose_b: bool, precision: Precision
) -> None:
    """Raise unless shapes and dtypes of the operands match.

    Raises:
        ValueError: there is no product for these shapes or dtypes.
    """
    if (a.ndim, b.ndim, c.ndim) != (2, 2, 2):
        raise ValueError(f"The operands of a product must be matrices, not have shapes {a.shape}, {b.shape} and {c.shape}.")
    left = a.shape[::-1] if transpose_a else a.shape
    right = b.shape[::-1] if transpose_b else b.shape
    if left[1] != right[0] or c.shape != (left[0], right[1]):
        raise ValueError(f"The product of {left} and {right} must have the shape ({left[0]}, {right[1]}), not {c.shape}.")
    if not a.dtype == b.dtype == DTYPES[precision] or c.dtype not in (a.dtype, "float32"):
        raise ValueError(f"A product in {precision} does not support {a.dtype} and {b.dtype} to {c.dtype}.")
    if c.dtype == "float32" and a.dtype == "float64":
        raise ValueError("The product of float64 matrices must be float64, not float32.")


def product(a: DeviceArray, b: DeviceArray, c: DeviceArray, *, transpose_a: bool, transpose_b: bool, accumulate: bool) -> None:
    """Compute c := op(a) op(b), plus c if `accumulate`."""
    left, right = read(a), read(b)
    total = (left.T if transpose_a else left) @ (right.T if transpose_b else right)
    write(c, total + read(c) if accumulate else total)


#: requested although nothing needs it, to detect callers that pass no workspace
WORKSPACE_BYTES = 256
_POISON = 0xFF


def spec_of(key: ConvolutionKey) -> Conv2dSpec:
    """Return the convolution of a key.

    Raises:
        BackendError: the key is invalid, or cuDNN has no plan for it.
    """
    if 0 in (*key.x, *key.w, *key.y):
        raise BackendError(f"cuDNN has no plan for empty arrays: {key}.")
    if key.x[3] != key.groups * key.w[3] or key.w[0] % key.groups:
        raise BackendError(f"The channels of {key} cannot be divided into {key.groups} groups.")
    if DTYPES[key.precision] != key.dtype:
        raise BackendError(f"A convolution in {key.precision} must have dtype {DTYPES[key.precision]}, not {key.dtype}.")
    if key.fused and key.kind != "forward":
        raise BackendError(f"Only forward convolutions can be fused with a bias: {key}.")
    if min(key.padding) < 0:
        raise BackendError(f"Padding must be at least 0: {key}.")
    window = Window((key.w[1], key.w[2]), key.stride, key.padding, key.dilation)
    spec = Conv2dSpec(key.x[3], key.w[0], window, key.groups, bias=False)
    if spec.output(TensorSpec(key.x, key.dtype)).shape != key.y:
        raise BackendError(f"The output shape of {key} does not fit its input.")
    return spec


class NumpyConvolution:
    """Convolution with NumPy; implements `DeviceConvolution`.

    Args:
        require: callback that raises for an array that is not in memory in use.
    """

    workspace_bytes = WORKSPACE_BYTES

    def __init__(self, key: ConvolutionKey, enqueue: Enqueue, require: Callable[..., None]) -> None:
        self._key, self._enqueue, self._require = key, enqueue, require
        dtype = parameter_dtype(key.dtype)
        self._operator = NumpyKernelSet().make(spec_of(key), (TensorSpec(key.x, dtype),), training=True)
        self._buffers = self._make_buffers(dtype)
        self._operator.bind(self._buffers)
        x, dy, w = self._buffers.inputs[0], self._buffers.output_grad, self._buffers.parameters["weight"]
        dx, dw, y = self._buffers.input_grads[0], self._buffers.gradients["weight"], self._buffers.output
        self._host_arrays = {"forward": (x, w, y), "input": (dy, w, dx), "weight": (x, dy, dw)}[key.kind]

    def _make_buffers(self, dtype: str) -> Buffers:
        key, operator = self._key, self._operator
        x, y, w = (np.zeros(shape, dtype) for shape in (key.x, key.y, key.w))
        return Buffers(
            inputs=(x,),
            output=y,
            input_grads=(np.zeros_like(x),),
            output_grad=np.zeros_like(y),
            accumulate=(False,),
            parameters={"weight": w},
            gradients={"weight": np.zeros_like(w)},
            saved=np.zeros(operator.saved_bytes, np.uint8),
            scratch=np.zeros(operator.scratch_bytes, np.uint8),
        )

    def run(
        self,
        stream: DeviceStream,
        a: DeviceArray,
        b: DeviceArray,
        out: DeviceArray,
        workspace: DeviceArray | None,
        bias: DeviceArray | None = None,
    ) -> None:
        self._check(a, b, out, workspace, bias)
        assert workspace is not None
        arrays = [a, b, out, workspace, *([] if bias is None else [bias])]
        self._enqueue(stream, partial(self._run, *map(borrowed, arrays)), f"convolution {self._key.kind}", arrays)

    def _check(
        self, a: DeviceArray, b: DeviceArray, out: DeviceArray, workspace: DeviceArray | None, bias: DeviceArray | None
    ) -> None:
        kind, key = self._key.kind, self._key
        for name, array, reference in zip("ab", (a, b), self._host_arrays, strict=False):
            _check_array(f"{name} of a convolution {kind}", array, reference.shape, key.dtype)
        _check_array(f"The result of a convolution {kind}", out, self._host_arrays[2].shape, key.dtype)
        if (bias is not None) != bool(key.fused):
            raise ValueError(f"A bias must be passed exactly if the key has one: {key}.")
        if bias is not None and (bias.shape != (key.w[0],) or bias.dtype != key.dtype or bias.pointer % PLAN_ALIGNMENT_BYTES):
            raise ValueError(f"The bias of {key} is {bias!r}.")
        if workspace is None or workspace.nbytes < self.workspace_bytes or workspace.pointer % ALIGNMENT_BYTES:
            raise ValueError(f"The workspace must have {self.workspace_bytes} aligned bytes, not be {workspace!r}.")
        if any(out.pointer < x.pointer + x.nbytes and x.pointer < out.pointer + out.nbytes for x in (a, b, workspace)):
            raise ValueError(f"The result of a convolution {kind} overlaps its inputs or its workspace.")

    def _run(
        self, a: DeviceArray, b: DeviceArray, out: DeviceArray, workspace: DeviceArray, bias: DeviceArray | None = None
    ) -> None:
        self._require(a, b, out, workspace, *([] if bias is None else [bias]))
        bytes_of(workspace).fill(_POISON)
        first, second, result = self._host_arrays
        np.copyto(first, read(a))
        np.copyto(second, read(b))
        if self._key.kind == "forward":
            self._operator.forward(StepContext())
            result = result if bias is None else result + read(bias)
            result = np.maximum(result, 0) if self._key.fused == "bias_relu" else result
        elif self._key.kind == "input":
            self._operator.backward_input()
        else:
            self._operator.backward_parameters()
        write(out, result)


def _check_array(name: str, array: DeviceArray, shape: tuple[int, ...], dtype: str) -> None:
    if (array.shape, array.dtype) != (shape, dtype) or array.pointer % PLAN_ALIGNMENT_BYTES:
        raise ValueError(f"{name} is {dtype} {shape}, aligned to {PLAN_ALIGNMENT_BYTES} bytes, not {array!r}.")
