"""Batch norm, linear layers and the loss: definitions, central differences, extreme numbers, labels, several ranks."""

import numpy as np
import pytest

from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.operators import LossSums, MixedLabels, StepContext
from hpctrain.backend.specs import BatchNormSpec, LinearSpec, SoftmaxCrossEntropySpec
from hpctrain.core.errors import DataError
from hpctrain.parallel.groups import RankStatistics
from hpctrain.testing.operators import (
    Gradients,
    OperatorBench,
    assert_close,
    check_gradient,
    default_parameters,
    numerical_gradient,
)
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.run import run_virtual, virtual_engine

KERNELS = NumpyKernelSet()

SHAPES = [(3, 7, 9, 5), (9, 5), (1, 3, 3, 5), (2, 1, 1, 1)]


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def affine(dtype: str = "float64") -> dict[str, np.ndarray]:
    return default_parameters(BatchNormSpec(5), dtype)


def definition(x: np.ndarray, spec: BatchNormSpec, parameters: dict[str, np.ndarray], *rest: np.ndarray) -> np.ndarray:
    dims = tuple(range(x.ndim - 1))
    y = (x - x.mean(dims)) / np.sqrt(x.var(dims) + spec.epsilon) * parameters["weight"] + parameters["bias"]
    y = y + rest[0] if rest else y
    return np.maximum(y, 0) if spec.relu else y


@pytest.mark.parametrize("shape", [*SHAPES, (5, 41, 43, 3), (2, 3, 2, 9001)])
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("relu", [False, True])
def test_equals_the_definition(shape: tuple[int, ...], relu: bool, add: bool) -> None:
    spec = BatchNormSpec(shape[-1], relu=relu, add=add)
    inputs = [normal(*shape, seed=i) for i in range(1 + add)]
    parameters = default_parameters(spec, "float64")
    bench = OperatorBench(KERNELS, spec, inputs, parameters=parameters)
    assert_close(bench.forward(), definition(inputs[0], spec, parameters, *inputs[1:]), 1e-10, "output")
    flat = inputs[0].reshape(-1, shape[-1])
    assert_close(bench.statistics["batch_mean"], flat.mean(0), 1e-12, "mean")
    assert_close(bench.statistics["batch_var"], flat.var(0, ddof=1), 1e-12, "unbiased variance")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_gradient(shape: tuple[int, ...], accumulate: bool, in_place: bool) -> None:
    check_gradient(KERNELS, BatchNormSpec(shape[-1]), [normal(*shape)], accumulate=accumulate, in_place=in_place, tolerance=1e-6)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_gradient_of_fused(add: bool, accumulate: bool, in_place: bool) -> None:
    spec = BatchNormSpec(5, relu=True, add=add)
    inputs = [normal(3, 7, 3, 5, seed=i) for i in range(1 + add)]
    check_gradient(KERNELS, spec, inputs, accumulate=accumulate, in_place=in_place, tolerance=1e-6, step=1e-6)


@pytest.mark.parametrize("training", [False, True])
def test_evaluation_uses_running_statistics(training: bool) -> None:
    """Whether the operator was made for evaluation, or is a training one asked to evaluate."""
    spec, x, parameters = BatchNormSpec(5), normal(3, 7, 9, 5), affine()
    mean, variance = normal(5, seed=1), normal(5, seed=2) ** 2
    statistics = {"running_mean": mean.copy(), "running_var": variance.copy()}
    bench = OperatorBench(KERNELS, spec, [x], parameters=parameters, statistics=statistics, training=training)
    expected = (x - mean) / np.sqrt(variance + spec.epsilon) * parameters["weight"] + parameters["bias"]
    assert_close(bench.forward(StepContext(training=False)), expected, 1e-12, "output")
    np.testing.assert_array_equal(statistics["running_mean"], mean)


def test_training_leaves_running_statistics_alone() -> None:
    statistics = {"running_mean": np.full(5, 7.0), "running_var": np.full(5, 9.0)}
    parameters = affine()
    OperatorBench(KERNELS, BatchNormSpec(5), [normal(3, 7, 9, 5)], parameters=parameters, statistics=statistics).forward()
    assert (statistics["running_mean"] == 7).all()
    assert (statistics["running_var"] == 9).all()


@pytest.mark.parametrize("shape", [(0, 7, 9, 5), (3, 0, 9, 5), (3, 7, 0, 5), (0, 5)])
def test_without_pixels_everything_is_zero(shape: tuple[int, ...]) -> None:
    bench = OperatorBench(KERNELS, BatchNormSpec(5), [np.zeros(shape)], parameters=affine())
    assert bench.forward().shape == shape
    grads = bench.backward(np.zeros(shape))
    assert grads.inputs[0].shape == shape
    assert not any(grad.any() for grad in grads.parameters.values())
    assert not bench.statistics["batch_mean"].any()
    assert not bench.statistics["batch_var"].any()


