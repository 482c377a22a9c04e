"""Rectified linear unit."""

from __future__ import annotations

from hpctrain.backend.specs import ReluSpec
from hpctrain.nn.layers import Leaf


class ReLU(Leaf):
    """y = max(x, 0), element by element; the gradient at 0 is 0."""

    def spec(self, name: str) -> ReluSpec:
        return ReluSpec()
