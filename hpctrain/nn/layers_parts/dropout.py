"""Dropout."""

from __future__ import annotations

from hpctrain.backend.specs import DropoutSpec
from hpctrain.core.errors import ShapeError
from hpctrain.nn.layers import Leaf


class Dropout(Leaf):
    """y = x * keep / (1 - rate) in training, y = x in evaluation (Srivastava et al. 2014, inverted form).

    keep is a pure function of (seed, step, layer name, sample id, index in the sample), the same for any grid of ranks.

    Args:
        rate: chance that an element is dropped, in [0, 1).
        seed: of the masks.

    Raises:
        ShapeError: a rate outside [0, 1).
    """

    def __init__(self, rate: float = 0.5, seed: int = 0) -> None:
        if not 0.0 <= rate < 1.0:
            raise ShapeError(f"A dropout rate of {rate} is outside [0, 1); the default is 0.5.")
        self._rate, self._seed = rate, seed

    def spec(self, name: str) -> DropoutSpec:
        return DropoutSpec(self._rate, name, self._seed)
