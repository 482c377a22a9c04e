"""Abilities: an operator that lacks one is planned around it, and computes the same."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from hpctrain.backend.kernels import abilities
from hpctrain.backend.kernels.abilities import Accumulating, InPlace
from hpctrain.backend.kernels.base import Array, Operator, StepContext
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.kernels.specs import ReluSpec, Spec, TensorSpec
from hpctrain.nn.network import Network
from tests.support import nets


class _PlainRelu(Operator):
    """As much as an author has to write: what it needs, forward and backward."""

    needs_output = True

    def __init__(self, spec: Spec, x: TensorSpec) -> None:
        self.spec, self.inputs, self.output = spec, (x.plain(),), x.plain()

    def forward(self, context: StepContext) -> None:
        np.maximum(self.buffers.inputs[0], 0, out=self.buffers.output)

    def backward_input(self) -> None:
        if self.buffers.input_grads[0] is not None:
            np.multiply(self.buffers.output_grad, self.buffers.output > 0, out=self.buffers.input_grads[0])


class _WithPlainRelu(NumpyKernelSet):
    def make(self, spec: Spec, inputs: tuple[TensorSpec, ...], *, training: bool, input_gradient: bool = True) -> Operator:
        if isinstance(spec, ReluSpec):
            return _PlainRelu(spec, inputs[0])
        return super().make(spec, inputs, training=training, input_gradient=input_gradient)


def _gradients(kernels: NumpyKernelSet) -> tuple[Array, int]:
    network = Network(nets.plain(), (9, 7, 3), kernels, dtype="float64")
    program = network.program(4, training=True)
    random = np.random.default_rng(0)
    program.x[...] = random.standard_normal(program.x.shape)
    program.forward(StepContext(sample_ids=np.arange(4), global_count=4))
    program.loss(random.integers(0, 5, 4), 4)
    program.backward()
    return network.groups["all"].grad.copy(), sum(buffer.region.size_bytes for buffer in program.plan.buffers)


def test_an_operator_without_abilities_computes_the_same_in_more_buffers() -> None:
    assert not issubclass(_PlainRelu, InPlace | Accumulating)
    (plain, more), (able, less) = _gradients(_WithPlainRelu()), _gradients(NumpyKernelSet())
    np.testing.assert_array_equal(plain, able)
    assert more > less


@pytest.mark.parametrize(
    "name", [name for name, member in inspect.getmembers(abilities, inspect.isclass) if member.__module__ == abilities.__name__]
)
def test_an_ability_alone_is_no_operator_and_needs_no_constructor(name: str) -> None:
    ability = getattr(abilities, name)
    assert not issubclass(ability, Operator)
    ability()
