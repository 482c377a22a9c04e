"""`trace: true`, `--compute-only`, `progress`, `calibrate` and `bench` as users run them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from hpctrain.backend.onednn.kernel_set import available
from hpctrain.bench import data as measurement
from hpctrain.bench.data import AUGMENT, NORMALISE, READ, WHOLE, DataRates, StageRate
from hpctrain.cli.bench import RankCounts, rates_table
from hpctrain.cli.main import cli
from hpctrain.runs.directory import RunDirectory
from hpctrain.storage import checkpoint
from hpctrain_testing.run import Outcome
from tests.support.here import run_here
from tests.support.tiny_runs import Start, hpctrain, newest_run, prepare, tiny

pytestmark = pytest.mark.slow

CONFIG = tiny("data: {train: FOLDER/train.h5}, batch: 12, epochs: 3, averager: blocking, batch_norm: {statistics: synchronised}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A configuration and 64 small images: 6 steps per epoch, the last of 4."""
    return prepare(tmp_path, CONFIG, 64, 0)


def _train(ranks: int, folder: Path, *more: str, start: Start = run_here) -> tuple[Outcome, RunDirectory]:
    return hpctrain(ranks, folder, "train", *more, start=start), newest_run(folder)


def test_a_run_of_several_ranks_ends_with_an_account_of_its_steps(job: Start, folder: Path) -> None:
    outcome, run = _train(2, folder, "epochs=5", "checkpoint.asynchronous=false", start=job)
    (record,) = [line for line in run.metrics() if line["kind"] == "steps"]
    assert (record["step"], record["steps"]) == (30, 19)
    seconds, exposed = record["measured_step_seconds"], record["measured_exposed_seconds"]
    assert isinstance(seconds, float)
    assert isinstance(exposed, float)
    assert seconds > exposed > 0
    names = ("work", "messages", "exposed", "data", "core")
    parts = {name: float(str(record[f"measured_{name}_seconds"])) for name in names}
    assert sum(parts.values()) == pytest.approx(seconds)
    assert 0 < parts["messages"] < seconds
    whole = outcome.stdout.replace("\n  ", " ")
    for text in (": compute and Python", ", posting and progress", ", communication not hidden"):
        assert text in whole.partition("step time ")[2]
    assert "predict" not in outcome.stdout
    assert not [name for name in record if "predict" in name or name == "machine"]


@pytest.mark.parametrize("ranks", [0, 3])
def test_a_traced_run_prints_and_keeps_where_its_time_went(folder: Path, ranks: int) -> None:
    outcome, run = _train(ranks, folder, "trace=true")
    assert "layer" in outcome.stdout
    assert "% of it left over" in outcome.stdout
    assert "their clocks agree to within" in outcome.stdout
    trace = json.loads((run.path / "trace.json").read_text())
    assert {event["pid"] for event in trace["traceEvents"]} == set(range(max(1, ranks)))
    content = json.loads((run.path / "time_table.json").read_text())
    table = content["table"]
    assert table["steps"] == 3 * 6 - 1
    spent = sum(row["compute_seconds"] + row["messages_seconds"] + row["exposed_seconds"] for row in table["rows"])
    assert spent + table["left_over_seconds"] == pytest.approx(table["step_seconds"])
    assert {"checkpoint", "bookkeeping", "loss"} & {row["name"] for row in table["rows"]} >= {"bookkeeping", "loss"}
    assert content["averager"] == "blocking"
    # Pages explain every row: layers are those of the table, and others have their names in docs/time.md.
    page = (Path(__file__).parents[2] / "docs" / "time.md").read_text().partition("### The rows")[2].partition("###")[0]
    for name in (row["name"] for row in table["rows"] if row["kind"] != "layer"):
        assert f"`{name}`" in page or f"`{name.partition(' of ')[0]} of " in page, name


@pytest.mark.parametrize(
    ("mode", "lines"), [("test", []), ("none", ["progress none: messages move by themselves while layers compute"])]
)
def test_the_progress_mode_is_recorded_and_reported_unless_it_is_the_default(folder: Path, mode: str, lines: list[str]) -> None:
    outcome, run = _train(2, folder, f"progress={mode}", "--steps", "1")
    assert next(line for line in run.metrics() if line["kind"] == "progress")["mode"] == mode
    assert [line for line in outcome.stdout.splitlines() if line.startswith("progress")] == lines


