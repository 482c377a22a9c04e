"""The scores that a network gives to images: those of one pass, or the mean over an image and its mirror image."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from hpctrain.backend.operators import StepContext
from hpctrain.data.loader import Batch, BatchSource
from hpctrain.nn.network import Network
from hpctrain.nn.program import Program

_LOG_2 = math.log(2.0)


def pairs(loader: BatchSource, mirrored: BatchSource | None) -> Iterator[tuple[Batch, Batch | None]]:
    """Each batch of all samples, with the batch of its mirror images where there are any.

    mirrored: the same samples in the same order, mirrored; None: there are none.
    """
    if mirrored is None:
        yield from ((batch, None) for batch in loader.epoch(0))
        return
    yield from zip(loader.epoch(0), mirrored.epoch(0), strict=True)


def forward(network: Network, batch: Batch) -> Program:
    """A program that has computed the logits of a rank's own samples. Collective over the split group.

    Not for a batch of which no rank of the split group has a sample.
    """
    program = network.program(batch.share.counts, training=False, image_shape=batch.image_shape)
    program.set_input(batch.x)
    program.forward(StepContext(training=False, sample_ids=batch.sample_ids, global_count=batch.global_count))
    return program


def host_logits(network: Network, program: Program) -> np.ndarray:
    """The logits (N, classes) that a program has computed, bfloat16 as float32, read only, valid until the next pass."""
    return network.kernels.arithmetic.to_host(program.logits)


def log_probabilities(network: Network, batch: Batch, mirror: Batch | None = None) -> np.ndarray:
    """Logarithms of the probabilities of a rank's own samples, (N, classes) float64. Collective over the split group.

    With mirror images they are those of the mean of both probabilities (Simonyan and Zisserman, ICLR 2015, section 3.2): like
    every mean of distributions it is one, so that probabilities still add up to 1, and the loss is never above the mean of both.

    Args:
        mirror: the mirror images of the same samples; None: the images alone count.
    """
    if not sum(batch.share.counts):  # of the split group: nobody computes anything
        return np.zeros((0, network.classes))
    scores = log_softmax(host_logits(network, forward(network, batch)))
    if mirror is None:
        return scores
    # In logarithms, because a probability of 1e-400 is 0 in float64, and its loss would be infinite.
    mean: np.ndarray = np.logaddexp(scores, log_softmax(host_logits(network, forward(network, mirror)))) - _LOG_2
    return mean


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Logarithms of softmax over the last dim, float64; NaN for a sample of which a logit is NaN or +infinity."""
    with np.errstate(invalid="ignore", over="ignore"):
        shifted = logits.astype(np.float64)
        shifted -= shifted.max(axis=-1, keepdims=True)
        shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted
