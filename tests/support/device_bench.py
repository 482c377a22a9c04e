"""One operator of the cuda set on an emulated device, with NaN wherever it has no right to read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from hpctrain.backend.cuda.device_array import DeviceArray
from hpctrain.backend.cuda.emulator.memory import on_host
from hpctrain.backend.cuda.emulator.rounding import read, write
from hpctrain.backend.dtypes import item_bytes
from hpctrain.backend.kernels.base import Buffers, StepContext
from hpctrain.backend.kernels.cuda.kernel_set import CudaKernelSet
from hpctrain.backend.kernels.specs import Spec, TensorSpec

#: of float64 NumPy, relative to the element: sums of the dtype, then (bfloat16) one rounding
TOLERANCE = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 1.01 * 2.0**-8}


def dyadic(*shape: int, seed: int = 0) -> np.ndarray:
    """Numbers that every dtype holds exactly, and whose sums float32 holds."""
    return np.random.default_rng(seed).integers(-63, 64, shape) / 32


def assert_rounded(actual: np.ndarray, expected: np.ndarray, dtype: str) -> None:
    """Equal within the accuracy of a dtype, infinities and NaN included."""
    np.testing.assert_allclose(actual, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * 1e-2)


@dataclass
class DeviceBench:
    """An operator of one input, bound; values go in and come out as arrays of the host.

    Args:
        start: what the input's gradient holds before it is added to; None: it is written. offset: elements by which x and the
            gradients begin behind an aligned address.
    """

    kernels: CudaKernelSet
    spec: Spec
    x: np.ndarray
    parameters: Mapping[str, np.ndarray] = field(default_factory=dict)
    training: bool = True
    start: np.ndarray | None = None
    wanted: bool = True
    offset: int = 0

    def __post_init__(self) -> None:
        runtime = self.kernels.runtime
        self.operator = operator = self.kernels.make(
            self.spec, (TensorSpec(self.x.shape, runtime.dtype),), training=self.training
        )
        self._x, self._dx = (self.array(self.x.shape, runtime.dtype) for _ in range(2))
        self._y, self._dy = (self.array(operator.output.shape, runtime.dtype) for _ in range(2))
        roles = self.parameters.items()
        self._gradients = {role: self.array(value.shape, runtime.parameter_dtype) for role, value in roles}
        shadows = {role: self.array(value.shape, runtime.dtype, value) for role, value in roles}
        self.saved, self.scratch = (self.kernels.allocate(n) for n in (operator.saved_bytes, operator.scratch_bytes))
        operator.bind(
            Buffers(
                inputs=(self._x,),
                output=self._y,
                input_grads=(self._dx if self.wanted else None,) if self.training else (),
                output_grad=self._dy if self.training else None,
                accumulate=(self.start is not None,),
                parameters={role: self.array(value.shape, runtime.parameter_dtype, value) for role, value in roles},
                gradients=self._gradients if self.training else {},
                shadows=shadows if runtime.dtype == "bfloat16" else {},
                saved=self.saved,
                scratch=self.scratch,
            )
        )

    def array(self, shape: tuple[int, ...], dtype: str, values: np.ndarray | None = None) -> DeviceArray:
        """An array of these values, else of NaN."""
        size = int(np.prod(shape)) * item_bytes(dtype)
        skipped = self.offset * item_bytes(dtype)
        array = self.kernels.allocate(skipped + size)[skipped:].view(dtype).reshape(shape)
        write(array, np.full(shape, np.nan) if values is None else values)
        return array

    def forward(self) -> np.ndarray:
        """The output."""
        write(self._x, self.x)
        for array in (self._y, self.saved, self.scratch):
            _poison(array)
        self.operator.forward(StepContext(training=self.training))
        return read(self._y).copy()

    def backward(self, dy: np.ndarray) -> dict[str, np.ndarray]:
        """The gradients by role, that of the input as "x"."""
        if not self.operator.needs_inputs[0]:
            _poison(self._x)
        if not self.operator.needs_output:
            _poison(self._y)
        write(self._dy, dy)
        write(self._dx, np.full(self.x.shape, np.nan) if self.start is None else self.start)
        for call in (self.operator.backward_parameters, self.operator.backward_input):
            _poison(self.scratch)
            call()
        return {"x": read(self._dx).copy(), **{role: read(gradient).copy() for role, gradient in self._gradients.items()}}

    def factors(self) -> tuple[np.ndarray, np.ndarray]:
        """The input and the output's gradient, as backward has left them."""
        return read(self._x).copy(), read(self._dy).copy()


def _poison(array: DeviceArray) -> None:
    on_host(array).reshape(-1).view(np.uint8).fill(0xFF)
