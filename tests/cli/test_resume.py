"""`hpctrain train --resume` with other values than before: what may change, what is mapped, what is refused, what is kept."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from hpctrain.data import format as data_format
from hpctrain.data.sampler import Sampler
from hpctrain.optim.schedules.cosine import Cosine
from hpctrain.storage import checkpoint
from hpctrain.storage.run_directory import RunDirectory, latest
from tests.support.jobs import Outcome

Job = Callable[..., Outcome]

SAMPLES = 75
CONFIG = """
name: tiny
seed: 7
backend: numpy
progress: test
model: {{name: small, channels: [3], hidden: 5}}
data:
  train: {folder}/train.h5
  test: {folder}/test.h5
batch: 16
epochs: 2
optimizer: {{name: sgd, lr: 0.05, momentum: 0.9}}
schedule: {{name: cosine, warmup_epochs: 0.5}}
metrics: {{interval_seconds: 1.0e-9}}
deadline_seconds: 60
output: {folder}/runs
"""

# The program; each rank appends the samples of each training step of its own to a file of its own.
SEEN = """
import json, os, runpy
from hpctrain.train.step import TrainingStep
run = TrainingStep.run
def noted(self, batch, global_step, lr):
    with open(f"seen-{os.environ.get('PMI_RANK', 0)}.jsonl", "a") as file:
        file.write(json.dumps([global_step, batch.epoch, lr, batch.sample_ids.tolist()]) + "\\n")
    run(self, batch, global_step, lr)
TrainingStep.run = noted
runpy.run_module("hpctrain", run_name="__main__", alter_sys=True)
"""


def write_images(path: Path, count: int, seed: int = 0, names: tuple[str, ...] = ("a", "b", "c")) -> None:
    """A data file of small images, the same for the same seed."""
    random = np.random.default_rng(seed)
    images = random.integers(0, 256, (count, 7, 6, 1), dtype=np.uint8)
    data_format.write(path, count, (7, 6, 1), list(names), [(images, random.integers(0, len(names), count))])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A configuration and two small data files: 75 images to train on (the last batch has 11), 21 to test on."""
    write_images(tmp_path / "train.h5", SAMPLES)
    write_images(tmp_path / "test.h5", 21, seed=1)
    (tmp_path / "tiny.yaml").write_text(CONFIG.format(folder=tmp_path))
    (tmp_path / "seen.py").write_text(SEEN)
    return tmp_path


def _train(job: Job, folder: Path, *more: str, ranks: int = 0, program: tuple[str, ...] = ("-m", "hpctrain")) -> Outcome:
    return job(ranks, [*program, "train", "tiny.yaml", *more], cwd=folder)


def _trains(job: Job, folder: Path, *more: str, ranks: int = 0, program: tuple[str, ...] = ("-m", "hpctrain")) -> Outcome:
    outcome = _train(job, folder, *more, ranks=ranks, program=program)
    assert outcome.code == 0, outcome.output
    return outcome


def _run(folder: Path) -> RunDirectory:
    run = latest(folder / "runs", "tiny")
    assert run is not None
    return run


def _position(folder: Path) -> dict[str, Any]:
    newest = checkpoint.read_newest(_run(folder).checkpoints)
    assert newest is not None
    return dict(newest[1].meta["position"])  # type: ignore[call-overload]


def _seen(folder: Path, epoch: int) -> list[list[int]]:
    """Samples of each step of an epoch, over all ranks, in order."""
    steps: dict[int, list[int]] = {}
    for path in sorted(folder.glob("seen-*.jsonl")):
        for line in path.read_text().splitlines():
            number, its_epoch, _, ids = json.loads(line)
            if its_epoch == epoch:
                steps.setdefault(number, []).extend(ids)
    return [steps[number] for number in sorted(steps)]


def test_another_batch_goes_on_with_the_next_sample(job: Job, folder: Path) -> None:
    """Batches of 16, then 5 on two ranks in micro-batches, then 30: every sample of the epoch once, in its order."""
    seen = ("seen.py",)
    _trains(job, folder, "--steps", "2", program=seen)
    assert _position(folder)["sums"]["count"] == 32
    _trains(job, folder, "--resume", "auto", "--steps", "3", "batch=5", "micro_batches=2", ranks=2, program=seen)
    position = _position(folder)
    assert (position["samples"], position["sums"]["count"], position["global_step"]) == (47, 47, 5)
    _trains(job, folder, "--resume", "auto", "batch=30", program=seen)
    order = Sampler(SAMPLES, 16, seed=7)
    for epoch, sizes in ((0, [16, 16, 5, 5, 5, 28]), (1, [30, 30, 15])):
        steps = _seen(folder, epoch)
        assert [len(step) for step in steps] == sizes
        assert [sample for step in steps for sample in step] == order.order(epoch).tolist()
    assert [record["step"] for record in _run(folder).metrics() if record["kind"] == "epoch"] == [6, 9]
    _assert_no_jump_of_the_learning_rate(folder)


