"""Evaluations, judgements and predictions, equal on any grid; weights of a checkpoint, and initial weights of a training."""

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.backend.graph import GraphBuilder
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.specs import Conv2dSpec, TensorSpec, Window
from hpctrain.comm.progress import ProgressEngine
from hpctrain.core.errors import CheckpointError, ConfigError, DataError, ShapeError
from hpctrain.data.image_file import ImageFile
from hpctrain.data.sampler import hold_out
from hpctrain.job.session import Session
from hpctrain.models import catalogue
from hpctrain.nn.network import Network
from hpctrain.nn.whitening import whitened_convolution, whitening_filters
from hpctrain.optim.ema import EMA
from hpctrain.optim.optimizers import Sgd
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.run import build
from hpctrain.run.build import put_weights
from hpctrain.run.evaluation import (
    Evaluation,
    Judgement,
    PredictedPicture,
    PredictionRequest,
    judge,
    run_evaluation,
    run_prediction,
)
from hpctrain.run.model_weights import ModelWeights, of_checkpoint, of_file
from hpctrain.runs.directory import latest
from hpctrain.storage import checkpoint, weights_file
from hpctrain.storage.checkpoint import (
    CheckpointContent,
    averaged_statistic_key,
    checkpoint_path,
    checkpoints,
    optimizer_key,
    parameter_key,
    read,
    statistic_key,
    write,
)
from hpctrain.storage.weights_file import WeightsFile
from hpctrain.training.evaluation import ConfusionCounts, log_softmax
from hpctrain.training.replica import Replica
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.run import run_virtual, virtual_engine
from tests.support import nets, network_state, run_in_process
from tests.support.newest_checkpoint import write_shards
from tests.support.runs import CLASSES, GRIDS, TrainedRun, train, train_virtual, work_virtual
from tests.support.tiny_runs import whole_lines
from tests.support.training import Task, assemble, replica_of

SAMPLES = 21


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    """A run with averaged weights whose checkpoint is a file, and a directory of shards with the same content next to it."""
    trained = train(tmp_path_factory.mktemp("trained"), "ema.decay=0.5", "init.freeze=[stage1.*]")
    ((_, path),) = checkpoint.checkpoints(trained.run.checkpoints)
    write_shards(trained.folder / "copy.shards", checkpoint.read(path), 3)
    return trained


@pytest.fixture(scope="module")
def trained32(tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    return train(tmp_path_factory.mktemp("trained"), "ema.decay=0.5", dtype="float32", layout="sharded")


@pytest.fixture(scope="module")
def expected(trained: TrainedRun) -> dict[bool, Evaluation]:
    """The evaluation of one rank in one batch, without mirror images and with them."""
    return {flip: _evaluated(trained, "1", flip=flip, batch=SAMPLES) for flip in (False, True)}


def _evaluated(
    trained: TrainedRun, grid: str, *, flip: bool, averaged: bool = False, batch: int = 5, sharded: bool = False
) -> Evaluation:
    ranks, overrides = GRIDS[grid]
    source = trained.folder / "copy.shards" if sharded else trained.run.path
    work = partial(run_evaluation, source=str(source), averaged=averaged, flip=flip, confusion=True)
    evaluations = work_virtual(ranks, trained.file, (*overrides, f"evaluate.batch={batch}"), work)
    for other in evaluations[1:]:
        assert np.array_equal(_matrix(other), _matrix(evaluations[0]))
    return evaluations[0]


def _matrix(evaluation: Evaluation | Judgement) -> np.ndarray:
    matrix = evaluation.confusion
    return np.array([matrix.of_label(label) for label in range(matrix.classes)])


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("grid", "sharded"), [*((grid, False) for grid in GRIDS if grid != "1"), ("1x3", True), ("mixed 2x2", True)]
)
def test_any_grid_counts_what_one_rank_counts(
    trained: TrainedRun, expected: dict[bool, Evaluation], grid: str, sharded: bool
) -> None:
    for flip, of_one in expected.items():
        found = _evaluated(trained, grid, flip=flip, sharded=sharded)
        assert np.array_equal(_matrix(found), _matrix(of_one))
        assert (found.sums.top1, found.sums.top5, found.sums.count) == (of_one.sums.top1, SAMPLES, SAMPLES)
        assert np.isclose(found.sums.loss, of_one.sums.loss, rtol=1e-12)
        assert found.sums.top1 == int(np.trace(_matrix(found)))
        assert (found.class_names, found.flip) == (CLASSES, flip)


