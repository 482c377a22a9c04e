"""The base of the operators of the cuda set."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from hpctrain.backend.cuda.device import ALIGNMENT_BYTES
from hpctrain.backend.cuda.device_array import DeviceArray
from hpctrain.backend.dtypes import item_bytes
from hpctrain.backend.kernels.abilities import Accumulating
from hpctrain.backend.operators import Buffers, Operator
from hpctrain.backend.kernels.cuda.runtime import TAGS, CudaRuntime
from hpctrain.backend.specs import Shape, Spec, TensorSpec

Request = tuple[Shape, str]  # shape, dtype


class CudaOperatorBase(Operator):
    """An operator on plain NHWC memory of a device. A subclass's constructor calls `declare` last; `bind` then gives it arrays.

    Calls enqueue work on the runtime's stream and never wait, so that a program can be captured: whatever changes from step to
    step is read from device memory, and no argument depends on the context.

    Attributes:
        tag: of the activations' dtype, in the names of kernels. saved, scratch: the arrays that were declared.
    """

    def __init__(self, spec: Spec, inputs: tuple[TensorSpec, ...], *, training: bool, runtime: CudaRuntime) -> None:
        self.spec = spec
        self.inputs = tuple(x.plain() for x in inputs)
        self.output = spec.output(*self.inputs)
        self.dtype = self.inputs[0].dtype
        self.training, self.runtime, self.tag = training, runtime, TAGS[self.dtype]
        self.needs_inputs = (False,) * len(inputs)
        self.saved: Sequence[DeviceArray] = ()
        self.scratch: Sequence[DeviceArray] = ()
        self._saved: Sequence[Request] = ()
        self._scratch: Sequence[Request] = ()

    def declare(self, *, saved: Sequence[Request] = (), scratch: Sequence[Request] = ()) -> None:
        """Fix which arrays this operator keeps from forward to backward, and works with inside a call."""
        self._saved, self._scratch = saved, scratch
        self.saved_bytes = total_bytes(saved)
        self.scratch_bytes = total_bytes(scratch)

    def bind(self, buffers: Buffers) -> None:
        self.buffers = buffers
        self.saved = carve(buffers.saved, self._saved)
        self.scratch = carve(buffers.scratch, self._scratch)

    def input_grad(self, i: int = 0) -> DeviceArray | None:
        """The buffer of the gradient of input i, None where nobody asks for it."""
        grads = self.buffers.input_grads
        grad: DeviceArray | None = grads[i] if i < len(grads) else None
        return grad

    def accumulates(self, i: int = 0) -> bool:
        """True where the gradient of input i is added to what is there."""
        return i < len(self.buffers.accumulate) and self.buffers.accumulate[i]

    @property
    def output_grad(self) -> DeviceArray:
        """The buffer of the output's gradient."""
        grad = self.buffers.output_grad
        assert isinstance(grad, DeviceArray), f"{type(self).__name__} is bound without a gradient of its output"
        return grad


class CudaOperator(Accumulating, CudaOperatorBase):
    """An operator whose `backward_input` adds where it is asked to, as all do that compute it by a kernel."""


def _aligned_bytes(request: Request) -> int:
    shape, dtype = request
    return -(-math.prod(shape) * item_bytes(dtype) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def total_bytes(requests: Iterable[Request]) -> int:
    """Bytes of a buffer that `carve` divides into these arrays."""
    return sum(map(_aligned_bytes, requests))


def carve(buffer: DeviceArray | None, requests: Iterable[Request]) -> list[DeviceArray]:
    """Arrays of these shapes and dtypes, one after another in `buffer` (uint8), each aligned to ALIGNMENT_BYTES."""
    arrays, start = [], 0
    for shape, dtype in requests:
        size = math.prod(shape) * item_bytes(dtype)
        memory = DeviceArray(0, (0,), "uint8", None) if buffer is None else buffer[start : start + size]
        assert memory.nbytes == size, "the buffer is smaller than what was declared"
        arrays.append(memory.view(dtype).reshape(shape))
        start += _aligned_bytes((shape, dtype))
    return arrays