def _assert_no_jump_of_the_learning_rate(folder: Path) -> None:
    """It follows from the share of the training that is done, to a step, whatever the batch: as with a batch of 1."""
    fine = Cosine(base_lr=0.05, epochs=2, steps_per_epoch=SAMPLES, warmup_epochs=0.5)
    sizes = [len(step) for epoch in (0, 1) for step in _seen(folder, epoch)]
    for line in (folder / "seen-0.jsonl").read_text().splitlines():
        number, _, rate, _ = json.loads(line)
        assert abs(rate - fine.lr(sum(sizes[:number]))) < 0.011, number


def test_other_batches_and_other_grids_at_each_resume_train_as_one_process(job: Job, folder: Path) -> None:
    """In float64: whatever grid, plan, averager and ranks go on, also where the epoch's last batch is another than planned."""
    common = ("dtype=float64", "batch_norm.statistics=synchronised", "optimizer.clip_norm=0.5", "checkpoint.every_steps=2")
    crop = ("data.augment=[{name: pad_crop, padding: 1}]", "model={name: small, channels: [3], hidden: 5, dropout: 0.3}")
    starts = (
        ("batch=16", "--steps", "2", 2, ("grid.rows=2", "plan.default=domain")),
        ("batch=7", "--steps", "3", 3, ("averager=overlap",)),
        ("batch=30", "--steps", "2", 2, ("grid.rows=2", "plan.default=model", "averager=priority")),
    )
    ends = []
    for output, on_ranks in (("alone", False), ("grids", True)):
        for batch, *steps, ranks, grid in starts:
            options = [*common, *crop, f"output={output}", "--resume", "auto", batch, *steps]
            _trains(job, folder, *options, *(grid if on_ranks else ()), ranks=ranks if on_ranks else 0)
        run = latest(folder / output, "tiny")
        assert run is not None
        newest = checkpoint.read_newest(run.checkpoints)
        assert newest is not None
        ends.append(newest[1])
    assert ends[0].meta["position"]["samples"] == 30  # type: ignore[index]  # 16 + 16, 7 + 7 + 7, 22; then 30 of the next epoch
    for key, tensor in ends[0].tensors.items():
        np.testing.assert_allclose(ends[1].tensors[key], tensor, rtol=1e-9, atol=1e-12, err_msg=key)


def test_an_option_that_is_written_out_is_no_change(job: Job, folder: Path) -> None:
    _trains(job, folder, "--steps", "1", "data.augment=[flip]")
    outcome = _trains(job, folder, "--resume", "auto", "--steps", "1", "data.augment=[{name: flip, probability: 0.5}]")
    assert " -> " not in outcome.stdout


def test_changes_are_printed_kept_and_followed_by_the_configuration(job: Job, folder: Path) -> None:
    _trains(job, folder, "--steps", "2")
    before = _run(folder).config()
    outcome = _trains(job, folder, "--resume", "auto", "--steps", "1", "batch=5", "optimizer.lr=0.1", ranks=2)
    assert "resumed at epoch 1, step 2, 32 of 75 images of the epoch done" in outcome.stdout
    for words in ("batch: 16 -> 5", "optimizer.lr: 0.05 -> 0.1", "ranks: 1 -> 2"):
        assert f"  {words}\n" in outcome.stdout
    run = _run(folder)
    assert "batch: 5\n" in run.config()
    assert (run.path / "config-00000002.yaml").read_text() == before
    _trains(job, folder, "--resume", "auto", "--steps", "1", "batch=5", "optimizer.lr=0.1", ranks=2)
    records = [record for record in run.metrics() if record["kind"] == "resume"]
    assert [record["step"] for record in records] == [2, 3]
    assert records[0]["changes"] == {"batch": [16, 5], "optimizer.lr": [0.05, 0.1], "ranks": [1, 2]}
    assert records[1]["changes"] == {}


def _contents(run: RunDirectory) -> dict[Path, bytes]:
    """Return all files of a run except the records of its owners, of which a refused resume was one."""
    return {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file() and path.parent.name != "owners"}


