"""Adam with decoupled weight decay (Loshchilov and Hutter, ICLR 2019, algorithm 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpctrain.nn.parameter import Segment
from hpctrain.optim.base import Norms, check_clip_norm, clip_scale
from hpctrain.optim.descent import MomentOptimizer


@dataclass(frozen=True, kw_only=True, eq=False)
class Adamw(MomentOptimizer):
    """Adam with decoupled weight decay: each element's step follows from means of its gradient and of that one's square.

    m := beta1 * m + (1 - beta1) * g; v := beta2 * v + (1 - beta2) * g^2;
    w := w - lr * (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + epsilon) + weight_decay * w), in the t-th update of a
    parameter (torch.optim.AdamW).

    Args:
        clip_norm: Largest norm of the gradient of all parameters together, above which it is scaled down to it; null switches
            clipping off.
    """

    clip_norm: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_clip_norm(self.clip_norm)

    def update(self, segments: Sequence[Segment], lr: float, norms: Norms | None) -> None:
        scale = clip_scale(self.clip_norm, norms)
        for runs, corrections in self.bound.counted([self.run(segment, scale) for segment in segments]):
            self.bound.descent.update(runs, corrections, lr)
