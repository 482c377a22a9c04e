"""`hpctrain train` and `eval` as users run them: results, resume bit by bit, and one sentence for every mistake."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
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
model: {{name: small, channels: [4, 6], hidden: 9, dropout: 0.2}}
data:
  train: {folder}/train.h5
  test: {folder}/test.h5
  augment: [{{name: pad_crop, padding: 1}}, {{name: flip}}]
batch: 16
epochs: 2
optimizer: {{name: sgd, lr: 0.05, momentum: 0.9, weight_decay: 1.0e-3}}
schedule: {{name: cosine, warmup_epochs: 0.5}}
checkpoint: {{keep: 9}}
metrics: {{interval_seconds: 0.01}}
deadline_seconds: 30
output: {folder}/runs
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A configuration and two small data files: 75 images to train on (the last batch has 11), 21 to test on."""
    random = np.random.default_rng(0)
    for name, count in (("train", 75), ("test", 21)):
        images = random.integers(0, 256, (count, 9, 8, 1), dtype=np.uint8)
        labels = random.integers(0, 3, count)
        data_format.write(tmp_path / f"{name}.h5", count, (9, 8, 1), ["a", "b", "c"], [(images, labels)])
    (tmp_path / "tiny.yaml").write_text(CONFIG.format(folder=tmp_path))
    return tmp_path


def _train(job: Job, ranks: int, folder: Path, *more: str) -> Outcome:
    return job(ranks, ["-m", "hpctrain", "train", str(folder / "tiny.yaml"), *more], cwd=folder)


def _run(folder: Path, output: str = "runs") -> Any:
    run = latest(folder / output, "tiny")
    assert run is not None
    return run


def test_one_process_trains_evaluates_and_leaves_its_files(job: Job, folder: Path) -> None:
    outcome = _train(job, 0, folder)
    assert outcome.code == 0, outcome.output
    run = _run(folder)
    assert f"files of this run: {run.path}" in outcome.stdout
    assert "test accuracy" in outcome.stdout
    kinds = [line["kind"] for line in run.metrics()]
    assert kinds.count("epoch") == 2
    assert kinds.count("evaluation") == 2
    assert kinds.count("data") == 2
    assert "steps waited for data " in outcome.stdout
    assert kinds.count("interval") >= 1
    assert "lr: 0.05" in run.config()
    assert "clip_norm: null" in run.config()  # a default of an option
    assert json.loads((run.path / "versions.json").read_text())["kernels"] == "numpy"
    assert [step for step, _ in checkpoint.checkpoints(run.checkpoints)] == [5, 10]


def test_eval_gives_what_training_gave(job: Job, folder: Path) -> None:
    trained = _train(job, 2, folder)
    assert trained.code == 0, trained.output
    outcome = job(3, ["-m", "hpctrain", "eval", str(folder / "tiny.yaml")], cwd=folder)
    assert outcome.code == 0, outcome.output
    accuracy = trained.stdout.split("test accuracy ")[1].split("%")[0]
    assert f"top1 {accuracy}%" in outcome.stdout
    assert "21 samples" in outcome.stdout


# The program; each rank prints a line for every checkpoint whose tensors it reads.
SAYS_WHAT_IT_READS = """
import runpy, sys
import h5py
opened = h5py.File.__init__
def hook(self, *arguments, **options):
    store = sys.modules.get("hpctrain.storage.hdf5_store")
    if store is not None and not hasattr(store, "original"):
        store.original = store._read
        store._read = lambda *given: sys.stderr.write("reads a checkpoint\\n") and store.original(*given)
    opened(self, *arguments, **options)
h5py.File.__init__ = hook
runpy.run_module("hpctrain", run_name="__main__", alter_sys=True)
"""


def test_a_checkpoint_is_read_once_by_each_rank(job: Job, folder: Path) -> None:
    ranks = 2
    (folder / "says.py").write_text(SAYS_WHAT_IT_READS)
    assert _train(job, ranks, folder, "--steps", "2").code == 0
    run, (path,) = _run(folder), _run(folder).checkpoints.iterdir()
    sources: list[list[str]] = [["eval", "tiny.yaml"]]
    sources += [["eval", "tiny.yaml", "--checkpoint", str(each)] for each in (run.path, path)]
    sources.append(["train", "tiny.yaml", "--steps", "1", "--resume", "auto"])
    for arguments in sources:
        outcome = job(ranks, ["says.py", *arguments], cwd=folder)
        assert outcome.code == 0, outcome.output
        assert outcome.stderr.count("reads a checkpoint") == ranks


