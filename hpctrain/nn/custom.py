"""User-defined layers in one file of plain array code, without a change to any kernel set.

Subclass `ArrayLayer`, return the output's shape, and write forward and backward. If a neighbouring layer uses another memory
layout, the compiler inserts a reorder between both. Averaging, checkpoints and the gradient check work as for any layer.
"""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpctrain.backend.operators import Array, Buffers, Operator, StepContext
from hpctrain.backend.specs import Shape, Spec, TensorSpec, Window
from hpctrain.core.errors import ShapeError
from hpctrain.core.text import shortened
from hpctrain.core.user_code import place, read_only
from hpctrain.nn.layers import Leaf


class ArrayLayer(Leaf):
    """Base of user-defined layers; subclasses compute with NumPy arrays.

    The argument `saved` of forward and backward is a dict. Each operator has one, which keeps its content from forward to
    backward.
    """

    @abstractmethod
    def output_shape(self, shape: Shape) -> Shape:
        """Return the shape of y for x of `shape`. Both shapes include the batch size N."""

    @abstractmethod
    def forward(self, x: Array, parameters: Mapping[str, Array], context: StepContext, saved: dict[str, Any]) -> Array:
        """Return y for x. `x` and `parameters` are read-only views, whose values are valid until the end of the step."""

    @abstractmethod
    def backward(
        self, x: Array, dy: Array, parameters: Mapping[str, Array], saved: dict[str, Any]
    ) -> tuple[Array, Mapping[str, Array]]:
        """Return the gradient of the loss with respect to x, and those with respect to the parameters, by role.

        `dy` has the shape of y, and each gradient must have the shape of its array. Only `saved` may be modified.
        """

    def with_window(self, window: Window) -> ArrayLayer:
        """Return this layer with another window, which has the same kernel and stride but other padding.

        The padding differs because a part of an image is padded only at the edges of the whole image. Forward and backward must
        read the padding from `self.window`.
        """
        other = copy.copy(self)
        other.window = window
        return other

    def spec(self, name: str) -> Spec:
        return ArraySpec(self, name)


@dataclass(frozen=True)
class ArraySpec:
    """Operation of one `ArrayLayer`."""

    layer: ArrayLayer
    name: str

    @property
    def window(self) -> Window | None:
        """Spatial window of the layer; None if it is unknown, in which case its images are never split."""
        return self.layer.window

    def with_window(self, window: Window) -> ArraySpec:
        """Return the same operation on a part of an image."""
        return ArraySpec(self.layer.with_window(window), self.name)

    def output(self, x: TensorSpec) -> TensorSpec:
        return x.with_shape(tuple(self.layer.output_shape(x.shape)))

    def flops(self, x: TensorSpec) -> int:
        return math.prod(self.output(x).shape)

    def operator(self, inputs: tuple[TensorSpec, ...], *, training: bool) -> Operator:
        return ArrayOperator(self, inputs[0])


class ArrayOperator(Operator):
    """Operator that runs an `ArrayLayer` on plain memory."""

    needs_inputs = (True,)

    def __init__(self, spec: ArraySpec, x: TensorSpec) -> None:
        self.spec, self.inputs, self.output = spec, (x,), spec.output(x)
        self._layer, self._name = spec.layer, spec.name
        self._saved: dict[str, Any] = {}
        self._dx: Array | None = None
        self._x, self._dy, self._parameters = None, None, dict[str, Array]()

    def bind(self, buffers: Buffers) -> None:
        super().bind(buffers)
        self._x, self._dy = (None if one is None else read_only(one) for one in (buffers.inputs[0], buffers.output_grad))
        self._parameters = {role: read_only(values) for role, values in buffers.parameters.items()}

    def forward(self, context: StepContext) -> None:
        self._saved.clear()
        self._dx = None
        y = self._layer.forward(self._x, self._parameters, context, self._saved)
        self._write(self.buffers.output, y, "y", "forward")

    def backward_parameters(self) -> None:
        gradients = self._backward()
        for role, target in self.buffers.gradients.items():
            self._write(target, gradients.get(role), f"the gradient of {role}", "backward")

    def backward_input(self) -> None:
        if self._dx is None:
            self._backward()
        target = self.buffers.input_grads[0]
        if target is not None:
            self._write(target, self._dx, "dx", "backward")
        self._dx = None

    def _backward(self) -> Mapping[str, Array]:
        self._dx, gradients = self._layer.backward(self._x, self._dy, self._parameters, self._saved)
        return gradients

    def _write(self, target: Array, value: Array | None, name: str, method: str) -> None:
        """Copy a result of the layer's code to a buffer.

        Args:
            name: name of the result in messages.
            method: method of the layer that returned it.

        Raises:
            ShapeError: the result has no numbers, or not the shape of the buffer, apart from leading dims of 1.
        """
        try:
            values = np.asarray(value)
            if values.dtype.kind not in "biuf" or values.size != target.size:  # NumPy would convert or repeat it
                raise TypeError
            target[...] = values
        except (TypeError, ValueError):
            shape = f"shape {np.shape(value)}" if isinstance(value, np.ndarray) else f"the value {shortened(value)}"
            raise ShapeError(
                f"Layer {self._name}: {place(type(self._layer), method)} returns {name} with {shape}, but must return numbers "
                f"of shape {target.shape}, which follows from "
                f"{'output_shape' if name == 'y' else 'the declaration of the parameters' if name != 'dx' else 'that of x'}."
            ) from None
