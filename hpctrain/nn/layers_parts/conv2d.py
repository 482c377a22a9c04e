"""Convolution of images."""

from __future__ import annotations

import math
from collections.abc import Mapping

from hpctrain.backend.specs import Conv2dSpec
from hpctrain.nn import initialise
from hpctrain.nn.layers import Leaf
from hpctrain.nn.parameter import Initializer, Interchange, ParameterSpec
from hpctrain.nn.windows import EdgesLike, PairLike, window


class Conv2d(Leaf):
    """y (N, Ho, Wo, K) from x (N, H, W, C) with weight (K, R, S, C / groups) and bias (K).

    Args:
        channels_in, channels_out: C and K.
        kernel, stride, dilation: one number or (rows, columns).
        padding: zeros around the image: one number, (rows, columns) or (top, bottom, left, right).
        groups: divides C and K; C for a depthwise convolution.
        bias: whether a bias is added; leave it out before a batch norm, which cancels it.
        weight_values, bias_values: first values; by default He's normal with fan out, and 0.

    Raises:
        ShapeError: sizes below 1, a negative padding, groups that do not divide the channels.
    """

    def __init__(
        self,
        channels_in: int,
        channels_out: int,
        kernel: PairLike,
        stride: PairLike = 1,
        padding: EdgesLike = 0,
        dilation: PairLike = 1,
        groups: int = 1,
        bias: bool = True,
        *,
        weight_values: Initializer | None = None,
        bias_values: Initializer | None = None,
    ) -> None:
        self.window = window(kernel, stride, padding, dilation)
        self._spec = Conv2dSpec(channels_in, channels_out, self.window, groups, bias)
        fan_out = channels_out * math.prod(self.window.kernel)
        self._weight_values = initialise.kaiming_normal(fan_out) if weight_values is None else weight_values
        self._bias_values = initialise.constant(0.0) if bias_values is None else bias_values

    def spec(self, name: str) -> Conv2dSpec:
        return self._spec

    def parameters(self) -> Mapping[str, ParameterSpec]:
        weight = ParameterSpec(self._spec.weight_shape, self._weight_values, interchange=Interchange(axes=(0, 3, 1, 2)))
        if not self._spec.bias:
            return {"weight": weight}
        bias = ParameterSpec((self._spec.channels_out,), self._bias_values, decay=False)
        return {"weight": weight, "bias": bias}
