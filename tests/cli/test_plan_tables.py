"""Plans and schedules as tables for people, and as data for programs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from hpctrain.cli import plan_tables
from hpctrain.cli.main import cli

CONFIGS = Path(__file__).parents[2] / "configs"

VGG = str(CONFIGS / "imagenet-vgg16.yaml")

RESNET = str(CONFIGS / "imagenet-resnet50.yaml")

MIXED = ("plan.features.*=domain", "plan.classifier.*=model")

IMAGENET = ("--image", "224", "224", "3", "--classes", "1000")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["plan", *arguments])


def shown(*arguments: str) -> dict[str, Any]:
    result = run("show", *arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.output)
    return found


def test_vgg16_on_a_grid_is_readable_in_100_columns() -> None:
    result = run("show", VGG, "grid.rows=2", "grid.cols=2", "batch=64", *MIXED, *IMAGENET)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert max(map(len, lines)) <= 100
    (row,) = [line for line in lines if line.startswith("features.2 ")]
    assert " ".join(row.split()) == "features.2 conv 3x3 domain rows 0:112 112:224 1 1 1,835,008 1,835,008 0.15 412.88"
    assert sum(line.startswith("  redistribute") for line in lines) == 5
    assert "  c = 1: 2 3   node 0" in lines


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


def test_json_has_every_rank_in_integers() -> None:
    found = shown(VGG, "grid.rows=3", "batch=64", *MIXED, *IMAGENET, "--ranks", "6", "--ranks-per-node", "4")
    layers = {entry["layer"]: entry for entry in found["entries"] if "layer" in entry}
    moves = [entry for entry in found["entries"] if "redistribution" in entry]
    assert layers["features.0"]["owns"][1] == {"samples": [0, 32], "rows": [75, 150], "columns": [0, 224], "channels": [0, 64]}
    assert layers["classifier.6"]["owns"][0] == {"samples": [0, 32], "channels": [0, 334]}
    assert layers["features.2"]["halo_rows"] == [1, 2, 1] * 2
    assert layers["classifier.0"]["parameter_bytes"] == [4 * (25088 + 1) * width for width in (1366, 1365, 1365)] * 2
    assert [(move["source"], move["target"]) for move in moves] == [
        ("rows", "samples"),
        ("samples", "everything"),
        ("channels", "everything"),
        ("channels", "everything"),
        ("channels", "samples"),
    ]
    for direction in ("bytes_forward", "bytes_backward"):
        assert found["total"][direction] == [sum(entry[direction][rank] for entry in found["entries"]) for rank in range(6)]
    assert [(place["r"], place["c"], place["node"]) for place in found["map"]] == [
        (0, 0, 0),
        (1, 0, 0),
        (2, 0, 0),
        (0, 1, 0),
        (1, 1, 1),
        (2, 1, 1),
    ]
    assert len(found["memory_bytes"]) == 6
    groups = {(each["group"], tuple(each["rows"])): each for each in found["averaging"]}
    assert groups["all", (0, 1, 2)]["ranks"] == 6
    assert groups["model", (1, 2)]["ranks"] == 2
    assert set(groups) == {("all", (0, 1, 2)), ("model", (0,)), ("model", (1, 2))}


def test_sentences_name_the_least_and_the_most() -> None:
    result = run("show", VGG, "grid.rows=3", "grid.cols=1", "batch=4", *MIXED, *IMAGENET)
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert re.search(r"Memory of a rank: [\d,.]+ to [\d,.]+ MB for a step's activations", text)
    assert re.search(r"Gradients in all: [\d,]+ to [\d,]+ bytes per rank and step\.", text)


@pytest.mark.parametrize("form", [("schedule",), ("--schedule",)])
def test_the_schedule_of_every_group_is_printed(form: tuple[str, ...]) -> None:
    result = run(*form, VGG, "grid.rows=2", "grid.cols=3", "batch=64", *MIXED, *IMAGENET)
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert "group all, r = 0, 1: 14,714,688 elements, 6 ranks" in lines
    assert "group model, r = 0, 1: 61,821,428 elements, 3 ranks" in lines
    for words in ("reduce-scatter", "all-to-all of inputs", "window", "hash "):
        assert words in result.output


def test_the_schedules_json_gives_the_same_hash() -> None:
    arguments = ("--schedule", VGG, "--ranks", "5", *IMAGENET)
    (group,) = json.loads(run(*arguments, "--json").output)
    assert f"hash {group['hash']}" in run(*arguments).output.splitlines()
    assert group["schedule"]["ranks"] == group["ranks"] == 5


def test_owners_are_ranks_in_their_own_order_on_nodes_of_several() -> None:
    averager = "averager={name: sharded, bucket_bytes: 40, fc_exchange: never}"
    small = ("model={name: small, channels: [3, 4], hidden: 9}", "--image", "9", "8", "1", "--classes", "10")
    arguments = ("--schedule", VGG, averager, *small, "--ranks", "4")
    last = run(*arguments).output.rstrip().splitlines()[-1]  # the last layer's bias
    assert last.endswith("  2 x 3, 2 x 2")
    nodes = ("--ranks-per-node", "2")
    assert run(*arguments, *nodes).output.rstrip().splitlines()[-1].endswith("  3, 2, 3, 2")
    (group,) = json.loads(run(*arguments, *nodes, "--json").output)
    assert group["order"] == [0, 2, 1, 3]
    assert [each["order"] for each in shown(*arguments[1:], *nodes)["averaging"]] == [group["order"]]
    sizes = [each["stop"] - each["start"] for each in group["schedule"]["slices"]]
    for place, rank in enumerate(group["order"]):
        assert group["exchanged_elements"][rank] == sum(2 * (size - (size + 3 - place) // 4) for size in sizes)


def test_data_are_written_as_a_line_for_each_object() -> None:
    box, other = {"rows": [0, 2]}, {"rows": [2, 4]}
    values = {
        "name": 'a "b"',
        "entries": [{"layer": "fc", "owns": [box, other, box], "words": [1, 2]}, {"owns": []}],
        "none": None,
        "map": [box, box],
        "empty": [],
    }
    lines = list(plan_tables.json_lines(values))
    assert json.loads("\n".join(lines)) == values
    assert len(lines) == 2 + 3 + 2 * 4


def test_a_plan_has_a_line_for_each_layer_and_each_rank() -> None:
    result = run("show", RESNET, "batch=32", *IMAGENET, "--ranks", "32", "--json")
    assert result.exit_code == 0, result.output
    plan = json.loads(result.output)
    assert [len(entry["activation_bytes"]) for entry in plan["entries"]] == [32] * len(plan["entries"])
    assert len(result.output.splitlines()) < len(plan["entries"]) + 3 * 32


def test_bytes_of_an_averager_that_leaves_layers_out_are_said_to_differ() -> None:
    quickstart = (str(CONFIGS / "quickstart.yaml"), "batch=8", "backend=numpy", "--image", "28", "28", "1", "--classes", "10")
    sentence = "this is one that averages all layers"
    assert sentence in run("show", *quickstart, "--ranks", "2", "averager=lazy").output
    assert sentence not in run("show", *quickstart, "--ranks", "2").output
