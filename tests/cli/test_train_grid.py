"""`hpctrain train` on grids: any plan trains as one process does, goes on on any other grid, and says what it cannot do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.tiny_runs import (
    Start,
    accuracy,
    assert_close,
    hpctrain,
    newest_checkpoint,
    newest_run,
    prepare,
    tiny,
    whole_lines,
)

CONFIG = tiny(
    "dtype: float64, model: {name: small, channels: [4, 6], hidden: 9, dropout: 0.2}, "
    "data: {train: FOLDER/train.h5, test: FOLDER/test.h5, augment: [{name: pad_crop, padding: 1}, {name: flip}]}, "
    "optimizer: {name: sgd, lr: 0.05, momentum: 0.9, weight_decay: 1.0e-3, clip_norm: 0.4}, "
    "schedule: {name: cosine, warmup_epochs: 0.5}, batch_norm: {statistics: synchronised}, checkpoint: {keep: 9}"
)

DOMAIN = ("plan.default=domain",)
MODEL = ("plan.default=model",)
MIXED = (
    "grid.rows=2",
    "plan.stage1.*=domain",
    "plan.stage2.*=model",
    "plan.classifier.*=model",
    "plan.classifier.dropout2=batch",
)

#: 9 x 8 images leave some of 4 ranks with one row in stage 2; name -> number of ranks, overrides, and those of both runs
GRIDS: dict[str, tuple[int, tuple[str, ...], tuple[str, ...]]] = {
    "domain 2x1": (2, ("grid.rows=2", *DOMAIN), ()),
    "model 3x1": (3, ("grid.rows=3", *MODEL), ()),
    "tiles 4x1": (4, ("grid={rows: 4, tiles: [2, 2]}", *DOMAIN), ()),
    "mixed 2x2": (4, MIXED, ()),
    "lars": (4, MIXED, ("optimizer={name: lars, lr: 0.5, trust_coefficient: 0.1}", "averager=priority")),
    # without batch norm, whose statistics would be those of other micro-batches
    "micro-batches and random crops": (
        4,
        MIXED,
        (
            "model.batch_norm=false",
            "micro_batches=3",
            "data.augment=[{name: random_resized_crop, size: 9}]",
            "data.evaluate_augment=[{name: random_resized_crop, size: 9, scale: [1, 1]}]",
        ),
    ),
    "a batch of 1": (4, MIXED, ("batch=1", "evaluate.batch=2", "--steps", "6")),
    "a batch of 3": (4, (*MIXED, "grid.rows=4"), ("batch=3", "evaluate.batch=2", "--steps", "6")),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A configuration and two small data files: 75 images to train on (the last batch has 11), 21 to test on."""
    return prepare(tmp_path, CONFIG)


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", GRIDS)
def test_a_plan_trains_as_one_process(folder: Path, name: str) -> None:
    ranks, options, both = GRIDS[name]
    alone = hpctrain(0, folder, "train", "epochs=1", *both, "output=alone")
    found = hpctrain(ranks, folder, "train", *options, "epochs=1", *both)
    assert_close(newest_checkpoint(folder), newest_checkpoint(folder, "alone"), 1e-10, 1e-13)
    if "--steps" not in both:
        assert accuracy(found) == accuracy(alone)


@pytest.mark.slow
def test_a_run_says_its_grid_traces_all_groups_and_is_evaluated_on_another(job: Start, folder: Path) -> None:
    """Over a real MPI."""
    trained = hpctrain(4, folder, "train", *MIXED, "trace=true", start=job)
    assert "4 ranks as 2 x 2: batch, stage1.* domain, stage2.* model, classifier.* model," in trained.stdout
    assert "2,957 parameters" in trained.stdout
    table = json.loads((newest_run(folder).path / "time_table.json").read_text())
    assert table["grid"].startswith("2 x 2: batch, stage1.* domain")
    assert len(table["per_rank"]) == 4
    for rank in table["per_rank"]:
        spent = sum(row["compute_seconds"] + row["messages_seconds"] + row["exposed_seconds"] for row in rank["rows"])
        assert spent + rank["left_over_seconds"] == pytest.approx(rank["step_seconds"], rel=1e-6)
    for ranks, options in ((0, ()), (3, ("grid.rows=3", *MODEL))):
        evaluated = whole_lines(hpctrain(ranks, folder, "eval", *options).stdout)
        assert "21 samples, " in evaluated
        assert f"top1 {accuracy(trained)}%" in evaluated
    hpctrain(0, folder, "train", "output=alone")
    assert_close(newest_checkpoint(folder), newest_checkpoint(folder, "alone"), 1e-10, 1e-13)


@pytest.mark.slow
def test_two_nodes_train_as_one_process(job: Start, folder: Path) -> None:
    """MPICH can take one machine for several nodes."""
    library = job(1, ["--mpi-lib-version"]).stdout
    if "MPICH" not in library:
        pytest.skip(f"only MPICH pretends nodes, and this is {library.splitlines()[0]}")
    hpctrain(0, folder, "train", "epochs=1", "output=alone")
    more = ("epochs=1", "trace=true", "progress=thread")
    hpctrain(4, folder, "train", *more, start=job, env={"MPIR_CVAR_NUM_CLIQUES": "2"})
    assert_close(newest_checkpoint(folder), newest_checkpoint(folder, "alone"), 1e-10, 1e-13)
    run = newest_run(folder)
    assert json.loads((run.path / "schedule-all.json").read_text())["request"].endswith("; 2 nodes of 2")
    assert len(json.loads((run.path / "time_table.json").read_text())["per_rank"]) == 4


@pytest.mark.slow
def test_compute_only_on_a_grid(folder: Path) -> None:
    outcome = hpctrain(4, folder, "train", *MIXED, "--compute-only", "--steps", "4")
    assert "compute-only step" in outcome.stdout
    assert "gradients alone" in outcome.stdout
