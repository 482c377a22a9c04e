"""Evaluations, predictions, scores, confusions, and averages of weights: those of one rank in one pass, on any grid."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.backend.numpy.classifier import SoftmaxCrossEntropy
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.operators import StepContext
from hpctrain.backend.specs import SoftmaxCrossEntropySpec
from hpctrain.core.errors import CheckpointError
from hpctrain.data.loader import ArrayLoader
from hpctrain.data.sampler import Sampler
from hpctrain.nn.network import Network, layer_of
from hpctrain.optim.ema import EmaRule
from hpctrain.optim.optimizers import Sgd
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.storage.checkpoint import CheckpointContent
from hpctrain.training import evaluation
from hpctrain.training.evaluation import (
    ClassScore,
    ConfusionCounts,
    ConfusionMatrix,
    TopClasses,
    evaluate,
    log_probabilities,
    log_softmax,
    pairs,
    predict,
)
from hpctrain.training.metrics import RunningSums
from hpctrain.training.replica import Replica
from hpctrain.training.snapshot import Position
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.run import lone_rank, run_virtual, virtual_engine
from tests.support import nets, network_state
from tests.support.training import Task, batches, made_up, replica_of

TASK = Task(nets.residual, NumpyKernelSet(), partial(Sgd), smoothing=0.0)


def _mean_chances(*arrays: np.ndarray) -> np.ndarray:
    """The mean over arrays of images of the probabilities, (samples, classes), on one rank."""
    network = Network(TASK.model(), TASK.image_shape, TASK.kernels, dtype=TASK.dtype, seed=TASK.seed)
    program, chances = network.program(len(arrays[0]), training=False), []
    with np.errstate(invalid="ignore"):
        for images in arrays:
            program.x[...] = images
            exponentials = np.exp(program.forward(StepContext(training=False)))
            chances.append(exponentials / exponentials.sum(axis=1, keepdims=True))
    return np.mean(chances, axis=0)


def _loaders(images: np.ndarray, labels: np.ndarray, batch: int, **place: Any) -> tuple[ArrayLoader, ArrayLoader]:
    """Of images, and of their mirror images."""
    sampler = Sampler(len(images), batch, shuffle=False)
    return ArrayLoader(images, labels, sampler, **place), ArrayLoader(images[:, :, ::-1], labels, sampler, **place)


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize(
    ("plan", "batch"),
    [
        (ParallelPlan(), 8), (ParallelPlan(1, 5), 1), (ParallelPlan(3, 1, Parallelism.DOMAIN), 8),
        (ParallelPlan(2, 1, Parallelism.MODEL), 64), (ParallelPlan(2, 2), 5),
    ],
    ids=str,
)  # fmt: skip
def test_confusions_are_exact_and_mirror_images_count_half_on_any_grid(plan: ParallelPlan, batch: int, flip: bool) -> None:
    images, labels, _ = made_up(TASK)

    def evaluate(comm: ThreadCommunicator) -> tuple[RunningSums, ConfusionMatrix]:
        replica = replica_of(replace(TASK, plan=plan), comm, virtual_engine(comm), Blocking)
        counts, (loader, mirrored) = ConfusionCounts(TASK.classes), _loaders(images, labels, batch, **replica.place)
        sums = replica.evaluate(loader, mirrored=mirrored if flip else None, confusion=counts)
        return sums, counts.summed(replica.groups.all_ranks, replica.progress)

    means = _mean_chances(images, *[images[:, :, ::-1]] * flip)
    expected = np.zeros((TASK.classes, TASK.classes), np.int64)
    np.add.at(expected, (labels, means.argmax(axis=1)), 1)
    for sums, matrix in run_virtual(plan.rows * plan.cols, evaluate):
        assert np.array_equal([matrix.of_label(label)[:-1] for label in range(TASK.classes)], expected)
        assert (sums.count, sums.top1, matrix.undecided) == (len(images), int(np.trace(expected)), 0)
        assert np.isclose(sums.loss, -np.log(means[np.arange(len(labels)), labels]).sum(), rtol=1e-12)


CLASSES, SAMPLES = 7, 225


def _samples() -> tuple[np.ndarray, np.ndarray]:
    """Labels, and scores of which many are equal, some NaN and some infinite."""
    random = np.random.default_rng(5)
    scores = random.integers(0, 3, (SAMPLES, CLASSES)).astype(np.float32)
    scores[random.random(SAMPLES) < 0.1, 2] = np.nan
    scores[4, 3] = np.inf
    scores[5] = -np.inf
    return random.integers(0, CLASSES - 1, SAMPLES), scores  # the last class has no sample


def _dense(labels: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """(classes, classes + 1), one sample after another."""
    expected = np.zeros((CLASSES, CLASSES + 1), np.int64)
    for label, of_sample in zip(labels, scores, strict=True):
        undecided = any(np.isnan(of_sample))
        expected[label, CLASSES if undecided else list(of_sample).index(max(of_sample))] += 1
    return expected


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_any_ranks_count_what_one_loop_counts(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "_BLOCK_CELLS", 3 * (CLASSES + 1) - 1)  # two labels at once
    monkeypatch.setattr(evaluation, "_MOST_PENDING", 9)
    labels, scores = _samples()

    def count(comm: ThreadCommunicator) -> ConfusionMatrix:
        counts = ConfusionCounts(CLASSES)
        own = slice(100, 100) if comm.rank == 1 and ranks > 2 else slice(comm.rank, None, ranks)  # a rank may have nothing
        for part in np.array_split(np.arange(SAMPLES)[own], 5):
            counts.add(labels[part], scores[part])
        return counts.summed(comm, virtual_engine(comm))

    kept = [sample for sample in range(SAMPLES) if ranks < 3 or sample % ranks != 1]
    expected = _dense(labels[kept], scores[kept])
    for matrix in run_virtual(ranks, count, seed=3):
        assert np.array_equal([matrix.of_label(label) for label in range(CLASSES)], expected)
        assert matrix.undecided == expected[:, CLASSES].sum() > 0
        assert (matrix.counts > 0).all(), "only cells that are not zero are kept"


def test_hits_are_those_of_the_loss() -> None:
    labels, scores = _samples()
    counts = ConfusionCounts(CLASSES)
    counts.add(labels, scores)
    losses = SoftmaxCrossEntropy(SoftmaxCrossEntropySpec()).run(scores, labels, 1, None)
    assert sum(score.hits for score in _summed(counts).scores()) == losses.top1


def test_the_worst_class_comes_first_and_one_without_samples_last() -> None:
    matrix = _matrix([[5, 0, 1, 0], [3, 1, 0, 4], [0, 0, 0, 0]])
    assert matrix.worst_first() == [
        ClassScore(1, 8, 1, 1, 0, 3),  # its samples that are of no class are of no other class either
        ClassScore(0, 6, 5, 8, 2, 1),
        ClassScore(2, 0, 0, 1, None, 0),
    ]
    assert [score.top1 for score in matrix.worst_first()] == [1 / 8, 5 / 6, None]
    assert matrix.largest_confusions(2) == [(1, 3, 4), (1, 0, 3)]
    assert matrix.undecided == 4


def _matrix(counts: list[list[int]]) -> ConfusionMatrix:
    labels, predictions = np.nonzero(counts)
    return ConfusionMatrix(len(counts), labels, predictions, np.array(counts)[labels, predictions])


def _summed(counts: ConfusionCounts) -> ConfusionMatrix:
    return counts.summed(*lone_rank())


def test_no_sample_is_an_empty_matrix() -> None:
    counts = ConfusionCounts(3)
    counts.add(np.zeros(0, np.int64), np.zeros((0, 3)))
    assert [score.samples for score in _summed(counts).scores()] == [0, 0, 0]


TOP = 3


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize(
    ("plan", "batch"),
    [(ParallelPlan(), 37), (ParallelPlan(1, 3), 2), (ParallelPlan(4, 1, Parallelism.DOMAIN), 8), (ParallelPlan(2, 2), 5)],
    ids=str,
)
def test_any_grid_predicts_what_one_rank_does(plan: ParallelPlan, batch: int, flip: bool) -> None:
    images, labels, _ = made_up(TASK)
    images[7] = np.nan

    def run(comm: ThreadCommunicator) -> list[TopClasses]:
        engine = virtual_engine(comm)
        replica = replica_of(replace(TASK, plan=plan), comm, engine, Blocking)
        loader, mirrored = _loaders(images, labels, batch, **replica.place)
        with np.errstate(invalid="ignore"):
            found = predict(replica.network, loader, replica.groups.all_ranks, engine, TOP, mirrored=mirrored if flip else None)
            return list(found)

    means = _mean_chances(images, *[images[:, :, ::-1]] * flip)
    order = np.argsort(-means, axis=1, kind="stable")[:, :TOP]
    finite = np.arange(len(images)) != 7
    for found in run_virtual(plan.rows * plan.cols, run):
        assert [part.first for part in found] == list(range(0, len(images), batch))
        predicted = np.concatenate([part.labels for part in found])
        probabilities = np.concatenate([part.probabilities for part in found])
        assert np.array_equal(predicted[finite], order[finite])
        assert np.allclose(probabilities[finite], np.take_along_axis(means, order, 1)[finite], rtol=1e-10)
        assert np.isnan(probabilities[7]).all()
        assert (np.diff(probabilities[finite], axis=1) <= 0).all()


def test_of_equal_classes_the_first_comes_first() -> None:
    network = Network(TASK.model(), TASK.image_shape, TASK.kernels, dtype=TASK.dtype)
    for group in network.groups.values():
        group.data[...] = 0
    images, labels, _ = made_up(TASK)
    loader, _ = _loaders(images, labels, 50)
    ((found,),) = run_virtual(1, lambda comm: list(predict(network, loader, comm, virtual_engine(comm), 5)))
    assert (found.labels == np.arange(5)).all()
    assert np.allclose(found.probabilities, 0.2, rtol=1e-15)


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
    loader, mirrored = _loaders(images, labels, 4)
    for batch, mirror in pairs(loader, mirrored):
        assert mirror is not None
        assert np.array_equal(batch.x, mirror.x[:, :, ::-1])
    assert [mirror for _, mirror in pairs(loader, None)] == [None, None, None]


@pytest.mark.torch
def test_the_mean_over_mirror_images_is_that_of_torch() -> None:
    torch = pytest.importorskip("torch")
    from hpctrain_testing import torch_parity

    size, classes, samples = 17, 10, 7
    batch = torch_parity.make_batch(samples, size, classes, seed=1)
    network = torch_parity.make_network("resnet20", size, {"classes": classes}, "float64", seed=1)
    module = torch_parity.torch_module("resnet20", 1.0, network_state.export(network), "float64").eval()
    x = torch.from_numpy(np.ascontiguousarray(batch.x.transpose(0, 3, 1, 2)).astype(np.float64))
    with torch.no_grad():
        mean = (torch.softmax(module(x), 1) + torch.softmax(module(torch.flip(x, [3])), 1)) / 2
    loss = torch.nn.functional.nll_loss(mean.log(), torch.from_numpy(batch.labels), reduction="sum").item()
    loader, mirrored = _loaders(batch.x.astype(np.float64), batch.labels, 4)
    logs = [log_probabilities(network, *pair) for pair in pairs(loader, mirrored)]
    assert np.allclose(np.exp(np.concatenate(logs)), mean.numpy(), rtol=1e-10)
    (sums,) = run_virtual(1, lambda comm: evaluate(network, loader, comm, virtual_engine(comm), mirrored=mirrored))
    assert np.isclose(sums.loss, loss, rtol=1e-10)
    assert sums.top1 == int((mean.argmax(1).numpy() == batch.labels).sum())


RULE = EmaRule(0.8)
AVERAGED = Task(nets.residual, NumpyKernelSet(), partial(Sgd, momentum=0.9), samples=19, batch=8, steps=4, ema=RULE)


def _means(replica: Replica) -> dict[str, float]:
    """Of an evaluation."""
    images, labels, _ = made_up(AVERAGED)
    return replica.evaluate(_loaders(images, labels, AVERAGED.batch, **replica.place)[0]).means()


def _trained(comm: ThreadCommunicator, task: Task = AVERAGED) -> tuple[CheckpointContent, dict[str, float]]:
    replica = replica_of(task, comm, virtual_engine(comm), Sharded)
    for batch in batches(task, comm.rank, comm.size, replica.tiles):
        replica.step(batch, AVERAGED.lr)
    means = _means(replica)
    return replica.state(Position(global_step=AVERAGED.steps), {}, copied=True), means


@pytest.fixture(scope="module")
def trained() -> tuple[CheckpointContent, dict[str, float]]:
    """The state of a training, and what its evaluation has said."""
    return run_virtual(3, _trained)[0]


def _alone(task: Task) -> Replica:
    """A replica on one rank."""
    return replica_of(task, *lone_rank(), Blocking)


def _evaluated(content: CheckpointContent, averaged: bool) -> dict[str, float]:
    """The means of loaded weights, or of their averages, on one rank."""
    replica = _alone(replace(AVERAGED, ema=None))
    replica.load_weights(content, averaged=averaged)
    return _means(replica)


def test_an_evaluation_is_one_of_the_weights_and_one_of_their_average(
    trained: tuple[CheckpointContent, dict[str, float]],
) -> None:
    content, means = trained

    for averaged, prefix in ((False, ""), (True, "ema_")):
        assert _evaluated(content, averaged) == pytest.approx(
            {name: means[f"{prefix}{name}"] for name in ("loss", "top1", "top5")}, rel=1e-12
        )
    assert means["loss"] != means["ema_loss"]


def test_a_run_that_begins_to_average_begins_with_its_weights(trained: tuple[CheckpointContent, dict[str, float]]) -> None:
    content, _ = trained
    without = {name: values for name, values in content.tensors.items() if "ema" not in name and "averaged" not in name}
    replica = _alone(AVERAGED)
    replica.load(CheckpointContent(without, content.meta))
    state = replica.state(Position(), {})
    for name, parameter in replica.network.parameters.items():
        assert np.array_equal(state.tensors[f"optimizer/ema/{name}"], parameter.data)
    for name, view in replica.network.statistics.views.items():
        assert np.array_equal(state.tensors[f"averaged_statistics/{name}"], view)


def test_a_run_may_drop_its_average(trained: tuple[CheckpointContent, dict[str, float]]) -> None:
    content, _ = trained
    replica = _alone(replace(AVERAGED, ema=None))
    replica.load(content)
    state = replica.state(Position(), {})
    assert not [name for name in state.tensors if "ema" in name or "averaged" in name]
    for name, values in state.tensors.items():
        assert np.array_equal(values, content.tensors[name])


def test_averages_that_are_not_there_are_not_evaluated(trained: tuple[CheckpointContent, dict[str, float]]) -> None:
    content, _ = trained
    without = {name: values for name, values in content.tensors.items() if "ema" not in name}
    with pytest.raises(CheckpointError, match="has no average of weights"):
        _alone(AVERAGED).load_weights(CheckpointContent(without, content.meta), averaged=True)


FROZEN = ("conv1", "bn1", "layer1.*", "fc")


@pytest.mark.parametrize("ranks", [1, 3])
def test_what_is_frozen_has_no_average_and_is_its_own(ranks: int) -> None:
    """Checkpoints of both layouts say so, and who freezes nothing reads them alike."""
    task = replace(AVERAGED, frozen=FROZEN)

    def program(comm: ThreadCommunicator) -> tuple[CheckpointContent, dict[str, float], set[str]]:
        content, means = _trained(comm, task)
        again = replica_of(task, comm, virtual_engine(comm), Sharded)
        again.load(content)
        state, (parts, _) = again.state(Position(), {}, copied=True), again.own_parts(Position(), {})
        for key, values in content.tensors.items():
            assert np.array_equal(state.tensors[key], values), key
        assert _means(again) == means
        return content, means, set(parts)

    results = run_virtual(ranks, program)
    content, means, _ = results[0]
    assert set().union(*(keys for *_, keys in results)) == content.tensors.keys()
    network = _alone(task).network
    statistics = {name for name in network.statistics.views if layer_of(name) not in network.frozen}
    assert 0 < len(statistics) < len(network.statistics.views)
    averages = {key for key in content.tensors if "ema/" in key or "averaged" in key}
    wanted = {f"optimizer/ema/{name}" for name in network.trained} | {f"averaged_statistics/{name}" for name in statistics}
    assert averages == wanted
    reader = _alone(replace(AVERAGED, ema=None))
    reader.load_weights(content, averaged=True)
    for name, parameter in reader.network.parameters.items():
        assert np.array_equal(parameter.data, content.tensors.get(f"optimizer/ema/{name}", content.tensors[f"parameters/{name}"]))
    assert _evaluated(content, averaged=True) == pytest.approx(
        {name: means[f"ema_{name}"] for name in ("loss", "top1", "top5")}, rel=1e-12
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_average_begins_with_weights_that_are_loaded_before_the_first_step(
    trained: tuple[CheckpointContent, dict[str, float]], ranks: int
) -> None:
    """Those that are loaded later it takes up by its rule alone."""
    content, means = trained

    def program(comm: ThreadCommunicator) -> None:
        replica = replica_of(AVERAGED, comm, virtual_engine(comm), Sharded)
        for _ in range(2):
            replica.load_weights(content)
            found = _means(replica)
            assert found["ema_loss"] == found["loss"] == pytest.approx(means["loss"], rel=1e-12)
        state = replica.state(Position(), {}, copied=True).tensors
        for name in replica.network.parameters:
            assert np.array_equal(state[f"optimizer/ema/{name}"], content.tensors[f"parameters/{name}"])
        for batch in batches(AVERAGED, comm.rank, comm.size, replica.tiles):
            replica.step(batch, AVERAGED.lr)
        replica.settle()
        replica.drain()
        before = replica.state(Position(), {}, copied=True).tensors
        replica.load_weights(content)
        after = replica.state(Position(), {}, copied=True).tensors
        for key, values in before.items():
            averages = "ema/" in key or "averaged" in key
            assert np.array_equal(after[key], values) is (averages or key.startswith("optimizer/")), key

    run_virtual(ranks, program)
