"""Average pooling to a fixed output size."""

from __future__ import annotations

from hpctrain.backend.specs import AdaptiveAveragePoolSpec
from hpctrain.nn.layers import Leaf
from hpctrain.nn.windows import PairLike, pair


class AdaptiveAveragePool(Leaf):
    """y (N, Ho, Wo, C): output (i, j) is the mean of rows [floor(i H / Ho), ceil((i + 1) H / Ho)) and columns alike.

    Args:
        size: (Ho, Wo) or one number for both; 1 is global pooling. May exceed the image's size.

    Raises:
        ShapeError: a size below 1.
    """

    def __init__(self, size: PairLike = 1) -> None:
        self._spec = AdaptiveAveragePoolSpec(pair(size, "pooled image size"))

    def spec(self, name: str) -> AdaptiveAveragePoolSpec:
        return self._spec
