"""Fully connected layer."""

from __future__ import annotations

import math
from collections.abc import Mapping

from hpctrain.backend.specs import LinearSpec
from hpctrain.core.errors import ShapeError
from hpctrain.nn import initialise
from hpctrain.nn.layers import Leaf
from hpctrain.nn.parameter import Initializer, Interchange, ParameterSpec


class Linear(Leaf):
    """y (N, out) = x (N, in) @ weight (in, out) + bias (out).

    Args:
        features_in, features_out: sizes of one sample.
        bias: whether a bias is added.
        image_shape: (H, W, C) of the image whose flattening is the input, if it is one: torchvision flattens (C, H, W), so its
            rows are in another order, which matters for interchange only.
        weight_values, bias_values: first values; uniform in +-1/sqrt(in) by default.

    Raises:
        ShapeError: sizes below 1, or an image of another size than the input.
    """

    def __init__(
        self,
        features_in: int,
        features_out: int,
        bias: bool = True,
        *,
        image_shape: tuple[int, int, int] | None = None,
        weight_values: Initializer | None = None,
        bias_values: Initializer | None = None,
    ) -> None:
        if min(features_in, features_out) < 1:
            raise ShapeError(f"A linear layer from {features_in} to {features_out} features is empty; both must be at least 1.")
        if image_shape is not None and math.prod(image_shape) != features_in:
            raise ShapeError(
                f"An image of shape {image_shape} has {math.prod(image_shape)} elements, the linear layer takes {features_in}."
            )
        self._spec = LinearSpec(features_in, features_out, bias)
        default = initialise.uniform(1.0 / math.sqrt(features_in))
        self._weight_values = default if weight_values is None else weight_values
        self._bias_values = default if bias_values is None else bias_values
        self._interchange = _interchange(features_out, image_shape)

    def spec(self, name: str) -> LinearSpec:
        return self._spec

    def parameters(self) -> Mapping[str, ParameterSpec]:
        weight = ParameterSpec(
            self._spec.weight_shape, self._weight_values, interchange=self._interchange, sufficient_factors=True
        )
        if not self._spec.bias:
            return {"weight": weight}
        return {
            "weight": weight,
            "bias": ParameterSpec((self._spec.features_out,), self._bias_values, decay=False, sufficient_factors=True),
        }


def _interchange(features_out: int, image_shape: tuple[int, int, int] | None) -> Interchange:
    if image_shape is None:
        return Interchange(axes=(1, 0))
    return Interchange((*image_shape, features_out), (3, 2, 0, 1), (features_out, math.prod(image_shape)))
