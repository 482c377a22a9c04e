"""Tables of plans, searches, predictions and evaluations: numbers with as many digits as they are worth, in 80 columns."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rich.console import Console

from hpctrain.averaging.averagers import AveragerChoice
from hpctrain.cli import plan_tables
from hpctrain.cli.result_tables import (
    print_json,
    print_lines,
    print_table,
    print_text,
    write_predictions,
)
from hpctrain.cli.simulation_tables import (
    print_search,
    print_whole,
    scaling_table,
)
from hpctrain.comm.link import LinkModel
from hpctrain.parallel.parallel_plan import ParallelPlan
from hpctrain.parallel.plan_report import LayerReport
from hpctrain.planner import planned_run
from hpctrain.planner.job import Candidate
from hpctrain.planner.program.group_schedules import group_schedules
from hpctrain.planner.search.configured_search import PlannedSearch, SimulatedPoint, on_any_grid
from hpctrain.planner.search.search import SearchChoice, SearchResult
from hpctrain.process.start import load_config
from hpctrain.run.evaluation import Evaluation, PredictedClass, PredictedPicture, Predictions
from hpctrain.training.evaluation import ConfusionMatrix
from hpctrain.training.metrics import RunningSums
from tests.cli.test_planning import CONFIGS, IMAGENET, MIXED, RESNET, VGG, run, shown
from tests.run.test_planned_runs import grid_task as task
from tests.support import predictions
from tests.support.sampling import amount


@pytest.mark.slow
def test_no_column_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures as long as they get: bytes of a large batch, least and most over the ranks."""
    arguments = (VGG, "grid.rows=2", "batch=512", *MIXED, *IMAGENET, "--ranks", "4")
    entries = {entry["layer"]: entry for entry in shown(*arguments)["entries"] if "layer" in entry}
    for columns in (80, 100):
        monkeypatch.setattr(plan_tables, "_COLUMNS", columns)
        result = run("show", *arguments)
        assert result.exit_code == 0, result.output
        lines = result.output.splitlines()
        assert max(map(len, lines)) <= columns
        assert "…" not in result.output
        rows = [line.split() for line in lines if line.startswith(("features.", "classifier."))]
        assert len(rows) == 38
        for row in rows:
            entry = entries[row[0]]
            assert row[-1] == f"{max(entry['activation_bytes']) / 1e6:,.2f}"
            assert not max(entry["parameter_bytes"]) or row[-2] == f"{max(entry['parameter_bytes']) / 1e6:,.2f}"


def ranks_of(text: str) -> list[int]:
    """Return the numbers of a text like "0-7, 16-8176:16, 9"."""
    numbers: list[int] = []
    for part in text.split(", "):
        ends, _, step = part.partition(":")
        first, _, last = ends.partition("-")
        numbers += range(int(first), int(last or first) + 1, int(step or 1))
    return numbers


def by_rank(classes: Sequence[Mapping[str, Any]], values: Sequence[Any]) -> list[Any]:
    """Return the value of each rank from the values of its class. Every rank is in one class."""
    pairs = [(rank, value) for of_class, value in zip(classes, values, strict=True) for rank in ranks_of(of_class["ranks"])]
    pairs.sort(key=lambda pair: pair[0])
    assert [rank for rank, _ in pairs] == list(range(len(pairs)))
    return [value for _, value in pairs]


@given(numbers=st.lists(st.integers(0, 40), min_size=1, max_size=30), ordered=st.booleans())
@settings(max_examples=amount(33, 100))
def test_ranges_contain_the_numbers_in_their_order(numbers: list[int], ordered: bool) -> None:
    """No range ends one number early or late, or loses the order in which a schedule has its ranks."""
    numbers = sorted(numbers) if ordered else numbers
    assert ranks_of(plan_tables.number_ranges(numbers)) == numbers