def test_one_sample_has_a_biased_variance() -> None:
    bench = OperatorBench(KERNELS, BatchNormSpec(5), [normal(1, 5)], parameters=affine())
    bench.forward()
    assert not bench.statistics["batch_var"].any()


@pytest.mark.parametrize("unlike", [False, True])
def test_a_large_mean_costs_no_digits(unlike: bool) -> None:
    """float32 with a mean of a thousand deviations, and images that differ in theirs, or a first one unlike all others."""
    x = (normal(16, 63, 65, 3) + 1000.0 * (not unlike) + 3.0 * np.arange(16)[:, None, None, None]).astype(np.float32)
    if unlike:
        x[0] = -1000.0
    bench = OperatorBench(KERNELS, BatchNormSpec(3), [x], parameters=default_parameters(BatchNormSpec(3), "float32"))
    bench.forward()
    flat = x.astype(np.float64).reshape(-1, 3)
    np.testing.assert_allclose(bench.statistics["batch_mean"], flat.mean(0), rtol=1e-5)
    np.testing.assert_allclose(bench.statistics["batch_var"], flat.var(0, ddof=1), rtol=1e-5)


@pytest.mark.parametrize("counts", [(3, 4), (5, 0, 2), (0, 7, 0), (1, 1, 1, 4, 0)])
def test_synchronised_ranks_equal_one(counts: tuple[int, ...]) -> None:
    """Outputs, input gradients and statistics are those of all samples; parameter gradients are this rank's sums only."""
    x, dy = normal(sum(counts), 7, 3, 5), normal(sum(counts), 7, 3, 5, seed=1)
    whole = OperatorBench(KERNELS, BatchNormSpec(5), [x], parameters=affine())
    y = whole.forward()
    expected: Gradients = whole.backward(dy)
    ends = np.cumsum(counts)[:-1]
    parts, grads = np.split(x, ends), np.split(dy, ends)

    def rank(comm: ThreadCommunicator) -> tuple[np.ndarray, Gradients, dict[str, np.ndarray]]:
        merger = RankStatistics(comm, virtual_engine(comm))
        spec = BatchNormSpec(5, synchronised=True)
        bench = OperatorBench(KERNELS, spec, [parts[comm.rank]], parameters=affine(), merger=merger)
        return bench.forward(), bench.backward(grads[comm.rank]), bench.statistics

    results = run_virtual(len(counts), rank)
    assert_close(np.concatenate([result[0] for result in results]), y, 1e-12, "outputs")
    assert_close(np.concatenate([result[1].inputs[0] for result in results]), expected.inputs[0], 1e-12, "input gradients")
    for role in ("weight", "bias"):
        assert_close(sum(result[1].parameters[role] for result in results), expected.parameters[role], 1e-12, role)
    for result in results:
        for role in ("batch_mean", "batch_var"):
            assert_close(result[2][role], whole.statistics[role], 1e-12, role)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_gradient(bias: bool, accumulate: bool) -> None:
    x = np.random.default_rng(0).standard_normal((3, 7))
    check_gradient(KERNELS, LinearSpec(7, 5, bias), [x], accumulate=accumulate)


@pytest.mark.parametrize("accumulate", [False, True])
def test_equals_the_products(accumulate: bool) -> None:
    """Large enough for several blocks of the accumulated input gradient."""
    spec = LinearSpec(9000, 11)
    random = np.random.default_rng(0)
    x, dy, start = random.standard_normal((37, 9000)), random.standard_normal((37, 11)), random.standard_normal((37, 9000))
    parameters = default_parameters(spec, "float64")
    bench = OperatorBench(KERNELS, spec, [x], parameters=parameters, accumulate=accumulate)
    assert_close(bench.forward(), x @ parameters["weight"] + parameters["bias"], 1e-12, "output")
    grads = bench.backward(dy, [start])
    assert_close(grads.inputs[0], dy @ parameters["weight"].T + (start if accumulate else 0), 1e-12, "input")
    assert_close(grads.parameters["weight"], x.T @ dy, 1e-12, "weight")
    assert_close(grads.parameters["bias"], dy.sum(axis=0), 1e-12, "bias")


