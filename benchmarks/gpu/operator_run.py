"""One operator of any kernel set, from host arrays to host arrays by way of the set's own arithmetic: on a GPU as on this CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hpctrain.backend.arithmetic import Array
from hpctrain.backend.operators import Buffers, InputView, KernelSet, StepContext
from hpctrain.backend.specs import BatchNormSpec, Spec, TensorSpec, parameter_dtype

_BATCH_STATISTICS = ("batch_mean", "batch_var")


class OperatorRun:
    """Forward and backward of one operator in training, once. Memory that it must not rely on holds NaN.

    Args:
        inputs, parameters: float64; rounded to the dtypes of the operator.
        dtype: of activations.
    """

    def __init__(
        self, kernels: KernelSet, spec: Spec, inputs: Sequence[np.ndarray], parameters: Mapping[str, np.ndarray], dtype: str
    ) -> None:
        self._kernels, self._arithmetic, self._dtype = kernels, kernels.arithmetic, dtype
        specs = tuple(TensorSpec(x.shape, dtype) for x in inputs)
        self._operator = operator = kernels.make(spec, specs, training=True)
        self._is_view = isinstance(operator, InputView)
        self._ids = np.arange(inputs[0].shape[0])
        kept = parameter_dtype(dtype)
        shadow = kernels.shadow_dtype
        self._gradients = {role: self._poisoned(value.shape, kept) for role, value in parameters.items()}
        channels = (spec.channels,) if isinstance(spec, BatchNormSpec) else ()
        self._statistics = {role: self._poisoned(channels, kept) for role in _BATCH_STATISTICS if channels}
        xs = tuple(self._array(x, dtype) for x in inputs)
        output = operator.output.shape
        self._buffers = Buffers(
            inputs=xs,
            output=xs[0].reshape(output) if self._is_view else self._poisoned(output, dtype),
            input_grads=tuple(self._poisoned(x.shape, dtype) for x in inputs),
            output_grad=self._poisoned(output, dtype),
            accumulate=(False,) * len(inputs),
            parameters={role: self._array(value, kept) for role, value in parameters.items()},
            gradients=self._gradients,
            shadows={} if shadow is None else {role: self._array(value, shadow) for role, value in parameters.items()},
            statistics=self._statistics,
            saved=self._poisoned((operator.saved_bytes,), "uint8"),
            scratch=self._poisoned((operator.scratch_bytes,), "uint8"),
        )
        operator.bind(self._buffers)

    def _array(self, values: np.ndarray, dtype: str) -> Array:
        array = self._arithmetic.zeros(values.size, dtype).reshape(values.shape)
        if values.size:
            self._arithmetic.from_host(array, values if dtype == "uint8" else values.astype(_host_dtype(dtype)))
        return array

    def _poisoned(self, shape: tuple[int, ...], dtype: str) -> Array:
        return self._array(np.full(shape, 0xFF, np.uint8) if dtype == "uint8" else np.full(shape, np.nan), dtype)

    def forward(self) -> dict[str, np.ndarray]:
        """The output, and statistics by role. The same samples and step each time."""
        context = StepContext(training=True, step=3, sample_ids=self._ids)
        self._kernels.begin(context)
        self._operator.forward(context)
        return self._to_host({"output": self._buffers.output, **self._statistics})

    def backward(self, output_grad: np.ndarray) -> dict[str, np.ndarray]:
        """Gradients of inputs and parameters, by name."""
        if self._is_view:
            return {}
        self._arithmetic.from_host(self._buffers.output_grad, output_grad.astype(_host_dtype(self._dtype)))
        self._operator.backward_parameters()
        self._operator.backward_input()
        gradients = {f"d input {number}": gradient for number, gradient in enumerate(self._buffers.input_grads)}
        return self._to_host(gradients | {f"d {role}": gradient for role, gradient in self._gradients.items()})

    def _to_host(self, arrays: Mapping[str, Array]) -> dict[str, np.ndarray]:
        return {name: np.array(self._arithmetic.to_host(array), np.float64) for name, array in arrays.items()}


def _host_dtype(dtype: str) -> str:
    return "float32" if dtype == "bfloat16" else dtype
