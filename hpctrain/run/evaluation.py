"""Evaluation of a checkpoint on a test or validation set, and prediction for pictures (`hpctrain eval` and `predict`).

Both use the classes and the normalisation that the checkpoint stores. A judgement has a confusion matrix and the images that the
checkpoint classified correctly and wrongly with the highest probability. Pictures are processed like evaluation images.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpctrain.assembly.images import (
    CHECKPOINT,
    EVALUATION_IMAGES,
    WARNING,
    Images,
    check_shapes,
    evaluation_images,
    mirrored,
    pictures,
    training_shape,
)
from hpctrain.assembly.recipe import ImageFacts
from hpctrain.comm.base import Subject, compare, raise_on_all_ranks
from hpctrain.config.schema import Config, Split
from hpctrain.core import log
from hpctrain.core.errors import CheckpointError, ConfigError
from hpctrain.data.image_file import DataFacts, ImageForm, described, differences
from hpctrain.data.loader import Loader
from hpctrain.job.session import Session
from hpctrain.run.build import make_replica
from hpctrain.run.data_cache import add_caches
from hpctrain.run.images import make_loader, open_alike
from hpctrain.run.resume import check_model, find_checkpoint, stored_config, stored_data
from hpctrain.runs.directory import RunDirectory, containing_run
from hpctrain.storage.checkpoint import CheckpointContent
from hpctrain.training.evaluation import ConfusionCounts, ConfusionMatrix, TopClasses, predict
from hpctrain.training.metrics import Reporter, RunningSums
from hpctrain.training.progress_bar import Advance
from hpctrain.training.replica import Replica

if TYPE_CHECKING:
    from hpctrain.data.pictures import DecodedPictures


@dataclass(frozen=True)
class Evaluation:
    """Results of a checkpoint on a test or validation set.

    Attributes:
        path: path of the checkpoint.
        split: evaluated set.
        notes: remarks on the data for the user, one sentence each.
        sums: sums of loss and accuracies over all samples.
        class_names: names of the classes by label.
        averaged: whether the averaged weights were evaluated.
        flip: whether outputs are means over each image and its mirror image.
        confusion: confusion matrix; None if it was not requested.
    """

    path: Path
    split: Split
    notes: tuple[str, ...]
    sums: RunningSums
    class_names: tuple[str, ...]
    averaged: bool
    flip: bool
    confusion: ConfusionMatrix | None


@dataclass(frozen=True)
class EvaluationSetup:
    """A rank's share of an evaluation or a prediction.

    Attributes:
        mirror: loader of the mirror images; None if they are not used.
    """

    images: Images
    replica: Replica
    loader: Loader
    mirror: Loader | None


def run_evaluation(
    session: Session,
    source: str,
    *,
    on: Split | None = None,
    averaged: bool = False,
    flip: bool = False,
    confusion: bool = False,
    show: Callable[[int], AbstractContextManager[Advance]] | None = None,
) -> Evaluation:
    """Evaluate a checkpoint on the test or the validation set. Collective; every rank has the results.

    Args:
        source: run directory, checkpoint or keyword, see `find_checkpoint`.
        on: set to evaluate on; None: the test set or, without one, the validation set.
        averaged: whether to evaluate the averaged weights.
        flip: whether to use the mean of the outputs for each image and its mirror image.
        confusion: whether to count a confusion matrix.
        show: function from a number of samples to a progress display (see `Reporter.evaluation`); None: no display.

    Raises:
        ConfigError: the set is not configured.
        CheckpointError: there is no checkpoint, it belongs to another model, or its training held out other samples.
        DataError: the set has other classes.
        ShapeError: its images have another shape.
    """
    split = evaluated_split(session.config, on)
    path, content = existing_checkpoint(session, source)
    setup = build_setup(session, path, content, split, averaged=averaged, flip=flip)
    if setup.mirror is not None:  # each image is read twice
        add_caches(session, session.config.data.cache, [setup.loader])
        setup.mirror.read_through(setup.loader.pixels)
    replica, names = setup.replica, setup.images.file.class_names
    counts = ConfusionCounts(len(names)) if confusion else None
    with (show or Reporter().evaluation)(setup.loader.sampler.samples) as advance:
        sums = replica.evaluate(setup.loader, mirrored=setup.mirror, confusion=counts, advance=advance)
    matrix = None if counts is None else counts.summed(replica.groups.all_ranks, session.progress)
    return Evaluation(path, split, setup.images.notes, sums, names, averaged, flip, matrix)


def evaluated_split(config: Config, on: Split | None = None) -> Split:
    """Return the set to evaluate on: `on` or, if it is None, the test set or, without one, the validation set.

    Raises:
        ConfigError: the set is not configured.
    """
    configured = config.data.evaluated_splits
    if not configured and on is None:
        raise ConfigError("Neither data.test nor data.validation is set, so there is no set to evaluate on; set one of them.")
    if on is not None and on not in configured:
        raise ConfigError(f"data.{on} is not set, so there is no {on} set; set it to the path of an HDF5 file.")
    return on or configured[-1]


def existing_checkpoint(session: Session, source: str) -> tuple[Path, CheckpointContent]:
    """Return the path and the content of the checkpoint that `source` names. Collective.

    Raises:
        CheckpointError: there is no intact checkpoint.
    """
    output, name = session.config.output, session.config.name
    there = find_checkpoint(session.world, output, name, source)
    if there is None:
        raise CheckpointError(f"No run of {name!r} in {Path(output).absolute()} has a checkpoint; train one first.")
    kept = log.current_rank_log()
    if kept is not None:  # continue it in the run that the checkpoint belongs to, else in the checkpoint's directory
        place = there[0].resolve().parent
        kept.keep_in(RunDirectory(containing_run(place) or place).log_path(session.world.rank))
    return there


def known_data(config: Config, path: Path, content: CheckpointContent) -> DataFacts:
    """Return the facts about the data that a checkpoint was trained on.

    Raises:
        CheckpointError: the configuration describes another model than that of the checkpoint, or the checkpoint has no facts.
    """
    data = stored_data(content, path)
    check_model(content, data, config, path)
    return data


def trained_replica(
    session: Session, content: CheckpointContent, data: DataFacts, images: Images, *, averaged: bool = False
) -> Replica:
    """Return a replica with the checkpoint's parameters, without an optimiser.

    Args:
        images: evaluated images, of the training images' shape unless the model was trained on several sizes.
        averaged: whether to load the averaged weights.

    Raises:
        CheckpointError: the checkpoint has no averaged weights.
        ShapeError: the images have another shape than the training images.
    """
    config = session.config
    trained_with = stored_config(content, config) or config
    if not trained_with.data.sizes:  # a model trained on several sizes accepts any that its layers accept
        check_shapes(training_shape(trained_with, data), images.shape)
    facts = ImageFacts((images.shape,), len(data.class_names))
    replica = make_replica(replace(session.recipe, facts=facts, backend=session.backend()), session, trains=False)
    replica.load_weights(content, averaged=averaged)
    return replica


def build_setup(
    session: Session, path: Path, content: CheckpointContent, split: Split, *, averaged: bool = False, flip: bool = False
) -> EvaluationSetup:
    """Build a rank's share of the evaluation of a checkpoint on a configured set; see `run_evaluation`. Collective.

    Raises:
        CheckpointError, DataError, ShapeError: as for `run_evaluation`.
    """
    own: Split = split if split in session.config.data.files else "train"
    opened = open_alike(session.world, session.config, (own,))

    def build() -> EvaluationSetup:
        config = session.config
        data = known_data(config, path, content)
        images = evaluation_images(config, opened, split, data, CHECKPOINT)
        if images.split is not None and DataFacts.of(images.file, images.split.validation).held_out != data.held_out:
            raise CheckpointError(
                f"{path} was not trained with these validation samples held out, so it may have been trained on them; give "
                "data.validation, data.train and seed the values of its training."
            )
        replica = trained_replica(session, content, data, images, averaged=averaged)
        return with_loaders(session, images, replica, config.evaluate.batch or config.batch, flip=flip)

    return raise_on_all_ranks(session.world, build)


def with_loaders(session: Session, images: Images, replica: Replica, batch: int, *, flip: bool) -> EvaluationSetup:
    """Return this rank's share of an evaluation of `replica` on `images`.

    Args:
        batch: number of images per batch over all ranks.
        flip: whether to make a loader of the mirror images.
    """

    def loader(of: Images) -> Loader:
        return make_loader(session, of, replica.tiles, batch=batch, shuffle=False, kernels=replica.network.kernels)

    return EvaluationSetup(images, replica, loader(images), loader(mirrored(images)) if flip else None)


@dataclass(frozen=True)
class JudgedImage:
    """Image of an evaluated set, with its true and its predicted class.

    Attributes:
        number: number of the image in the file.
        pixels: stored pixels, (H, W, C) uint8.
        label, prediction: true and predicted class.
        probability: probability of the predicted class.
    """

    number: int
    pixels: np.ndarray
    label: int
    prediction: int
    probability: float


@dataclass(frozen=True)
class Judgement:
    """Judgement of a checkpoint by the test or the validation set.

    Attributes:
        checkpoint: path of the checkpoint.
        split: set of the images.
        class_names: names of the classes by label.
        confusion: confusion matrix.
        right: per class, the correctly classified image with the highest probability; in descending order.
        wrong: the misclassified images with the highest probabilities, in descending order.
    """

    checkpoint: Path
    split: Split
    class_names: tuple[str, ...]
    confusion: ConfusionMatrix
    right: tuple[JudgedImage, ...]
    wrong: tuple[JudgedImage, ...]


def judge(session: Session, source: str, most: int) -> Judgement:
    """Judge a checkpoint by the test set or, without one, by the validation set. Collective; every rank has the result.

    Args:
        source: run directory, checkpoint or keyword, see `find_checkpoint`.
        most: maximum number of images of each kind: correctly classified and misclassified.

    Raises:
        ConfigError, CheckpointError, DataError, ShapeError: as for `run_evaluation`.
    """
    split = evaluated_split(session.config)
    path, content = existing_checkpoint(session, source)
    setup = build_setup(session, path, content, split)
    replica = setup.replica
    batches = predict(replica.network, setup.loader, replica.groups.all_ranks, session.progress, 1)
    predictions, probabilities = _joined(batches)
    return raise_on_all_ranks(session.world, lambda: _judgement(path, split, setup, predictions, probabilities, most))


def _joined(batches: Iterable[TopClasses]) -> tuple[np.ndarray, np.ndarray]:
    """Return the most probable class of every sample, (N,) int64, and its probability, (N,) float64."""
    pairs = [(batch.labels[:, 0], batch.probabilities[:, 0]) for batch in batches]
    return np.concatenate([labels for labels, _ in pairs]), np.concatenate([values for _, values in pairs])


def _judgement(
    path: Path, split: Split, setup: EvaluationSetup, predictions: np.ndarray, probabilities: np.ndarray, most: int
) -> Judgement:
    file, subset = setup.images.file, setup.images.subset
    of_file = np.arange(len(file)) if subset is None else subset  # numbers of the evaluated images in the file
    labels, classes = file.labels[of_file], len(file.class_names)
    decided = ~np.isnan(probabilities)
    width = classes + 1  # the last column counts images without a finite prediction
    cells, counts = np.unique(labels * width + np.where(decided, predictions, classes), return_counts=True)
    confusion = ConfusionMatrix(classes, cells // width, cells % width, counts.astype(np.int64))
    surest = [number for number in np.argsort(-probabilities, kind="stable").tolist() if decided[number]]
    wrong = [number for number in surest if predictions[number] != labels[number]]
    of_class = {labels[number]: number for number in reversed(surest) if predictions[number] == labels[number]}
    right = sorted(of_class.values(), key=lambda number: -probabilities[number])

    def images(numbers: list[int]) -> tuple[JudgedImage, ...]:
        return tuple(
            JudgedImage(
                int(of_file[number]),
                file.pixels[int(of_file[number])],
                int(labels[number]),
                int(predictions[number]),
                float(probabilities[number]),
            )
            for number in numbers[:most]
        )

    return Judgement(path, split, file.class_names, confusion, images(right), images(wrong))


#: default maximum number of pictures per rank and batch, as a configured batch may be meant for many more ranks
MOST_OF_A_RANK = 64


_NOT_A_NUMBER = "The network's outputs for the image are not finite."


@dataclass(frozen=True)
class PredictionRequest:
    """Pictures to classify, and options of the prediction.

    Attributes:
        places: files and directories of pictures.
        top: number of classes to return per picture, at least 1.
        flip: whether to use the mean of the outputs for each picture and its mirror image.
        averaged: whether to use the averaged weights.
        fit: how pictures are fitted to the network's input size; None: as the checkpoint's evaluation images.
        batch: number of pictures per batch over all ranks; None: the batch size of evaluations, at most 64 pictures per rank.
        max_pixels: maximum number of pixels of a picture; see `decoding.decode`.
    """

    places: tuple[Path, ...]
    top: int = 5
    flip: bool = False
    averaged: bool = False
    fit: str | None = None
    batch: int | None = None
    max_pixels: int | None = None


@dataclass(frozen=True)
class PredictedClass:
    """A candidate class of a picture.

    Attributes:
        label: number of the class in the model's outputs.
    """

    name: str
    label: int
    probability: float


@dataclass(frozen=True)
class PredictedPicture:
    """Result for one picture.

    Attributes:
        classes: most probable classes in descending order; empty after an error.
        error: why the picture has no result; None if it has.
    """

    file: Path
    classes: tuple[PredictedClass, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class Predictions:
    """Results of a `PredictionRequest`.

    Attributes:
        checkpoint: path of the checkpoint.
        averaged: whether its averaged weights were used.
        class_names: names of the classes by label.
        files: all pictures, in order.
        answers: iterator over one result per file, in the same order, on every rank. A batch of results is computed when the
            first of them is requested; collective.
    """

    checkpoint: Path
    averaged: bool
    class_names: tuple[str, ...]
    files: tuple[Path, ...]
    answers: Iterator[PredictedPicture]

    def counted(self, advance: Callable[[int], None]) -> Predictions:
        """Return the predictions with a callback for progress.

        Args:
            advance: callback, called before each result with the number of finished pictures.
        """

        def answers() -> Iterator[PredictedPicture]:
            for number, picture in enumerate(self.answers):
                advance(number)
                yield picture

        return replace(self, answers=answers())


def run_prediction(session: Session, source: str, request: PredictionRequest) -> Predictions:
    """Load a checkpoint and predict the classes of pictures. Collective.

    Args:
        source: run directory, checkpoint or keyword, see `find_checkpoint`.

    Raises:
        CheckpointError: the checkpoint does not exist, belongs to another model, or has no averaged weights.
        DataError: a file or directory does not exist, or there are no pictures.
        ShapeError: the pictures cannot be fitted to the network's input.
    """
    from hpctrain.data.pictures import picture_facts, picture_files  # here: evaluations decode no pictures

    path, content = existing_checkpoint(session, source)
    listed = raise_on_all_ranks(session.world, lambda: picture_files(request.places) if session.is_root else ())
    files: tuple[Path, ...] = session.world.broadcast_object(listed)
    if session.world.size > 1:
        compare(session.world, Subject("other pictures", "give all nodes the same files", picture_facts(files), partial=True))
    setup = raise_on_all_ranks(session.world, lambda: _build_prediction(session, path, content, files, request))
    names = setup.images.file.class_names
    return Predictions(path, request.averaged, names, files, _answers(session, setup, files, min(request.top, len(names))))


def _build_prediction(
    session: Session,
    path: Path,
    content: CheckpointContent,
    files: Sequence[Path],
    request: PredictionRequest,
) -> EvaluationSetup:
    config = session.config
    data = known_data(config, path, content)
    form = _form(content, data)
    if request.fit is not None:
        form = replace(form, fit=request.fit)
    facts = described(replace(data, shape=form.shape, fit=form.fit, value_range=form.value_range))
    known = described(replace(data, value_range=ImageForm.of(data).value_range))
    for warning in differences("each picture", facts, "the training images", known) if session.is_root else ():
        logging.getLogger(__name__).warning(warning.removeprefix(WARNING))
    images = pictures(config, data, form, files, session.threads.threads, request.max_pixels)
    replica = trained_replica(session, content, data, images, averaged=request.averaged)
    replica.parameters_written()
    usual = min(config.evaluate.batch or config.batch, MOST_OF_A_RANK * session.world.size)
    return with_loaders(session, images, replica, request.batch or usual, flip=request.flip)


def _form(content: CheckpointContent, data: DataFacts) -> ImageForm:
    """Return the form of the checkpoint's evaluation images or, if it is not stored, of its training images."""
    stored: Any = content.meta.get(EVALUATION_IMAGES)
    plain: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in (stored or {}).items()}
    return ImageForm(**plain) if plain else ImageForm.of(data)