@pytest.mark.slow
def test_averaged_weights_are_evaluated_as_the_run_has_done_it(trained: TrainedRun) -> None:
    """Whose configuration keeps averages and freezes layers, unlike that of the evaluation."""
    lines = map(json.loads, (trained.run.path / "metrics.jsonl").read_text().splitlines())
    (by_run,) = (line for line in lines if line["kind"] == "evaluation")
    for averaged, prefix in ((False, ""), (True, "ema_")):
        found = _evaluated(trained, "1x2", flip=False, averaged=averaged, batch=8)
        for name, value in found.sums.means().items():
            assert by_run[f"{prefix}{name}"] == pytest.approx(value, rel=1e-12)
        assert found.averaged is averaged
    assert by_run["loss"] != by_run["ema_loss"]


def test_only_what_was_asked_for_is_counted(trained: TrainedRun) -> None:
    (plain,) = work_virtual(1, trained.file, (), partial(run_evaluation, source=str(trained.run.path)))
    assert plain.confusion is None
    assert plain.sums.loss == _evaluated(trained, "1", flip=False, batch=8).sums.loss


def test_made_up_images_are_counted_alike_on_any_ranks(tmp_path: Path) -> None:
    file = tmp_path / "made-up.yaml"
    file.write_text(
        "{name: made-up, backend: numpy, dtype: float64, model: {name: small, channels: [3], hidden: 5}, batch: 8, epochs: 1, "
        "optimizer: {name: sgd, lr: 0.01}, schedule: constant, data: {train: synthetic, test: synthetic, synthetic: "
        f"{{height: 9, width: 7, classes: 5, samples: 24, test_samples: 25}}}}, output: {tmp_path}/runs}}"
    )
    train_virtual(1, file)
    work = partial(run_evaluation, source="auto", confusion=True)
    (expected,) = work_virtual(1, file, (), work)
    for found in work_virtual(3, file, ("evaluate.batch=7",), work):
        assert np.array_equal(_matrix(found), _matrix(expected))
        assert [score.samples for score in found.confusion.scores()] == [5] * 5


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("grid", ["1", "1x3", "mixed 2x2"])
def test_every_rank_has_the_counts_of_the_evaluation(trained32: TrainedRun, grid: str) -> None:
    ranks, overrides = GRIDS[grid]
    source = str(trained32.run.path)
    evaluated = partial(run_evaluation, source=source, confusion=True)
    (evaluation, *_) = work_virtual(ranks, trained32.file, overrides, evaluated)
    for judgement in work_virtual(ranks, trained32.file, overrides, partial(judge, source=source, most=3)):
        assert np.array_equal(_matrix(judgement), _matrix(evaluation))
        assert sum(score.hits for score in judgement.confusion.scores()) == evaluation.sums.top1


def test_without_a_test_set_the_validation_samples_are_judged(tmp_path: Path) -> None:
    """Validation samples are numbered within the training file. No image or label is that of a training sample."""
    held_out = ("data.test=null", "data.validation=0.4")
    trained = train(tmp_path, *held_out, dtype="float32")
    work = partial(judge, source=str(trained.run.path), most=1000)
    (judgement,) = work_virtual(1, trained.file, held_out, work)
    file = ImageFile.open(trained.folder / "train.h5")
    split = hold_out(file.labels, 0.4, 7, "")
    assert judgement.split == "validation"
    assert sum(score.samples for score in judgement.confusion.scores()) == len(split.validation)
    for image in (*judgement.right, *judgement.wrong):
        assert image.number in split.validation
        assert image.label == file.labels[image.number]
        np.testing.assert_array_equal(image.pixels, file.images[image.number])


def test_pictures_are_those_of_the_file_and_the_surest_come_first(trained32: TrainedRun) -> None:
    ranks, overrides = GRIDS["1"]
    (judgement,) = work_virtual(ranks, trained32.file, overrides, partial(judge, source=str(trained32.run.path), most=1000))
    file = ImageFile.open(trained32.folder / "test.h5")
    scores = judgement.confusion.scores()
    assert len(judgement.wrong) == sum(score.samples - score.hits for score in scores)
    assert len(judgement.right) == sum(score.hits > 0 for score in scores)
    assert len({image.label for image in judgement.right}) == len(judgement.right)
    for images, hits in ((judgement.right, True), (judgement.wrong, False)):
        assert all((image.label == image.prediction) is hits for image in images)
        probabilities = [image.probability for image in images]
        assert probabilities == sorted(probabilities, reverse=True)
        for image in images:
            assert image.label == file.labels[image.number]
            np.testing.assert_array_equal(image.pixels, file.images[image.number])


