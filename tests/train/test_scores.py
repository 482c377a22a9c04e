"""Scores are logarithms of probabilities; those of an image and its mirror image are the mean that PyTorch computes."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.data.arrays import ArrayLoader
from hpctrain.data.sampler import Sampler
from hpctrain.models import interchange
from hpctrain.train.evaluator import evaluate
from hpctrain.train.scores import log_probabilities, log_softmax, pairs
from hpctrain.virtual.run import run_virtual, virtual_engine


def test_softmax_adds_up_to_one_however_large_the_logits_are() -> None:
    logits = np.random.default_rng(0).standard_normal((9, 7)) * np.logspace(-3, 4, 9)[:, None]
    logs = log_softmax(logits.astype(np.float32))
    assert logs.dtype == np.float64
    assert np.allclose(np.exp(logs).sum(axis=1), 1, rtol=1e-14)
    assert np.isfinite(logs).all()
    wide = logits.astype(np.float32).astype(np.float64)
    assert np.allclose(logs[:4], np.log(np.exp(wide[:4]) / np.exp(wide[:4]).sum(axis=1, keepdims=True)), rtol=1e-12)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_stays_so_without_a_warning(value: float) -> None:
    logs = log_softmax(np.array([[0.0, value, 1.0], [0.0, 0.5, 1.0]]))
    assert np.isnan(logs[0]).any()
    assert np.isfinite(logs[1]).all()


def test_pairs_are_of_the_same_samples() -> None:
    images, labels = np.arange(11.0).reshape(11, 1, 1, 1) * np.array([1.0, -1.0])[:, None], np.zeros(11, np.int64)
    sampler = Sampler(11, 4, shuffle=False)
    loader, mirrored = (ArrayLoader(array, labels, sampler) for array in (images, images[:, :, ::-1]))
    for batch, mirror in pairs(loader, mirrored):
        assert mirror is not None
        assert np.array_equal(batch.x, mirror.x[:, :, ::-1])
    assert [mirror for _, mirror in pairs(loader, None)] == [None, None, None]


@pytest.mark.torch
def test_the_mean_over_mirror_images_is_that_of_torch() -> None:
    torch = pytest.importorskip("torch")
    from tests.support import torch_parity

    size, classes, samples = 17, 10, 7
    batch = torch_parity.make_batch(samples, size, classes, seed=1)
    network = torch_parity.make_network("resnet20", size, {"classes": classes}, "float64", seed=1)
    module = torch_parity.torch_module("resnet20", 1.0, interchange.export(network), "float64").eval()
    x = torch.from_numpy(np.ascontiguousarray(batch.x.transpose(0, 3, 1, 2)).astype(np.float64))
    with torch.no_grad():
        mean = (torch.softmax(module(x), 1) + torch.softmax(module(torch.flip(x, [3])), 1)) / 2
    loss = torch.nn.functional.nll_loss(mean.log(), torch.from_numpy(batch.labels), reduction="sum").item()
    images = batch.x.astype(np.float64)
    sampler = Sampler(samples, 4, shuffle=False)
    loader, mirrored = (ArrayLoader(array, batch.labels, sampler) for array in (images, images[:, :, ::-1]))
    logs = [log_probabilities(network, *pair) for pair in pairs(loader, mirrored)]
    assert np.allclose(np.exp(np.concatenate(logs)), mean.numpy(), rtol=1e-10)
    (sums,) = run_virtual(1, lambda comm: evaluate(network, loader, comm, virtual_engine(comm), mirrored=mirrored))
    assert np.isclose(sums.loss, loss, rtol=1e-10)
    assert sums.top1 == int((mean.argmax(1).numpy() == batch.labels).sum())
