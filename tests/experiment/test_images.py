"""Loaders of a configuration: batches are made by as many threads as it says, and do not show how many these were."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hpctrain.backend.kernels.base import KernelSet, PixelInput
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.pixel_batch import PixelBatch
from hpctrain.comm.single import SingleCommunicator
from hpctrain.config.load import parse
from hpctrain.data import batch_threads
from hpctrain.experiment.images import make_loader, open_images, training_images
from hpctrain.launch.threads import ThreadPlan

CONFIG = """
model: small
data:
  train: synthetic
  synthetic: {{height: 80, width: 96, samples: 37}}
  augment: [{{name: random_resized_crop, size: 88}}, flip, randaugment, random_erasing]
  threads: {threads}
batch: 16
epochs: 1
optimizer: {{name: sgd, lr: 0.05}}
schedule: constant
"""


def _session(threads: object, cores: int) -> Any:
    return SimpleNamespace(
        config=parse(CONFIG.format(threads=threads))[0],
        world=SingleCommunicator(),
        groups=SimpleNamespace(position=0, split_size=1, all_ranks=SimpleNamespace(size=1)),
        threads=ThreadPlan(cores, cores, "here"),
        progress=SimpleNamespace(notes=SimpleNamespace(alive=lambda: None)),
    )


def _epoch(threads: object, cores: int, monkeypatch: pytest.MonkeyPatch) -> tuple[np.ndarray, set[int]]:
    """All images of an epoch, and the numbers of threads that batches were shared out over."""
    session = _session(threads, cores)
    counts = set()
    run = batch_threads.BatchThreads.run

    def counted(self: batch_threads.BatchThreads, *arguments: Any) -> None:
        counts.add(self.count)
        run(self, *arguments)

    monkeypatch.setattr(batch_threads.BatchThreads, "run", counted)
    images, _ = training_images(session.config, open_images(session.config, "train"), None)
    loader = make_loader(session, images, None, batch=session.config.batch, shuffle=True)
    return np.concatenate([np.array(batch.x) for batch in loader.epoch(1)]), counts


def test_batches_are_shared_out_as_configured_and_do_not_show_it(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, counts = _epoch(1, 4, monkeypatch)
    assert alone.shape == (37, 88, 88, 3)
    assert counts == {1}
    for threads, cores, expected in ((3, 1, 3), ("auto", 1, 1), ("auto", 8, 2), ("auto", 64, 8)):
        shared, counts = _epoch(threads, cores, monkeypatch)
        assert counts == {expected}
        assert np.array_equal(shared, alone)


class _PixelKernels(PixelInput, NumpyKernelSet):
    """Kernels of the host that ask for pixels."""

    def make_input(self, target: Any, images: PixelBatch) -> None:
        target[...] = images


def test_kernels_that_take_pixels_get_them() -> None:
    session = _session(1, 1)
    images, _ = training_images(session.config, open_images(session.config, "train"), None)

    def epoch(kernels: KernelSet) -> Iterator[np.ndarray | PixelBatch]:
        loader = make_loader(session, images, None, batch=16, shuffle=True, kernels=kernels)
        return (batch.x for batch in loader.epoch(0))

    plain = [np.array(x) for x in epoch(NumpyKernelSet())]  # a pipeline makes the batches of one loader at a time
    for expected, ours in zip(plain, epoch(_PixelKernels()), strict=True):
        assert isinstance(ours, PixelBatch)
        np.testing.assert_array_equal(np.asarray(ours), expected)
    assert all(isinstance(x, np.ndarray) for x in epoch(NumpyKernelSet()))
