"""Gradient clipping by the global norm."""

from __future__ import annotations

from hpctrain.core.errors import OptionError
from hpctrain.optim.base import Norms

#: added to |g|, so that a gradient of zeros is not divided by
EPSILON = 1e-6


def check_clip_norm(clip_norm: float | None) -> None:
    """Nothing, where the value is legal.

    Raises:
        OptionError: it is not.
    """
    if clip_norm is not None and not clip_norm > 0.0:
        sentence = f"clip_norm {clip_norm} must be positive; leave it out (null) to switch clipping off."
        raise OptionError(sentence, "clip_norm")


def clip_scale(clip_norm: float | None, norms: Norms | None) -> float:
    """min(1, clip_norm / (|g| + 1e-6)), |g| over all parameters of `norms`; 1 where clipping is off.

    A gradient that is not finite stays so: |g| = nan gives 1 and |g| = inf gives 0, and 0 * inf is nan.
    """
    if clip_norm is None:
        return 1.0
    assert norms is not None, "clipping needs norms"
    return min(1.0, clip_norm / (norms.global_gradient() + EPSILON))
