"""Average pooling."""

from __future__ import annotations

from hpctrain.backend.specs import PoolSpec
from hpctrain.nn.layers import Leaf
from hpctrain.nn.windows import EdgesLike, PairLike, window


class AveragePool(Leaf):
    """y (N, Ho, Wo, C): the mean of each window of x (N, H, W, C).

    Args:
        kernel: one number or (rows, columns).
        stride: the kernel by default.
        padding: one number, (rows, columns) or (top, bottom, left, right); at most half the kernel.
        ceil_mode: a last window that only partly covers the image counts too.
        count_include_pad: the mean divides by the padding's elements too, as torch does by default.

    Raises:
        ShapeError: sizes below 1, or a padding of more than half the kernel.
    """

    def __init__(
        self,
        kernel: PairLike,
        stride: PairLike | None = None,
        padding: EdgesLike = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
    ) -> None:
        self.window = window(kernel, kernel if stride is None else stride, padding)
        self._spec = PoolSpec("average", self.window, ceil_mode, count_include_pad)

    def spec(self, name: str) -> PoolSpec:
        return self._spec
