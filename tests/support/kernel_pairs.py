"""Runs one operation through a kernel set, from plain arrays of the host to such, so that two sets can be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hpctrain.backend.operators import Array, Buffers, InputView, KernelSet, Operator, StepContext
from hpctrain.backend.specs import NHWC, Spec, TensorSpec, parameter_dtype
from hpctrain.testing import operators


@dataclass
class Result:
    """Everything an operation produces, in plain layout."""

    output: np.ndarray
    input_grads: list[np.ndarray] = field(default_factory=list)
    gradients: dict[str, np.ndarray] = field(default_factory=dict)
    statistics: dict[str, np.ndarray] = field(default_factory=dict)

    def arrays(self) -> dict[str, np.ndarray]:
        named = {"output": self.output} | {f"d input {i}": grad for i, grad in enumerate(self.input_grads)}
        return named | {f"d {k}": v for k, v in self.gradients.items()} | self.statistics


def buffer(kernels: KernelSet, spec: TensorSpec) -> Array:
    """Memory of `spec`; what lies there before must not matter."""
    return operators.empty(kernels, spec.shape if spec.layout == NHWC else (spec.size,), spec.dtype)


def place(kernels: KernelSet, array: np.ndarray, spec: TensorSpec) -> Array:
    """A plain array in the layout of `spec`."""
    plain = TensorSpec(array.shape, spec.dtype)
    source = buffer(kernels, plain)
    operators.put(kernels, source, array)
    return source if spec.layout == NHWC else _reordered(kernels, source, plain, spec)


def take(kernels: KernelSet, array: Array, spec: TensorSpec) -> np.ndarray:
    """The plain array of a buffer of `spec`."""
    return operators.take(kernels, array if spec.layout == NHWC else _reordered(kernels, array, spec, spec.plain()))


def _reordered(kernels: KernelSet, array: Array, source: TensorSpec, target: TensorSpec) -> Array:
    operator = kernels.reorder(source, target)
    out = buffer(kernels, target)
    operator.bind(Buffers((array,), out, scratch=_bytes(kernels, operator.scratch_bytes)))
    operator.forward(StepContext())
    return out


def _bytes(kernels: KernelSet, size: int) -> Array | None:
    return operators.empty(kernels, (size,), "uint8") if size else None


def _placed(kernels: KernelSet, arrays: Mapping[str, np.ndarray] | None, dtype: str) -> dict[str, Array]:
    return {role: place(kernels, value, TensorSpec(value.shape, dtype)) for role, value in (arrays or {}).items()}


def _taken(kernels: KernelSet, arrays: Mapping[str, Array]) -> dict[str, np.ndarray]:
    return {role: operators.take(kernels, array) for role, array in arrays.items()}


def run(
    kernels: KernelSet,
    spec: Spec,
    inputs: Sequence[np.ndarray],
    *,
    dtype: str = "float32",
    parameters: Mapping[str, np.ndarray] | None = None,
    statistics: Mapping[str, np.ndarray] | None = None,
    output_grad: np.ndarray | None = None,
    accumulate: Sequence[np.ndarray | None] | None = None,
    layouts: Sequence[TensorSpec] | None = None,
    wants: Sequence[bool] | None = None,
    in_place: bool = False,
    input_first: bool = False,
    steps: int = 1,
) -> Result:
    """Forward and, with `output_grad`, backward.

    accumulate[i]: what the i-th input's gradient holds before and is added to. layouts: specs that the producers offer.
    wants[i]: somebody asks for the i-th input's gradient. in_place: the first input's gradient lies in the output's memory.
    """
    training = output_grad is not None
    offered = tuple(layouts) if layouts is not None else tuple(TensorSpec(x.shape, dtype) for x in inputs)
    asked = wants is None or any(wants)
    operator = kernels.make(spec, offered, training=training, input_gradient=asked)
    sums = parameter_dtype(dtype)
    own, kept = _placed(kernels, parameters, sums), _placed(kernels, statistics, sums)
    buffers = Buffers(
        inputs=tuple(place(kernels, x, wanted) for x, wanted in zip(inputs, operator.inputs, strict=True)),
        output=buffer(kernels, operator.output),
        parameters=own,
        gradients={role: operators.empty(kernels, value.shape, sums) for role, value in own.items()} if training else {},
        shadows={} if kernels.shadow_dtype is None else _placed(kernels, parameters, kernels.shadow_dtype),
        statistics=kept,
        saved=_bytes(kernels, operator.saved_bytes),
        scratch=_bytes(kernels, operator.scratch_bytes),
    )
    if training:
        _add_gradients(kernels, operator, buffers, output_grad, accumulate, wants, in_place)
    operator.bind(buffers)
    if isinstance(operator, InputView):
        return Result(take(kernels, buffers.inputs[0].reshape(buffers.output.shape), operator.output))
    for _ in range(steps):
        operator.forward(StepContext(training=training))
    result = Result(take(kernels, buffers.output, operator.output), statistics=_taken(kernels, kept))
    if training:
        halves = [operator.backward_parameters, operator.backward_input]
        for half in reversed(halves) if input_first else halves:
            half()
        result.gradients = _taken(kernels, buffers.gradients)
        result.input_grads = [
            take(kernels, grad, wanted)
            for grad, wanted in zip(buffers.input_grads, operator.inputs, strict=True)
            if grad is not None
        ]
    return result


def _add_gradients(
    kernels: KernelSet,
    operator: Operator,
    buffers: Buffers,
    output_grad: np.ndarray | None,
    accumulate: Sequence[np.ndarray | None] | None,
    wants: Sequence[bool] | None,
    in_place: bool,
) -> None:
    assert output_grad is not None
    before = accumulate if accumulate is not None else [None] * len(operator.inputs)
    asked = wants if wants is not None else [True] * len(operator.inputs)
    buffers.output_grad = place(kernels, output_grad, operator.output)
    grads = [
        None if not want else buffer(kernels, spec) if old is None else place(kernels, old, spec)
        for spec, old, want in zip(operator.inputs, before, asked, strict=True)
    ]
    if in_place:
        grads[0] = buffers.output_grad
    buffers.input_grads = tuple(grads)
    buffers.accumulate = tuple(old is not None for old in before)


def difference(ours: np.ndarray, reference: np.ndarray) -> float:
    """max |a - b| / max |b|."""
    scale = float(np.max(np.abs(reference), initial=0.0))
    return float(np.max(np.abs(ours - reference), initial=0.0)) / (scale or 1.0)


def assert_close(ours: Result, reference: Result, bound: float = 1e-5) -> None:
    """Every array of two results."""
    for name, wanted in reference.arrays().items():
        found = ours.arrays()[name]
        assert found.shape == wanted.shape, name
        assert difference(found, wanted) <= bound, f"{name}: {difference(found, wanted):.2e}"
