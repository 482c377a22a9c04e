"""The judgement of a test set as a page shows it."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import pytest

from hpctrain.experiment.judgement import JudgedImage, Judgement
from hpctrain.report import judged_set
from hpctrain.report.judged_set import Cell, result_of
from tests.support.written_runs import confusion_of


def _judgement(matrix: list[list[int]], undecided: int = 0, *images: JudgedImage) -> Judgement:
    """The undecided samples are of the first class."""
    names = tuple(f"class {k}" for k in range(len(matrix)))
    return Judgement(Path("checkpoint-00000007.h5"), names, confusion_of(matrix, undecided), (), images)


def test_cells_are_coloured_by_their_share_of_the_class() -> None:
    result = result_of("run", _judgement([[9, 1], [0, 0]]))
    assert result.confusion[0].cells == (Cell(9, 63, True), Cell(1, 7, False))
    assert result.confusion[1].cells == (Cell(0, 0, False), Cell(0, 0, True))
    assert result.words == "checkpoint-00000007.h5: 10 images, top-1 90.00%."


def test_many_classes_are_told_by_their_largest_confusions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judged_set, "MOST_CLASSES", 2)
    result = result_of("run", _judgement([[5, 2, 0], [0, 5, 0], [3, 0, 5]], 5))
    assert result.confusion == ()
    assert "top-1 60.00%. The outputs for 5 images are not finite." in result.words
    assert result.words.endswith(
        "Most often taken: class 0 for no class 5 times; class 2 for class 0 3 times; class 0 for class 1 2 times."
    )


def test_classes_are_told_with_their_rivals_the_worst_first() -> None:
    result = result_of("run", _judgement([[9, 1, 0], [3, 1, 2], [0, 0, 0]]))
    told = [(line.name, line.images, line.top1, line.rival) for line in result.classes]
    assert told == [
        ("class 1", "6", "16.67%", "class 0, 3 times"),
        ("class 0", "10", "90.00%", "class 1, 1 times"),
        ("class 2", "0", "-", "-"),
    ]


@pytest.mark.parametrize(("side", "form", "limit"), [(32, "png", 2_000), (64, "png", 8_000), (232, "jpeg", 12_000)])
def test_photographs_are_small_files(side: int, form: str, limit: int) -> None:
    """Waves with noise, which do not become smaller by luck."""
    waves = 128 + 100 * np.sin(np.arange(side * side).reshape(side, side, 1) / 97 + np.arange(3))
    pixels = (waves + np.random.default_rng(0).normal(0, 4, (side, side, 3))).clip(0, 255).astype(np.uint8)
    groups = result_of("run", _judgement([[0, 1], [0, 0]], 0, JudgedImage(4, pixels, 0, 1, 0.5))).groups
    data = groups[0].pictures[0].data
    assert data.startswith(f"data:image/{form};base64,")
    assert len(data) < limit * 2


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB")])
def test_pictures_are_whole_and_small(channels: int, mode: str) -> None:
    from PIL import Image

    pixels = np.full((400, 200, channels), 77, np.uint8)
    groups = result_of("run", _judgement([[0, 1], [0, 0]], 0, JudgedImage(4, pixels, 0, 1, 0.987))).groups
    (picture,) = groups[0].pictures
    assert (picture.number, picture.label, picture.words) == (4, "class 0", "98.7% class 1")
    with Image.open(io.BytesIO(base64.b64decode(picture.data.partition(",")[2]))) as image:
        assert (image.size, image.mode) == ((80, 160), mode)
        assert image.getextrema() == ((77, 77) if channels == 1 else ((77, 77),) * 3)
