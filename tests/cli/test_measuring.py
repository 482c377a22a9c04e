"""`trace: true`, `--compute-only`, `progress` and `bench scaling` as users run them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.data import format as data_format
from hpctrain.storage import checkpoint
from hpctrain.storage.run_directory import RunDirectory, latest
from tests.support.jobs import Outcome

Job = Callable[..., Outcome]

CONFIG = """
name: tiny
seed: 7
backend: numpy
model: {{name: small, channels: [4, 6], hidden: 9}}
data: {{train: {folder}/train.h5}}
batch: 12
epochs: 3
optimizer: {{name: sgd, lr: 0.01, momentum: 0.9}}
schedule: constant
averager: blocking
batch_norm: {{statistics: synchronised}}
deadline_seconds: 30
output: {folder}/runs
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A configuration and 64 small images: 6 steps per epoch, the last of 4."""
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (64, 9, 8, 1), dtype=np.uint8)
    data_format.write(tmp_path / "train.h5", 64, (9, 8, 1), ["a", "b", "c"], [(images, random.integers(0, 3, 64))])
    (tmp_path / "tiny.yaml").write_text(CONFIG.format(folder=tmp_path))
    return tmp_path


def _train(job: Job, ranks: int, folder: Path, *more: str) -> tuple[Outcome, RunDirectory]:
    outcome = job(ranks, ["-m", "hpctrain", "train", str(folder / "tiny.yaml"), *more], cwd=folder)
    assert outcome.code == 0, outcome.output
    run = latest(folder / "runs", "tiny")
    assert run is not None
    return outcome, run


def test_a_run_of_several_ranks_ends_with_an_account_of_its_steps(job: Job, folder: Path) -> None:
    outcome, run = _train(job, 2, folder, "epochs=5", "checkpoint.asynchronous=false")
    (record,) = [line for line in run.metrics() if line["kind"] == "steps"]
    assert (record["step"], record["steps"]) == (30, 19)
    seconds, exposed = record["measured_step_seconds"], record["measured_exposed_seconds"]
    assert isinstance(seconds, float)
    assert isinstance(exposed, float)
    assert seconds > exposed > 0
    predicted = record["predicted_step_seconds"]
    assert isinstance(predicted, float)
    assert f"predicted {predicted:.3g} s a step, measured {seconds:.3g} (" in outcome.stdout
    messages = record["measured_messages_seconds"]
    assert isinstance(messages, float)
    assert 0 < messages < seconds
    whole = outcome.stdout.replace(";\n  ", "; ")
    assert f" against {exposed:.3g}; posting and progress took {messages:.2g} s\n" in whole


@pytest.mark.parametrize(("ranks", "epochs"), [(0, 5), (2, 3)])
def test_one_rank_and_a_short_run_have_no_account_of_their_steps(job: Job, folder: Path, ranks: int, epochs: int) -> None:
    outcome, run = _train(job, ranks, folder, f"epochs={epochs}")
    assert "measured" not in outcome.stdout
    assert "steps" not in [line["kind"] for line in run.metrics()]


@pytest.mark.parametrize("ranks", [0, 3])
def test_a_traced_run_prints_and_keeps_where_its_time_went(job: Job, folder: Path, ranks: int) -> None:
    outcome, run = _train(job, ranks, folder, "trace=true")
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


def test_tracing_changes_no_bit_of_the_result(job: Job, folder: Path) -> None:
    ends = []
    for more in ([], ["trace=true", "progress=thread"], ["trace=true", "progress=none"]):
        _, run = _train(job, 2, folder, *more)
        newest = checkpoint.read_newest(run.checkpoints)
        assert newest is not None
        ends.append(newest[1].tensors)
    for other in ends[1:]:
        for key, tensor in ends[0].items():
            assert np.array_equal(tensor, other[key]), key


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_way_of_progress_is_said_and_recorded(job: Job, folder: Path, ranks: int) -> None:
    """22 MB of gradients take a while; one rank has nobody to send them to."""
    hidden = 9 if ranks == 1 else 200_000
    outcome, run = _train(job, ranks, folder, f"model.hidden={hidden}", "--steps", "1", "checkpoint.every_epochs=0")
    chosen = next(line for line in run.metrics() if line["kind"] == "progress")
    assert chosen["mode"] in ("none", "test", "thread")
    lines = [line for line in outcome.stdout.splitlines() if line.startswith("progress")]
    if ranks == 1:
        assert chosen["mode"] == "test"
        assert lines == []
    else:
        together: Any = chosen["together_seconds"]
        assert set(together) == {"none", "test", "thread"}
        assert min(together.values()) > 0
        assert len(lines) == 1
        assert lines[0].startswith(f"progress {chosen['mode']}: ")
        assert "ms" not in lines[0]


def test_nothing_is_measured_or_said_where_there_is_nothing_to_hide(job: Job, folder: Path) -> None:
    outcome, run = _train(job, 2, folder, "--steps", "1")
    chosen = next(line for line in run.metrics() if line["kind"] == "progress")
    assert chosen["mode"] == "test"
    assert "there is nothing to hide" in str(chosen["reason"])
    assert "wire_seconds" not in chosen
    assert "progress" not in outcome.stdout


@pytest.mark.parametrize("ranks", [0, 3])
def test_compute_only_exchanges_nothing_and_keeps_nothing(job: Job, folder: Path, ranks: int) -> None:
    outcome, run = _train(job, ranks, folder, "--compute-only", "--steps", "8")
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


def test_compute_only_is_not_resumed(job: Job, folder: Path) -> None:
    outcome = job(0, ["-m", "hpctrain", "train", str(folder / "tiny.yaml"), "--compute-only", "--resume", "auto"], cwd=folder)
    assert outcome.code == 2
    assert "leave --resume out" in outcome.stderr


@pytest.mark.parametrize("mode", ["weak", "strong"])
def test_scaling_reports_each_number_of_ranks(job: Job, folder: Path, mode: str) -> None:
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


def test_a_failing_job_is_one_sentence_with_its_end(job: Job, folder: Path) -> None:
    arguments = ["-m", "hpctrain", "bench", "scaling", "--config", str(folder / "tiny.yaml"), "--ranks", "1"]
    outcome = job(0, [*arguments, "--steps", "3", "data.train=nowhere.h5"], cwd=folder)
    assert outcome.code == 2
    assert "ended with exit code" in outcome.stderr
    assert "nowhere.h5" in outcome.stderr
    assert "Traceback" not in outcome.output