def test_what_does_not_go_together_is_refused_in_one_sentence_and_nothing_is_touched(job: Job, folder: Path) -> None:
    _trains(job, folder, "--steps", "2")
    run = _run(folder)
    before = _contents(run)
    write_images(folder / "train.h5", SAMPLES + 1, seed=5)
    outcome = _train(job, folder, "--resume", "auto", "seed=8", "model.hidden=6", "batch=5", ranks=2)
    assert outcome.code == 2, outcome.output
    (line,) = [line for line in outcome.stderr.splitlines() if line.startswith("hpctrain: ")]
    for words in ("seed: 7 -> 8", "model.hidden: 5 -> 6", "images: 75 of 7 x 6 x 1", "-> 76 of", "labels: ", run.path.name):
        assert words in line
    assert "batch" not in line
    assert _contents(run) == before
    assert len(list((folder / "runs").iterdir())) == 1


def test_between_epochs_the_seed_and_the_images_may_change(job: Job, folder: Path) -> None:
    _trains(job, folder, "epochs=1", program=("seen.py",))
    write_images(folder / "more.h5", SAMPLES + 9, seed=5)
    changes = ("seed=8", f"data.train={folder}/more.h5")
    outcome = _trains(job, folder, "--resume", "auto", *changes, program=("seen.py",))
    for words in ("epochs: 1 -> 2", "seed: 7 -> 8", "images: 75 of 7 x 6 x 1"):
        assert words in outcome.stdout
    seen = [sample for step in _seen(folder, 1) for sample in step]
    assert seen == Sampler(SAMPLES + 9, 1, seed=8).order(1).tolist()


def test_an_epoch_that_is_over_stays_over_with_other_images(job: Job, folder: Path) -> None:
    """A checkpoint of an epoch's last step, which is older than the end of the epoch."""
    _trains(job, folder, "--steps", "5", program=("seen.py",))
    assert _position(folder)["sums"]["count"] == SAMPLES
    write_images(folder / "train.h5", SAMPLES + 9, seed=5)
    outcome = _trains(job, folder, "--resume", "auto", program=("seen.py",))
    assert len(_seen(folder, 0)) == 5
    assert sum(map(len, _seen(folder, 1))) == SAMPLES + 9
    (ended,) = [line for line in outcome.stdout.splitlines() if line.startswith("epoch 1/2: train loss")]
    assert "images/s" not in ended
    assert [record["epoch"] for record in _run(folder).metrics() if record["kind"] == "epoch"] == [1, 2]


@pytest.mark.parametrize("every_steps", [0, 5])
def test_a_finished_run_is_said_to_be_finished_and_records_no_epoch(job: Job, folder: Path, every_steps: int) -> None:
    trained = _trains(job, folder, f"checkpoint.every_steps={every_steps}")
    epochs = [record for record in _run(folder).metrics() if record["kind"] == "epoch"]
    outcome = _trains(job, folder, "--resume", "auto", f"checkpoint.every_steps={every_steps}")
    assert "resumed a run that is finished after 2 epochs, step 10: it is evaluated only\n" in outcome.stdout
    assert "resumed at" not in outcome.stdout
    assert _accuracy(outcome) == _accuracy(trained)
    assert [r["step"] for r in _run(folder).metrics() if r["kind"] == "epoch"] == [record["step"] for record in epochs]
    refused = _train(job, folder, "--resume", "auto", "epochs=1", "batch=75")
    assert refused.code == 2
    assert "epochs: 2 -> 1 (the smallest value is 2" in refused.stderr


def _accuracy(outcome: Outcome) -> str:
    return outcome.stdout.split("test accuracy ")[1].split("\n")[0]


def test_auto_starts_anew_where_nothing_is_there_and_eval_does_not(job: Job, folder: Path) -> None:
    outcome = _trains(job, folder, "--resume", "auto", "--steps", "1", "name=tiny-b", ranks=2)
    assert "nothing to resume: no run named tiny-b" in outcome.stdout
    # Neither a name that begins alike nor another output is this run.
    for more in ("name=tiny", "name=tiny-b-c"):
        assert "nothing to resume" in _trains(job, folder, "--resume", "auto", "--steps", "1", more).stdout
    assert "nothing to resume" in _trains(job, folder, "--resume", "auto", "--steps", "1", "name=tiny-b", "output=o").stdout
    assert "resumed at epoch 1, step 1" in _trains(job, folder, "--resume", "auto", "--steps", "1", "name=tiny-b").stdout
    refused = job(0, ["-m", "hpctrain", "eval", "tiny.yaml", "name=tiny-d"], cwd=folder)
    assert refused.code == 2
    assert "No run of 'tiny-d'" in refused.stderr


