"""The NumPy kernel set: the reference for tests of the other sets, and the fallback if no faster set can be used."""

from __future__ import annotations

from typing import ClassVar

from hpctrain.backend.arithmetic import Arithmetic
from hpctrain.backend.host_arithmetic import HostArithmetic
from hpctrain.backend.numpy.batch_norm import NumpyBatchNorm
from hpctrain.backend.numpy.classifier import NumpyLinear, SoftmaxCrossEntropy
from hpctrain.backend.numpy.conv2d import NumpyConv2d
from hpctrain.backend.numpy.elementwise import Add, NumpyDropout, NumpyStochasticDepth, Relu
from hpctrain.backend.numpy.operator import allocate
from hpctrain.backend.numpy.pool import NumpyAdaptiveAveragePool, NumpyAveragePool, NumpyMaxPool
from hpctrain.backend.operators import Array, KernelSet, LossOperator, Operator, ViewOperator
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
)
from hpctrain.core.errors import BackendError


class NumpyKernelSet(KernelSet):
    """float32 and float64 on plain NHWC memory; matrix products by the BLAS that NumPy was built with.

    The set fuses no operations. Its blocks stay in the cache, so fusing batch norm and ReLU would gain little in forward and lose
    more in backward, which would compute the mask twice. Fused specs are still supported.
    """

    name: ClassVar[str] = "numpy"
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "float64")
    arithmetic: Arithmetic = HostArithmetic(allocate)

    def make(self, spec: Spec, inputs: tuple[TensorSpec, ...], *, training: bool, input_gradient: bool = True) -> Operator:
        for x in inputs:
            if x.dtype not in self.dtypes:
                raise BackendError(f"Backend numpy computes in {' and '.join(self.dtypes)}, not in {x.dtype}; use one of these.")
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
            case DropoutSpec() if training and spec.rate:
                return (NumpyStochasticDepth if spec.per_sample else NumpyDropout)(spec, *inputs, training=training)
            case DropoutSpec() | FlattenSpec():
                return ViewOperator(spec, *inputs)
        raise BackendError(f"Backend numpy has no operator for {type(spec).__name__}; add one to NumpyKernelSet.make.")

    def make_loss(self, spec: SoftmaxCrossEntropySpec) -> LossOperator:
        return SoftmaxCrossEntropy(spec)

    def allocate(self, size_bytes: int) -> Array:
        return allocate(size_bytes)
