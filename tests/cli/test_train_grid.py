"""`hpctrain train` on grids: any plan trains as one process does, goes on on any other grid, and says what it cannot do."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hpctrain.data import format as data_format
from hpctrain.storage import checkpoint
from hpctrain.storage.run_directory import latest
from tests.support.jobs import Outcome

Job = Callable[..., Outcome]

CONFIG = """
name: tiny
seed: 7
backend: numpy
dtype: float64
model: {{name: small, channels: [4, 6], hidden: 9, dropout: 0.2}}
data:
  train: {folder}/train.h5
  test: {folder}/test.h5
  augment: [{{name: pad_crop, padding: 1}}, {{name: flip}}]
batch: 16
epochs: 2
optimizer: {{name: sgd, lr: 0.05, momentum: 0.9, weight_decay: 1.0e-3}}
schedule: {{name: cosine, warmup_epochs: 0.5}}
batch_norm: {{statistics: synchronised}}
checkpoint: {{keep: 9}}
progress: test
deadline_seconds: 30
output: {folder}/runs
"""

DOMAIN = ("plan.default=domain",)
MODEL = ("plan.default=model",)
CLIPPED = "optimizer.clip_norm=0.4"
MIXED = ("plan.stage1.*=domain", "plan.stage2.*=model", "plan.classifier.*=model", "plan.classifier.dropout2=batch")

#: number of ranks and overrides; 9 x 8 images leave some of 4 ranks with one row in stage 2
GRIDS = {
    "domain 2x1": (2, ("grid={rows: 2, overlap: ['*.conv']}", *DOMAIN)),
    "model 3x1": (3, ("grid.rows=3", *MODEL)),
    "tiles 4x1": (4, ("grid={rows: 4, tiles: [2, 2]}", *DOMAIN)),
    "mixed 2x2": (4, ("grid.rows=2", *MIXED)),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A configuration and two small data files: 75 images to train on (the last batch has 11), 21 to test on."""
    return _prepared(tmp_path)


