"""The clipping factor."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.nn.parameter import FlatGroup, ParameterSpec
from hpctrain.optim.base import Norms
from hpctrain.optim.clip import clip_scale


def norms_with(*gradient_norms):
    group = FlatGroup({str(i): ParameterSpec((3,), lambda rng, shape: rng.random(shape)) for i in range(len(gradient_norms))})
    norms = Norms(group)
    norms.squares[:, 1] = np.square(gradient_norms)
    return norms


def test_the_clipped_gradient_has_at_most_the_asked_norm():
    for length in (1e-8, 0.3, 0.999, 1.0, 1.001, 25.0, 1e12):
        norms = norms_with(0.6 * length, 0.8 * length)
        scale = clip_scale(1.0, norms)
        assert 0.0 < scale <= 1.0
        assert scale * length <= 1.0
        assert scale == pytest.approx(min(1.0, 1.0 / (length + 1e-6)), rel=1e-12)


def test_off_and_zero_gradients():
    assert clip_scale(None, None) == 1.0
    assert clip_scale(0.5, norms_with(0.0, 0.0)) == 1.0
    with pytest.raises(AssertionError, match="norms"):
        clip_scale(0.5, None)
