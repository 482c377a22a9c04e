"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.backend.arithmetic import UpdateRun
from hpctrain.nn.parameter import Segment
from hpctrain.optim.base import Norms, clip_scale
from hpctrain.optim.descent import MomentumOptimizer, merged


@dataclass(frozen=True, kw_only=True, eq=False)
class Sgd(MomentumOptimizer):
    """Stochastic gradient descent with momentum.

    g' = clip(g) + weight_decay * w; m := momentum * m + g'; w := w - lr * m (torch.optim.SGD, dampening 0).

    Args:
        momentum: Share of the previous update's direction that is kept, in [0, 1); 0 is plain gradient descent.
    """

    def update(self, segments: Sequence[Segment], lr: float, norms: Norms | None) -> None:
        scale = clip_scale(self.clip_norm, norms)
        runs = (UpdateRun(segment.start, segment.stop, scale, self.decay(segment)) for segment in segments)
        self.descent.update(merged(runs), lr)
