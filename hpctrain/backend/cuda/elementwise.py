"""Rectified linear units, residual sums, and dropout.

The mask of dropout (Srivastava et al., JMLR 2014) does not depend on how the activation is split.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hpctrain.backend.cuda.device import DeviceArray, pack_width
from hpctrain.backend.cuda.operator import CudaOperator
from hpctrain.backend.cuda.runtime import CudaRuntime, StepBlock
from hpctrain.backend.operators import InPlace, StepContext
from hpctrain.backend.specs import AddSpec, DropoutSpec, ReluSpec, TensorSpec, parameter_dtype
from hpctrain.core.errors import BackendError


class _Elementwise(InPlace, CudaOperator):
    """Base of ReLU and residual sums, with their kernel launches."""

    def _launch(self, kernel: str, *arrays: DeviceArray | None, adds: int | None = None) -> None:
        """Enqueue a kernel over all elements of these arrays; None: no gradient is wanted. Bit i of `adds`: add to gradient i."""
        size, itemsize = self.output.size, self.output.item_bytes
        width = pack_width(itemsize, size, arrays)
        flags = () if adds is None else (np.int32(adds),)
        self.runtime.launch_items("elementwise", f"{kernel}_{self.tag}_w{width}", size // width, *arrays, *flags)

    def _pass_back(self, kernel: str, grads: tuple[DeviceArray | None, DeviceArray | None]) -> None:
        adds = sum(1 << i for i in range(2) if self.accumulates(i))
        if any(grad is not None for grad in grads):
            self._launch(kernel, self.buffers.output, self.output_grad, *grads, adds=adds)


class CudaRelu(_Elementwise):
    """Rectified linear unit: y = max(x, 0)."""

    def __init__(self, spec: ReluSpec, x: TensorSpec, *, training: bool, runtime: CudaRuntime) -> None:
        super().__init__(spec, (x,), training=training, runtime=runtime)
        self.needs_output = training
        self.declare()

    def forward(self, context: StepContext) -> None:
        self._launch("relu_forward", self.buffers.inputs[0], self.buffers.output)

    def backward_input(self) -> None:
        self._pass_back("add_relu_backward", (self.input_grad(), None))


class CudaAdd(_Elementwise):
    """Residual sum: y = a + b, then ReLU if the spec has `relu` set. The gradient passes to both inputs."""

    def __init__(self, spec: AddSpec, *inputs: TensorSpec, training: bool, runtime: CudaRuntime) -> None:
        super().__init__(spec, inputs, training=training, runtime=runtime)
        self._relu = "relu_" if spec.relu else ""
        self.needs_output = training and spec.relu
        self.declare()

    def forward(self, context: StepContext) -> None:
        self._launch(f"add_{self._relu}forward", *self.buffers.inputs, self.buffers.output)

    def backward_input(self) -> None:
        first, second = (self._incomplete_grad(i) for i in range(2))
        self._pass_back(f"add_{self._relu}backward", (first, second))

    def _incomplete_grad(self, i: int) -> DeviceArray | None:
        """Return the gradient of input i; None if backward need not write it.

        Without a ReLU, a gradient that shares the buffer of the output's gradient is already complete.
        """
        grad = self.input_grad(i)
        shares = grad is not None and grad.pointer == self.output_grad.pointer
        return None if shares and not self._relu else grad


_DIMS = 3


@dataclass(frozen=True)
class SamplePlace:
    """The position of one sample's block in its unsplit activation: first + i * step0 + j * step1 + k for element (i, j, k).

    Attributes:
        shape: shape of the block in three dims.
    """

    shape: tuple[int, int, int]
    first: int = 0
    step0: int = 0
    step1: int = 0

    @classmethod
    def of(cls, spec: DropoutSpec, x: TensorSpec) -> SamplePlace:
        """Return the position of each sample's part of `x` (N, ...) in the unsplit activation.

        Raises:
            BackendError: the activation is split and has more than three dims in addition to N.
        """
        shape = x.shape[1:]
        if spec.unsplit_shape is None or spec.per_sample:
            return cls((1, 1, math.prod(shape)))
        if len(shape) > _DIMS:
            raise BackendError(
                f"Split dropout on a GPU supports activations of at most {_DIMS} dims in addition to the batch, not "
                f"{len(shape)}; set the layer's use in the plan to batch."
            )
        fill = _DIMS - len(shape)
        steps = [math.prod(spec.unsplit_shape[dim + 1 :]) for dim in range(len(shape))]
        first = sum(corner * step for corner, step in zip(spec.origin, steps, strict=True))
        n0, n1, n2 = (1,) * fill + shape
        step0, step1, _ = (0,) * fill + tuple(steps)
        return cls((n0, n1, n2), first, step0, step1)

    @property
    def run(self) -> int:
        """Greatest common divisor of the length of the block's rows and of their positions in the unsplit activation."""
        return math.gcd(self.shape[2], self.first, self.step0, self.step1)


class CudaDropout(InPlace, CudaOperator):
    """Dropout: y = x * keep / (1 - rate), with `keep` drawn per element or per sample.

    The mask is not saved: backward draws it again, which costs less than reading it. Backward must therefore run before the next
    forward pass calls `begin`.
    """

    def __init__(self, spec: DropoutSpec, x: TensorSpec, *, training: bool, runtime: CudaRuntime, block: StepBlock) -> None:
        super().__init__(spec, (x,), training=training, runtime=runtime)
        self._ids = spec.first_sample + x.shape[0]
        self._place, self._per_sample = SamplePlace.of(spec, x), spec.per_sample
        step = block.register(spec.seed, spec.layer, self._ids)
        self._step = step.training, step.key.view("uint32"), step.ids[spec.first_sample :]
        self._scale = np.dtype(parameter_dtype(self.dtype)).type(1.0 / (1.0 - spec.rate))
        self._threshold = np.uint32(min(round(spec.rate * 2**32), 2**32 - 1))
        self.declare()

    def forward(self, context: StepContext) -> None:
        ids = context.sample_ids.size
        assert ids >= self._ids or not context.training, f"dropout needs the ids of {self._ids} samples, not {ids}"
        self._launch("dropout", self.buffers.inputs[0], self.buffers.output)

    def backward_input(self) -> None:
        dx = self.input_grad()
        if dx is not None:
            self._launch("dropout_add" if self.accumulates() else "dropout", self.output_grad, dx)

    def _launch(self, kernel: str, values: DeviceArray, out: DeviceArray) -> None:
        place = self._place
        width = pack_width(values.itemsize, place.run, (values, out))
        packs = place.shape[2] // width
        counts = (np.int32(place.shape[1]), np.int32(packs), np.int64(math.prod(place.shape[:2]) * packs))
        steps = (np.int64(place.first), np.int64(place.step0), np.int64(place.step1))
        name = f"{'sample_' * self._per_sample}{kernel}_{self.tag}_w{width}"
        arguments = (values, out, *self._step, *steps, *counts, self._scale, self._threshold)
        self.runtime.launch_items("dropout", name, values.size // width, *arguments)
