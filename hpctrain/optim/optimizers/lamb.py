"""Layer-wise adaptive moments for batch training (You et al., ICLR 2020, arXiv 1904.00962, algorithm 2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from hpctrain.backend.arithmetic import Descent, UpdateRun
from hpctrain.nn.parameter import FlatGroup, Segment
from hpctrain.optim.base import Norms
from hpctrain.optim.descent import MomentOptimizer, merged


@dataclass(frozen=True, kw_only=True, eq=False)
class Lamb(MomentOptimizer):
    """Layer-wise adaptive moments: AdamW whose step of each parameter is scaled by a ratio of norms, for large batches.

    u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + epsilon) + weight_decay * w, with the moments of AdamW;
    w := w - lr * |w| / |u| * u, the norms over the whole parameter (the paper's phi is the identity).

    The ratio is 1 where |w| or |u| is 0. A parameter that `decay_exclude` leaves out (norms and biases) has neither decay nor
    ratio: it is updated as by AdamW. There is no clipping: the length of a step does not follow from that of the gradient.

    Args:
        epsilon: Number added to the root of the mean of squares, above 0.
        decay_exclude: Parameters without weight decay and ratio: "norm_and_bias" leaves out biases and the parameters of batch
            norms, "none" leaves out nothing.
    """

    layer_norms: ClassVar[bool] = True

    epsilon: float = 1e-6
    _descent: Descent | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "prepares_norms", True)

    def bind(self, group: FlatGroup, owned: Sequence[Segment]) -> None:
        super().bind(group, owned)
        nothing = group.arithmetic.zeros(0, group.dtype)
        descent = group.arithmetic.descent(group.data, group.grad, nothing, factor=0.0, nesterov=False, shadow=group.shadow)
        object.__setattr__(self, "_descent", descent)

    def prepare_norms(self, segments: Sequence[Segment]) -> None:
        """Replace the moments, and the gradient by u, of which the norms are taken."""
        for runs, corrections in self.bound.counted([self.run(segment) for segment in segments]):
            self.bound.descent.direct(runs, corrections)

    def update(self, segments: Sequence[Segment], lr: float, norms: Norms | None) -> None:
        assert norms is not None, "LAMB needs norms"
        assert self._descent is not None, "the optimiser is not bound"
        runs = (UpdateRun(segment.start, segment.stop, self.trust_ratio(segment, norms), 0.0) for segment in segments)
        self._descent.update(merged(runs), lr)

    def trust_ratio(self, segment: Segment, norms: Norms) -> float:
        """|w| / |u| of the parameter that `segment` belongs to."""
        if self.decay_excludes(segment):
            return 1.0
        data, direction = (math.sqrt(square) for square in norms.squares[norms.index[segment.parameter]])
        return data / direction if data > 0.0 and direction > 0.0 else 1.0