def _answers(session: Session, setup: EvaluationSetup, files: Sequence[Path], top: int) -> Iterator[PredictedPicture]:
    from hpctrain.data.pictures import DecodedPictures

    names, comm, decoded = setup.images.file.class_names, setup.replica.groups.all_ranks, setup.images.file.pixels
    assert isinstance(decoded, DecodedPictures)
    for batch in predict(setup.replica.network, setup.loader, comm, session.progress, top, mirrored=setup.mirror):
        numbers = range(batch.first, batch.first + len(batch.labels))
        broken = _broken(session, setup.replica, decoded, numbers)
        for number, labels, probabilities in zip(numbers, batch.labels.tolist(), batch.probabilities.tolist(), strict=True):
            if number in broken:
                yield PredictedPicture(files[number], error=broken[number])
            elif np.isnan(probabilities[0]):
                yield PredictedPicture(files[number], error=_NOT_A_NUMBER)
            else:
                classes = (PredictedClass(names[k], k, p) for k, p in zip(labels, probabilities, strict=True))
                yield PredictedPicture(files[number], tuple(classes))


def _broken(session: Session, replica: Replica, decoded: DecodedPictures, numbers: range) -> dict[int, str]:
    """Return the error messages of the pictures of a batch that a rank could not decode, by the picture's number. Collective.

    All ranks exchange errors, because a rank that owns a shared sample may not have read any part of it.
    """
    flags = np.array([number in decoded.broken for number in numbers], np.int64)
    comm = replica.groups.all_ranks
    broken_here = {number: decoded.broken[number] for number in numbers if number in decoded.broken}
    queue = session.progress.queue(comm)
    session.progress.wait(queue.post(lambda: comm.iallreduce(flags), "pictures that are broken"))
    if not flags.any():
        return {}
    sentences: dict[int, str] = {}
    for of_rank in comm.allgather_object(broken_here):
        sentences = {**of_rank, **sentences}
    return sentences