@pytest.mark.parametrize("ranks", [0, 3])
def test_compute_only_exchanges_nothing_and_keeps_nothing(folder: Path, ranks: int) -> None:
    outcome, run = _train(ranks, folder, "--compute-only", "--steps", "8")
    assert "compute-only step" in outcome.stdout
    found = json.loads((run.path / "compute_only.json").read_text())
    count = max(1, ranks)
    assert found["ranks"] == count
    assert found["steps"] == 7
    assert len(found["per_rank_seconds"]) == count
    assert found["compute_only_seconds"] == max(found["per_rank_seconds"]) > 0
    assert found["limit_seconds"] >= found["compute_only_seconds"]
    assert found["exchange"]["payload_bytes"] > 0
    assert ("gradients alone" in outcome.stdout) == (count > 1)
    assert checkpoint.checkpoints(run.checkpoints) == []
    table = json.loads((run.path / "time_table.json").read_text())["table"]
    late = [row["late"] for row in table["rows"] if row["late"] is not None]
    assert late == []  # nothing that several ranks posted


def test_compute_only_is_not_resumed(folder: Path) -> None:
    assert "leave --resume out" in hpctrain(0, folder, "train", "--compute-only", "--resume", "auto", code=2).stderr


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", ["weak", "strong"])
def test_scaling_reports_each_number_of_ranks(job: Start, folder: Path, mode: str) -> None:
    arguments = ["-m", "hpctrain", "bench", "scaling", "--config", str(folder / "tiny.yaml"), "--ranks", "2,1"]
    outcome = job(0, [*arguments, "--mode", mode, "--steps", "5", "--out", "out.json", "batch=6"], cwd=folder)
    assert outcome.code == 0, outcome.output
    content = json.loads((folder / "out.json").read_text())
    assert content["mode"] == mode
    points = content["points"]
    assert [point["ranks"] for point in points] == [1, 2]
    assert [point["batch"] for point in points] == ([6, 12] if mode == "weak" else [6, 6])
    for point in points:
        assert min(point["step_seconds"], point["compute_only_seconds"], point["limit_seconds"]) > 0
        assert (point["efficiency"] is None) == (point["oversubscribed"] or points[0]["oversubscribed"])
    assert points[0]["exposed_seconds"] == pytest.approx(0.0, abs=1e-4)
    assert sorted(path.name for path in folder.iterdir() if path.name.startswith("hpctrain-scaling")) == []
    assert f"{mode} efficiency" in outcome.stdout


def test_a_failing_job_is_one_sentence_with_its_end(job: Start, folder: Path) -> None:
    arguments = ["-m", "hpctrain", "bench", "scaling", "--config", str(folder / "tiny.yaml"), "--ranks", "1"]
    outcome = job(0, [*arguments, "--steps", "3", "data.train=nowhere.h5"], cwd=folder)
    assert outcome.code == 2
    assert "ended with exit code" in outcome.stderr
    assert "nowhere.h5" in outcome.stderr
    assert "Traceback" not in outcome.output


QUICKSTART = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")

FEW = ["data=synthetic", "data.synthetic.samples=40", "batch=8", "data.augment=[flip]", "--threads", "1,2"]


def _rates(*threads: int) -> DataRates:
    stages = [StageRate(READ, 1, 1234567.0, 0.0)]
    stages += [StageRate(stage, count, 1000.0 * count, 0.0) for stage in (AUGMENT, NORMALISE, WHOLE) for count in threads]
    return DataRates(64, (256, 256, 3), True, tuple(stages), "resnet50", None, 1)


def test_numbers_of_threads_that_find_no_room_stand_below() -> None:
    lines = rates_table(_rates(1, 2, 4, 8, 16, 32, 128))
    assert max(map(len, lines)) <= 80
    assert lines[:3] == [
        "images/s, in batches of 64 images of 256 x 256 x 3",
        "stage               1 thread   2 threads   4 threads   8 threads  16 threads",
        "read, decode       1,234,567   1,234,567   1,234,567   1,234,567   1,234,567",
    ]
    assert lines[6:8] == ["stage             32 threads 128 threads", "read, decode       1,234,567   1,234,567"]
    assert len(lines) == 11