@given(
    rows=st.integers(1, 4),
    cols=st.integers(1, 5),
    batch=st.integers(1, 23),
    micro_batches=st.integers(1, 2),
    use=st.sampled_from(["batch", "model", "domain"]),
    per_node=st.sampled_from([1, 2, 3, 4, 64]),
)
@settings(max_examples=25, deadline=None)
def test_the_summary_expands_to_the_report_of_every_rank(
    rows: int, cols: int, batch: int, micro_batches: int, use: str, per_node: int
) -> None:
    """No rank is in a wrong class if groups have unequal samples, and numbers of averaging are at the right rank."""
    assume(batch >= cols * micro_batches)
    config, _ = load_config(
        CONFIGS / "quickstart.yaml",
        ("backend=numpy", f"batch={batch}", f"micro_batches={micro_batches}", f"grid.rows={rows}", f"plan.default={use}"),
    )
    task = planned_run.prepare(config, rows * cols, (12, 12, 1), 10)
    full, groups = planned_run.description(task), planned_run.equal_split_groups(task)
    averaged = group_schedules(task.job, task.candidate, LinkModel(1e-5, 1e-9), per_node)
    report = planned_run.description(task, [equal[0] for equal in groups])
    found = json.loads(json.dumps(plan_tables.as_dict(task, report, groups, averaged, per_node)))
    classes, item = found["classes"], full.item_bytes
    assert by_rank(classes, [one["samples"] for one in classes]) == list(full.counts)
    assert by_rank(classes, found["total"]["bytes_backward"]) == list(full.traffic.bytes_backward(item))
    arenas = [memory["activations"] for memory in found["memory_bytes"]]
    assert by_rank(classes, arenas) == [memory.activations for memory in full.memory or ()]
    for entry, whole in zip(found["entries"], full.entries, strict=True):
        assert by_rank(classes, entry["words_forward"]) == list(whole.traffic.forward)
        assert by_rank(classes, entry["activation_bytes"]) == [item * size for size in whole.activations]
        if isinstance(whole, LayerReport):
            owned = [[list(interval) for interval in box] for box in whole.owns]
            assert [list(box.values()) for box in by_rank(classes, entry["owns"])] == owned
            assert by_rank(classes, entry["halo_rows"]) == [high for high, _ in whole.halo]
            assert by_rank(classes, entry["parameter_bytes"]) == [item * size for size in whole.parameters]
    averaging = found["averaging_bytes"]
    of_ranks = planned_run.averaging_bytes(task, averaged)
    assert by_rank(averaging, [one["bytes"] for one in averaging]) == list(of_ranks)
    for group, one in zip(averaged, found["averaging"], strict=True):
        assert by_rank(one["classes"], [each["exchanged_elements"] for each in one["classes"]]) == list(group.exchanged)
        assert by_rank(one["classes"], [each["samples"] for each in one["classes"]]) == list(group.samples)
        assert ranks_of(one["order"]) == list(group.order or range(group.ranks))


@pytest.mark.parametrize("grid", [(RESNET,), (VGG, "grid.rows=8", *MIXED)], ids=["resnet50", "vgg16 on 8 x 1024"])
def test_the_plan_of_thousands_of_ranks_is_as_long_as_that_of_few(grid: tuple[str, ...]) -> None:
    """The plan has no list by rank, which takes 100 MB for 8192 ranks."""
    few, many = (
        run("show", *grid, f"batch={2 * ranks}", *IMAGENET, "--ranks", f"{ranks}", "--ranks-per-node", "16", "--json").output
        for ranks in (64, 8192)
    )
    assert len(few) > 10_000
    assert len(many) < 1.5 * len(few) < 1_000_000


def test_json_has_every_class_of_ranks_in_integers() -> None:
    found = shown(VGG, "grid.rows=3", "batch=64", *MIXED, *IMAGENET, "--ranks", "6", "--ranks-per-node", "4")
    layers = {entry["layer"]: entry for entry in found["entries"] if "layer" in entry}
    moves = [entry for entry in found["entries"] if "redistribution" in entry]
    assert layers["features.0"]["owns"][1] == {"samples": [0, 32], "rows": [75, 150], "columns": [0, 224], "channels": [0, 64]}
    assert layers["classifier.6"]["owns"][0] == {"samples": [0, 32], "channels": [0, 334]}
    assert layers["features.2"]["halo_rows"] == [1, 2, 1]
    assert layers["classifier.0"]["parameter_bytes"] == [4 * (25088 + 1) * width for width in (1366, 1365, 1365)]
    assert [(move["source"], move["target"]) for move in moves] == [
        ("rows", "samples"),
        ("samples", "everything"),
        ("channels", "everything"),
        ("channels", "everything"),
        ("channels", "samples"),
    ]
    for direction in ("bytes_forward", "bytes_backward"):
        assert found["total"][direction] == [sum(entry[direction][rank] for entry in found["entries"]) for rank in range(3)]
    assert found["ranks_per_node"] == 4
    assert [of_class["ranks"] for of_class in found["classes"]] == ["0, 3", "1, 4", "2, 5"]
    assert len(found["memory_bytes"]) == 3
    groups = {(each["group"], tuple(each["rows"])): each for each in found["averaging"]}
    assert groups["all", (0, 1, 2)]["ranks"] == 6
    assert groups["model", (1, 2)]["ranks"] == 2
    assert set(groups) == {("all", (0, 1, 2)), ("model", (0,)), ("model", (1, 2))}


