"""`grid: auto`, `plan: auto`, `averager: auto` as users run them: started, resumed, refused, and held to account."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.data import format as data_format
from hpctrain.planner import machine_file
from hpctrain.storage import checkpoint
from hpctrain.storage.run_directory import RunDirectory, runs
from tests.support import planned
from tests.support.jobs import Outcome

Job = Callable[..., Outcome]

CONFIG = """
name: tiny
seed: 7
backend: numpy
progress: test
model: {{name: small, channels: [4, 6], hidden: 9}}
data: {{train: {folder}/train.h5}}
batch: 8
epochs: 3
optimizer: {{name: sgd, lr: 0.05, momentum: 0.9}}
schedule: constant
batch_norm: {{statistics: synchronised}}
grid: auto
plan: auto
averager: auto
machine: {folder}/machine.yaml
deadline_seconds: 60
output: {folder}/runs
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A configuration, a machine and 64 small images: 8 steps per epoch."""
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (64, 9, 8, 1), dtype=np.uint8)
    data_format.write(tmp_path / "train.h5", 64, (9, 8, 1), ["a", "b", "c"], [(images, random.integers(0, 3, 64))])
    machine_file.write(tmp_path / "machine.yaml", planned.machine())
    (tmp_path / "tiny.yaml").write_text(CONFIG.format(folder=tmp_path))
    return tmp_path


def _train(job: Job, ranks: int, folder: Path, *more: str) -> Outcome:
    return job(ranks, ["-m", "hpctrain", "train", "tiny.yaml", *more], cwd=folder, env={"XDG_CACHE_HOME": str(folder / "cache")})


def _trains(job: Job, ranks: int, folder: Path, *more: str) -> Outcome:
    outcome = _train(job, ranks, folder, *more)
    assert outcome.code == 0, outcome.output
    return outcome


def _run(folder: Path, output: str = "runs") -> RunDirectory:
    return next(iter(runs(folder / output, "tiny")))


def _tensors(folder: Path, output: str) -> dict[str, np.ndarray]:
    newest = checkpoint.read_newest(_run(folder, output).checkpoints)
    assert newest is not None
    return dict(newest[1].tensors)


def _choice(folder: Path) -> dict[str, Any]:
    choice: dict[str, Any] = json.loads(_run(folder).choice_path.read_text())
    return choice


@pytest.mark.slow
def test_a_run_chooses_says_so_keeps_it_and_is_held_to_account(job: Job, folder: Path) -> None:
    outcome = _trains(job, 2, folder)
    (line,) = [line for line in outcome.stdout.splitlines() if line.startswith("grid, plan, averager auto: ")]
    choice = _choice(folder)
    assert f"predicted {choice['prediction']['seconds']:.3g} s a step" in line
    assert choice["ranks"] == 2
    config = _run(folder).config()
    others = ("progress", "backend", "threads", "layout", "memory", "fill", "local_limit", "transport")  # which nobody predicts
    assert not [line for line in config.splitlines() if line.endswith(": auto") and line.split(":")[0].strip() not in others]
    newest = checkpoint.read_newest(_run(folder).checkpoints)
    assert newest is not None
    assert newest[1].meta["choice"] == choice
    (record,) = [line for line in _run(folder).metrics() if line["kind"] == "steps"]
    assert record["predicted_step_seconds"] == choice["prediction"]["seconds"]
    assert record["machine"] == planned.machine().name
    assert outcome.stdout.count("predicted ") == 2
    assert "a step, measured" in outcome.stdout
    # On as many ranks the choice stays, whatever the machine is now.
    (folder / "machine.yaml").write_text("nodes: -1")
    again = _trains(job, 2, folder, "--resume", "auto", "epochs=4")
    assert "; kept from " in again.stdout
    assert _choice(folder) == choice
    assert " -> " not in again.stdout.replace("epochs: 3 -> 4", "")


@pytest.mark.slow
def test_a_resumed_run_is_the_same_to_the_bit(job: Job, folder: Path) -> None:
    _trains(job, 2, folder, "output=whole", "--steps", "6")
    _trains(job, 2, folder, "output=parts", "--steps", "3")
    _trains(job, 2, folder, "output=parts", "--steps", "3", "--resume", "auto")
    whole, parts = _tensors(folder, "whole"), _tensors(folder, "parts")
    assert whole.keys() == parts.keys()
    assert all(np.array_equal(tensor, parts[key]) for key, tensor in whole.items())


@pytest.mark.slow
def test_on_other_ranks_a_resume_chooses_again_and_says_so(job: Job, folder: Path) -> None:
    _trains(job, 2, folder, "--steps", "2")
    outcome = _trains(job, 3, folder, "--steps", "2", "--resume", "auto")
    assert "3 ranks instead of 2: grid and plan and averager chosen again\n" in outcome.stdout
    assert _choice(folder)["ranks"] == 3
    evaluated = job(1, ["-m", "hpctrain", "eval", "tiny.yaml", f"data.test={folder}/train.h5"], cwd=folder)
    assert evaluated.code == 0, evaluated.output


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["machine=nowhere.yaml"], "There is no machine file 'nowhere.yaml'"),
        (["averager.window=3"], "averager is auto, which chooses options as well"),
        (["batch=2", "grid={rows: 1}"], "batch is 2, but 3 ranks"),
    ],
)
def test_what_cannot_be_chosen_is_said_in_one_sentence_on_every_number_of_ranks(
    job: Job, folder: Path, change: list[str], words: str
) -> None:
    outcome = _train(job, 3, folder, *change)
    assert outcome.code == 2, outcome.output
    (sentence,) = [line for line in outcome.stderr.splitlines() if line.startswith("hpctrain: ")]
    assert words in sentence


def test_a_job_that_fits_in_no_plan_tells_the_smallest_memory_that_would_do(job: Job, folder: Path) -> None:
    machine_file.write(folder / "machine.yaml", planned.machine(memory_bytes=1000))
    outcome = _train(job, 2, folder)
    assert outcome.code == 2, outcome.output
    (sentence,) = [line for line in outcome.stderr.splitlines() if line.startswith("hpctrain: ")]
    assert "fits in no plan on 2 ranks" in sentence
    assert "the least that would do is" in sentence


def test_a_choice_for_another_model_is_refused(job: Job, folder: Path) -> None:
    _trains(job, 2, folder, "--steps", "1")
    outcome = _train(job, 2, folder, "--resume", "auto", "model.hidden=8")
    assert outcome.code == 2, outcome.output
    (sentence,) = [line for line in outcome.stderr.splitlines() if line.startswith("hpctrain: ")]
    assert "no longer matches the model" in sentence


@pytest.mark.slow
def test_without_a_machine_the_ranks_measure_it_and_the_run_keeps_it(job: Job, folder: Path) -> None:
    outcome = _trains(job, 2, folder, "machine=null", "--steps", "1")
    assert "grid, plan, averager auto: " in outcome.stdout
    kept = machine_file.read(_run(folder).machine_path)
    assert (kept.nodes, kept.ranks_per_node) == (1, 2)
    assert any(source.startswith("measured on") for source in kept.sources.values())


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["machine.yaml", "null"])
def test_a_run_that_chose_nothing_is_held_to_account_as_well(job: Job, folder: Path, machine: str) -> None:
    named = ("grid={rows: 2}", "plan={default: domain}", "averager=bucketed")
    outcome = _trains(job, 2, folder, f"machine={machine}", *named)
    (record,) = [line for line in _run(folder).metrics() if line["kind"] == "steps"]
    assert record["predicted_step_seconds"] > record["predicted_exposed_seconds"] >= 0  # type: ignore[operator]
    assert record["measured_share"] > 0.2  # type: ignore[operator]
    assert "a step, measured" in outcome.stdout


def test_plans_are_shown_for_what_a_run_would_choose(job: Job, folder: Path) -> None:
    show = ["-m", "hpctrain", "plan", "show", "tiny.yaml"]
    outcome = job(0, [*show, "--ranks", "2", "--json"], cwd=folder)
    assert outcome.code == 0, outcome.output
    assert json.loads(outcome.stdout)
    for more, words in (([], "give --ranks"), (["--ranks", "2", "machine=null"], "give --machine")):
        refused = job(0, [*show, *more], cwd=folder)
        assert refused.code == 2
        assert words in refused.stderr