@pytest.mark.parametrize("ranks", [1, 3])  # two below, with every averager
def test_resume_is_bitwise(job: Job, folder: Path, ranks: int) -> None:
    """7 steps and 3 more equal 10, across an epoch's end and inside the second epoch."""
    whole = _train(job, ranks, folder, f"output={folder}/whole")
    assert whole.code == 0, whole.output
    first = _train(job, ranks, folder, "--steps", "7")
    assert first.code == 0, first.output
    second = _train(job, ranks, folder, "--resume", "auto")
    assert second.code == 0, second.output
    assert "resumed at epoch 2, step 7" in second.stdout
    _assert_same(_last(_run(folder)), _last(_run(folder, "whole")))


@pytest.mark.parametrize("ranks", [0, 3])
def test_a_run_that_diverges_names_the_layer_and_keeps_nothing(job: Job, folder: Path, ranks: int) -> None:
    outcome = _train(job, ranks, folder, "optimizer.lr=1e30", "checkpoint.every_steps=1", "checkpoint.keep=99")
    assert outcome.code == 2
    assert outcome.stderr.count("is the first, in forward order, whose") == 1
    assert "Warning" not in outcome.output
    for _, path in checkpoint.checkpoints(_run(folder).checkpoints):
        for name, tensor in checkpoint.read(path).tensors.items():
            assert np.isfinite(tensor).all(), f"{name} in {path}"


def test_steps_end_in_words_and_a_short_run_records_its_first_step_and_its_last(job: Job, folder: Path) -> None:
    calm = "metrics.interval_seconds=1000"
    outcome = _train(job, 0, folder, "--steps", "3", calm)
    assert outcome.code == 0, outcome.output
    run = _run(folder)
    assert "ended after step 3, in epoch 1 of 2, as --steps asked\nno evaluation was made" in outcome.stdout
    assert f"go on with the same command and --resume {run.path}\n" in outcome.stdout
    assert outcome.stdout.count(" left\n") == 2
    assert [(r["epoch"], r["step"]) for r in run.metrics() if r["kind"] == "interval"] == [(1, 1), (1, 3)]
    outcome = _train(job, 0, folder, "--resume", "auto", calm, "--progress", "none")
    assert outcome.code == 0, outcome.output
    assert " left\n" not in outcome.stdout
    records = [(r["kind"], r["epoch"], r["step"]) for r in run.metrics() if "loss" in r]
    assert records[:3] == [("interval", 1, 1), ("interval", 1, 3), ("interval", 1, 4)]
    assert records[3:] == [("epoch", 1, 5), ("evaluation", 1, 5), ("epoch", 2, 10), ("evaluation", 2, 10)]


AVERAGERS = {
    "priority": "averager={name: priority, slice_parameters: 100, window: 2}",
    "gradients only": "averager={name: sharded, bucket_bytes: 500, fc_exchange: never}",
    "lazy": "averager={name: lazy, max_interval: 1, bucket_bytes: 500}",
}


@pytest.mark.parametrize("averager", AVERAGERS)
def test_resume_is_bitwise_with_every_kind_of_state(job: Job, folder: Path, averager: str) -> None:
    options = (AVERAGERS[averager], "optimizer.clip_norm=0.3")
    for more in ((f"output={folder}/whole",), ("--steps", "7"), ("--resume", "auto")):
        outcome = _train(job, 2, folder, *options, *more)
        assert outcome.code == 0, outcome.output
    _assert_same(_last(_run(folder)), _last(_run(folder, "whole")))


def test_sharded_state_goes_on_with_other_ranks(job: Job, folder: Path) -> None:
    options = ("dtype=float64", "batch_norm.statistics=synchronised", "averager.bucket_bytes=500")
    for ranks, more in ((1, [f"output={folder}/whole"]), (3, ["--steps", "4"]), (2, ["--resume", "auto"])):
        outcome = _train(job, ranks, folder, *options, *more)
        assert outcome.code == 0, outcome.output
    ours, theirs = _last(_run(folder)).tensors, _last(_run(folder, "whole")).tensors
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        np.testing.assert_allclose(ours[key], tensor, rtol=1e-9, atol=1e-12, err_msg=key)


# The program, on a link that measures as slow or as fast as said: slices are of other sizes then.
ON_A_LINK = """
import runpy, sys
from hpctrain.averaging import agreement
from hpctrain.comm.link import LinkModel
alpha = float(sys.argv.pop(1))
agreement.calibrate = lambda comm, progress: LinkModel(alpha, 1e-8)
runpy.run_module("hpctrain", run_name="__main__", alter_sys=True)
"""


def _train_on_a_link(job: Job, ranks: int, folder: Path, alpha: str, *more: str) -> Outcome:
    (folder / "on_a_link.py").write_text(ON_A_LINK)
    options = ["model.hidden=199", "optimizer.clip_norm=0.3", "averager.fc_exchange=never", *more]
    return job(ranks, ["on_a_link.py", alpha, "train", "tiny.yaml", *options], cwd=folder)