def test_the_schedule_of_every_group_is_printed() -> None:
    result = run("schedule", VGG, "grid.rows=2", "grid.cols=3", "batch=64", *MIXED, *IMAGENET)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert "group all, r = 0, 1: 14,714,688 elements, 6 ranks" in lines
    assert "group model, r = 0, 1: 61,821,428 elements, 3 ranks" in lines
    for word in ("reduce-scatter", "all-to-all of inputs", "window", "hash "):
        assert word in result.output


def test_the_schedules_json_has_the_same_hash() -> None:
    arguments = ("schedule", VGG, "--ranks", "5", *IMAGENET)
    (group,) = json.loads(run(*arguments, "--json").output)
    assert f"hash {group['hash']}" in run(*arguments).output.splitlines()
    assert group["schedule"]["ranks"] == group["ranks"] == 5


def test_owners_are_ranks_in_their_own_order_on_nodes_of_several() -> None:
    averager = "averager={name: sharded, bucket_bytes: 40, fc_exchange: never}"
    small = ("model={name: small, channels: [3, 4], hidden: 9}", "--image", "9", "8", "1", "--classes", "10")
    arguments = ("schedule", VGG, averager, *small, "--ranks", "4")
    last = run(*arguments).output.rstrip().splitlines()[-1]  # the last layer's bias
    assert last.endswith("  3 of 0-1; 2 of 2-3")
    nodes = ("--ranks-per-node", "2")
    assert run(*arguments, *nodes).output.rstrip().splitlines()[-1].endswith("  3 of 0, 2; 2 of 1, 3")
    (group,) = json.loads(run(*arguments, *nodes, "--json").output)
    assert group["order"] == "0, 2, 1, 3"
    assert [each["order"] for each in shown(*arguments[1:], *nodes)["averaging"]] == [group["order"]]
    sizes = [each["stop"] - each["start"] for each in group["schedule"]["slices"]]
    exchanged = by_rank(group["classes"], [each["exchanged_elements"] for each in group["classes"]])
    for place, rank in enumerate(ranks_of(group["order"])):
        assert exchanged[rank] == sum(2 * (size - (size + 3 - place) // 4) for size in sizes)


def outcome(*overrides: str) -> PlannedSearch:
    """Two choices with long plans, for a machine that is too small for them."""
    uses = {f"stage{number}.*": "domain" for number in range(1, 9)}
    candidates = (
        Candidate(ParallelPlan(2, 2, "batch", uses), AveragerChoice("sharded", {"fc_exchange": "never"})),
        Candidate(ParallelPlan(1, 4)),
    )
    choices = [
        SearchChoice(candidate, predictions.prediction(12.5 + number, 0.25, memory_bytes=2 * 10**12), fits=not number)
        for number, candidate in enumerate(candidates)
    ]
    asked = task(*overrides)
    return PlannedSearch(asked, on_any_grid(asked), SearchResult(tuple(choices), 7), "3.1 times as fast")


def test_all_lines_fit_but_the_command(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpctrain.cli.simulation_tables._COLUMNS", 80)
    command = "mpiexec " + "x" * 200
    print_search(outcome(), 5, command)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"  {command}"
    assert max(map(len, lines[:-1])) <= 80
    assert lines[0].startswith("Simulated: small on 4 ranks")
    assert lines.count("   It does not fit in the memory of a rank.") == 1
    assert "Choice 1: 3.1 times as fast." in lines
    assert not any(line.startswith("Batch norm") for line in lines)  # its statistics are synchronised
    assert any("A rank needs up to 2 TB" in line for line in lines)


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
def test_no_number_is_cut_on_a_narrow_terminal(columns: int) -> None:
    points = [SimulatedPoint("sharded", 8192, 8192, (1, 8192), predictions.prediction(99.0, 98.0, memory_bytes=10**12))]
    out = io.StringIO()
    print_whole(Console(file=out, width=columns), scaling_table(points))
    assert out.getvalue().splitlines()[1].split() == ["8,192", "99,000", "98,000", "100.0%", "82.7", "1,000,000"]


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


def test_a_row_of_csv_for_each_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Names with commas must not break rows, and pictures without a prediction must have a row."""
    assert write_predictions(_predictions(), path=tmp_path / "found.csv", visible=True) == [ODD]
    first, *_, last = csv.DictReader((tmp_path / "found.csv").read_text().splitlines())
    names = {"image": str(LONG), "class": NAMES[1], "class_2": NAMES[2]}
    assert first == names | {"probability": "0.75", "probability_2": "0.25", "error": ""}
    assert last["image"] == "odd-\ufffd.png"
    assert (last["class"], last["error"]) == ("", "The image cannot be decoded: it is cut off.")
    assert capsys.readouterr().out == f"runs/a/checkpoints/checkpoint-00000001.h5: 4 images in {tmp_path / 'found.csv'}\n"


@pytest.mark.parametrize("show", [print_lines, print_table])
def test_a_rank_that_prints_nothing_consumes_all_predictions(capsys: pytest.CaptureFixture[str], show) -> None:
    predictions = _predictions()
    assert show(predictions, visible=False) == [ODD]
    assert list(predictions.answers) == []
    assert capsys.readouterr().out == ""


CLASS_NAMES = ("T-shirt/top", "a class, whose name is far too long to stand in one line", "bag")

COUNTS = ((5, 0, 1), (30_000, 1, 4), (0, 0, 0))


def _evaluation(counts=COUNTS, names: tuple[str, ...] = CLASS_NAMES, *, loss: float = 2.5) -> Evaluation:
    """counts: may have a last column of samples whose outputs are not finite."""
    array = np.array(counts)
    labels, predictions = np.nonzero(array)
    matrix = ConfusionMatrix(len(array), labels, predictions, array[labels, predictions])
    sums = RunningSums(loss * array.sum(), int(np.trace(array)), int(array.sum()), int(array.sum()))
    return Evaluation(Path("runs/a/checkpoint.h5"), "validation", ("a note",), sums, names, False, False, matrix)


def test_text_has_the_worst_class_first_and_the_matrix_where_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    print_text(_evaluation(), per_class=True, confusion=True)
    lines = capsys.readouterr().out.splitlines()
    means = "loss 2.5000, top1 0.02%, top5 100.00%"
    assert lines[:3] == ["a note", "evaluated on the validation set", f"runs/a/checkpoint.h5: 30,011 samples, {means}"]
    assert all(len(line) <= 80 for line in lines)
    text = [line.split() for line in lines]
    assert ["class", "most", "often", "taken", "for", "times", "samples", "top1"] in text
    starts = [lines.index(next(line for line in lines if line.startswith(name))) for name in ("a class", "T-shirt", "bag")]
    assert starts == sorted(starts)
    assert text[starts[0]][-3:] == ["30,000", "30,005", "0.00%"]
    assert text[starts[2]] == ["bag", "-", "-", "0", "-"]
    assert ["class", "0", "1", "2"] in text
    assert ["T-shirt/top", "0", "5", "0", "1"] in text


def test_where_the_matrix_does_not_fit_the_most_frequent_mistakes_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    counts = np.zeros((100, 101), np.int64)
    counts[np.arange(100), np.arange(100)] = 9
    counts[70, 3], counts[4, 100] = 8, 5
    print_text(_evaluation(counts, tuple(f"class {n}" for n in range(100))), per_class=False, confusion=True)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[4:]]
    assert lines == [
        ["class", "taken", "for", "times"],
        ["class", "70", "class", "3", "8"],
        ["class", "4", "(not", "finite)", "5"],
    ]


def test_json_has_all_of_an_evaluation(capsys: pytest.CaptureFixture[str]) -> None:
    print_json(_evaluation([[*line, 2] for line in COUNTS]), per_class=False, confusion=True)
    assert json.loads(capsys.readouterr().out)["confusion"]["no_class"] == [2, 2, 2]
    print_json(_evaluation(loss=float("nan")), per_class=True, confusion=True)
    content = json.loads(capsys.readouterr().out)
    assert (content["loss"], content["samples"], content["hits1"], content["notes"]) == (None, 30_011, 6, ["a note"])
    assert content["classes"][0] == {
        "class": CLASS_NAMES[1],
        "label": 1,
        "samples": 30_005,
        "hits": 1,
        "top1": 1 / 30_005,
        "predictions": 1,
        "most_often_taken_for": {"class": CLASS_NAMES[0], "label": 0, "times": 30_000},
    }
    assert content["classes"][2]["top1"] is None
    assert content["confusion"] == {
        "class_names": list(CLASS_NAMES),
        "matrix": [list(line) for line in COUNTS],
        "no_class": [0, 0, 0],
    }
    print_json(_evaluation(), per_class=False, confusion=False)
    assert not {"classes", "confusion"} & json.loads(capsys.readouterr().out).keys()
