"""LAMB beside timm's, over 50 updates in double precision; skipped where timm is not installed, which nothing else needs."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed (make parity installs it)")

import torch

from hpctrain.optim.optimizers.lamb import Lamb
from tests.optim.test_optimizers import gradients, make_group, run

pytestmark = pytest.mark.torch

UPDATES = 50
BETAS = (0.9, 0.99)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_updates_are_timms(decay: float, foreach: bool) -> None:
    """Without timm's clipping of the whole gradient, which is its default, and without that of ratios, which is not."""
    if importlib.util.find_spec("timm") is None or importlib.util.find_spec("torchvision") is None:
        pytest.skip("timm is not installed (pip install --no-deps timm, beside torch and torchvision)")
    from tests.support import torchvision_models

    assert torchvision_models.models  # timm imports torchvision, whose operators have to be known first
    from timm.optim.lamb import Lamb as Theirs

    group = make_group("float64")
    grads = gradients(group, UPDATES)
    rates = [0.02 * (1 + step % 5) for step in range(UPDATES)]
    tensors = {one.parameter: torch.tensor(group.data[one.start : one.stop].copy()) for one in group.segments}
    of_decay = [{"params": [tensors[one.parameter] for one in group.segments if one.decay], "weight_decay": decay}]
    of_decay += [{"params": [tensors[one.parameter] for one in group.segments if not one.decay], "weight_decay": 0.0}]
    # Ours scales steps of weights by their ratio whatever the decay; timm those of parameters that decay, or of all.
    theirs = [
        Theirs([one], betas=BETAS, eps=1e-6, max_grad_norm=None, always_adapt=adapts, foreach=foreach)
        for one, adapts in zip(of_decay, (True, False), strict=True)
    ]
    for grad, rate in zip(grads, rates, strict=True):
        for one in group.segments:
            tensors[one.parameter].grad = torch.tensor(grad[one.start : one.stop].copy())
        for optimizer in theirs:
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
    ours = run(Lamb(beta1=BETAS[0], beta2=BETAS[1], weight_decay=decay), group, grads, rates)
    wanted = np.concatenate([tensors[one.parameter].numpy() for one in group.segments])
    assert np.linalg.norm(ours - wanted) <= 1e-12 * np.linalg.norm(wanted)
