"""A bench for one operator: its buffers, the reorders it wants, and a memory that is hostile where it may be.

Buffers that an operator must not read hold NaN bytes: the output and the saved memory before forward, the scratch before every
call, and before backward whatever the operator says that backward does not need. An operator that relies on zeroed memory, on
scratch surviving, or on an undeclared input therefore fails its test.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hpctrain.backend.kernels.abilities import Accumulating, InPlace, InputView, ParameterCopies
from hpctrain.backend.kernels.base import Buffers, KernelSet, LocalStatistics, Operator, StatisticsMerger, StepContext
from hpctrain.backend.kernels.specs import NHWC, BatchNormSpec, Conv2dSpec, LinearSpec, Spec, TensorSpec


@dataclass
class Gradients:
    """The results of a backward pass: per input (None where not asked for) and per parameter role. Copies."""

    inputs: tuple[np.ndarray | None, ...]
    parameters: dict[str, np.ndarray]


@dataclass
class OperatorBench:
    """An operator of `kernels` for `spec` on `inputs` (plain arrays), bound once; run it as often as you like.

    Args:
        parameters, statistics: by role; `default_parameters` makes some. Arrays are used as they are, not copied.
        training: also passed to the operator's context unless `context` is given.
        wanted: per input, whether its gradient is asked for (all by default).
        accumulate: gradients of the inputs are added to what `backward` is given; where the operator cannot, by the bench.
        in_place: where the operator allows it, the output shares the buffer of input 0 (unless backward needs that input), and
            the gradient of input 0 that of the output (unless it accumulates).
    """

    kernels: KernelSet
    spec: Spec
    inputs: Sequence[np.ndarray]
    parameters: Mapping[str, np.ndarray] = field(default_factory=dict)
    statistics: dict[str, np.ndarray] = field(default_factory=dict)
    training: bool = True
    wanted: Sequence[bool] | None = None
    accumulate: bool = False
    in_place: bool = False
    merger: StatisticsMerger = field(default_factory=LocalStatistics)

    def __post_init__(self) -> None:
        dtype = str(self.inputs[0].dtype)
        self._plain = tuple(TensorSpec(x.shape, dtype) for x in self.inputs)
        self.operator: Operator = self.kernels.make(self.spec, self._plain, training=self.training)
        operator = self.operator
        self.in_place = self.in_place and isinstance(operator, InPlace) and operator.inputs[0].layout == operator.output.layout
        self._overwrites = isinstance(operator, InputView) or (self.in_place and not operator.needs_inputs[0])
        self._xs = [self._buffer(spec) for spec in operator.inputs]
        self._y = self._shared(self._xs[0], operator.output) if self._overwrites else self._buffer(operator.output)
        self._dy = self._buffer(operator.output)
        self._dxs = [self._grad_buffer(i) for i in range(len(self._xs))] if self.training else []
        self._scratch, self._saved = (self.kernels.allocate(n) for n in (operator.scratch_bytes, operator.saved_bytes))
        self.gradients = {role: np.full_like(value, np.nan) for role, value in self.parameters.items()} if self.training else {}
        if isinstance(self.spec, BatchNormSpec) and self.training:
            for role in ("batch_mean", "batch_var"):
                self.statistics.setdefault(role, np.full(self.spec.channels, np.nan, dtype))
        accumulates = self.accumulate and isinstance(operator, Accumulating)
        operator.bind(
            Buffers(
                inputs=tuple(self._xs),
                output=self._y,
                input_grads=tuple(self._dxs),
                output_grad=self._dy if self.training else None,
                accumulate=tuple(accumulates for _ in self._dxs),
                parameters=self.parameters,
                gradients=self.gradients,
                statistics=self.statistics,
                saved=self._saved,
                scratch=self._scratch,
                merger=self.merger,
            )
        )

    def forward(self, context: StepContext | None = None) -> np.ndarray:
        """The output, plain, a copy."""
        if context is None:
            context = StepContext(training=self.training, sample_ids=np.arange(self.inputs[0].shape[0]))
        if not self._overwrites:
            _poison(self._y)
        _poison(self._saved)
        _poison(self._scratch)
        for x, plain, spec, buffer in zip(self.inputs, self._plain, self.operator.inputs, self._xs, strict=True):
            self._reordered(x, plain, spec, buffer)
        if isinstance(self.operator, ParameterCopies):
            self.operator.parameters_changed()
        self.operator.forward(context)
        return self._to_plain(self._y, self.operator.output, self.spec.output(*self._plain))

    def backward(self, output_grad: np.ndarray, start: Sequence[np.ndarray] | None = None) -> Gradients:
        """The gradients after the latest `forward`. `start`: what the inputs' gradients hold before, where they accumulate."""
        operator = self.operator
        plain_output = self.spec.output(*self._plain)
        for i, (x, needed) in enumerate(zip(self._xs, operator.needs_inputs, strict=True)):
            if not needed and not (i == 0 and self._overwrites):
                _poison(x)
        if not operator.needs_output:
            _poison(self._y)
        native = self.accumulate and isinstance(operator, Accumulating)
        for i, buffer in enumerate(self._dxs):
            if buffer is None:
                continue
            _poison(buffer)
            if native:
                assert start is not None, "the bench accumulates: it needs what to add to"
                self._reordered(start[i], self._plain[i], operator.inputs[i], buffer)
        self._reordered(output_grad, plain_output, operator.output, self._dy)
        _poison(self._scratch)
        operator.backward_parameters()
        _poison(self._scratch)
        operator.backward_input()
        grads = [
            None if buffer is None else self._to_plain(buffer, spec, plain)
            for buffer, spec, plain in zip(self._dxs, operator.inputs, self._plain, strict=True)
        ]
        if self.accumulate and not native:
            assert start is not None
            grads = [None if grad is None else grad + first for grad, first in zip(grads, start, strict=True)]
        return Gradients(tuple(grads), {role: grad.copy() for role, grad in self.gradients.items()})

    def _buffer(self, spec: TensorSpec) -> np.ndarray:
        memory = self.kernels.allocate(spec.bytes)
        flat: np.ndarray = memory[: spec.bytes].view(spec.dtype)
        return flat.reshape(spec.shape) if spec.layout == NHWC else flat

    def _shared(self, buffer: np.ndarray, spec: TensorSpec) -> np.ndarray:
        return buffer.reshape(spec.shape) if spec.layout == NHWC else buffer

    def _grad_buffer(self, i: int) -> np.ndarray | None:
        if self.wanted is not None and not self.wanted[i]:
            return None
        spec = self.operator.inputs[i]
        if i == 0 and (isinstance(self.operator, InputView) or (self.in_place and not self.accumulate)):
            return self._shared(self._dy, spec)
        return self._buffer(spec)

    def _reordered(self, array: np.ndarray, plain: TensorSpec, spec: TensorSpec, buffer: np.ndarray) -> None:
        """Write a plain array to a buffer of the operator's layout."""
        if spec.layout == NHWC:
            np.copyto(buffer, array)
            return
        self._run_reorder(plain, spec, np.ascontiguousarray(array), buffer)

    def _to_plain(self, buffer: np.ndarray, spec: TensorSpec, plain: TensorSpec) -> np.ndarray:
        """A plain copy of a buffer of the operator's layout."""
        if spec.layout == NHWC:
            return buffer.copy()
        array = np.empty(plain.shape, plain.dtype)
        self._run_reorder(spec, plain, buffer, array)
        return array

    def _run_reorder(self, source: TensorSpec, target: TensorSpec, x: np.ndarray, y: np.ndarray) -> None:
        reorder = self.kernels.reorder(source, target)
        memory = [self.kernels.allocate(n) for n in (reorder.saved_bytes, reorder.scratch_bytes)]
        reorder.bind(Buffers(inputs=(x,), output=y, input_grads=(None,), saved=memory[0], scratch=memory[1]))
        reorder.forward(StepContext(training=False))


def default_parameters(spec: Spec, dtype: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Random parameters by role for the specs that have any: "weight" and, where there is one, "bias"."""
    random = np.random.default_rng(seed)
    match spec:
        case Conv2dSpec() | LinearSpec():
            shapes = {"weight": spec.weight_shape}
            if spec.bias:
                shapes["bias"] = spec.weight_shape[:1] if isinstance(spec, Conv2dSpec) else spec.weight_shape[1:]
        case BatchNormSpec():
            shapes = {"weight": (spec.channels,), "bias": (spec.channels,)}
        case _:
            shapes = {}
    return {role: random.standard_normal(shape).astype(dtype) for role, shape in shapes.items()}


def _poison(buffer: np.ndarray) -> None:
    """Fill with bytes 0xFF: NaN in every float dtype, True-ish rubbish in masks."""
    buffer.reshape(-1).view(np.uint8).fill(0xFF)