@pytest.fixture(scope="module")
def stopped(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Such a folder with a whole run of one process in `alone`, and in `runs` 7 steps on a grid, both clipped."""
    folder = _prepared(tmp_path_factory.mktemp("stopped"))
    _train(job, 0, folder, CLIPPED, f"output={folder}/alone")
    _train(job, 4, folder, "grid.rows=2", *MIXED, CLIPPED, "--steps", "7")
    return folder


def _prepared(folder: Path) -> Path:
    random = np.random.default_rng(0)
    for name, count in (("train", 75), ("test", 21)):
        images = random.integers(0, 256, (count, 9, 8, 1), dtype=np.uint8)
        labels = random.integers(0, 3, count)
        data_format.write(folder / f"{name}.h5", count, (9, 8, 1), ["a", "b", "c"], [(images, labels)])
    (folder / "tiny.yaml").write_text(CONFIG.format(folder=folder))
    return folder


def _train(job: Job, ranks: int, folder: Path, *more: str) -> Outcome:
    outcome = job(ranks, ["-m", "hpctrain", "train", str(folder / "tiny.yaml"), *more], cwd=folder)
    assert outcome.code == 0, outcome.output
    return outcome


def _last(folder: Path, output: str = "runs") -> checkpoint.CheckpointContent:
    run = latest(folder / output, "tiny")
    assert run is not None
    newest = checkpoint.read_newest(run.checkpoints)
    assert newest is not None
    return newest[1]


def _assert_close(ours: checkpoint.CheckpointContent, theirs: checkpoint.CheckpointContent) -> None:
    assert ours.meta["position"]["global_step"] == theirs.meta["position"]["global_step"]  # type: ignore[index]
    assert ours.tensors.keys() == theirs.tensors.keys()
    for key, tensor in ours.tensors.items():
        np.testing.assert_allclose(tensor, theirs.tensors[key], rtol=1e-10, atol=1e-13, err_msg=key)


def _assert_same(ours: checkpoint.CheckpointContent, theirs: checkpoint.CheckpointContent) -> None:
    assert ours.meta["position"] == theirs.meta["position"]
    assert ours.tensors.keys() == theirs.tensors.keys()
    for key, tensor in ours.tensors.items():
        assert np.array_equal(tensor, theirs.tensors[key]), key


def _accuracy(outcome: Outcome) -> str:
    return outcome.stdout.split("test accuracy ")[1].split("\n")[0]


def test_every_plan_trains_as_one_process(job: Job, folder: Path) -> None:
    clipped = (CLIPPED, "epochs=1")
    alone = _train(job, 0, folder, *clipped, f"output={folder}/alone")
    for name, (ranks, options) in GRIDS.items():
        output = name.replace(" ", "-")
        found = _train(job, ranks, folder, *options, *clipped, f"output={folder}/{output}")
        _assert_close(_last(folder, output), _last(folder, "alone"))
        assert _accuracy(found) == _accuracy(alone), name


def test_lars_scales_split_layers_by_their_whole_norms(job: Job, folder: Path) -> None:
    lars = ("optimizer={name: lars, lr: 0.5, trust_coefficient: 0.1}", "epochs=1", "averager=priority")
    _train(job, 0, folder, *lars, f"output={folder}/alone")
    _train(job, 4, folder, "grid.rows=2", *MIXED, *lars)
    _assert_close(_last(folder), _last(folder, "alone"))


def test_micro_batches_and_random_crops_on_a_grid(job: Job, folder: Path) -> None:
    # without batch norm, whose statistics would be those of other micro-batches
    options = ("model.batch_norm=false", "micro_batches=3", "data.augment=[{name: random_resized_crop, size: 9}]", "epochs=1")
    crop = ("data.evaluate_augment=[{name: random_resized_crop, size: 9, scale: [1, 1]}]",)
    _train(job, 0, folder, *options, *crop, f"output={folder}/alone")
    _train(job, 4, folder, "grid.rows=2", *MIXED, *options, *crop)
    _assert_close(_last(folder), _last(folder, "alone"))


@pytest.mark.parametrize(("batch", "rows"), [(1, 2), (3, 4)])
def test_a_batch_may_be_smaller_than_the_ranks(job: Job, folder: Path, batch: int, rows: int) -> None:
    small = (f"batch={batch}", "evaluate.batch=2", "--steps", "6")
    _train(job, 0, folder, *small, f"output={folder}/alone")
    _train(job, 4, folder, f"grid.rows={rows}", *MIXED, *small)
    _assert_close(_last(folder), _last(folder, "alone"))


def test_local_statistics_are_those_of_a_split_group(job: Job, folder: Path) -> None:
    """2 ranks, and 2 split groups of 2: the same samples share statistics."""
    local = ("batch_norm.statistics=local", "epochs=1")
    _train(job, 2, folder, *local, f"output={folder}/ranks")
    _train(job, 4, folder, "grid.rows=2", *MIXED, *local)
    _assert_close(_last(folder), _last(folder, "ranks"))


def test_a_resume_on_the_same_grid_is_bitwise(job: Job, stopped: Path, tmp_path: Path) -> None:
    shutil.copytree(stopped / "runs", tmp_path / "runs", symlinks=True)
    options = ("grid.rows=2", *MIXED, CLIPPED)
    _train(job, 4, stopped, *options, f"output={tmp_path}/whole")
    second = _train(job, 4, stopped, *options, f"output={tmp_path}/runs", "--resume", "auto")
    assert "resumed at epoch 2, step 7" in second.stdout
    _assert_same(_last(tmp_path), _last(tmp_path, "whole"))


@pytest.mark.parametrize(("ranks", "options"), [(0, ()), (4, ("grid.rows=4", *MODEL)), (4, ())])
def test_a_resume_on_another_grid_with_another_plan(
    job: Job, stopped: Path, tmp_path: Path, ranks: int, options: tuple[str, ...]
) -> None:
    shutil.copytree(stopped / "runs", tmp_path / "runs", symlinks=True)
    outcome = _train(job, ranks, stopped, *options, CLIPPED, f"output={tmp_path}/runs", "--resume", "auto")
    assert "resumed at epoch 2, step 7" in outcome.stdout
    _assert_close(_last(tmp_path), _last(stopped, "alone"))


def test_a_checkpoint_of_a_grid_is_evaluated_on_another(job: Job, folder: Path) -> None:
    trained = _train(job, 4, folder, "grid.rows=2", *MIXED)
    percent = _accuracy(trained).split("%")[0]
    for ranks, options in ((0, ()), (3, ("grid.rows=3", *MODEL))):
        outcome = job(ranks, ["-m", "hpctrain", "eval", str(folder / "tiny.yaml"), *options], cwd=folder)
        assert outcome.code == 0, outcome.output
        assert "21 samples, " in outcome.stdout
        assert f"top1 {percent}%" in outcome.stdout


def test_a_run_says_its_grid_and_traces_all_groups(job: Job, folder: Path) -> None:
    outcome = _train(job, 4, folder, "grid.rows=2", *MIXED, "trace=true", "progress=auto")
    assert "4 ranks as 2 x 2: batch, stage1.* domain, stage2.* model, classifier.* model," in outcome.stdout
    assert "2,957 parameters" in outcome.stdout
    run = latest(folder / "runs", "tiny")
    assert run is not None
    table = json.loads((run.path / "time_table.json").read_text())
    assert table["grid"].startswith("2 x 2: batch, stage1.* domain")
    assert len(table["per_rank"]) == 4
    for rank in table["per_rank"]:
        spent = sum(row["compute_seconds"] + row["messages_seconds"] + row["exposed_seconds"] for row in rank["rows"])
        assert spent + rank["left_over_seconds"] == pytest.approx(rank["step_seconds"], rel=1e-6)


def test_two_nodes_train_as_one_process(job: Job, folder: Path) -> None:
    """MPICH can take one machine for several nodes."""
    library = job(1, ["--mpi-lib-version"]).stdout
    if "MPICH" not in library:
        pytest.skip(f"only MPICH pretends nodes, and this is {library.splitlines()[0]}")
    options = ("epochs=1", CLIPPED)
    _train(job, 0, folder, *options, f"output={folder}/alone")
    more = ("trace=true", "progress=thread")
    command = ["-m", "hpctrain", "train", str(folder / "tiny.yaml"), *options, *more]
    outcome = job(4, command, cwd=folder, env={"MPIR_CVAR_NUM_CLIQUES": "2"})
    assert outcome.code == 0, outcome.output
    _assert_close(_last(folder), _last(folder, "alone"))
    run = latest(folder / "runs", "tiny")
    assert run is not None
    assert json.loads((run.path / "schedule-all.json").read_text())["request"].endswith("; 2 nodes of 2")
    assert len(json.loads((run.path / "time_table.json").read_text())["per_rank"]) == 4


def test_compute_only_on_a_grid(job: Job, folder: Path) -> None:
    outcome = _train(job, 4, folder, "grid.rows=2", *MIXED, "--compute-only", "--steps", "4")
    assert "compute-only step" in outcome.stdout
    assert "gradients alone" in outcome.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("grid={rows: 4, tiles: [3, 1]}",), ["tiles 3 x 1 make 3 parts", "4 x 1"]),
        (("grid.rows=2", "plan.stages1.*=domain"), ["'stages1.*'", 'nearest is "stage1.']),
    ],
)
def test_what_cannot_work_is_said_in_one_sentence(job: Job, folder: Path, options: tuple[str, ...], words: list[str]) -> None:
    outcome = job(4, ["-m", "hpctrain", "train", str(folder / "tiny.yaml"), *options], cwd=folder)
    assert outcome.code == 2, outcome.output
    assert "Traceback" not in outcome.output
    said = [line for line in outcome.stderr.splitlines() if all(word in line for word in words)]
    assert said, outcome.stderr
