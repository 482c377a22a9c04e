"""The NumPy kernel set: the reference for tests of the other sets, and the fallback if no faster set can be used."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from hpctrain.backend.arithmetic import Arithmetic
from hpctrain.backend.host_arithmetic import HostArithmetic
from hpctrain.backend.numpy.batch_norm import NumpyBatchNorm
from hpctrain.backend.numpy.classifier import NumpyLinear, SoftmaxCrossEntropy
from hpctrain.backend.numpy.conv2d import NumpyConv2d
from hpctrain.backend.numpy.elementwise import Add, NumpyDropout, NumpyStochasticDepth, RectifiedLinear, RectifiedOperator, Relu
from hpctrain.backend.numpy.operator import allocate
from hpctrain.backend.numpy.pool import NumpyAdaptiveAveragePool, NumpyAveragePool, NumpyMaxPool
from hpctrain.backend.operators import Array, KernelSet, LossOperator, Operator, SufficientFactors, ViewOperator
from hpctrain.backend.rounded import BFLOAT16, Conversion, convert_by_numpy, rounded
from hpctrain.backend.specs import (
    AdaptiveAveragePoolSpec,
    AddSpec,
    BatchNormSpec,
    Conv2dSpec,
    DropoutSpec,
    FlattenSpec,
    LinearSpec,
    PoolSpec,
    ReluSpec,
    SoftmaxCrossEntropySpec,
    Spec,
    TensorSpec,
    WithRelu,
)
from hpctrain.core.errors import BackendError


class NumpyKernelSet(KernelSet):
    """float32, float64 and bfloat16 on plain NHWC memory; matrix products by the BLAS that NumPy was built with.

    The set fuses no operations. Its blocks stay in the cache, so fusing batch norm and ReLU would gain little in forward and lose
    more in backward, which would compute the mask twice. Fused specs are still supported. Operators on bfloat16 compute in
    float32 between rounded copies (`RoundedOperator`).

    Args:
        convert: function that prepares the copies between bfloat16 and float32.
    """

    name: ClassVar[str] = "numpy"
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "float64", "bfloat16")
    arithmetic: Arithmetic = HostArithmetic(allocate)

    def __init__(self, convert: Conversion = convert_by_numpy) -> None:
        self._convert = convert

    def make(self, spec: Spec, inputs: tuple[TensorSpec, ...], *, training: bool, input_gradient: bool = True) -> Operator:
        for x in inputs:
            if x.dtype not in self.dtypes:
                raise BackendError(f"Backend numpy computes in {' or '.join(self.dtypes)}, not in {x.dtype}; use one of these.")
        match spec:
            case WithRelu():
                inner = self.make(spec.inner, inputs, training=training, input_gradient=input_gradient)
                return (RectifiedLinear if isinstance(inner, SufficientFactors) else RectifiedOperator)(spec, inner)
            case DropoutSpec() if training and spec.rate:
                pass
            case DropoutSpec() | FlattenSpec():
                return ViewOperator(spec, *inputs)
        if inputs[0].dtype == BFLOAT16.name:
            plain = [x.plain() for x in inputs]
            return rounded(partial(self._make, spec, training=training), plain, training=training, convert=self._convert)
        return self._make(spec, *inputs, training=training)

    def _make(self, spec: Spec, *inputs: TensorSpec, training: bool) -> Operator:
        """Return the operator on inputs of float32 or float64."""
        match spec:
            case Conv2dSpec():
                return NumpyConv2d(spec, *inputs, training=training)
            case LinearSpec():
                return NumpyLinear(spec, *inputs, training=training)
            case BatchNormSpec():
                return NumpyBatchNorm(spec, *inputs, training=training)
            case PoolSpec():
                kind = NumpyMaxPool if spec.kind == "max" else NumpyAveragePool
                return kind(spec, *inputs, training=training)
            case AdaptiveAveragePoolSpec():
                return NumpyAdaptiveAveragePool(spec, *inputs, training=training)
            case ReluSpec():
                return Relu(spec, *inputs, training=training)
            case AddSpec():
                return Add(spec, *inputs, training=training)
            case DropoutSpec():
                return (NumpyStochasticDepth if spec.per_sample else NumpyDropout)(spec, *inputs, training=training)
        raise BackendError(f"Backend numpy has no operator for {type(spec).__name__}; add one to NumpyKernelSet._make.")

    def make_loss(self, spec: SoftmaxCrossEntropySpec) -> LossOperator:
        return SoftmaxCrossEntropy(spec)

    def allocate(self, size_bytes: int) -> Array:
        return allocate(size_bytes)
