"""Evaluations are printed 80 columns wide, and written to files that hold every number."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hpctrain.cli.evaluation_tables import print_json, print_text, write_confusion
from hpctrain.experiment.evaluation import Evaluation
from hpctrain.train.confusion import ConfusionMatrix
from hpctrain.train.metrics import RunningSums

NAMES = ("T-shirt/top", "a class, whose name is far too long to stand in one line", "bag")
COUNTS = ((5, 0, 1), (30_000, 1, 4), (0, 0, 0))


def _evaluation(counts=COUNTS, names: tuple[str, ...] = NAMES, *, loss: float = 2.5) -> Evaluation:
    """counts: may have a last column of samples whose outputs are not finite."""
    array = np.array(counts)
    labels, predictions = np.nonzero(array)
    matrix = ConfusionMatrix(len(array), labels, predictions, array[labels, predictions])
    sums = RunningSums(loss * array.sum(), int(np.trace(array)), int(array.sum()), int(array.sum()))
    return Evaluation(Path("runs/a/checkpoint.h5"), ("a note",), sums, names, False, False, matrix)


def test_text_has_the_worst_class_first_and_the_matrix_where_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    print_text(_evaluation(), per_class=True, confusion=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["a note", "runs/a/checkpoint.h5: 30011 samples, loss 2.5000, top1 0.02%, top5 100.00%"]
    assert all(len(line) <= 80 for line in lines)
    text = [line.split() for line in lines]
    assert ["class", "most", "often", "taken", "for", "times", "samples", "top1"] in text
    starts = [lines.index(next(line for line in lines if line.startswith(name))) for name in ("a class", "T-shirt", "bag")]
    assert starts == sorted(starts)
    assert text[starts[0]][-3:] == ["30,000", "30,005", "0.00%"]
    assert text[starts[2]] == ["bag", "-", "-", "0", "-"]
    assert ["class", "0", "1", "2"] in text
    assert ["T-shirt/top", "0", "5", "0", "1"] in text


def test_averaged_weights_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    for averaged in (False, True):
        evaluation = replace(_evaluation(), averaged=averaged)
        print_text(evaluation, per_class=False, confusion=False)
        assert ("checkpoint.h5 (averaged weights): " in capsys.readouterr().out) is averaged
        print_json(evaluation, per_class=False, confusion=False)
        assert json.loads(capsys.readouterr().out)["averaged"] is averaged


def test_where_the_matrix_does_not_fit_the_most_frequent_mistakes_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    counts = np.zeros((100, 101), np.int64)
    counts[np.arange(100), np.arange(100)] = 9
    counts[70, 3], counts[4, 100] = 8, 5
    print_text(_evaluation(counts, tuple(f"class {n}" for n in range(100))), per_class=False, confusion=True)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[3:]]
    assert lines == [
        ["class", "taken", "for", "times"],
        ["class", "70", "class", "3", "8"],
        ["class", "4", "(not", "finite)", "5"],
    ]


def test_json_has_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    print_json(_evaluation(loss=float("nan")), per_class=True, confusion=True)
    content = json.loads(capsys.readouterr().out)
    assert (content["loss"], content["samples"], content["hits1"], content["notes"]) == (None, 30_011, 6, ["a note"])
    assert content["classes"][0] == {
        "class": NAMES[1],
        "label": 1,
        "samples": 30_005,
        "hits": 1,
        "top1": 1 / 30_005,
        "predictions": 1,
        "most_often_taken_for": {"class": NAMES[0], "label": 0, "times": 30_000},
    }
    assert content["classes"][2]["top1"] is None
    assert content["confusion"] == {"class_names": list(NAMES), "matrix": [list(line) for line in COUNTS], "no_class": [0, 0, 0]}
    print_json(_evaluation(), per_class=False, confusion=False)
    assert not {"classes", "confusion"} & json.loads(capsys.readouterr().out).keys()


@pytest.mark.parametrize("undecided", [False, True])
def test_files_hold_every_number(tmp_path: Path, undecided: bool) -> None:
    counts = [[*line, 2] for line in COUNTS] if undecided else COUNTS
    evaluation = _evaluation(counts)
    write_confusion(evaluation, tmp_path / "a.json")
    content = json.loads((tmp_path / "a.json").read_text())
    assert content["matrix"] == [list(line)[:3] for line in counts]
    assert content["no_class"] == [2 * undecided] * 3
    write_confusion(evaluation, tmp_path / "a.csv")
    with open(tmp_path / "a.csv", newline="") as file:
        titles, *lines = list(csv.reader(file))
    assert titles == ["class", *NAMES, *(["(not finite)"] if undecided else [])]
    assert lines == [[name, *map(str, line)] for name, line in zip(NAMES, counts, strict=True)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.csv", "a.json"]
