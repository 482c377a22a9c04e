"""Convolutions of the emulated device: by the NumPy kernel set in float32 or float64, rounded where they are written."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hpctrain.backend.cuda.device import PLAN_ALIGNMENT_BYTES, ConvolutionKey, DeviceStream
from hpctrain.backend.cuda.device_array import DeviceArray
from hpctrain.backend.cuda.emulator.rounding import read, write
from hpctrain.backend.dtypes import parameter_dtype
from hpctrain.backend.kernels.base import Buffers, StepContext
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.kernels.specs import Conv2dSpec, TensorSpec, Window

#: asked for although nothing needs it, so that a caller who gives none is found
WORKSPACE_BYTES = 256


class NumpyConvolution:
    """Implements `DeviceConvolution`."""

    workspace_bytes = WORKSPACE_BYTES

    def __init__(self, key: ConvolutionKey, enqueue: Callable[..., None]) -> None:
        self._key, self._enqueue = key, enqueue
        window = Window((key.w[1], key.w[2]), key.stride, key.padding, key.dilation)
        spec = Conv2dSpec(key.x[3], key.w[0], window, key.groups, bias=False)
        dtype = parameter_dtype(key.dtype)
        self._operator = NumpyKernelSet().make(spec, (TensorSpec(key.x, dtype),), training=True)
        x, y, w = (np.zeros(shape, dtype) for shape in (key.x, key.y, key.w))
        self._buffers = Buffers(
            inputs=(x,),
            output=y,
            input_grads=(np.zeros_like(x),),
            output_grad=np.zeros_like(y),
            accumulate=(False,),
            parameters={"weight": w},
            gradients={"weight": np.zeros_like(w)},
            saved=np.zeros(self._operator.saved_bytes, np.uint8),
            scratch=np.zeros(self._operator.scratch_bytes, np.uint8),
        )
        self._operator.bind(self._buffers)

    def run(
        self,
        stream: DeviceStream,
        a: DeviceArray,
        b: DeviceArray,
        out: DeviceArray,
        workspace: DeviceArray | None,
        bias: DeviceArray | None = None,
    ) -> None:
        assert workspace is not None, "a convolution is given its workspace"
        assert workspace.nbytes >= self.workspace_bytes, "a convolution is given its whole workspace"
        assert (bias is not None) == bool(self._key.fused), "a bias is given where the key says so"
        for array in (a, b, out) if bias is None else (a, b, out, bias):
            assert array.dtype == self._key.dtype, f"{array!r} is not of the key's dtype"
            assert array.pointer % PLAN_ALIGNMENT_BYTES == 0, f"{array!r} does not begin at a multiple of {PLAN_ALIGNMENT_BYTES}"
        self._enqueue(stream, lambda: self._run(a, b, out, bias), f"convolution {self._key.kind}")

    def _run(self, a: DeviceArray, b: DeviceArray, out: DeviceArray, bias: DeviceArray | None) -> None:
        buffers, kind = self._buffers, self._key.kind
        x, dy, w = buffers.inputs[0], buffers.output_grad, buffers.parameters["weight"]
        first, second = {"forward": (x, w), "input": (dy, w), "weight": (x, dy)}[kind]
        np.copyto(first, read(a).reshape(first.shape))
        np.copyto(second, read(b).reshape(second.shape))
        if kind == "forward":
            self._operator.forward(StepContext())
            result = buffers.output if bias is None else buffers.output + read(bias)
            result = np.maximum(result, 0) if self._key.fused == "bias_relu" else result
        elif kind == "input":
            self._operator.backward_input()
            result = buffers.input_grads[0]
        else:
            self._operator.backward_parameters()
            result = buffers.gradients["weight"]
        write(out, result.reshape(out.shape))