def _predicted(
    trained32: TrainedRun, grid: str, request: PredictionRequest | None = None, source: str | None = None
) -> list[PredictedPicture]:
    """The answers, the same on all ranks of a grid; by default of all test pictures, in the batches of the evaluation."""
    request = request or PredictionRequest((trained32.folder / "test",))

    def work(session: Session) -> list[PredictedPicture]:
        return list(run_prediction(session, source or str(trained32.run.path), request).answers)

    ranks, overrides = GRIDS[grid]
    first, *others = work_virtual(ranks, trained32.file, overrides, work)
    assert all(other == first for other in others)
    return first


def _probabilities(answers: list[PredictedPicture]) -> np.ndarray:
    """(N, classes), by label."""
    return np.array([[one.probability for one in sorted(each.classes, key=lambda one: one.label)] for each in answers])


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(("grid", "flip"), [("1", False), ("1x3", True), ("domain 3x1", False), ("mixed 2x2", True)])
def test_pictures_have_the_bits_of_the_evaluation(trained32: TrainedRun, grid: str, flip: bool, monkeypatch) -> None:
    """The evaluation's own scores, as they are counted, of images that the converter has decoded."""
    ranks, overrides = GRIDS[grid]
    scores: dict[str, list[np.ndarray]] = {}

    def add(self: ConfusionCounts, labels: np.ndarray, of_batch: np.ndarray) -> None:
        scores.setdefault(f"{id(self)}", []).append(np.array(of_batch))
        plain_add(self, labels, of_batch)

    plain_add = ConfusionCounts.add
    monkeypatch.setattr(ConfusionCounts, "add", add)
    work = partial(run_evaluation, source=str(trained32.run.path), flip=flip, confusion=True)
    (evaluation, *_) = work_virtual(ranks, trained32.file, overrides, work)
    answers = _predicted(trained32, grid, PredictionRequest((trained32.folder / "test",), flip=flip))
    found = _probabilities(answers)
    evaluated = np.concatenate([log_softmax(one) if not flip else one for batches in scores.values() for one in batches])
    assert sorted(map(tuple, found.tolist())) == sorted(map(tuple, np.exp(evaluated).tolist()))
    hits = sum(each.classes[0].name == each.file.parent.name for each in answers)
    assert (hits, len(answers)) == (evaluation.sums.top1, evaluation.sums.count)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(("grid", "flip"), [("1", False), ("mixed 2x2", True)])
def test_averaged_weights_predict_what_they_are_evaluated_with(trained32: TrainedRun, grid: str, flip: bool) -> None:
    ranks, overrides = GRIDS[grid]
    work = partial(run_evaluation, source=str(trained32.run.path), averaged=True, flip=flip)
    (evaluation, *_) = work_virtual(ranks, trained32.file, overrides, work)
    request = PredictionRequest((trained32.folder / "test",), flip=flip, averaged=True)
    answers = _predicted(trained32, grid, request)
    of_truth = [next(one.probability for one in each.classes if one.name == each.file.parent.name) for each in answers]
    assert -np.log(of_truth).sum() == pytest.approx(evaluation.sums.loss, rel=1e-5)
    assert answers != _predicted(trained32, grid, replace(request, averaged=False))


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("grid", [grid for grid in GRIDS if grid != "1"])
def test_any_grid_answers_in_order(trained32: TrainedRun, grid: str) -> None:
    files = tuple(sorted((trained32.folder / "test").rglob("*.*")))
    chosen = (*files[::-1], files[3])
    found, expected = (_predicted(trained32, one, PredictionRequest(chosen, batch=5)) for one in (grid, "1"))
    assert [each.file for each in found] == list(chosen)
    assert np.allclose(_probabilities(found), _probabilities(expected), rtol=1e-5)
    assert np.allclose(_probabilities(found).sum(axis=1), 1, rtol=1e-14)
    assert {one.name for one in found[0].classes} == set(CLASSES)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(("grid", "flip"), [("1", True), ("1x4", False), ("tiles 4x1", True)])
