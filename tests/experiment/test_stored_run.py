"""A run is found by its directory, and described by its own configuration without what concerned its own ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hpctrain.config.load import parse
from hpctrain.config.schema import Config
from hpctrain.errors import CheckpointError, ConfigError
from hpctrain.experiment.stored_run import FRESH, find_run
from hpctrain.storage import best_record, checkpoint
from hpctrain.storage.best_record import BestRecord
from hpctrain.storage.checkpoint import CheckpointContent
from tests.support.unmarked_run import make_unmarked

CONFIG = """
name: {name}
model: {model}
data: {{train: train.h5}}
batch: 8
epochs: 1
optimizer: {{name: sgd, lr: 0.1}}
schedule: constant
threads: 3
grid: {{rows: 2, cols: 4}}
plan: {{default: model}}
averager: {{name: priority}}
deadline_seconds: 17
"""
OLD, NEW = "first-20260101-120000", "second-20260301-120000"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two runs of unlike names, of which the older one has a best checkpoint, and a newer one without any checkpoint."""
    for name, step in ((OLD, 4), (NEW, 9), ("third-20260401-120000", None)):
        directory = tmp_path / "runs" / name
        text = CONFIG.format(name=name.partition("-")[0], model="small")
        make_unmarked(directory, text)
        if step is not None:
            content = CheckpointContent({"parameters/w": np.ones(2)}, {"config": text.replace("small", "alexnet")})
            checkpoint.write(checkpoint.checkpoint_path(directory / "checkpoints", step), content)
    best_record.write(tmp_path / "runs" / OLD / "checkpoints", BestRecord("checkpoint-00000004.h5", 4, 1, "top1", 0.5))
    return tmp_path / "runs"


def test_auto_is_the_newest_run_with_a_checkpoint_whatever_its_name(runs: Path) -> None:
    found = find_run("auto", runs)
    assert found.source == str(runs / NEW)
    assert found.parsed(())[0].name == "second"


def test_best_is_of_the_newest_run_that_has_one(runs: Path) -> None:
    found = find_run("best", runs)
    assert found.source == str(runs / OLD / "checkpoints" / "checkpoint-00000004.h5")
    assert found.parsed(())[0].name == "first"


def test_a_path_is_a_run_or_a_checkpoint_which_says_what_it_was_written_with(runs: Path, tmp_path: Path) -> None:
    assert find_run(str(runs / OLD), Path("nowhere")).parsed(())[0].model.name == "small"
    alone = tmp_path / "copied.h5"
    (runs / OLD / "checkpoints" / "checkpoint-00000004.h5").rename(alone)
    found = find_run(str(alone), Path("nowhere"))
    assert (found.source, found.parsed(())[0].model.name) == (str(alone), "alexnet")


def test_the_ranks_of_the_training_do_not_count_unless_they_are_asked_for(runs: Path) -> None:
    config, _ = find_run("auto", runs).parsed(())
    plain = Config.model_construct()
    for section in ("grid", "plan", "threads", "micro_batches", "machine"):
        assert getattr(config, section) == getattr(plain, section), section
    assert config.averager.name == "sharded"
    assert config.deadline_seconds == 17
    config, _ = find_run("auto", runs).parsed(("grid.rows=3", "threads=1"))
    assert (config.grid.rows, config.grid.cols, config.threads) == (3, None, 1)


def test_what_begins_afresh_is_the_default_of_every_key() -> None:
    text = CONFIG.format(name="a", model="small")
    kept = "\n".join(line for line in text.splitlines() if not line.startswith(("threads", "grid", "plan", "averager")))
    assert parse(text, "a.yaml", FRESH)[0] == parse(kept, "a.yaml", ("flight=none",))[0]


@pytest.mark.parametrize("model", ["mine.py:Net", "package.module:Net"])
def test_code_that_a_run_alone_names_is_not_imported(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "runs" / NEW
    (tmp_path / "mine.py").write_text("raise SystemExit('imported')")
    make_unmarked(directory, CONFIG.format(name="second", model=f'"{model}"'))
    with pytest.raises(
        ConfigError, match=f'names code, "{model}", which is imported only where you name it yourself; give --config'
    ):
        find_run(str(directory), tmp_path).parsed(())


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("auto", r"No run in \S*empty has a checkpoint; train one first"),
        ("best", r"No run in \S*empty has a best checkpoint"),
        ("nowhere", "nowhere is no run directory: it has no config.yaml"),
        ("nowhere.shards", "nowhere.shards"),
    ],
)
def test_there_is_nothing(tmp_path: Path, source: str, words: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=words):
        find_run(source, tmp_path / "empty")


def test_a_checkpoint_of_another_program_does_not_say_its_model(tmp_path: Path) -> None:
    checkpoint.write(tmp_path / "own.h5", CheckpointContent({"parameters/w": np.ones(2)}, {"notes": {}}))
    with pytest.raises(CheckpointError, match=r"own\.h5 was written by a program with a loop of its own"):
        find_run(str(tmp_path / "own.h5"), tmp_path)