def test_auto_goes_on_where_a_run_that_went_back_has_come_to(job: Job, folder: Path) -> None:
    """Its earlier checkpoints are of higher steps, and of a training that was given up."""
    keep = "checkpoint.keep=9"
    _trains(job, folder, "--steps", "2", keep)
    first = checkpoint.checkpoint_path(_run(folder).checkpoints, 2)
    _trains(job, folder, "--resume", "auto", "--steps", "2", "batch=10", keep)
    back = _trains(job, folder, "--resume", str(first), "--steps", "1", "batch=12", keep)
    assert "checkpoint-00000004-set-aside.h5" in back.stderr
    again = _trains(job, folder, "--resume", "auto", "--steps", "1", "batch=12", keep)
    assert "resumed at epoch 1, step 3, 44 of 75 images" in again.stdout
    assert [line["images"] for line in _run(folder).metrics() if line["kind"] == "interval"] == [16, 32, 44, 56]
    aside = _run(folder).checkpoints / "checkpoint-00000004-set-aside.h5"
    assert "step 4, 52 of 75 images" in _trains(job, folder, "--resume", str(aside), "--steps", "1", "batch=12").stdout


def test_auto_does_not_start_anew_over_damaged_checkpoints(job: Job, folder: Path) -> None:
    _trains(job, folder, "--steps", "1")
    for path in _run(folder).checkpoints.iterdir():
        path.write_bytes(path.read_bytes()[:999])
    outcome = _train(job, folder, "--resume", "auto")
    assert outcome.code == 2
    assert "damaged" in outcome.stderr
    assert len(list((folder / "runs").iterdir())) == 1


def test_checkpoints_of_the_first_version_go_on(job: Job, folder: Path) -> None:
    """It counted steps, and knew nothing of the data."""
    _trains(job, folder, "--steps", "2", program=("seen.py",))
    (path,) = _run(folder).checkpoints.iterdir()
    content = checkpoint.read(path)
    meta = {key: value for key, value in content.meta.items() if key not in ("data", "samples")} | {"step_in_epoch": 2}
    position = dict(content.meta["position"])  # type: ignore[call-overload]
    del position["samples"]
    meta["position"] = position | {"step_in_epoch": 2}
    checkpoint.write(path, checkpoint.CheckpointContent(content.tensors, meta))
    with h5py.File(path, "r+") as file:
        file.attrs["format_version"] = 1
    write_images(folder / "other.h5", SAMPLES, seed=5)
    refused = _train(job, folder, "--resume", "auto", f"data.train={folder}/other.h5")
    assert refused.code == 2
    assert "images: " in refused.stderr
    _trains(job, folder, "--resume", "auto", "batch=30", program=("seen.py",))
    assert [sample for step in _seen(folder, 0) for sample in step] == Sampler(SAMPLES, 1, seed=7).order(0).tolist()


def test_norms_are_summed_where_only_the_resume_asks_for_them(job: Job, folder: Path) -> None:
    """The checkpoint's schedule, which has no place for them, is not used then; nor one that has it without need."""
    ends = []
    for averager in ("sharded", "blocking"):
        options = (f"averager={averager}", f"output={averager}")
        _trains(job, folder, *options, "--steps", "1")
        _trains(job, folder, *options, "--steps", "1", "--resume", "auto", "optimizer.clip_norm=0.01")
        _trains(job, folder, *options, "--steps", "1", "--resume", "auto")
        run = latest(folder / averager, "tiny")
        assert run is not None
        newest = checkpoint.read_newest(run.checkpoints)
        assert newest is not None
        ends.append(newest[1].tensors)
    for key, tensor in ends[1].items():
        np.testing.assert_allclose(ends[0][key], tensor, rtol=1e-4, atol=1e-6, err_msg=key)


def test_to_lazy_and_back(job: Job, folder: Path) -> None:
    """Gradients that it has added up are refused by others until a step has applied them."""
    _trains(job, folder, "--steps", "1")
    lazy = ("averager={name: lazy, layers: 2}", "--resume", "auto", "--steps")
    _trains(job, folder, *lazy, "3", ranks=2)
    refused = _train(job, folder, "--resume", "auto", "--steps", "1", ranks=2)
    assert refused.code == 2
    assert "The averager lazy has added up gradients" in refused.stderr
    assert "another model" not in refused.stderr
    _trains(job, folder, *lazy, "1")
    outcome = _trains(job, folder, "--resume", "auto", "--steps", "1", "averager=overlap")
    assert "  averager: lazy -> overlap\n" in outcome.stdout
    assert _position(folder)["global_step"] == 6
