"""Batch normalisation."""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.backend.specs import BatchNormSpec
from hpctrain.core.errors import ShapeError
from hpctrain.nn import initialise
from hpctrain.nn.layers import Leaf
from hpctrain.nn.parameter import ParameterSpec, StatisticSpec


class BatchNorm(Leaf):
    """y = weight * (x - mean) / sqrt(var + epsilon) + bias per channel, the last dim (Ioffe and Szegedy 2015, algorithm 1).

    The number of batches seen, which torchvision stores beside the running statistics, is not modelled: with a fixed momentum
    nothing depends on it.

    Args:
        channels: C.
        epsilon: added to the variance.
        momentum: weight of the newest batch in the running mean and variance, in [0, 1].
        synchronised: statistics of all ranks that share the step instead of this rank's samples only.
        weight: first value of every element of the weight (gamma); 0 makes a residual block start as the identity.

    Raises:
        ShapeError: channels below 1, a momentum outside [0, 1], an epsilon that is not positive.
    """

    def __init__(
        self,
        channels: int,
        epsilon: float = 1e-5,
        momentum: float = 0.1,
        synchronised: bool = False,
        *,
        weight: float = 1.0,
    ) -> None:
        if channels < 1:
            raise ShapeError(f"Batch norm over {channels} channels is empty; it needs at least 1.")
        if not 0.0 <= momentum <= 1.0:
            raise ShapeError(f"A batch norm momentum of {momentum} is outside [0, 1]; the default is 0.1.")
        if not epsilon > 0.0:
            raise ShapeError(f"A batch norm epsilon of {epsilon} is not positive; the default is 1e-05.")
        self._spec = BatchNormSpec(channels, epsilon, synchronised)
        self._momentum = momentum
        self._weight = weight

    def spec(self, name: str) -> BatchNormSpec:
        return self._spec

    def parameters(self) -> Mapping[str, ParameterSpec]:
        shape = (self._spec.channels,)
        return {
            "weight": ParameterSpec(shape, initialise.constant(self._weight), decay=False),
            "bias": ParameterSpec(shape, initialise.constant(0.0), decay=False),
        }

    def statistics(self) -> Mapping[str, StatisticSpec]:
        shape = (self._spec.channels,)
        return {
            "running_mean": StatisticSpec(shape, 0.0, self._momentum),
            "running_var": StatisticSpec(shape, 1.0, self._momentum),
        }
