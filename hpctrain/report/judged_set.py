"""The judgement of a test set as a page shows it: a table of confusions, and pictures."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hpctrain.experiment.judgement import JudgedImage, Judgement

#: a table of more classes is not read by anybody; the largest confusions stand for it
MOST_CLASSES = 40
_MOST_CONFUSIONS = 30
_STRONGEST_PERCENT = 70
#: the side of a picture on the page; larger images are made smaller
_PIXELS = 160
#: larger pictures are JPEG files, of which a hundred weigh half a megabyte; smaller ones are kept to the last bit
_MOST_EXACT = 64


@dataclass(frozen=True)
class Cell:
    """A count of the table. percent: of its class's samples, for its colour. right: the class was recognised."""

    count: int
    percent: int
    right: bool


@dataclass(frozen=True)
class ConfusionLine:
    """A class, and how often it was taken for each."""

    name: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class ClassLine:
    """A class with its accuracy, in words. rival: the class that it was most often taken for, and how often."""

    name: str
    images: str
    top1: str
    rival: str


@dataclass(frozen=True)
class Picture:
    """An image. data: as an URL. words: what it was taken for."""

    number: int
    label: str
    words: str
    data: str


@dataclass(frozen=True)
class Pictures:
    """A group of images."""

    title: str
    pictures: tuple[Picture, ...]


@dataclass(frozen=True)
class JudgedSet:
    """The result of one run on its test set. headings: above the table of `confusion`, which is () for too many classes."""

    name: str
    words: str
    headings: tuple[str, ...]
    confusion: tuple[ConfusionLine, ...]
    classes: tuple[ClassLine, ...]
    groups: tuple[Pictures, ...]


def result_of(name: str, judgement: Judgement) -> JudgedSet:
    """The result of a run of that name."""
    names = judgement.class_names
    whole = len(names) <= MOST_CLASSES
    groups = (
        Pictures("Surest mistakes", tuple(_picture(image, names) for image in judgement.wrong)),
        Pictures("Surest hits, by class", tuple(_picture(image, names) for image in judgement.right)),
    )
    lines = tuple(_lines(judgement)) if whole else ()
    return JudgedSet(name, _words(judgement, whole=whole), names, lines, tuple(_classes(judgement)), groups)


def _words(judgement: Judgement, *, whole: bool) -> str:
    confusion, names = judgement.confusion, judgement.class_names
    scores = confusion.scores()
    samples, hits = sum(score.samples for score in scores), sum(score.hits for score in scores)
    accuracy = f"{hits / samples:.2%}" if samples else "-"
    words = f"{judgement.checkpoint.name}: {samples:,} images, top-1 {accuracy}."
    if confusion.undecided:
        words += f" The outputs for {confusion.undecided:,} images are not finite."
    if whole:
        return words
    mistakes = confusion.largest_confusions(_MOST_CONFUSIONS)
    told = "; ".join(f"{names[label]} for {_taken_for(rival, names)} {count:,} times" for label, rival, count in mistakes)
    return f"{words} Most often taken: {told}." if told else words


def _taken_for(prediction: int, names: tuple[str, ...]) -> str:
    return names[prediction] if prediction < len(names) else "no class"


def _lines(judgement: Judgement) -> Iterator[ConfusionLine]:
    for label, name in enumerate(judgement.class_names):
        counts = judgement.confusion.of_label(label)[: len(judgement.class_names)].tolist()
        samples = max(1, sum(counts))
        cells = (
            Cell(count, -(-_STRONGEST_PERCENT * count // samples), prediction == label) for prediction, count in enumerate(counts)
        )
        yield ConfusionLine(f"{label} {name}", tuple(cells))


def _classes(judgement: Judgement) -> Iterator[ClassLine]:
    """All classes, the lowest accuracy first; those without images last."""
    names = judgement.class_names
    for score in judgement.confusion.worst_first():
        rival = "-" if score.rival is None else f"{names[score.rival]}, {score.rival_count:,} times"
        yield ClassLine(names[score.label], f"{score.samples:,}", "-" if score.top1 is None else f"{score.top1:.2%}", rival)


def _picture(image: JudgedImage, names: tuple[str, ...]) -> Picture:
    words = f"{image.probability:.1%} {names[image.prediction]}"
    return Picture(image.number, names[image.label], words, _url(image.pixels))


def _url(pixels: np.ndarray) -> str:
    """A picture of (H, W, C) uint8 with one or three channels, or of the first of others."""
    from PIL import Image

    picture = Image.fromarray(pixels if pixels.shape[2] == 3 else pixels[:, :, 0])
    form, options = ("PNG", {"optimize": True}) if max(picture.size) <= _MOST_EXACT else ("JPEG", {"quality": 85})
    picture.thumbnail((_PIXELS, _PIXELS))
    buffer = io.BytesIO()
    picture.save(buffer, form, **options)
    return f"data:image/{form.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"
