"""The base of the operators of the NumPy set."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpctrain.backend.kernels.abilities import Accumulating
from hpctrain.backend.operators import Buffers, Operator
from hpctrain.backend.kernels.numpy.memory import Request, carve, total_bytes
from hpctrain.backend.specs import Spec, TensorSpec


class NumpyOperator(Accumulating, Operator):
    """An operator on plain memory. A subclass's constructor calls `declare` last; `bind` then gives it arrays.

    Training operators compute gradients; the others keep nothing for them and must not be asked for any.
    """

    def __init__(self, spec: Spec, inputs: tuple[TensorSpec, ...], *, training: bool) -> None:
        self.spec = spec
        self.inputs = tuple(x.plain() for x in inputs)
        self.output = spec.output(*self.inputs)
        self.dtype = self.inputs[0].dtype
        self.training = training
        self.needs_inputs = (False,) * len(inputs)
        self._saved: Sequence[Request] = ()
        self._scratch: Sequence[Request] = ()

    def declare(self, *, saved: Sequence[Request] = (), scratch: Sequence[Request] = ()) -> None:
        """Fix which arrays this operator keeps from forward to backward, and works with inside a call."""
        self._saved, self._scratch = saved, scratch
        self.saved_bytes = total_bytes(saved)
        self.scratch_bytes = total_bytes(scratch)

    def bind(self, buffers: Buffers) -> None:
        self.buffers = buffers
        self.saved = carve(buffers.saved, self._saved)
        self.scratch = carve(buffers.scratch, self._scratch)

    def input_grad(self, i: int = 0) -> np.ndarray | None:
        """The buffer of the gradient of input i, None where nobody asks for it."""
        grads = self.buffers.input_grads
        grad: np.ndarray | None = grads[i] if i < len(grads) else None
        return grad

    def accumulates(self, i: int = 0) -> bool:
        """True where the gradient of input i is added to what is there."""
        return i < len(self.buffers.accumulate) and self.buffers.accumulate[i]

    @property
    def output_grad(self) -> np.ndarray:
        """The buffer of the output's gradient."""
        grad = self.buffers.output_grad
        assert isinstance(grad, np.ndarray), f"{type(self).__name__} is bound without a gradient of its output"
        return grad