def _slices(run: Any) -> Any:
    return json.loads(run.schedule_path("all").read_text())["slices"]


def test_resume_is_bitwise_whatever_the_link_measures_then(job: Job, folder: Path) -> None:
    def train(alpha: str, *more: str) -> None:
        outcome = _train_on_a_link(job, 3, folder, alpha, "averager.sizes=measured", *more)
        assert outcome.code == 0, outcome.output

    train("1e-6", f"output={folder}/whole")
    train("1e-6", "--steps", "7")
    before = _run(folder).schedule_path("all").read_text()
    train("1e-2", "--resume", "auto")
    _assert_same(_last(_run(folder)), _last(_run(folder, "whole")))
    assert _run(folder).schedule_path("all").read_text() == before
    train("1e-2", "--steps", "7", f"output={folder}/other")
    assert len(_slices(_run(folder))) > len(_slices(_run(folder, "other")))
    train("1e-2", "--schedule-from", str(_run(folder, "whole").path), f"output={folder}/again")
    _assert_same(_last(_run(folder, "again")), _last(_run(folder, "whole")))


def test_two_runs_end_with_the_same_bits_whatever_the_link_measures(job: Job, folder: Path) -> None:
    for alpha, output in (("1e-6", "first"), ("1e-2", "second")):
        outcome = _train_on_a_link(job, 3, folder, alpha, f"output={folder}/{output}")
        assert outcome.code == 0, outcome.output
    assert _slices(_run(folder, "second")) == _slices(_run(folder, "first"))
    _assert_same(_last(_run(folder, "second")), _last(_run(folder, "first")))
    source = str(_run(folder, "first").path)
    refused = _train_on_a_link(job, 2, folder, "1e-6", "--schedule-from", source)
    assert refused.code == 2
    assert "is one of 3 ranks, but here are 2; start as many ranks" in refused.stderr


def _last(run: Any) -> checkpoint.CheckpointContent:
    newest = checkpoint.read_newest(run.checkpoints)
    assert newest is not None
    return newest[1]


def _assert_same(ours: checkpoint.CheckpointContent, theirs: checkpoint.CheckpointContent) -> None:
    assert ours.meta["position"] == theirs.meta["position"]
    assert ours.tensors.keys() == theirs.tensors.keys()
    for kind in ("parameters/", "statistics/", "optimizer/momentum/"):
        assert any(key.startswith(kind) for key in ours.tensors)
    for key, tensor in ours.tensors.items():
        assert np.array_equal(tensor, theirs.tensors[key]), key


# The program; it is killed where a record of a kind and step has been appended, and half of another line.
KILLED = """
import os, runpy, signal, sys
from hpctrain.storage.run_directory import RunDirectory
kind, step, torn = sys.argv.pop(1), int(sys.argv.pop(1)), b'{"kind": "inter'
append = RunDirectory.append_metrics
def killed(self, record):
    append(self, record)
    if (record["kind"], record.get("step", 0)) == (kind, step):
        with open(self.metrics_path, "ab") as file:
            file.write(torn)
        os.kill(os.getpid(), signal.SIGKILL)
RunDirectory.append_metrics = killed
runpy.run_module("hpctrain", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("ranks", "every_steps", "kills"),
    [
        (0, 3, [("interval", 8)]),
        # Killed again before the next checkpoint, then at an epoch's end behind one.
        (2, 4, [("evaluation", 5), ("progress", 0), ("interval", 7), ("epoch", 10)]),
        # A checkpoint inside the last step of an epoch is older than the epoch's record and its evaluation.
        (0, 5, [("evaluation", 5), ("evaluation", 10)]),
    ],
)
def test_a_killed_and_resumed_run_has_each_step_once(
    job: Job, folder: Path, ranks: int, every_steps: int, kills: list[tuple[str, int]]
) -> None:
    (folder / "killed.py").write_text(KILLED)
    options = ["metrics.interval_seconds=1e-9", f"checkpoint.every_steps={every_steps}", "progress=test"]
    options += ["checkpoint.asynchronous=false"]  # what was written before a kill is there
    whole = _train(job, ranks, folder, *options, f"output={folder}/whole")
    assert whole.code == 0, whole.output
    assert [record["step"] for record in _run(folder, "whole").metrics() if record["kind"] == "memory"] == [10]
    resume: list[str] = []
    for kind, step in kills:
        outcome = job(ranks, ["killed.py", kind, str(step), "train", "tiny.yaml", *options, *resume], cwd=folder)
        assert outcome.code != 0
        assert "Traceback" not in outcome.output
        resume = ["--resume", "auto"]
    run = _run(folder)
    assert run.metrics_path.read_bytes().endswith(b'"inter')
    last = _train(job, ranks, folder, *options, *resume)
    assert last.code == 0, last.output
    assert _run(folder).path == run.path
    records = _without_times(run.metrics())
    assert records == _without_times(_run(folder, "whole").metrics())
    assert [record["step"] for record in records if record["kind"] == "interval"] == list(range(1, 11))
    again = _train(job, ranks, folder, *options, *resume)  # nothing to train: evaluated once more, in place of the last time
    assert again.code == 0, again.output
    assert _without_times(run.metrics()) == records
    assert not list(run.path.glob("*unreadable*"))


def _without_times(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records that are the same in every run: none of starts, nor of what a job has waited for, read and held."""
    times = ("time", "images_per_second")
    of_jobs = ("progress", "start", "resume", "data", "reads", "memory")
    kept = [record for record in records if record["kind"] not in of_jobs]
    return [{key: value for key, value in record.items() if key not in times} for record in kept]


