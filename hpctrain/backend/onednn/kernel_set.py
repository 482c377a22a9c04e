"""The `onednn` kernel set: float32 on x86-64 processors with AVX2 or more, bfloat16 on those that multiply bfloat16."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import ClassVar

from threadpoolctl import threadpool_limits

from hpctrain.backend.arithmetic import Arithmetic
from hpctrain.backend.graph import Graph, fuse
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.onednn import constants as c
from hpctrain.backend.onednn.arithmetic import OnednnArithmetic
from hpctrain.backend.onednn.batch_norm import BatchNormOperator
from hpctrain.backend.onednn.binding import Descriptor, Engine, Unimplemented, available
from hpctrain.backend.onednn.conv2d import ProductConv2d, make_conv2d, products_pay
from hpctrain.backend.onednn.elementwise import AddOperator, OnednnRectifiedLinear, OnednnRectifiedOperator, ReluOperator
from hpctrain.backend.onednn.linear import LinearOperator
from hpctrain.backend.onednn.operator import Copy, LibraryOperator, ReorderOperator, allocate
from hpctrain.backend.onednn.pool import PoolOperator, plain_pool
from hpctrain.backend.operators import Array, KernelSet, LossOperator, Operator, SufficientFactors, ViewOperator
from hpctrain.backend.rounded import Copying, convert_by_numpy, rounded
from hpctrain.backend.specs import (
    NHWC,
    AdaptiveAveragePoolSpec,
    AddSpec,
    BatchNormSpec,
    Conv2dSpec,
    LinearSpec,
    PoolSpec,
    ReluSpec,
    SoftmaxCrossEntropySpec,
    Spec,
    TensorSpec,
    Window,
    WithRelu,
)
from hpctrain.core.errors import BackendError

__all__ = ["OnednnKernelSet", "available"]

_Inputs = tuple[TensorSpec, ...]
_PRODUCTS_REASON = "it has few pixels and many weights"


class OnednnKernelSet(KernelSet):
    """oneDNN's kernels for the operations for which they are fast, and NumPy's in plain memory for the others.

    NumPy computes empty images, dropout, batch norm in training with synchronised or fixed statistics, pooling with windows of
    different sizes, the loss, and all operations for which oneDNN has only plain loops. The set owns the engine. oneDNN uses the
    threads of OpenMP; OMP_NUM_THREADS is read when the library is loaded. The set limits NumPy's BLAS to one thread in the whole
    process: OpenMP's threads spin between two kernels, and a second thread pool would compete with them for the cores.

    Raises:
        BackendError: oneDNN cannot be used here (see `available`).
    """

    name: ClassVar[str] = "onednn"
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16")

    def __init__(self) -> None:
        reason = available()
        if reason is not None:
            raise BackendError(reason)
        self._engine = Engine()
        threadpool_limits(limits=1, user_api="blas")
        self.arithmetic: Arithmetic = OnednnArithmetic(self._engine)
        self._fallback = NumpyKernelSet(self._conversion)

    @property
    def version(self) -> str:
        return self._engine.version

    @property
    def multiplies_bfloat16(self) -> bool:
        """Whether the library multiplies bfloat16 with instructions of this processor that `ONEDNN_MAX_CPU_ISA` permits.

        Otherwise the library emulates the products, several times as slowly as float32.
        """
        if self._engine.library.dnnl_get_effective_cpu_isa() & c.ISA_AVX512_CORE_BF16 != c.ISA_AVX512_CORE_BF16:
            return False
        spec = Conv2dSpec(self._engine.block, self._engine.block, Window((3, 3), (1, 1), (1, 1, 1, 1)))
        try:
            made = make_conv2d(self._engine, spec, TensorSpec((1, 8, 8, spec.channels_in), "bfloat16"), training=True)
        except Unimplemented:
            return False
        return not made.plain_loops

    def _conversion(self, source: Array, target: Array) -> Copying:
        """Return the call that copies between arrays of bfloat16 and float32; implements `Conversion`."""
        if not source.size:
            return convert_by_numpy(source, target)
        formats = (Descriptor.tagged(self._engine, (array.size,), "a", array.dtype.name) for array in (source, target))
        return Copy(self._engine, "a rounding", *formats).bind(source, target)

    def make(self, spec: Spec, inputs: _Inputs, *, training: bool, input_gradient: bool = True) -> Operator:
        for x in inputs:
            if x.dtype not in self.dtypes:
                raise BackendError(
                    f"Backend onednn computes in {' or '.join(self.dtypes)}, not in {x.dtype}; set backend to numpy."
                )
        chosen = self._choose(spec, inputs, training, input_gradient)
        if isinstance(chosen, Operator):
            return chosen
        plain = tuple(x.plain() for x in inputs)
        inner = spec.inner if isinstance(spec, WithRelu) else spec
        operator: Operator
        if chosen == _PRODUCTS_REASON:
            assert isinstance(inner, Conv2dSpec)
            operator = ProductConv2d(self._engine, inner, plain[0], training=training)
        else:
            operator = self._fallback.make(inner, plain, training=training, input_gradient=input_gradient)
        if isinstance(spec, WithRelu):
            operator = self._rectified(spec, operator)
        operator.fallback_reason = chosen
        return operator

    def _rounded(self, make: Callable[..., Operator], inputs: _Inputs, training: bool) -> Operator:
        """Return the operator that `make` returns for the inputs; for bfloat16, in float32 between rounded copies."""
        if inputs[0].dtype == "float32":
            return make(*inputs)
        return rounded(make, inputs, training=training, convert=self._conversion)

    def _rectified(self, spec: WithRelu, inner: Operator) -> Operator:
        kind = OnednnRectifiedLinear if isinstance(inner, SufficientFactors) else OnednnRectifiedOperator
        return kind(self._engine, spec, inner)

    def _choose(self, spec: Spec, inputs: _Inputs, training: bool, input_gradient: bool) -> Operator | str:
        """Return the library's operator, or the reason why another set's operator is better."""
        if any(0 in x.shape for x in inputs) or 0 in spec.output(*(x.plain() for x in inputs)).shape:
            return "it is empty"
        made = self._make(spec, inputs, training, input_gradient)
        if isinstance(made, LibraryOperator) and made.plain_loops:
            return f"oneDNN has only plain loops for its {' and '.join(made.plain_loops)}"
        return made

    def _make(self, spec: Spec, inputs: _Inputs, training: bool, input_gradient: bool) -> Operator | str:
        """Return the library's operator, whether fast or not, or the reason why there is none."""
        engine, x = self._engine, inputs[0]
        match spec:
            case Conv2dSpec() | WithRelu(inner=Conv2dSpec()):
                inner = spec.inner if isinstance(spec, WithRelu) else spec
                if training and isinstance(inner, Conv2dSpec) and products_pay(inner, x):
                    return _PRODUCTS_REASON
                return make_conv2d(engine, spec, x, training=training, input_gradient=input_gradient)
            case LinearSpec() | WithRelu() if x.dtype == "float32":
                return LinearOperator(engine, spec, x, training=training)
            case LinearSpec():
                return self._rounded(partial(LinearOperator, engine, spec, training=training), (x.plain(),), training)
            case WithRelu():
                made = self._make(spec.inner, inputs, training, input_gradient)
                assert isinstance(made, Operator)
                return self._rectified(spec, made)
            case BatchNormSpec(synchronised=True) if training:
                return "its statistics are merged over ranks"
            case BatchNormSpec(fixed=True) if training:
                return "its statistics are fixed, but it computes gradients"
            case BatchNormSpec():
                return BatchNormOperator(engine, spec, x, training=training)
            case PoolSpec() | AdaptiveAveragePoolSpec():
                plain = plain_pool(spec, x)
                if plain is None:
                    adaptive = isinstance(spec, AdaptiveAveragePoolSpec)
                    return "its windows differ in size" if adaptive else "its windows reach over the edge and count padding"
                if math.prod(plain.window.kernel) == 1 and plain.window.stride == (1, 1) and not any(plain.window.padding):
                    return ViewOperator(spec, x, keeps_layout=True)
                make = partial(PoolOperator, engine, spec, training=training)
                # If windows overlap, the library rounds a gradient in bfloat16 after each summand.
                overlap = any(k > stride for k, stride in zip(plain.window.kernel, plain.window.stride, strict=True))
                return self._rounded(make, (x,), training) if training and overlap else make(x)
            case ReluSpec():
                return ReluOperator(engine, spec, x)
            case AddSpec():  # in the blocked layout of an input, if any
                return AddOperator(engine, spec, next((other for other in inputs if other.layout != NHWC), x))
        return "oneDNN has no such operation"

    def make_loss(self, spec: SoftmaxCrossEntropySpec) -> LossOperator:
        return self._fallback.make_loss(spec)

    def fuse(self, graph: Graph, *, training: bool) -> Graph:
        empty = any(0 in tensor.shape for tensor in graph.tensors)
        return graph if empty else fuse(graph, training=training)

    def reorder(self, source: TensorSpec, target: TensorSpec) -> Operator:
        return ReorderOperator(self._engine, source, target)

    def allocate(self, size_bytes: int) -> Array:
        return allocate(size_bytes)
