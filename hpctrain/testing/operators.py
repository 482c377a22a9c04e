"""A bench for one operator: its buffers, the reorders it wants, and a memory that is hostile where it may be.

Buffers that an operator must not read hold NaN bytes: the output and the saved memory before forward, the scratch before every
call, and before backward whatever the operator says that backward does not need. An operator that relies on zeroed memory, on
scratch surviving, or on an undeclared input therefore fails its test. Values go in and come out as arrays of the host, wherever
the kernel set's memory is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hpctrain.backend.dtypes import parameter_dtype
from hpctrain.backend.kernels.abilities import Accumulating, InPlace, InputView, ParameterCopies
from hpctrain.backend.operators import Array, Buffers, KernelSet, LocalStatistics, Operator, StatisticsMerger, StepContext
from hpctrain.backend.specs import NHWC, BatchNormSpec, Conv2dSpec, LinearSpec, Spec, TensorSpec
from hpctrain.testing.transfers import empty, poison, put, take


@dataclass
class Gradients:
    """The results of a backward pass: per input (None where not asked for) and per parameter role. Copies."""

    inputs: tuple[np.ndarray | None, ...]
    parameters: dict[str, np.ndarray]


@dataclass
class OperatorBench:
    """An operator of `kernels` for `spec` on `inputs` (plain arrays), bound once; run it as often as you like.

    Args:
        parameters, statistics: by role; `default_parameters` makes some. Arrays of the host are used as they are; to other memory
            they are copied before each forward, and statistics back behind it.
        training: also passed to the operator's context unless `context` is given.
        wanted: per input, whether its gradient is asked for (all by default).
        accumulate: gradients of the inputs are added to what `backward` is given; where the operator cannot, by the bench.
        in_place: where the operator allows it, the output shares the buffer of input 0 (unless backward needs that input), and
            the gradient of input 0 that of the output (unless it accumulates).
        dtype: of activations; the inputs' unless it is given. Values of bfloat16 are float32 on the host.
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
    dtype: str = ""

    def __post_init__(self) -> None:
        dtype = self.dtype or str(self.inputs[0].dtype)
        kept = parameter_dtype(dtype)
        self._plain = tuple(TensorSpec(x.shape, dtype) for x in self.inputs)
        unwanted = {} if self.wanted is None or any(self.wanted) else {"input_gradient": False}
        self.operator: Operator = self.kernels.make(self.spec, self._plain, training=self.training, **unwanted)
        operator = self.operator
        self.in_place = self.in_place and isinstance(operator, InPlace) and operator.inputs[0].layout == operator.output.layout
        self._overwrites = isinstance(operator, InputView) or (self.in_place and not operator.needs_inputs[0])
        self._xs = [self._buffer(spec) for spec in operator.inputs]
        self._y = self._shared(self._xs[0], operator.output) if self._overwrites else self._buffer(operator.output)
        self._dy = self._buffer(operator.output)
        self._dxs = [self._grad_buffer(i) for i in range(len(self._xs))] if self.training else []
        self._scratch, self._saved = (self.kernels.allocate(n) for n in (operator.scratch_bytes, operator.saved_bytes))
        self._on_host = self.kernels.arithmetic.on_host
        shapes = {role: value.shape for role, value in self.parameters.items()}
        self.gradients = {role: empty(self.kernels, shape, kept) for role, shape in shapes.items()} if self.training else {}
        if isinstance(self.spec, BatchNormSpec) and self.training:
            for role in ("batch_mean", "batch_var"):
                self.statistics.setdefault(role, np.full(self.spec.channels, np.nan, kept))
        self._parameters, self._statistics = self._placed(self.parameters), self._placed(self.statistics)
        rounded = self.kernels.shadow_dtype
        self._shadows = {role: empty(self.kernels, shape, rounded) for role, shape in shapes.items()} if rounded else {}
        accumulates = self.accumulate and isinstance(operator, Accumulating)
        operator.bind(
            Buffers(
                inputs=tuple(self._xs),
                output=self._y,
                input_grads=tuple(self._dxs),
                output_grad=self._dy if self.training else None,
                accumulate=tuple(accumulates for _ in self._dxs),
                parameters=self._parameters,
                gradients=self.gradients,
                shadows=self._shadows,
                statistics=self._statistics,
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
            poison(self.kernels, self._y)
        poison(self.kernels, self._saved)
        poison(self.kernels, self._scratch)
        for x, plain, spec, buffer in zip(self.inputs, self._plain, self.operator.inputs, self._xs, strict=True):
            self._reordered(x, plain, spec, buffer)
        if isinstance(self.operator, ParameterCopies):
            self.operator.parameters_changed()
        self._put_in()
        self.kernels.begin(context)
        self.operator.forward(context)
        self._take_statistics()
        return self._to_plain(self._y, self.operator.output, self.spec.output(*self._plain))

    def backward(self, output_grad: np.ndarray, start: Sequence[np.ndarray] | None = None) -> Gradients:
        """The gradients after the latest `forward`. `start`: what the inputs' gradients hold before, where they accumulate."""
        operator = self.operator
        plain_output = self.spec.output(*self._plain)
        for i, (x, needed) in enumerate(zip(self._xs, operator.needs_inputs, strict=True)):
            if not needed and not (i == 0 and self._overwrites):
                poison(self.kernels, x)
        if not operator.needs_output:
            poison(self.kernels, self._y)
        native = self.accumulate and isinstance(operator, Accumulating)
        for i, buffer in enumerate(self._dxs):
            if buffer is None:
                continue
            poison(self.kernels, buffer)
            if native:
                assert start is not None, "the bench accumulates: it needs what to add to"
                self._reordered(start[i], self._plain[i], operator.inputs[i], buffer)
        self._reordered(output_grad, plain_output, operator.output, self._dy)
        poison(self.kernels, self._scratch)
        operator.backward_parameters()
        poison(self.kernels, self._scratch)
        operator.backward_input()
        grads = [
            None if buffer is None else self._to_plain(buffer, spec, plain)
            for buffer, spec, plain in zip(self._dxs, operator.inputs, self._plain, strict=True)
        ]
        if self.accumulate and not native:
            assert start is not None
            grads = [None if grad is None else grad + first for grad, first in zip(grads, start, strict=True)]
        return Gradients(tuple(grads), {role: take(self.kernels, grad) for role, grad in self.gradients.items()})

    def _placed(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Array]:
        """These very arrays, or memory of the set for them."""
        kept = parameter_dtype(self._plain[0].dtype)
        return {role: x if self._on_host else empty(self.kernels, x.shape, kept) for role, x in arrays.items()}

    def _put_in(self) -> None:
        """Parameters and statistics to the set's memory."""
        for role, shadow in self._shadows.items():
            put(self.kernels, shadow, self.parameters[role])
        if not self._on_host:
            for array, values in zip(self._arrays(), (*self.parameters.values(), *self.statistics.values()), strict=True):
                put(self.kernels, array, values)

    def _arrays(self) -> list[Array]:
        return [*self._parameters.values(), *self._statistics.values()]

    def _take_statistics(self) -> None:
        if not self._on_host:
            for role, array in self._statistics.items():
                self.statistics[role][...] = take(self.kernels, array)

    def _buffer(self, spec: TensorSpec) -> Array:
        shape = spec.shape if spec.layout == NHWC else (spec.size,)
        return empty(self.kernels, shape, spec.dtype)

    def _shared(self, buffer: Array, spec: TensorSpec) -> Array:
        return buffer.reshape(spec.shape) if spec.layout == NHWC else buffer

    def _grad_buffer(self, i: int) -> Array | None:
        if self.wanted is not None and not self.wanted[i]:
            return None
        spec = self.operator.inputs[i]
        if i == 0 and (isinstance(self.operator, InputView) or (self.in_place and not self.accumulate)):
            return self._shared(self._dy, spec)
        return self._buffer(spec)

    def _reordered(self, array: np.ndarray, plain: TensorSpec, spec: TensorSpec, buffer: Array) -> None:
        """Write a plain array to a buffer of the operator's layout."""
        if spec.layout == NHWC:
            put(self.kernels, buffer, array)
            return
        self._run_reorder(plain, spec, np.ascontiguousarray(array), buffer)

    def _to_plain(self, buffer: Array, spec: TensorSpec, plain: TensorSpec) -> np.ndarray:
        """A plain copy of a buffer of the operator's layout."""
        if spec.layout == NHWC:
            return take(self.kernels, buffer)
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
