"""The last layers of a classifier: the fully connected layer, as three matrix products, and softmax cross entropy.

The loss has label smoothing (Szegedy et al., CVPR 2016) and weights of classes, and counts top-1 and top-5 hits.
"""

from __future__ import annotations

import math

import numpy as np

from hpctrain.backend.numpy.operator import NumpyOperator, column_sums
from hpctrain.backend.numpy.windows import split
from hpctrain.backend.operators import Array, LossOperator, LossSums, MixedLabels, StepContext, SufficientFactors, checked_labels
from hpctrain.backend.specs import LinearSpec, SoftmaxCrossEntropySpec, TensorSpec

_BLOCK_BYTES = 1 << 20


class NumpyLinear(SufficientFactors, NumpyOperator):
    """Linear layer: y (N, out) = x (N, in) @ weight (in, out) + bias (out)."""

    def __init__(self, spec: LinearSpec, x: TensorSpec, *, training: bool) -> None:
        super().__init__(spec, (x,), training=training)
        self.bias = spec.bias
        self.needs_inputs = (training,)
        self.rows = min(x.shape[0], max(1, _BLOCK_BYTES // max(1, spec.features_in * x.item_bytes)))
        self.declare(scratch=[((self.rows, spec.features_in), self.dtype)] if training else [])

    def forward(self, context: StepContext) -> None:
        y = self.buffers.output
        np.matmul(self.buffers.inputs[0], self.buffers.parameters["weight"], out=y)
        if self.bias:
            np.add(y, self.buffers.parameters["bias"], out=y)

    def backward_parameters(self) -> None:
        np.matmul(self.buffers.inputs[0].T, self.output_grad, out=self.buffers.gradients["weight"])
        if self.bias:
            column_sums(self.output_grad, self.buffers.gradients["bias"])

    def backward_input(self) -> None:
        grad = self.input_grad()
        if grad is None:
            return
        weight = self.buffers.parameters["weight"].T
        if not self.accumulates():
            np.matmul(self.output_grad, weight, out=grad)
            return
        for low, high in split(grad.shape[0], self.rows):
            part = self.scratch[0][: high - low]
            np.matmul(self.output_grad[low:high], weight, out=part)
            np.add(grad[low:high], part, out=grad[low:high])


class SoftmaxCrossEntropy(LossOperator):
    """Loss over logits (N, classes) and integer labels (N,), computed in float64 for every dtype of logits."""

    def __init__(self, spec: SoftmaxCrossEntropySpec) -> None:
        self.spec = spec

    def run(
        self,
        logits: Array,
        labels: Array | MixedLabels,
        global_count: int,
        d_logits: Array | None,
        class_scale: float | None = None,
    ) -> LossSums:
        count, classes = logits.shape
        if count == 0:
            return LossSums(0.0, 0, 0, 0)
        shares = _shares(labels, classes)
        rows, counted = np.arange(count), max(shares, key=lambda share: share[0])[1]
        weights = _class_weights(self.spec, class_scale)
        with np.errstate(over="ignore", invalid="ignore"):
            shifted = logits.astype(np.float64)
            ranks = _ranks(shifted, rows, counted)
            shifted -= shifted.max(axis=1, keepdims=True)
            soft = np.exp(shifted)
            total = soft.sum(axis=1, keepdims=True)
            uniform, sure = self.spec.smoothing / classes, 1.0 - self.spec.smoothing
            # The target of each sample: a part for each of its labels, and the uniform part of label smoothing.
            parts = [(sure * share * (1.0 if weights is None else weights[indices]), indices) for share, indices in shares]
            target = 1.0 if weights is None else sum(part for part, _ in parts) + uniform * weights.sum()
            aim = sum(part * shifted[rows, indices] for part, indices in parts)
            if uniform:
                aim = aim + uniform * (shifted if weights is None else shifted * weights).sum(axis=1)
            loss = float((target * np.log(total[:, 0]) - aim).sum())
            if not math.isfinite(loss):  # NaN in any logit makes the loss NaN; samples with NaN count as wrong
                ranks[np.isnan(logits).any(axis=1)] = max(classes, self.spec.top)
            if d_logits is not None:
                soft /= total
                if weights is not None:
                    soft *= np.asarray(target)[:, None]
                if uniform:
                    soft -= uniform if weights is None else uniform * weights
                for part, indices in parts:
                    soft[rows, indices] -= part
                np.divide(soft, global_count, out=d_logits, casting="same_kind")
        return LossSums(loss, int(np.count_nonzero(ranks < 1)), int(np.count_nonzero(ranks < self.spec.top)), count)


def _class_weights(spec: SoftmaxCrossEntropySpec, class_scale: float | None) -> np.ndarray | None:
    """Return the scaled weight of each class; None if weights are not applied."""
    return np.array(spec.class_weights) * class_scale if spec.class_weights and class_scale is not None else None


def _shares(labels: Array | MixedLabels, classes: int) -> list[tuple[float, np.ndarray]]:
    """Return (share of the target, labels (N,)) for each array of labels."""
    if not isinstance(labels, MixedLabels):
        return [(1.0, checked_labels(labels, classes))]
    pairs = (labels.weight, labels.first), (1.0 - labels.weight, labels.second)
    return [(weight, checked_labels(indices, classes)) for weight, indices in pairs]


def _ranks(logits: np.ndarray, rows: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return, for each sample, the number of logits that rank before the label's: greater, or equal with a smaller index.

    Args:
        rows: indices of the samples: 0, 1, ...
    """
    of_label = logits[rows, labels][:, None]
    earlier = np.arange(logits.shape[1]) < labels[:, None]
    ranks: np.ndarray = ((logits > of_label) | ((logits == of_label) & earlier)).sum(axis=1)
    return ranks
