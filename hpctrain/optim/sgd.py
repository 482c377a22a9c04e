"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hpctrain.nn.parameter import FlatGroup, Segment
from hpctrain.optim._momentum import DecayExclude, MomentumDescent, Run, merged
from hpctrain.optim.base import Norms, Optimizer
from hpctrain.optim.clip import check_clip_norm, clip_scale


class Sgd(Optimizer):
    """Stochastic gradient descent with momentum.

    g' = clip(g) + weight_decay * w; m := momentum * m + g'; w := w - lr * m (torch.optim.SGD, dampening 0).

    Args:
        momentum: Share of the previous update's direction that is kept, in [0, 1); 0 is plain gradient descent.
        nesterov: Nesterov's momentum: the update looks one step ahead, w := w - lr * (g' + momentum * m).
        weight_decay: Factor on the weights that is added to their gradient (L2 regularisation).
        decay_exclude: Parameters without weight decay: "norm_and_bias" leaves out biases and the parameters of batch norms,
            "none" leaves out nothing.
        clip_norm: Largest norm of the gradient of all parameters together, above which it is scaled down to it; null switches
            clipping off.

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