def test_a_broken_picture_disturbs_no_other(trained32: TrainedRun, grid: str, flip: bool, tmp_path: Path) -> None:
    good = sorted((trained32.folder / "test").rglob("*.*"))[:3]
    (tmp_path / "bad.jpg").write_text("no image")
    places = (good[0], tmp_path / "bad.jpg", good[1], good[2])
    answers = _predicted(trained32, grid, PredictionRequest(places, flip=flip, batch=4, top=1))
    assert [each.file for each in answers] == list(places)
    error = "The image cannot be decoded: its format is not supported; save it as JPEG or PNG."
    assert answers[1] == PredictedPicture(places[1], error=error)
    alone = _predicted(trained32, "1", PredictionRequest(tuple(good), flip=flip, top=1))
    for each, other in zip([answers[0], *answers[2:]], alone, strict=True):
        assert each.classes[0].name == other.classes[0].name
        assert np.isclose(each.classes[0].probability, other.classes[0].probability, rtol=1e-5)


def test_a_checkpoint_without_the_form_of_evaluation_images_takes_that_of_training(trained32: TrainedRun, tmp_path: Path) -> None:
    _, newest = checkpoint.checkpoints(trained32.run.checkpoints)[-1]
    content = checkpoint.read(newest)
    old = CheckpointContent(
        dict(content.tensors), {key: value for key, value in content.meta.items() if key != "evaluation_images"}
    )
    checkpoint.write(tmp_path / "old.h5", old)
    request = PredictionRequest((trained32.folder / "train",), fit="crop")
    found = _predicted(trained32, "1", request, str(tmp_path / "old.h5"))
    assert _probabilities(found).shape == (21, 3)
    as_trained = _predicted(trained32, "1", replace(request, fit=None), str(tmp_path / "old.h5"))
    assert found == as_trained
    assert found != _predicted(trained32, "1", replace(request, fit="squash"), str(tmp_path / "old.h5"))


def test_outputs_that_are_not_finite_are_said(trained32: TrainedRun, tmp_path: Path) -> None:
    _, newest = checkpoint.checkpoints(trained32.run.checkpoints)[-1]
    content = checkpoint.read(newest)
    tensors = {key: np.array(value) for key, value in content.tensors.items()}
    key = next(name for name in tensors if name.startswith("parameters/") and name.endswith("bias"))
    tensors[key][...] = np.nan
    checkpoint.write(tmp_path / "nan.h5", CheckpointContent(tensors, content.meta))
    answers = _predicted(trained32, "1x2", source=str(tmp_path / "nan.h5"))
    assert {each.error for each in answers} == {"The network's outputs for the image are not finite."}


def test_what_is_not_there_is_said_on_all_ranks(trained32: TrainedRun) -> None:
    with pytest.raises(DataError, match=r"There is no image nowhere\.png"):
        _predicted(trained32, "1x2", PredictionRequest((Path("nowhere.png"),)))
    with pytest.raises(CheckpointError, match="nowhere is not a run directory"):
        _predicted(trained32, "1x2", source="nowhere")


CONFIG: dict[str, Any] = {
    "model": {"name": "small", "channels": [3], "hidden": 4},
    "data": {"train": "train.h5", "normalise": False},
    "batch": 4,
    "micro_batches": 2,
    "epochs": 1,
    "optimizer": {"name": "sgd", "lr": 0.1},
    "schedule": "constant",
}
DATA = {
    "samples": 8,
    "shape": [9, 8, 1],
    "images": "0",
    "labels": "0",
    "class_names": ["ant", "bee"],
    "mean": [0.5],
    "std": [0.25],
}
SUMS = {"loss": 0.0, "top1": 0, "top5": 0, "count": 0}


def network() -> Network:
    model = catalogue.build("small", {"channels": (3,), "hidden": 4, "classes": 2})
    return Network(model, (9, 8, 1), NumpyKernelSet(), dtype="float64", seed=1)


