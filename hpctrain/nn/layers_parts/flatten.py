"""Images to vectors."""

from __future__ import annotations

from hpctrain.backend.specs import FlattenSpec
from hpctrain.nn.layers import Leaf


class Flatten(Leaf):
    """(N, H, W, C) -> (N, H*W*C), in that order; no data moves."""

    def spec(self, name: str) -> FlattenSpec:
        return FlattenSpec()
