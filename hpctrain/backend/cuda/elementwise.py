"""Dropout (Srivastava et al., JMLR 2014) with masks that any split of the activation draws alike, on a device."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hpctrain.backend.cuda.device import pack_width
from hpctrain.backend.cuda.device_array import DeviceArray
from hpctrain.backend.dtypes import parameter_dtype
from hpctrain.backend.kernels.abilities import InPlace
from hpctrain.backend.operators import Operator, StepContext
from hpctrain.backend.kernels.cuda.flatten import CudaView
from hpctrain.backend.cuda.operator import CudaOperator
from hpctrain.backend.kernels.cuda.runtime import CudaRuntime
from hpctrain.backend.kernels.cuda.step_block import StepBlock
from hpctrain.backend.specs import DropoutSpec, TensorSpec
from hpctrain.core.errors import BackendError

_DIMS = 3


def make_dropout(spec: DropoutSpec, x: TensorSpec, *, training: bool, runtime: CudaRuntime, block: StepBlock) -> Operator:
    """Dropout, or the identity where nothing is dropped."""
    if not training or spec.rate == 0:
        return CudaView(spec, x)
    return CudaDropout(spec, x, training=training, runtime=runtime, block=block)


@dataclass(frozen=True)
class SamplePlace:
    """Where the elements of one sample's block lie in its unsplit activation: first + i * step0 + j * step1 + k at (i, j, k).

    shape: of the block in three dims.
    """

    shape: tuple[int, int, int]
    first: int = 0
    step0: int = 0
    step1: int = 0

    @classmethod
    def of(cls, spec: DropoutSpec, x: TensorSpec) -> SamplePlace:
        """The place of an activation `x` (N, ...).

        Raises:
            BackendError: a split activation with more than three dims beside N.
        """
        shape = x.shape[1:]
        if spec.unsplit_shape is None or spec.per_sample:
            return cls((1, 1, math.prod(shape)))
        if len(shape) > _DIMS:
            raise BackendError(f"Split dropout on a device takes up to {_DIMS} dims beside the batch, not {len(shape)}.")
        fill = _DIMS - len(shape)
        steps = [math.prod(spec.unsplit_shape[dim + 1 :]) for dim in range(len(shape))]
        first = sum(corner * step for corner, step in zip(spec.origin, steps, strict=True))
        n0, n1, n2 = (1,) * fill + shape
        step0, step1, _ = (0,) * fill + tuple(steps)
        return cls((n0, n1, n2), first, step0, step1)

    @property
    def run(self) -> int:
        """The largest number so that all aligned runs of that many elements are neighbours there, at a multiple of it."""
        return math.gcd(self.shape[2], self.first, self.step0, self.step1)


class CudaDropout(InPlace, CudaOperator):
    """Compute y = x * keep / (1 - rate), keep by element or by sample.

    The mask is not saved: backward draws it again, which costs less than reading it. So backward must run before the `begin`
    of the next forward pass.
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