def test_figures_are_printed_and_are_json_where_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurement, "_LEAST_SECONDS", 1e-4)
    words = ["bench", "data", QUICKSTART, *FEW]
    lines = CliRunner().invoke(cli, words, catch_exceptions=False).output.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split("  ")[0] for line in lines[1:6]] == ["stage", "read", "augment", "normalise", "whole batches"]
    content = json.loads(CliRunner().invoke(cli, [*words, "--json"], catch_exceptions=False).output)
    assert (content["images"], content["model"], len(content["stages"])) == (8, "small", 7)
    assert content["needed"] > 0
    assert len(content["sentences"]) == 2
    content = json.loads(CliRunner().invoke(cli, [*words, "--no-step", "--json"], catch_exceptions=False).output)
    assert content["needed"] is None
    assert [sentence.split(":")[0].endswith("takes longest") for sentence in content["sentences"]] == [True, True]


def _measured(tmp_path: Path, *arguments: str, start: Start = run_here) -> tuple[dict[str, Any], str]:
    words = ["--model", "small", "--batch", "3", "--px", "29", "--steps", "2", "--out", "engine.json", *arguments]
    done = start(0, ["-m", "hpctrain", "bench", "engine", *words], cwd=tmp_path)
    assert done.code == 0, done.stderr
    return json.loads((tmp_path / "engine.json").read_text()), done.stdout


@pytest.mark.parametrize("backend", ["numpy", "onednn"])
def test_the_engine_reports_every_operator(tmp_path: Path, backend: str, job: Start) -> None:
    if backend == "onednn" and available() is not None:
        pytest.skip(str(available()))
    start = run_here if backend == "numpy" else job
    found, printed = _measured(tmp_path, "--backend", backend, "--threads", "1", start=start)
    assert (found["backend"], found["batch"], found["pixels"], found["threads"]) == (backend, 3, 29, 1)
    layers = {layer["name"]: layer for layer in found["layers"]}
    wanted = ["stage1.conv", "stage1.bn", "stage2.conv", "classifier.fc1", "classifier.fc2", "loss", "update"]
    assert [name for name in layers if name in wanted] == wanted
    assert all(name in printed for name in layers)
    assert (f"all {found['own_operators']} operators run on onednn" in printed) == (backend == "onednn")
    assert found["images_per_second"] == pytest.approx(3 / found["step_seconds"])
    assert found["peak_gflops"] > 0 < found["arena_bytes"] < found["peak_bytes"]
    # Forward 2 N Ho Wo K R S C; backward as much for the weights and, after the first layer, for the input.
    first, second = 2 * 3 * 29 * 29 * 16 * 9, 2 * 3 * 14 * 14 * 32 * 9 * 16
    assert (layers["stage1.conv"]["forward_flops"], layers["stage1.conv"]["flops"]) == (first, 2 * first)
    assert (layers["stage2.conv"]["forward_flops"], layers["stage2.conv"]["flops"]) == (second, 3 * second)
    if backend == "onednn":  # whose reorders have an account of their own
        assert found["reorders"] > 0
        assert 0 < found["reorder_seconds"] < found["kernel_seconds"]
        assert f"in {found['reorders']} reorders" in printed
        assert "onednn_verbose" not in printed


def test_more_threads_than_a_rank_may_run_on_are_refused() -> None:
    done = run_here(0, ["-m", "hpctrain", "bench", "engine", "--model", "small", "--threads", "100000"])
    assert (done.code, "Traceback" in done.stderr) == (2, False)
    assert "threads is 100000, but a rank here may run on" in done.stderr


@pytest.mark.parametrize(("text", "counts"), [("1", (1,)), ("1,2,4", (1, 2, 4)), ("8, 4,4", (4, 8))])
def test_numbers_are_read_each_once_in_order(text: str, counts: tuple[int, ...]) -> None:
    assert RankCounts().convert(text, None, None) == counts


@pytest.mark.parametrize("text", ["", "0", "1,-2", "two", "1,,2", "1.5", "1,1000001"])
def test_what_is_no_number_of_ranks_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        RankCounts().convert(text, None, None)
