"""bfloat16 in the host's memory: float32 operators between copies, so that each tensor is rounded once.

`ml_dtypes` adds the dtype to NumPy. Activations and their gradients are bfloat16; parameters, their gradients, statistics and all
sums are float32, as on a GPU (docs/gpu.md, "Precision"). A `RoundedOperator` copies its inputs to float32, runs a float32
operator, and rounds the results. The NumPy set, the reference of the other sets, computes all operators in this way except views
and fused ReLUs, which round nothing. oneDNN's set does so if the library has no kernel that rounds once, or if float32 is
faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import ml_dtypes
import numpy as np

from hpctrain.backend.operators import (
    Accumulating,
    Array,
    Buffers,
    InPlace,
    Operator,
    Request,
    StepContext,
    SufficientFactors,
    carve,
    total_bytes,
)
from hpctrain.backend.specs import NHWC, Conv2dSpec, TensorSpec

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

#: call that copies one array to another
Copying = Callable[[], object]
#: function (source, target) that prepares a copy between arrays of bfloat16 and float32, rounded to nearest even
Conversion = Callable[[Array, Array], Copying]


def convert_by_numpy(source: Array, target: Array) -> Copying:
    """Return the call that copies `source` to `target`, an array of the same size in any dtype."""
    return partial(np.copyto, target, source.reshape(target.shape), casting="same_kind")


def rounded(
    make: Callable[..., Operator], inputs: Sequence[TensorSpec], *, training: bool, convert: Conversion = convert_by_numpy
) -> Operator:
    """Return the operator that `make` returns for these inputs in float32, between rounded copies.

    Args:
        make: function that returns an operator for the specs of its inputs.
        inputs: specs of the inputs in bfloat16.
    """
    inner = make(*(replace(x, dtype="float32") for x in inputs))
    kind = RoundedLinear if isinstance(inner, SufficientFactors) else RoundedOperator
    return kind(inner, training=training, convert=convert)


class RoundedOperator(InPlace, Accumulating, Operator):
    """A float32 operator between copies: inputs to float32, outputs and gradients to bfloat16.

    The operator also rounds the weight of a convolution. It does not round the weight of a linear layer, because a copy in every
    pass would take longer than the product. A gradient that is added to another one is rounded after the addition. Each half of
    backward copies the tensors that it reads, since scratch is valid only within one call.
    """

    def __init__(self, inner: Operator, *, training: bool, convert: Conversion = convert_by_numpy) -> None:
        self.spec, self._inner, self._convert, self._training = inner.spec, inner, convert, training
        self.inputs = tuple(replace(x, dtype=BFLOAT16.name) for x in inner.inputs)
        self.output = replace(inner.output, dtype=BFLOAT16.name)
        self.needs_inputs, self.needs_output = inner.needs_inputs, inner.needs_output
        self.saved_bytes, self.fallback_reason = inner.saved_bytes, inner.fallback_reason
        weight = inner.spec.weight_shape if isinstance(inner.spec, Conv2dSpec) else (0,)
        activations = [*map(_request, inner.inputs), _request(inner.output)]
        # A gradient shares the memory of its tensor, unless backward reads both.
        needed = [*self.needs_inputs, self.needs_output] if training else [False] * len(activations)
        gradients = [request for request, apart in zip(activations, needed, strict=True) if apart]
        self._requests = [
            ((inner.scratch_bytes,), "uint8"),
            (weight, BFLOAT16.name),
            (weight, "float32"),
            *activations,
            *gradients,
        ]
        self.scratch_bytes = total_bytes(self._requests)
        self._load: list[Copying] = []
        self._load_backward: list[Copying] = []
        self._round_weight: list[Copying] = []
        self._store: Copying | None = None
        self._targets: list[tuple[Array, Array | None, Copying]] = []

    def bind(self, buffers: Buffers) -> None:
        super().bind(buffers)
        scratch, half, weight, *floats = carve(buffers.scratch, self._requests)
        count = len(self.inputs)
        xs, y, gradients = floats[:count], floats[count], iter(floats[count + 1 :])
        dxs = [next(gradients) if self._training and needed else x for x, needed in zip(xs, self.needs_inputs, strict=True)]
        dy = next(gradients) if self._training and self.needs_output else y
        self._load = [self._convert(x, values) for x, values in zip(buffers.inputs, xs, strict=True)]
        parameters = dict(buffers.parameters)
        if weight.size:
            self._round_weight = [self._convert(parameters["weight"], half), self._convert(half, weight)]
            parameters["weight"] = weight
        self._store = self._convert(y, buffers.output)
        targets = list(zip(buffers.input_grads, dxs, strict=False))
        wanted = tuple(None if target is None else values for target, values in targets)
        self._targets = [
            (values, target if adds else None, self._convert(values, target))
            for (target, values), adds in zip(targets, buffers.accumulate or (False,) * len(targets), strict=True)
            if target is not None
        ]
        if buffers.output_grad is not None:
            read = [load for load, needed in zip(self._load, self.needs_inputs, strict=True) if needed]
            read += [self._convert(buffers.output, y)] if self.needs_output else []
            self._load_backward = [*read, self._convert(buffers.output_grad, dy)]
        self._inner.bind(
            replace(
                buffers,
                inputs=tuple(xs),
                output=y,
                input_grads=wanted,
                output_grad=None if buffers.output_grad is None else dy,
                accumulate=(False,) * len(targets),
                parameters=parameters,
                scratch=scratch,
            )
        )

    def forward(self, context: StepContext) -> None:
        for copy in (*self._load, *self._round_weight):
            copy()
        self._inner.forward(context)
        assert self._store is not None, "the operator is not bound"
        self._store()

    def backward_parameters(self) -> None:
        for copy in self._load_backward:
            copy()
        self._inner.backward_parameters()

    def backward_input(self) -> None:
        if not self._targets:
            return
        for copy in (*self._load_backward, *self._round_weight):
            copy()
        self._inner.backward_input()
        for values, before, store in self._targets:
            if before is not None:
                np.add(values, before, out=values)
            store()


class RoundedLinear(SufficientFactors, RoundedOperator):
    """A linear layer in float32 between copies; its sufficient factors are the rounded input and gradient."""


def _request(spec: TensorSpec) -> Request:
    """Return the request for a float32 array that holds a tensor, padding included."""
    return spec.shape if spec.layout == NHWC else (spec.size,), "float32"
