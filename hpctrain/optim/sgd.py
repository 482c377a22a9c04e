"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpctrain.nn.parameter import FlatGroup, Segment
from hpctrain.optim._momentum import DecayExclude, MomentumDescent, Run, merged
from hpctrain.optim.base import Norms, Optimizer
from hpctrain.optim.clip import check_clip_norm, clip_scale


class Sgd(Optimizer):
    """g' = clip(g) + weight_decay * w; m := momentum * m + g'; w := w - lr * m (torch.optim.SGD, dampening 0).

    Args:
        momentum: in [0, 1). nesterov: w := w - lr * (g' + momentum * m) instead.
        weight_decay: of the parameters that `decay_exclude` leaves in: "norm_and_bias" leaves those out that their layer
            declares so, "none" leaves none out.
        clip_norm: g is scaled by min(1, clip_norm / (|g| + 1e-6)), |g| over all parameters and owners; None: off.

    Raises:
        ConfigError: a value outside its range.
    """

    def __init__(
        self,
        *,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        decay_exclude: DecayExclude = "norm_and_bias",
        clip_norm: float | None = None,
    ) -> None:
        self.clip_norm = check_clip_norm(clip_norm)
        self._descent = MomentumDescent(momentum, nesterov, weight_decay, decay_exclude)

    def bind(self, group: FlatGroup, owned: Sequence[Segment]) -> None:
        self._descent.bind(group, owned)

    def update(self, segments: Sequence[Segment], lr: float, norms: Norms | None) -> None:
        descent, scale = self._descent, clip_scale(self.clip_norm, norms)
        runs = merged(
            Run(segment.start, segment.stop, scale, 0.0 if descent.excluded(segment) else descent.weight_decay)
            for segment in segments
        )
        descent.update(runs, lr)

    def state(self, segment: Segment) -> dict[str, np.ndarray]:
        return self._descent.state(segment)
