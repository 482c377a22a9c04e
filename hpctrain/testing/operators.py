"""Checks of a single operator: its buffers, its reorders, the memory that it must not rely on, and its gradients.

Buffers that an operator must not read are filled with NaN bytes: the output and the saved memory before forward, the scratch
memory before every call, and before backward all buffers that the operator declares unnecessary for it. An operator that relies
on zeroed memory, on the contents of scratch memory, or on an undeclared input therefore fails its test. Values are host arrays,
wherever the memory of the kernel set is.

`check_gradient` compares an operator's vector-Jacobian products with central differences, in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hpctrain.backend.operators import (
    Accumulating,
    Array,
    Buffers,
    InPlace,
    InputView,
    KernelSet,
    LocalStatistics,
    Operator,
    ParameterCopies,
    StatisticsMerger,
    StepContext,
)
from hpctrain.backend.specs import NHWC, BatchNormSpec, Conv2dSpec, LinearSpec, Spec, TensorSpec, item_bytes, parameter_dtype


def empty(kernels: KernelSet, shape: tuple[int, ...], dtype: str) -> Array:
    """Return a poisoned array in the memory of the kernel set."""
    array = kernels.allocate(int(np.prod(shape)) * item_bytes(dtype)).view(dtype).reshape(shape)
    poison(kernels, array)
    return array


def poison(kernels: KernelSet, array: Array) -> None:
    """Fill an array with bytes 0xFF: NaN in every float dtype, neither 0 nor 1 in masks."""
    raw = array.reshape(-1).view("uint8")
    kernels.arithmetic.from_host(raw, np.full(raw.size, 0xFF, np.uint8))


def put(kernels: KernelSet, array: Array, values: np.ndarray) -> None:
    """Write values to an array, rounded to its dtype."""
    kernels.arithmetic.from_host(array, values)


def take(kernels: KernelSet, array: Array) -> np.ndarray:
    """Return a copy of the elements on the host; bfloat16 is converted to float32."""
    return np.array(kernels.arithmetic.to_host(array))


@dataclass
class Gradients:
    """The results of a backward pass, as copies: per input (None if not requested) and per parameter role."""

    inputs: tuple[np.ndarray | None, ...]
    parameters: dict[str, np.ndarray]


@dataclass
class OperatorBench:
    """An operator of `kernels` for `spec` on `inputs` (plain arrays), bound once. It can be run any number of times.

    Args:
        parameters, statistics: arrays by role, such as those of `default_parameters`. Host arrays are used directly. For other
            memory they are copied there before each forward, and statistics are copied back after it.
        training: whether the operator runs in training mode; ignored if `context` is passed.
        wanted: whether the gradient of each input is requested; default: all.
        accumulate: whether gradients are added to the inputs' existing gradients. If the operator does not support this, the
            bench adds them.
        in_place: whether the output shares the buffer of input 0 (unless backward needs that input) and the gradient of input 0
            that of the output (unless it accumulates), if the operator supports this.
        dtype: dtype of activations; default: that of the inputs. Values of bfloat16 are float32 on the host.
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
        """Return a copy of the output in plain layout."""
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
        """Return the gradients after the latest `forward`.

        Args:
            start: initial gradients of the inputs if they accumulate.
        """
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
                assert start is not None, "the bench accumulates gradients, so `start` must be given"
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
        """Return host arrays unchanged, or new arrays in the memory of the kernel set."""
        kept = parameter_dtype(self._plain[0].dtype)
        return {role: x if self._on_host else empty(self.kernels, x.shape, kept) for role, x in arrays.items()}

    def _put_in(self) -> None:
        """Copy parameters and statistics to the memory of the kernel set."""
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
        """Write a plain array to a buffer in the operator's layout."""
        if spec.layout == NHWC:
            put(self.kernels, buffer, array)
            return
        self._run_reorder(plain, spec, np.ascontiguousarray(array), buffer)

    def _to_plain(self, buffer: Array, spec: TensorSpec, plain: TensorSpec) -> np.ndarray:
        """Return a plain copy of a buffer in the operator's layout."""
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
    """Return random parameters of a spec by role: "weight" and, if the spec has one, "bias"."""
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


def numerical_gradient(
    function: Callable[[], np.ndarray], variable: np.ndarray, cotangent: np.ndarray, *, step: float = 1e-5
) -> np.ndarray:
    """Return d <function(), cotangent> / d variable for every element, by central differences of the whole Jacobian.

    Args:
        function: callback that reads `variable` (float64), which is changed in place and restored.
        cotangent: array with the shape of the function's result.
        step: half-width of the differences. The error is of order step**2 and 1e-16 / step.
    """
    assert variable.dtype == np.float64, "central differences need float64"
    gradient = np.zeros_like(variable)
    for index in np.ndindex(variable.shape):
        value = variable[index]
        variable[index] = value + step
        above = np.vdot(function(), cotangent)
        variable[index] = value - step
        below = np.vdot(function(), cotangent)
        variable[index] = value
        gradient[index] = (above - below) / (2 * step)
    return gradient


def assert_close(actual: np.ndarray, expected: np.ndarray, tolerance: float, what: str) -> None:
    """Check that shapes are equal and the largest difference is within `tolerance` of the largest expected value (or of 1).

    Raises:
        AssertionError: the arrays differ; the message has the name `what`, the difference and its position.
    """
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, expected {expected.shape}"
    if expected.size == 0:
        return
    difference = np.abs(actual - expected)
    worst = np.unravel_index(int(np.argmax(np.nan_to_num(difference, nan=np.inf))), difference.shape)
    limit = tolerance * max(1.0, float(np.abs(expected).max()))
    assert difference[worst] <= limit, (
        f"{what}: {actual[worst]} at {tuple(map(int, worst))}, expected {expected[worst]}; "
        f"the difference {difference[worst]:.3g} is above {limit:.3g}"
    )


def check_gradient(
    kernels: KernelSet,
    spec: Spec,
    inputs: Sequence[np.ndarray],
    *,
    parameters: Mapping[str, np.ndarray] | None = None,
    context: StepContext | None = None,
    accumulate: bool = False,
    in_place: bool = False,
    merger: StatisticsMerger | None = None,
    tolerance: float = 1e-7,
    step: float = 1e-5,
) -> None:
    """Check all gradients of a training operator, of inputs and parameters, against central differences.

    Inputs and parameters are float64; they are changed in place and restored. `step` must not move an input across a kink (ReLU
    at 0, ties of a maximum): keep the inputs further from kinks.

    Raises:
        AssertionError: a gradient differs by more than `tolerance`, relative to its largest element.
    """
    parameters = default_parameters(spec, "float64") if parameters is None else parameters
    bench = OperatorBench(
        kernels, spec, inputs, parameters=parameters, accumulate=accumulate, in_place=in_place, merger=merger or LocalStatistics()
    )
    random = np.random.default_rng(1)
    output = bench.forward(context)
    cotangent = random.standard_normal(output.shape)
    start = [random.standard_normal(x.shape) for x in inputs]
    analytic = bench.backward(cotangent, start)

    def run() -> np.ndarray:
        return bench.forward(context)

    for i, x in enumerate(inputs):
        grad = analytic.inputs[i]
        assert grad is not None
        expected = numerical_gradient(run, x, cotangent, step=step)
        assert_close(grad - start[i] if accumulate else grad, expected, tolerance, f"gradient of input {i}")
    for role, value in parameters.items():
        expected = numerical_gradient(run, value, cotangent, step=step)
        assert_close(analytic.parameters[role], expected, tolerance, f"gradient of {role}")
