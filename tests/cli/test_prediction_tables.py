"""Predictions are printed while they come, 80 columns wide, each picture in its place, the broken ones too."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hpctrain.cli.prediction_tables import print_lines, print_table
from hpctrain.experiment.prediction import PredictedClass, PredictedPicture, Predictions

NAMES = ("ankle boot", "a class whose name is far too long to stand in one line of a table", "日本")
LONG = Path("a-directory-with-a-long-name") / "another-directory-of-the-same-kind" / "0123456789.jpg"
ODD = Path(os.fsdecode(b"odd-\xff.png"))


def _predictions(count: int = 3) -> Predictions:
    def answers():
        for number in range(count):
            classes = (PredictedClass(NAMES[1], 1, 0.75), PredictedClass(NAMES[2], 2, 0.25))
            yield PredictedPicture(LONG if number == 0 else Path(f"{number}.png"), classes)
        yield PredictedPicture(ODD, error="The image cannot be decoded: it is cut off.")

    return Predictions(Path("runs/a/checkpoints/checkpoint-00000001.h5"), False, NAMES, (LONG,) * (count + 1), answers())


@pytest.mark.parametrize("count", [1, 3, 40])
def test_the_table_fits_80_columns_and_has_every_picture(capsys: pytest.CaptureFixture[str], count: int) -> None:
    assert print_table(_predictions(count), visible=True) == [ODD]
    output = capsys.readouterr().out
    lines = output.splitlines()
    assert lines[0] == f"runs/a/checkpoints/checkpoint-00000001.h5: {count + 1} images"
    assert lines[1].split() == ["image", "class", "probability"]
    assert all(len(line) <= 80 and line == line.rstrip() for line in lines[1:])
    assert output.count("75.00%") == output.count("25.00%") == count
    assert output.count("\ufffd") == 1
    assert lines[-1] == "odd-\ufffd.png: The image cannot be decoded: it is cut off."
    ends = {len(line) for line in lines if line.endswith("%") and "日" not in line}
    assert len(ends) == 1, "all pieces of the table are as wide"
    folded = "".join(line[:35].strip() for line in lines[2:6])
    assert str(LONG).startswith(folded[:30])


def test_a_line_of_json_for_each_picture(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_lines(_predictions(), visible=True) == [ODD]
    first, *_, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert first == {
        "image": str(LONG),
        "predictions": [
            {"class": NAMES[1], "label": 1, "probability": 0.75},
            {"class": NAMES[2], "label": 2, "probability": 0.25},
        ],
    }
    assert last == {"image": str(ODD), "error": "The image cannot be decoded: it is cut off."}


@pytest.mark.parametrize("show", [print_lines, print_table])
def test_a_rank_that_prints_nothing_goes_through_all_of_it(capsys: pytest.CaptureFixture[str], show) -> None:
    predictions = _predictions()
    assert show(predictions, visible=False) == [ODD]
    assert list(predictions.answers) == []
    assert capsys.readouterr().out == ""
