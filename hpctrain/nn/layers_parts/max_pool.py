"""Max pooling."""

from __future__ import annotations

from hpctrain.backend.specs import PoolSpec
from hpctrain.nn.layers import Leaf
from hpctrain.nn.windows import EdgesLike, PairLike, window


class MaxPool(Leaf):
    """y (N, Ho, Wo, C): the largest value of each window of x (N, H, W, C); padding counts as -inf.

    Args:
        kernel, dilation: one number or (rows, columns).
        stride: the kernel by default.
        padding: one number, (rows, columns) or (top, bottom, left, right); at most half the kernel.
        ceil_mode: a last window that only partly covers the image counts too.

    Raises:
        ShapeError: sizes below 1, or a padding of more than half the kernel.
    """

    def __init__(
        self,
        kernel: PairLike,
        stride: PairLike | None = None,
        padding: EdgesLike = 0,
        dilation: PairLike = 1,
        ceil_mode: bool = False,
    ) -> None:
        self.window = window(kernel, kernel if stride is None else stride, padding, dilation)
        self._spec = PoolSpec("max", self.window, ceil_mode)

    def spec(self, name: str) -> PoolSpec:
        return self._spec
