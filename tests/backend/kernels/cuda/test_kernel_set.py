"""The cuda set as a whole: which operators it has, what it says of its memory, its hook before a forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from hpctrain.backend.cuda.device import ALIGNMENT_BYTES, Precision
from hpctrain.backend.kernels.base import Buffers, KernelSet, StepContext
from hpctrain.backend.kernels.cuda.arithmetic import CudaArithmetic
from hpctrain.backend.kernels.cuda.dropout import CudaDropout
from hpctrain.backend.kernels.cuda.elementwise import CudaRelu
from hpctrain.backend.kernels.cuda.flatten import CudaView
from hpctrain.backend.kernels.cuda.loss import CudaSoftmaxCrossEntropy
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.kernels.specs import DropoutSpec, FlattenSpec, ReluSpec, SoftmaxCrossEntropySpec, Spec, TensorSpec
from hpctrain.errors import BackendError
from hpctrain.nn.network import Network
from hpctrain.testing.transfers import put, take
from tests.support import nets
from tests.support.emulated import CudaKernelsFactory


@dataclass(frozen=True)
class Doubling:
    """An operation that no set knows."""

    def output(self, x: TensorSpec) -> TensorSpec:
        return x

    def flops(self, x: TensorSpec) -> int:
        return 0


@pytest.mark.parametrize(
    ("spec", "kind"),
    [(ReluSpec(), CudaRelu), (DropoutSpec(0.5, "a"), CudaDropout), (FlattenSpec(), CudaView)],
    ids=lambda x: type(x).__name__,
)
def test_operators_are_the_sets_own(cuda_kernels: CudaKernelsFactory, spec: Spec, kind: type) -> None:
    operator = cuda_kernels().make(spec, (TensorSpec((2, 3, 4, 5)),), training=True)
    assert isinstance(operator, kind)
    assert operator.spec == spec


def test_an_unknown_operation_is_refused_by_name(cuda_kernels: CudaKernelsFactory) -> None:
    with pytest.raises(BackendError, match="no operator for Doubling"):
        cuda_kernels().make(Doubling(), (TensorSpec((2, 3)),), training=True)


def test_the_loss_and_the_arithmetic(cuda_kernels: CudaKernelsFactory) -> None:
    kernels: KernelSet = cuda_kernels()
    assert isinstance(kernels.make_loss(SoftmaxCrossEntropySpec()), CudaSoftmaxCrossEntropy)
    assert isinstance(kernels.arithmetic, CudaArithmetic)
    assert not kernels.arithmetic.on_host


@pytest.mark.parametrize(
    ("precision", "shadow"), [("float64", None), ("float32", None), ("tf32", None), ("bfloat16", "bfloat16")]
)
def test_a_shadow_is_kept_where_activations_are_rounder_than_parameters(
    cuda_kernels: CudaKernelsFactory, precision: Precision, shadow: str | None
) -> None:
    assert cuda_kernels(precision).shadow_dtype == shadow


def test_memory_is_zeroed_and_aligned(cuda_kernels: CudaKernelsFactory) -> None:
    kernels = cuda_kernels()
    memory = kernels.allocate(1000)
    assert (memory.dtype, memory.shape, memory.pointer % kernels.alignment_bytes) == ("uint8", (1000,), 0)
    assert kernels.alignment_bytes == ALIGNMENT_BYTES
    assert not kernels.arithmetic.to_host(memory).any()


def test_begin_brings_the_steps_numbers(cuda_kernels: CudaKernelsFactory) -> None:
    kernels = cuda_kernels()
    operator = kernels.make(DropoutSpec(0.5, "a"), (TensorSpec((1, 400), "float32"),), training=True)
    x, y = (kernels.arithmetic.zeros(400, "float32").reshape(1, 400) for _ in range(2))
    kernels.arithmetic.fill(x, 1)
    operator.bind(Buffers(inputs=(x,), output=y))
    outputs = []
    for step in (0, 1, 0):
        context = StepContext(step=step, sample_ids=np.array([6]))
        kernels.begin(context)
        operator.forward(context)
        outputs.append(kernels.arithmetic.to_host(y))
    assert (outputs[0] != outputs[1]).any()
    np.testing.assert_array_equal(outputs[0], outputs[2])


def step(kernels: KernelSet, *, synchronised: bool) -> tuple[list[np.ndarray], set[str]]:
    """Logits and gradients of a residual network in float64, and the kinds of its operators."""
    network = Network(nets.residual(synchronised=synchronised), (9, 7, 3), kernels, dtype="float64")
    program = network.program(2, training=True)
    random = np.random.default_rng(0)
    put(kernels, program.x, random.standard_normal(program.x.shape))
    values = [take(kernels, program.forward(StepContext(global_count=2)))]
    put(kernels, program.d_logits, random.standard_normal(program.d_logits.shape))
    program.backward()
    values += [take(kernels, parameter.grad) for parameter in network.parameters.values()]
    return values, {type(planned.operator).__name__ for planned in program.plan.steps}


@pytest.mark.parametrize("synchronised", [False, True])
def test_a_fused_network_equals_numpys(cuda_kernels: CudaKernelsFactory, synchronised: bool) -> None:
    """Every ReLU joins the batch norm or the sum before it, but for batch norms that may have to merge their statistics."""
    values, kinds = step(cuda_kernels(seed=2), synchronised=synchronised)
    assert ("CudaRelu" in kinds) == ("CudaAdd" in kinds) == synchronised
    for value, expected in zip(values, step(NumpyKernelSet(), synchronised=synchronised)[0], strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-10, atol=1e-10 * float(np.abs(expected).max()))