def weights_of_run(folder: Path, averaged: Sequence[str] = (), **others: Any) -> Path:
    """A checkpoint after three steps; `others` replaces keys of its configuration.

    averaged: names of parameters and statistics that have an average, which is their negative.
    """
    whole = network()
    tensors = {parameter_key(name): one.data for name, one in whole.parameters.items()}
    tensors |= {statistic_key(name): view for name, view in whole.statistics.views.items()}
    tensors |= {optimizer_key(EMA, name): -one.data for name, one in whole.parameters.items() if name in averaged}
    views = whole.statistics.views
    tensors |= {averaged_statistic_key(name): -view for name, view in views.items() if name in averaged}
    position = {"epoch": 0, "samples": 4, "global_step": 3, "sums": SUMS}
    config = {**CONFIG, **{key: value for key, value in others.items() if key in CONFIG}}
    path = checkpoint_path(folder, 3)
    write(path, CheckpointContent(tensors, {"config": yaml.safe_dump(config), "position": position, "data": DATA}))
    return path


def test_a_checkpoint_has_its_model_and_what_a_reader_must_know(tmp_path: Path) -> None:
    content = of_checkpoint(weights_of_run(tmp_path))
    wanted = network_state.export(network())
    assert content.state.keys() - wanted.keys() == {"stage1.bn.num_batches_tracked"}
    assert all(content.state[name].tobytes() == array.tobytes() for name, array in wanted.items())
    assert content.state["stage1.bn.num_batches_tracked"] == 6  # of two micro-batches each
    assert content.image_shape == (9, 8, 1)
    facts = {key: json.loads(content.metadata[key]) for key in ("classes", "mean", "std", "step")}
    assert facts == {"classes": ["ant", "bee"], "mean": [0.0], "std": [1.0], "step": 3}  # images are not normalised


def test_written_and_read_again_it_is_the_same(tmp_path: Path) -> None:
    content = of_checkpoint(weights_of_run(tmp_path))
    content.write(tmp_path / "w.safetensors")
    again = of_file(tmp_path / "w.safetensors", None, None, {})
    assert (again.metadata, again.image_shape, list(again.state)) == (content.metadata, content.image_shape, list(content.state))
    assert all(again.state[name].tobytes() == array.tobytes() for name, array in content.state.items())


def test_averages_are_exported_where_there_are_any(tmp_path: Path) -> None:
    """Layers that were frozen have none, and are their own."""
    plain, whole = of_checkpoint(weights_of_run(tmp_path)), network()
    names = [name for name in (*whole.parameters, *whole.statistics.views) if not name.startswith("stage1.")]
    assert names
    path = weights_of_run(tmp_path, averaged=names)
    content = of_checkpoint(path, averaged=True)
    assert content.state.keys() == plain.state.keys()
    for name, values in content.state.items():
        np.testing.assert_array_equal(values, -plain.state[name] if name in names else plain.state[name])
    assert (content.metadata, of_checkpoint(path).metadata) == ({**plain.metadata, "averaged": "true"}, plain.metadata)
    content.write(tmp_path / "w.safetensors")
    assert of_file(tmp_path / "w.safetensors", None, None, {}).metadata == content.metadata
    with pytest.raises(CheckpointError, match=r"has no average of weights; .* train with ema\.decay\."):
        of_checkpoint(weights_of_run(tmp_path), averaged=True)


