"""Softmax cross entropy: definition, central differences, extreme logits, accuracies and their ties, labels out of range."""

import numpy as np
import pytest

from hpctrain.backend.kernels.base import LossSums
from hpctrain.backend.kernels.labels import MixedLabels
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.kernels.specs import SoftmaxCrossEntropySpec
from hpctrain.errors import DataError
from hpctrain.testing.operator_gradients import assert_close, numerical_gradient


def run(
    logits: np.ndarray, labels: np.ndarray | MixedLabels, smoothing: float = 0.0, global_count: int = 1
) -> tuple[LossSums, np.ndarray]:
    d_logits = np.full_like(logits, np.nan)
    loss = NumpyKernelSet().make_loss(SoftmaxCrossEntropySpec(smoothing))
    return loss.run(logits, labels, global_count, d_logits), d_logits


def sample(count: int = 7, classes: int = 9) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.standard_normal((count, classes)) * 3, random.integers(0, classes, count)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_equals_the_definition(smoothing: float) -> None:
    logits, labels = sample()
    q = np.full(logits.shape, smoothing / 9)
    q[np.arange(7), labels] += 1 - smoothing
    expected = -(q * np.log(np.exp(logits) / np.exp(logits).sum(1, keepdims=True))).sum()
    assert run(logits, labels, smoothing)[0].loss == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("global_count", [7, 225])
def test_gradient_is_that_of_the_sum_over_the_global_count(smoothing: float, global_count: int) -> None:
    logits, labels = sample()
    _, d_logits = run(logits, labels, smoothing, global_count)

    def share() -> np.ndarray:
        return np.array([run(logits, labels, smoothing)[0].loss / global_count])

    assert_close(d_logits, numerical_gradient(share, logits, np.ones(1)), 1e-9, "logits")
    np.testing.assert_allclose(d_logits.sum(axis=1), 0, atol=1e-15)


@pytest.mark.parametrize("scale", [1e4, 1e30, 3e38])
def test_extreme_logits_stay_finite(scale: float) -> None:
    logits = np.array([[1.0, -1.0, 0.0], [0.0, 1.0, -1.0]], np.float32) * np.float32(scale)
    sums, d_logits = run(logits, np.array([0, 2]))
    assert sums.loss == pytest.approx(2 * np.float64(np.float32(scale)))
    np.testing.assert_allclose(d_logits, [[0, 0, 0], [0, 1, -1]], atol=1e-12)


def test_a_shift_of_the_logits_changes_nothing() -> None:
    logits, labels = sample()
    first, second = run(logits, labels), run(logits + 12345.0, labels)
    assert first[0].loss == pytest.approx(second[0].loss, rel=1e-11)
    assert_close(first[1], second[1], 1e-11, "logits")


def test_accuracies_count_ranks() -> None:
    """The rank of a label is how many logits are greater, or equal and earlier: ties go to the smaller index."""
    logits = np.zeros((9, 9))
    sums, _ = run(logits, np.arange(9))
    assert (sums.top1, sums.top5, sums.count) == (1, 5, 9)
    logits = np.tile(np.arange(9.0), (9, 1))
    sums, _ = run(logits, np.arange(9))
    assert (sums.top1, sums.top5) == (1, 5)
    logits, labels = sample(225)
    sums, _ = run(logits, labels)
    order = np.argsort(-logits, axis=1, kind="stable")
    assert sums.top1 == (order[:, 0] == labels).sum()
    assert sums.top5 == (order[:, :5] == labels[:, None]).any(axis=1).sum()


def test_all_labels_are_within_five_of_three_classes() -> None:
    logits, labels = sample(7, 3)
    assert run(logits, labels)[0].top5 == 7


@pytest.mark.parametrize("classes", [3, 9])
def test_nan_is_wrong_and_shows_in_the_loss(classes: int) -> None:
    logits, labels = np.zeros((2, classes)), np.array([0, 0])
    logits[1, 2] = np.nan
    sums, _ = run(logits, labels)
    assert np.isnan(sums.loss)
    assert (sums.top1, sums.top5, sums.count) == (1, 1, 2)


@pytest.mark.parametrize(("label", "nearest"), [(-1, 0), (9, 8), (250, 8)])
def test_labels_out_of_range_are_refused(label: int, nearest: int) -> None:
    logits, labels = sample()
    labels[3] = label
    with pytest.raises(DataError, match=rf"Label {label} is outside .* 0 to 8; the nearest legal label is {nearest}"):
        run(logits, labels)


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64])
def test_labels_of_any_integer_type(dtype: type) -> None:
    logits, labels = sample()
    assert run(logits, labels.astype(dtype))[0] == run(logits, labels)[0]


def test_without_samples() -> None:
    sums, d_logits = run(np.zeros((0, 9), np.float32), np.zeros(0, np.int64), global_count=0)
    assert sums == LossSums(0.0, 0, 0, 0)
    assert d_logits.shape == (0, 9)


def test_evaluation_needs_no_gradient() -> None:
    logits, labels = sample()
    loss = NumpyKernelSet().make_loss(SoftmaxCrossEntropySpec())
    assert loss.run(logits, labels, 7, None) == run(logits, labels)[0]


def test_float32_is_near_float64() -> None:
    logits, labels = sample()
    double, single = run(logits, labels, 0.1, 7), run(logits.astype(np.float32), labels, 0.1, 7)
    assert single[1].dtype == np.float32
    assert single[0].loss == pytest.approx(double[0].loss, rel=1e-6)
    assert_close(single[1], double[1], 1e-6, "logits")


@pytest.mark.torch
@pytest.mark.parametrize("weight", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_mixed_labels_are_torchs_soft_targets(smoothing: float, weight: float) -> None:
    """The targets of timm's mixup_target; samples whose two labels are equal among them."""
    torch = pytest.importorskip("torch")
    logits, first = sample()
    second = np.roll(first, 1)
    second[2] = first[2]
    one_hot = [np.full(logits.shape, smoothing / 9), np.full(logits.shape, smoothing / 9)]
    for target, labels in zip(one_hot, (first, second), strict=True):
        target[np.arange(7), labels] = 1 - smoothing + smoothing / 9
    theirs = torch.tensor(logits, requires_grad=True)
    target = torch.tensor(one_hot[0] * weight + one_hot[1] * (1 - weight))
    loss = torch.nn.functional.cross_entropy(theirs, target, reduction="sum")
    (loss / 11).backward()
    sums, d_logits = run(logits, MixedLabels(first, second, weight), smoothing, 11)
    assert sums.loss == pytest.approx(loss.item(), rel=1e-13)
    np.testing.assert_allclose(d_logits, theirs.grad.numpy(), rtol=1e-12, atol=1e-15)
    counted = run(logits, first if weight >= 0.5 else second, smoothing)[0]
    assert (sums.top1, sums.top5, sums.count) == (counted.top1, counted.top5, 7)


def test_both_mixed_labels_are_checked() -> None:
    logits, labels = sample()
    for pair in ((labels, labels + 9), (labels - 9, labels)):
        with pytest.raises(DataError, match="outside the model's classes"):
            run(logits, MixedLabels(*pair, 0.5))
