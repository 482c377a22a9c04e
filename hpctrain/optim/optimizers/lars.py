"""Layer-wise adaptive rate scaling (You, Gitman and Ginsburg, arXiv 1708.03888, equation 6)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from hpctrain.backend.arithmetic import UpdateRun
from hpctrain.core.errors import OptionError
from hpctrain.nn.parameter import Segment
from hpctrain.optim.base import Norms, clip_scale
from hpctrain.optim.descent import MomentumOptimizer, merged


@dataclass(frozen=True, kw_only=True, eq=False)
class Lars(MomentumOptimizer):
    """Layer-wise adaptive rate scaling: SGD whose step of each parameter is scaled by a ratio of norms, for large batches.

    lambda = trust_coefficient * |w| / (|g| + weight_decay * |w| + epsilon), the norms over the whole parameter;
    g' = lambda * (g + weight_decay * w); m := momentum * m + g'; w := w - lr * m.

    lambda is 1 where |w| or |g| is 0. A parameter that `decay_exclude` leaves out (norms and biases) has neither decay nor
    ratio: it is updated as by plain SGD. Clipping comes first: g and |g| above are those of the clipped gradient. The
    learning rate is outside the momentum as in `Sgd`, so a change of rate acts on the whole sum at once (the paper's
    algorithm 1 has it inside; the two are equal while the rate is constant).

    Args:
        momentum: Share of the previous update's direction that is kept, in [0, 1).
        decay_exclude: Parameters without weight decay and ratio: "norm_and_bias" leaves out biases and the parameters of batch
            norms, "none" leaves out nothing.
        clip_norm: Largest norm of the gradient of all parameters together, above which it is scaled down to it, before the
            ratios are taken; null switches clipping off.
        trust_coefficient: Factor on all ratios (the paper's eta), above 0.
        epsilon: Number added to the ratios' denominators, so that they stay finite.

    Raises:
        OptionError: a value outside its range.
    """

    layer_norms: ClassVar[bool] = True

    trust_coefficient: float = 0.001
    epsilon: float = 1e-9

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.trust_coefficient > 0.0:
            sentence = f"trust_coefficient {self.trust_coefficient} must be positive; the usual value is 0.001."
            raise OptionError(sentence, "trust_coefficient")
        if not self.epsilon >= 0.0:
            raise OptionError(f"epsilon {self.epsilon} must be at least 0; the usual value is 1e-9.", "epsilon")

    def update(self, segments: Sequence[Segment], lr: float, norms: Norms | None) -> None:
        assert norms is not None, "LARS needs norms"
        scale = clip_scale(self.clip_norm, norms)
        self.descent.update(merged(self._run(segment, scale, norms) for segment in segments), lr)

    def trust_ratio(self, segment: Segment, norms: Norms, clip: float = 1.0) -> float:
        """lambda of the parameter that `segment` belongs to; `clip` has scaled its gradient."""
        if self.decay_excludes(segment):
            return 1.0
        data, gradient = (math.sqrt(square) for square in norms.squares[norms.index[segment.parameter]])
        gradient *= clip
        if data == 0.0 or gradient == 0.0:
            return 1.0
        return float(self.trust_coefficient * data / (gradient + self.weight_decay * data + self.epsilon))

    def _run(self, segment: Segment, clip: float, norms: Norms) -> UpdateRun:
        ratio = self.trust_ratio(segment, norms, clip)
        return UpdateRun(segment.start, segment.stop, ratio * clip, ratio * self.decay(segment))