def test_what_a_checkpoint_does_not_know_is_reported(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has weights of the model small, not of resnet18"):
        of_checkpoint(weights_of_run(tmp_path), "resnet18")
    with pytest.raises(CheckpointError, match=r"has shape \(3, 3, 3, 1\) in .*, and \(5, 3, 3, 1\) in the model"):
        of_checkpoint(weights_of_run(tmp_path, model={"name": "small", "channels": [5], "hidden": 4}))
    with pytest.raises(CheckpointError, match=r"lacks stage2\.conv\.weight, which the model has"):
        of_checkpoint(weights_of_run(tmp_path, model={"name": "small", "channels": [3, 4], "hidden": 4}))


def test_a_checkpoint_of_an_own_loop_is_exported_with_the_model_that_is_named(tmp_path: Path) -> None:
    whole = checkpoint.read(weights_of_run(tmp_path / "run"))
    path = tmp_path / "own.h5"
    write(path, CheckpointContent(whole.tensors, {"position": whole.meta["position"], "notes": {}}))
    with pytest.raises(CheckpointError, match=r"was written by job\.save and does not name its model; give --model"):
        of_checkpoint(path)
    options = {"channels": (3,), "hidden": 4}
    content = of_checkpoint(path, "small", None, options)
    expected = of_checkpoint(weights_of_run(tmp_path / "run")).state
    for name in expected.keys() - {"stage1.bn.num_batches_tracked"}:
        assert content.state[name].tobytes() == expected[name].tobytes()
    with pytest.raises(CheckpointError, match=r"give --model, --classes and --option as in the program"):
        of_checkpoint(path, "small", 7, options)
    with pytest.raises(CheckpointError, match=r"contains the options of its model"):
        of_checkpoint(weights_of_run(tmp_path / "run"), None, 7)


def test_code_of_the_users_is_loaded_where_it_is_named_only(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import pathlib\n"
        "from hpctrain.models.families.small import build\n"
        f"pathlib.Path({str(tmp_path / 'loaded')!r}).touch()\n"
        "def model(*, classes=2):\n    return build(classes=classes, channels=(3,), hidden=4)\n"
    )
    reference = f"{tmp_path}/own.py:model"
    path = weights_of_run(tmp_path, model={"name": reference})
    with pytest.raises(ConfigError, match="is user code, which is loaded only on request; give --model"):
        of_checkpoint(path)
    assert not (tmp_path / "loaded").exists()
    assert of_checkpoint(path, reference).state.keys() == of_checkpoint(weights_of_run(tmp_path)).state.keys()


def test_an_onnx_file_needs_the_images_size(tmp_path: Path) -> None:
    content = of_checkpoint(weights_of_run(tmp_path))
    unknown = ModelWeights(content.model, None, content.state, {})
    with pytest.raises(ConfigError, match="needs the size of its images"):
        unknown.write(tmp_path / "w.onnx")
    unknown.write(tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match="does not name its model"):
        of_file(tmp_path / "w.safetensors", None, None, {})
    assert not (tmp_path / "w.onnx").exists()


PLANS = {
    "1x1": ParallelPlan(),
    "2x2 model": ParallelPlan(2, 2, Parallelism.MODEL),
    "3x1 domain": ParallelPlan(3, 1, Parallelism.DOMAIN),
}


def task_on(plan: ParallelPlan) -> Task:
    return Task(nets.residual, NumpyKernelSet(), lambda: Sgd(momentum=0.9), plan=plan)


def network_by_seed(seed: int) -> Network:
    network = Network(nets.residual(), Task.image_shape, NumpyKernelSet(), dtype="float64", seed=seed)
    for name, view in network.statistics.views.items():
        view[...] = np.random.default_rng(len(name)).random(view.shape)
    return network


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of weights that are not those of the task's seed, in float64."""
    weights_file.write(tmp_path / "w.safetensors", WeightsFile(network_state.export(network_by_seed(11))))
    return tmp_path / "w.safetensors"


def on_ranks(plan: ParallelPlan, work: Callable[[ThreadCommunicator, Replica], object]) -> list[object]:
    def program(comm: ThreadCommunicator) -> object:
        engine: ProgressEngine = virtual_engine(comm)
        return work(comm, replica_of(task_on(plan), comm, engine, Sharded))

    return list(run_virtual(plan.rows * plan.cols, program, seed=4))


def whole_state(replica: Replica) -> dict[str, np.ndarray]:
    parameters = {name: assemble(replica, name, one.data) for name, one in replica.network.parameters.items()}
    return parameters | {name: view.copy() for name, view in replica.network.statistics.views.items()}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("ignore", [(), ("fc.*", "layer2.bn1.*")])
def test_every_grid_starts_from_the_same_bits(path: Path, plan: str, ignore: tuple[str, ...]) -> None:
    drawn, file = network_by_seed(Task.seed), network_by_seed(11)

    def start(comm: ThreadCommunicator, replica: Replica) -> dict[str, np.ndarray]:
        put_weights(comm, replica, path, ignore, "residual")
        return whole_state(replica)

    for state in on_ranks(PLANS[plan], start):
        assert isinstance(state, dict)
        for name, parameter in file.parameters.items():
            left_out = bool(ignore) and name.startswith(("fc.", "layer2.bn1."))
            wanted = drawn.parameters[name].data if left_out else parameter.data
            assert state[name].tobytes() == np.ascontiguousarray(wanted).tobytes(), name
        for name, view in file.statistics.views.items():
            if ignore and name.startswith("layer2.bn1."):
                view = np.full_like(view, float(name.endswith("var")))
            assert state[name].tobytes() == view.tobytes(), name


def test_what_does_not_fit_is_refused_alike_and_changes_nothing(path: Path) -> None:
    content = dict(weights_file.read(path).tensors)
    content["fc.bias"] = np.zeros(9)
    weights_file.write(path, WeightsFile(content))

    def start(comm: ThreadCommunicator, replica: Replica) -> str:
        before = whole_state(replica)
        with pytest.raises(CheckpointError) as raised:
            put_weights(comm, replica, path, (), "residual")
        assert all(np.array_equal(values, before[name]) for name, values in whole_state(replica).items())
        return str(raised.value)

    said = on_ranks(PLANS["2x2 model"], start)
    assert len(set(map(str, said))) == 1
    assert "fc.bias has shape (9,) in" in str(said[0])
    assert 'set init.ignore to ["fc.*"]' in str(said[0])


def test_another_file_on_a_rank_is_reported_by_all(path: Path) -> None:
    def start(comm: ThreadCommunicator, replica: Replica) -> str:
        own = path if comm.rank != 2 else path.with_name("other.safetensors")
        with pytest.raises(CheckpointError) as raised:
            put_weights(comm, replica, own, (), "residual")
        return str(raised.value).partition(" ")[2]

    weights_file.write(path.with_name("other.safetensors"), WeightsFile({"a": np.zeros(1)}))
    said = on_ranks(PLANS["2x2 model"], start)
    assert len(set(map(str, said))) == 1
    assert str(said[0]).startswith("2 has another file of weights than rank 0: sha256 is ")


# -- whole runs ------------------------------------------------------------------------------------------------------------------
@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A configuration, data, and weights of its model with another number of classes."""
    run_in_process.prepare(tmp_path)
    model = catalogue.build("small", {"channels": (2,), "hidden": 3, "classes": 8})
    network = Network(model, (7, 6, 1), NumpyKernelSet(), seed=99)
    for view in network.statistics.views.values():
        view[...] = 0.7
    weights_file.write(tmp_path / "w.safetensors", WeightsFile(network_state.export(network)))
    return tmp_path


def overrides(folder: Path, *others: str) -> tuple[str, ...]:
    return (f"init.weights={folder}/w.safetensors", "init.ignore=[classifier.fc2.*]", "init.freeze=[stage1.*]", *others)


def newest(folder: Path) -> dict[str, np.ndarray]:
    directory = latest(folder / "runs", "tiny")
    return dict(read(checkpoints(directory.checkpoints)[-1][1]).tensors)


def test_a_run_is_fine_tuned_and_resumes_without_the_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_in_process.train(folder, *overrides(folder))
    whole = newest(folder)
    said = whole_lines(capsys.readouterr().out)
    assert f"weights of {folder}/w.safetensors, without classifier.fc2.*" in said
    assert "2 layers frozen:" in said
    run_in_process.train(folder, *overrides(folder), steps=2)
    file = weights_file.read(folder / "w.safetensors").tensors
    (folder / "w.safetensors").unlink()
    capsys.readouterr()
    run_in_process.train(folder, *overrides(folder), resume="auto")
    assert "weights of" not in capsys.readouterr().out
    resumed = newest(folder)
    assert resumed.keys() == whole.keys()
    for key, values in whole.items():
        assert resumed[key].tobytes() == values.tobytes(), key
    np.testing.assert_array_equal(whole[parameter_key("stage1.conv.weight")].transpose(0, 3, 1, 2), file["stage1.conv.weight"])
    np.testing.assert_array_equal(whole[statistic_key("stage1.bn.running_mean")], file["stage1.bn.running_mean"])
    assert not np.array_equal(whole[parameter_key("classifier.fc1.bias")], file["classifier.fc1.bias"])
    assert {key.rpartition("/")[2] for key in whole if key.startswith("optimizer/")} == {
        f"classifier.{layer}.{role}" for layer in ("fc1", "fc2") for role in ("weight", "bias")
    }


def test_an_image_without_a_whole_patch_is_refused_with_one_sentence() -> None:
    """NumPy does not raise a ValueError about a window that is larger than the array."""
    spec = Conv2dSpec(1, 8, Window((3, 2), (1, 1), (0, 0, 0, 0)))
    with pytest.raises(
        ShapeError, match=r"^The images have 2 x 4 pixels, but the filters .* cover 3 x 2; .* at least 3 x 2 pixels\.$"
    ):
        whitening_filters([np.zeros((2, 4, 1))], spec)


def test_a_run_whitens_patches_of_its_training_images(folder: Path) -> None:
    """The filters whiten normalised images, do not change if frozen, and are restored from the checkpoint at a resume."""
    words = ("init.whiten=stage1.conv", "init.freeze=[stage1.*]", "model.channels=[18, 2]")
    run_in_process.train(folder, *words)
    whole = newest(folder)
    file = ImageFile.open(folder / "train.h5")
    images = (np.asarray(file.images[:]) / 255.0 - file.mean) / file.std
    filters = whole[parameter_key("stage1.conv.weight")]
    patches = np.lib.stride_tricks.sliding_window_view(images, (3, 3), (1, 2)).reshape(-1, 9)
    np.testing.assert_allclose(np.cov(patches @ filters.reshape(18, 9).T, rowvar=False, bias=True)[:9, :9], np.eye(9), atol=0.02)
    np.testing.assert_array_equal(filters[9:], -filters[:9])
    run_in_process.train(folder, *words, steps=2)
    run_in_process.train(folder, *words, "init.whiten=null", resume="auto")
    for key, values in newest(folder).items():
        assert whole[key].tobytes() == values.tobytes(), key


@pytest.mark.sample(1)
@pytest.mark.parametrize("grid", ["1x3", "mixed 2x2", "model 2x1"])
def test_each_grid_starts_with_the_same_filters(folder: Path, grid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks use the filters that the first one computed, and their own part of them if the layer is split."""
    words = ("init.whiten=stage1.conv", "init.freeze=[stage1.*]", "model.channels=[18, 2]")
    run_in_process.train(folder, *words, steps=1)
    expected, computed = newest(folder)[parameter_key("stage1.conv.weight")], []

    def counted(*arguments: Any) -> np.ndarray:
        computed.append(threading.current_thread())
        return whitening_filters(*arguments)

    monkeypatch.setattr(build, "whitening_filters", counted)
    ranks, of_grid = GRIDS[grid]
    run_in_process.train_virtual(ranks, folder / "tiny.yaml", *words, *of_grid, steps=1)
    assert len(computed) == 1
    np.testing.assert_array_equal(newest(folder)[parameter_key("stage1.conv.weight")], expected)


def test_patches_of_a_dilated_convolution_are_dilated() -> None:
    """The filters are not those of neighbouring pixels, which the convolution does not read together."""
    spec = Conv2dSpec(2, 8, Window((2, 2), (1, 1), (0, 0, 0, 0), dilation=(2, 3)))
    images = np.random.default_rng(0).standard_normal((5, 9, 8, 2)).cumsum(1).cumsum(2)
    corners = [images[:, row : row + 7, column : column + 5] for row in (0, 2) for column in (0, 3)]
    outputs = np.concatenate(corners, 3).reshape(-1, 8) @ whitening_filters(images, spec).reshape(8, 8).T
    np.testing.assert_allclose(np.cov(outputs, rowvar=False, bias=True), np.eye(8), atol=0.01)


def test_what_cannot_be_whitened_is_refused() -> None:
    spec = Conv2dSpec(1, 20, Window((3, 3), (1, 1), (1, 1, 1, 1)))
    builder = GraphBuilder(TensorSpec((1, 7, 6, 1)))
    graph = builder.build(builder.emit("a", spec, (0,), parameters={"weight": "a.weight"}))
    with pytest.raises(ConfigError, match="20 filters in 1 groups, but whitening needs 1 group and at most 18 filters"):
        whitened_convolution(graph, "a")
    with pytest.raises(ConfigError, match=r"init.whiten is b, but must be the name of .*; that of this model is a"):
        whitened_convolution(graph, "b")


def test_a_resume_with_other_frozen_layers_is_refused(folder: Path) -> None:
    run_in_process.train(folder, *overrides(folder), steps=2)
    with pytest.raises(
        CheckpointError, match=r"init.freeze: .* -> .*may not change: the checkpoint stores optimiser state of the"
    ):
        run_in_process.train(folder, *overrides(folder, "init.freeze=[]"), resume="auto")


def test_another_number_of_classes_tells_of_ignore(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"classifier.fc2.bias has shape \(8,\)") as raised:
        run_in_process.train(folder, *overrides(folder, "init.ignore=[]"))
    assert str(raised.value).endswith('set init.ignore to ["classifier.fc2.*"].')
    with pytest.raises(CheckpointError, match="There is no weight file"):
        run_in_process.train(folder, *overrides(folder, "init.weights=nowhere.pt"))