def test_a_resume_that_is_refused_leaves_the_metrics_alone(job: Job, folder: Path) -> None:
    (folder / "killed.py").write_text(KILLED)
    options = ["metrics.interval_seconds=1e-9", "checkpoint.every_steps=3", "checkpoint.asynchronous=false"]
    job(0, ["killed.py", "interval", "5", "train", "tiny.yaml", *options], cwd=folder)
    before = _run(folder).metrics_path.read_bytes()
    outcome = _train(job, 0, folder, "model.hidden=11", "--resume", "auto")
    assert "model.hidden: 9 -> 11 (may not change" in outcome.stderr
    assert _run(folder).metrics_path.read_bytes() == before


def test_float64_training_does_not_depend_on_the_number_of_ranks(job: Job, folder: Path) -> None:
    options = ["dtype=float64", "batch_norm.statistics=synchronised"]
    ends = []
    for ranks in (1, 4):
        outcome = _train(job, ranks, folder, *options, f"output={folder}/on{ranks}")
        assert outcome.code == 0, outcome.output
        ends.append(_last(_run(folder, f"on{ranks}")).tensors)
    for key, tensor in ends[0].items():
        np.testing.assert_allclose(ends[1][key], tensor, rtol=1e-9, atol=1e-12, err_msg=key)


def _truncate(folder: Path) -> None:
    path = folder / "train.h5"
    path.write_bytes(path.read_bytes()[:3000])


def _wrong_label(folder: Path) -> None:
    with h5py.File(folder / "train.h5", "r+", locking=False) as file:
        file["labels"][3] = 17


def _nothing(folder: Path) -> None:
    pass


MISTAKES: dict[str, tuple[Callable[[Path], None], list[str], str]] = {
    "missing file": (_nothing, ["data.train=nowhere.h5"], "nowhere.h5"),
    "truncated file": (_truncate, [], "train.h5"),
    "wrong label": (_wrong_label, [], "17"),
    "class count": (_nothing, ["model.classes=5"], "set model.classes to 3"),
    "grid": (_nothing, ["grid.rows=3", "grid.cols=5"], "grid"),
    "small batch": (_nothing, ["batch=1"], "the smallest batch is 2"),
    "unknown key": (_nothing, ["optimizer.momentun=0.9"], "momentum"),
    "nan": (_nothing, ["optimizer.lr=1e30"], "not finite"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence_and_leaves_nothing_half_written(job: Job, folder: Path, mistake: str) -> None:
    spoil, overrides, words = MISTAKES[mistake]
    spoil(folder)
    outcome = _train(job, 2, folder, *overrides)
    assert outcome.code != 0, outcome.output
    lines = [line for line in outcome.stderr.splitlines() if line.startswith("hpctrain: ")]
    assert len(lines) == 1, outcome.output
    assert words in lines[0]
    assert "Traceback" not in outcome.output
    runs = list((folder / "runs").glob("*")) if mistake != "nan" else []
    assert runs == []
    assert not list(folder.glob("runs/*/checkpoints/*"))


def test_steps_end_the_run_with_a_checkpoint_that_says_how_to_go_on(job: Job, folder: Path) -> None:
    outcome = _train(job, 2, folder, "--steps", "3")
    assert outcome.code == 0, outcome.output
    assert "--resume" in outcome.stdout
    assert [step for step, _ in checkpoint.checkpoints(_run(folder).checkpoints)] == [3]


def test_another_models_checkpoint_is_refused(job: Job, folder: Path) -> None:
    assert _train(job, 1, folder, "--steps", "2").code == 0
    outcome = _train(job, 2, folder, "model.hidden=11", "--resume", "auto")
    assert outcome.code != 0
    assert "model.hidden: 9 -> 11 (may not change" in outcome.stderr
    assert "Traceback" not in outcome.output
