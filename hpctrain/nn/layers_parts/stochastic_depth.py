"""Stochastic depth."""

from __future__ import annotations

from hpctrain.backend.specs import DropoutSpec
from hpctrain.core.errors import ShapeError
from hpctrain.nn.layers import Leaf


class StochasticDepth(Leaf):
    """y = x * keep / (1 - rate) with one keep for all of a sample in training, y = x in evaluation (Huang et al., ECCV 2016).

    At the end of a residual block's body it drops the whole body, sample by sample: torchvision.ops.StochasticDepth in the mode
    "row". keep is a pure function of (seed, step, layer name, sample id), the same for any grid of ranks.

    Args:
        rate: chance that a sample is dropped, in [0, 1).
        seed: of the masks.

    Raises:
        ShapeError: a rate outside [0, 1).
    """

    def __init__(self, rate: float, seed: int = 0) -> None:
        if not 0.0 <= rate < 1.0:
            raise ShapeError(f"A stochastic depth of {rate} is outside [0, 1); 0 switches it off.")
        self._rate, self._seed = rate, seed

    def spec(self, name: str) -> DropoutSpec:
        return DropoutSpec(self._rate, name, self._seed, per_sample=True)
