"""PyTorch as the peer of a fine-tuning: steps of both from the same weights and batches have the same losses and weights."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed (make parity installs it)")

from hpctrain.core.errors import ConfigError
from tests.support.network_state import export

pytestmark = [pytest.mark.torch, pytest.mark.job]  # imports of torch ask the system for its processor

# Batch norms of two or three values a channel, as 32 px would have them in the last layers, magnify roundings without bound.
FILE = Path(__file__).parents[2] / "configs" / "finetune-resnet18.yaml"
SMALL = [
    "init={}",
    "data.train=synthetic",
    "data.test=synthetic",
    "data.synthetic={height: 56, width: 56, classes: 3, samples: 20, test_samples: 5}",
    "data.augment.0.size=48",
    "data.evaluate_augment.0.size=48",
    "batch=8",
    "epochs=1",
    "dtype=float64",
    "backend=numpy",
    "threads=1",
]


@pytest.fixture(scope="module")
def finetune_peer() -> Any:
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed (make parity-install installs it)")
    from benchmarks import finetune_peer as module

    return module


@pytest.mark.slow
def test_an_epoch_of_both_has_the_same_weights_and_evaluations(finetune_peer: Any) -> None:
    """Two whole batches and a short one, with the warm-up's rates, decay, momentum, and batch norms of few samples."""
    config, parts = finetune_peer.prepare(FILE, SMALL)
    parts.replica.agree()
    model = finetune_peer.torch_model(config, parts).double()
    records = list(finetune_peer.train(config, parts, model))
    for step, batch in enumerate(parts.loader.epoch(0, 0)):
        parts.replica.step(batch, parts.schedule.lr(step))
    parts.replica.settle()
    parts.replica.drain()
    state = model.state_dict()
    for name, ours in export(parts.replica.network).items():
        np.testing.assert_allclose(ours, state[name].numpy(), rtol=1e-9, atol=1e-11, err_msg=name)
    assert parts.evaluation_loader is not None
    means = parts.replica.evaluate(parts.evaluation_loader).means()
    assert [record["kind"] for record in records] == ["epoch", "evaluation"]
    assert records[1]["top1"] == means["top1"]
    assert records[1]["loss"] == pytest.approx(means["loss"], rel=1e-9)


@pytest.mark.parametrize(
    "override", ["optimizer.name=lars", "ema.decay=0.9", "data.mixing.mixup=0.2", "init.freeze=[conv1]", "model=resnet20"]
)
def test_what_the_peer_does_not_receive_is_refused(finetune_peer: Any, override: str) -> None:
    with pytest.raises(ConfigError):
        finetune_peer.prepare(FILE, [*SMALL, override])
