"""User-defined layers in one file of plain array code, without a change to any kernel set.

Subclass `ArrayLayer`, return the output's shape, and write forward and backward. If a neighbouring layer uses another memory
layout, a reorder is inserted in between. Averaging, checkpoints and the gradient check work as for any layer.
"""

from __future__ import annotations

import copy
import inspect
import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpctrain.backend.operators import Array, Operator, StepContext
from hpctrain.backend.specs import Shape, Spec, TensorSpec, Window
from hpctrain.core.errors import ShapeError
from hpctrain.core.text import shortened
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
        """Return y for x. Must not write to x."""

    @abstractmethod
    def backward(
        self, x: Array, dy: Array, parameters: Mapping[str, Array], saved: dict[str, Any]
    ) -> tuple[Array, Mapping[str, Array]]:
        """Return dx and the gradients of the parameters by role. Must not write to x or dy."""

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
        return x.with_shape(self.layer.output_shape(x.shape))

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

    def forward(self, context: StepContext) -> None:
        self._saved.clear()
        self._dx = None
        y = self._layer.forward(self.buffers.inputs[0], self.buffers.parameters, context, self._saved)
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
        buffers = self.buffers
        result = self._layer.backward(buffers.inputs[0], buffers.output_grad, buffers.parameters, self._saved)
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
            raise ShapeError(
                f"{self._place('backward')} returns {shortened(result)}, but must return dx and a mapping of gradients; without "
                "parameters, return dx, {}."
            )
        self._dx, gradients = result
        return gradients

    def _write(self, target: Array, value: Array | None, name: str, method: str) -> None:
        """Copy a result of the layer's code to a buffer.

        Args:
            name: name of the result in messages.
            method: method of the layer that returned it.

        Raises:
            ShapeError: the result is None, or cannot be broadcast to the shape of the buffer.
        """
        try:
            if value is None:  # NumPy would convert it to nan
                raise TypeError
            target[...] = value
        except (TypeError, ValueError):
            shape = f"shape {np.shape(value)}" if isinstance(value, np.ndarray) else f"the value {shortened(value)}"
            raise ShapeError(
                f"{self._place(method)} returns {name} with {shape}, but its shape must be {target.shape}, which follows from "
                f"{'output_shape' if name == 'y' else 'the declaration of the parameters' if name != 'dx' else 'that of x'}."
            ) from None

    def _place(self, method: str) -> str:
        """Return the name and class of the layer, and the method with its file and line, if it is a function."""
        code = getattr(inspect.unwrap(getattr(type(self._layer), method)), "__code__", None)  # a callable object has none
        line = "" if code is None else f" ({code.co_filename}, line {code.co_firstlineno})"
        return f"Layer {self._name}: {type(self._layer).__name__}.{method}{line}"
