"""`hpctrain predict`: what a checkpoint takes pictures for, by the way that evaluation images go."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.comm.base import raise_on_all_ranks
from hpctrain.config.images import EVALUATION_IMAGES, pictures
from hpctrain.data.image_file import DataFacts, ImageFile, ImageForm, Split
from hpctrain.data.pictures import DecodedPictures, picture_facts, picture_files
from hpctrain.job.same_start import Subject, compare
from hpctrain.job.session import Session
from hpctrain.run.evaluation import (
    EvaluationSetup,
    existing_checkpoint,
    known_data,
    trained_replica,
    unknown_splits,
    with_loaders,
)
from hpctrain.run.images import open_alike
from hpctrain.storage.checkpoint import CheckpointContent
from hpctrain.train.evaluation import predict
from hpctrain.train.replica import Replica

#: of a batch, unless another one is asked for: what trained on many ranks is looked at on few
MOST_OF_A_RANK = 64
_NOT_A_NUMBER = "The network's outputs for the image are not finite."


@dataclass(frozen=True)
class PredictionRequest:
    """A question of a user.

    Args:
        places: files and directories of pictures. top: classes of each that are wanted, at least 1.
        flip: the mean over a picture and its mirror image counts. averaged: the average of the weights predicts.
        fit: how pictures are brought to the network's size; None: as the images were that the checkpoint was evaluated on.
        batch: pictures that all ranks compute at once; None: as the configuration's evaluation, at most 64 of each rank.
        max_pixels: pixels of the largest picture that is accepted; see `decoder.decode`.
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
    """A class that a picture may be of. label: its number in the model's outputs."""

    name: str
    label: int
    probability: float


@dataclass(frozen=True)
class PredictedPicture:
    """The answer for one picture: its most probable classes first, or the sentence that says why there is none."""

    file: Path
    classes: tuple[PredictedClass, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class Predictions:
    """Answers to a request.

    Args:
        checkpoint: whose they are. averaged: the average of its weights. class_names: by label. files: of all pictures, in order.
        answers: one for each file, in this order, on every rank. Collective; computed as they are asked for.
    """

    checkpoint: Path
    averaged: bool
    class_names: tuple[str, ...]
    files: tuple[Path, ...]
    answers: Iterator[PredictedPicture]

    def counted(self, advance: Callable[[int], None]) -> Predictions:
        """Return the same, and `advance` is called with the number of pictures that are done, as they are asked for."""

        def answers() -> Iterator[PredictedPicture]:
            for number, picture in enumerate(self.answers):
                advance(number)
                yield picture

        return replace(self, answers=answers())


def run_prediction(session: Session, source: str, request: PredictionRequest) -> Predictions:
    """Load a checkpoint, and predict the classes of pictures. Collective.

    Args:
        source: as `find_checkpoint` takes it.

    Raises:
        CheckpointError: there is no such checkpoint, it is another model's, or has no average. DataError: no such picture.
        ShapeError: pictures that cannot be brought to the form of the network's images.
    """
    path, content = existing_checkpoint(session, source)
    listed = raise_on_all_ranks(session.world, lambda: picture_files(request.places) if session.is_root else ())
    files: tuple[Path, ...] = session.world.broadcast_object(listed)
    if session.world.size > 1:
        compare(session.world, Subject("other pictures", "give all nodes the same files", picture_facts(files), partial=True))
    opened = open_alike(session.world, session.config, unknown_splits(content))
    setup = raise_on_all_ranks(session.world, lambda: _build(session, path, content, opened, files, request))
    names = setup.images.file.class_names
    return Predictions(path, request.averaged, names, files, _answers(session, setup, files, min(request.top, len(names))))


def _build(
    session: Session,
    path: Path,
    content: CheckpointContent,
    opened: Mapping[Split, ImageFile],
    files: Sequence[Path],
    request: PredictionRequest,
) -> EvaluationSetup:
    config = session.config
    data, _ = known_data(config, path, content, opened)
    form = _form(content, data)
    if request.fit is not None:
        form = replace(form, fit=request.fit)
    images = pictures(config, data, form, files, session.threads.threads, request.max_pixels)
    replica = trained_replica(session, content, data, images, averaged=request.averaged)
    replica.parameters_written()
    usual = min(config.evaluate.batch or config.batch, MOST_OF_A_RANK * session.world.size)
    return with_loaders(session, images, replica, request.batch or usual, flip=request.flip)


def _form(content: CheckpointContent, data: DataFacts) -> ImageForm:
    """Return the form of the images that the checkpoint was evaluated on, else of those that it was trained on."""
    stored: Any = content.meta.get(EVALUATION_IMAGES)
    return ImageForm.of(data) if stored is None else ImageForm.from_meta(stored)


def _answers(session: Session, setup: EvaluationSetup, files: Sequence[Path], top: int) -> Iterator[PredictedPicture]:
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
    """Return the sentences of those among some pictures that a rank could not decode. Collective.

    Where ranks share samples, the one that owns a sample may have read nothing of it: all of them are asked.
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