def test_without_samples_gradients_are_zero() -> None:
    spec = LinearSpec(7, 5)
    bench = OperatorBench(KERNELS, spec, [np.zeros((0, 7))], parameters=default_parameters(spec, "float64"))
    assert bench.forward().shape == (0, 5)
    grads = bench.backward(np.zeros((0, 5)))
    assert grads.inputs[0].shape == (0, 7)
    assert not grads.parameters["weight"].any()
    assert not grads.parameters["bias"].any()


def run(
    logits: np.ndarray,
    labels: np.ndarray | MixedLabels,
    smoothing: float = 0.0,
    global_count: int = 1,
    weights: tuple[float, ...] = (),
    class_scale: float | None = None,
) -> tuple[LossSums, np.ndarray]:
    d_logits = np.full_like(logits, np.nan)
    loss = NumpyKernelSet().make_loss(SoftmaxCrossEntropySpec(smoothing, weights))
    return loss.run(logits, labels, global_count, d_logits, class_scale), d_logits


def sample(count: int = 7, classes: int = 9) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.standard_normal((count, classes)) * 3, random.integers(0, classes, count)


WEIGHTS = tuple(np.linspace(0.2, 3.0, 9).tolist())


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("share", "global_count"), [(1.0, 7), (0.3, 225)])
@pytest.mark.parametrize("weights", [(), WEIGHTS], ids=["equal", "weighted"])
def test_loss_and_gradient_equal_the_definition(
    smoothing: float, share: float, global_count: int, weights: tuple[float, ...]
) -> None:
    """Each class has its own weight, and the gradient is that of the weighted loss over the global count."""
    logits, first = sample()
    second = first[::-1]
    q = np.full(logits.shape, smoothing / 9)
    for part, labels in ((share, first), (1 - share, second)):
        q[np.arange(7), labels] += (1 - smoothing) * part
    mixed = MixedLabels(first, second, share)
    scale = 7 / sum(weights[label] for label in first) if weights else None
    weighted = q * np.array(weights) * scale if weights else q
    expected = -(weighted * np.log(np.exp(logits) / np.exp(logits).sum(1, keepdims=True))).sum()
    sums, d_logits = run(logits, mixed, smoothing, global_count, weights, scale)
    assert sums.loss == pytest.approx(expected, rel=1e-13)

    def loss() -> np.ndarray:
        return np.array([run(logits, mixed, smoothing, 1, weights, scale)[0].loss / global_count])

    assert_close(d_logits, numerical_gradient(loss, logits, np.ones(1)), 1e-9, "logits")
    if not weights:
        np.testing.assert_allclose(d_logits.sum(axis=1), 0, atol=1e-15)
    assert run(logits, mixed, smoothing, 7, weights)[0] == run(logits, mixed, smoothing, 7)[0]  # an evaluation


@pytest.mark.torch
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_weighted_mean_is_torchs(smoothing: float) -> None:
    """The sum of weights of the whole batch divides each part, not the sum of the part's own weights."""
    torch = pytest.importorskip("torch")
    logits, labels = sample()
    theirs = torch.tensor(logits, requires_grad=True)
    criterion = torch.nn.CrossEntropyLoss(weight=torch.tensor(WEIGHTS, dtype=torch.float64), label_smoothing=smoothing)
    loss = criterion(theirs, torch.tensor(labels))
    loss.backward()
    scale = 7 / sum(WEIGHTS[label] for label in labels)
    parts = [run(logits[part], labels[part], smoothing, 7, WEIGHTS, scale) for part in (slice(0, 3), slice(3, 7))]
    assert sum(sums.loss for sums, _ in parts) / 7 == pytest.approx(loss.item(), rel=1e-13)
    np.testing.assert_allclose(np.concatenate([d for _, d in parts]), theirs.grad.numpy(), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("scale", [1e4, 1e30, 3e38])
def test_extreme_logits_stay_finite(scale: float) -> None:
    logits = np.array([[1.0, -1.0, 0.0], [0.0, 1.0, -1.0]], np.float32) * np.float32(scale)
    sums, d_logits = run(logits, np.array([0, 2]))
    assert sums.loss == pytest.approx(2 * np.float64(np.float32(scale)))
    np.testing.assert_allclose(d_logits, [[0, 0, 0], [0, 1, -1]], atol=1e-12)


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


@pytest.mark.parametrize("classes", [3, 9])
def test_nan_is_wrong_and_shows_in_the_loss(classes: int) -> None:
    logits, labels = np.zeros((2, classes)), np.array([0, 0])
    logits[1, 2] = np.nan
    sums, _ = run(logits, labels)
    assert np.isnan(sums.loss)
    assert (sums.top1, sums.top5, sums.count) == (1, 1, 2)


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
