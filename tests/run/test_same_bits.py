"""Runs with the same bits: rollbacks, hashes of each step, one order of sums."""

import json
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.backend.choice import machine_fault
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.onednn.kernel_set import OnednnKernelSet
from hpctrain.core.errors import CheckpointError, ConfigError, DivergedError
from hpctrain.data.loader import Batch
from hpctrain.data.sampler import Reordering, Sampler
from hpctrain.launch.threads import ThreadPlan
from hpctrain.run.accounts import RunHashes
from hpctrain.run.reproducibility import EXACT_META, check_kept_record, check_same_record, reproducibility_record
from hpctrain.runs.comparison import SameBits, compared
from hpctrain.runs.directory import RunDirectory, latest, runs
from hpctrain.runs.records import read_hashes
from hpctrain.storage import checkpoint
from hpctrain.storage.checkpoint import CheckpointContent, checkpoint_path, checkpoints, read
from hpctrain.training.state_hashes import hash_of, hash_of_all
from hpctrain.training.step import TrainingStep
from hpctrain_testing.run import Outcome
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.run import run_virtual
from tests.support.runs import _rank, train_virtual
from tests.support.tiny_runs import assert_same, newest_checkpoint, newest_run, prepare, whole_lines, write_images

pytestmark = pytest.mark.slow
SAMPLES, BATCH, SEED = 75, 16, 7
CONFIG = """
{{name: tiny, seed: {seed}, backend: numpy, progress: test, model: {{name: small, channels: [4, 6], hidden: 9, dropout: 0.2}},
 data: {{train: {folder}/train.h5, test: {folder}/test.h5}}, batch: {batch}, epochs: 2,
 optimizer: {{name: sgd, lr: 0.05, momentum: 0.9}}, schedule: {{name: cosine}}, checkpoint: {{every_steps: 2, keep: 99}},
 metrics: {{interval_seconds: 1.0e-9}}, deadline_seconds: 60, output: {folder}/runs}}
"""
#: by step, the samples of each rank as they were taken last
Seen = dict[tuple[int, int], dict[int, list[int]]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return prepare(tmp_path, CONFIG.format(folder=tmp_path, batch=BATCH, seed=SEED), SAMPLES)


def _train(folder: Path, ranks: int, bad: Mapping[str, Any], *more: str, resume: str | None = None, steps: int = 0) -> Seen:
    """Train with images that are NaN on one rank in some steps, or where two samples meet in some epoch; return what was seen."""
    here, run, seen = threading.local(), TrainingStep.run, Seen()

    def poisoned(self: TrainingStep, batch: Batch, global_step: int, lr: float) -> None:
        ids = batch.sample_ids.tolist()
        together = batch.epoch == bad.get("epoch") and set(bad["pair"]) <= set(ids)
        if together or (here.rank == bad.get("rank") and global_step in bad["steps"]):
            batch = replace(batch, x=np.full_like(batch.x, np.nan))
        seen.setdefault((batch.epoch, global_step), {})[here.rank] = ids
        run(self, batch, global_step, lr)

    def program(comm: ThreadCommunicator) -> None:
        here.rank = comm.rank
        _rank(comm, folder / "tiny.yaml", more, resume, steps)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingStep, "run", poisoned)
        run_virtual(ranks, program, deadline_seconds=120)
    return seen


def _records(run: RunDirectory, kind: str) -> list[dict[str, Any]]:
    return [record for record in run.metrics() if record["kind"] == kind]


def _meet(step: int) -> dict[str, Any]:
    """Two samples that the first rank reads together in a step of the first order."""
    epoch, inside = divmod(step, -(-SAMPLES // BATCH))
    first, second, *_ = Sampler(SAMPLES, BATCH, SEED).ids(epoch, inside)
    return {"epoch": epoch, "pair": [int(first), int(second)], "steps": []}


def test_stop_ends_the_run_after_its_last_checkpoint(folder: Path) -> None:
    with pytest.raises(DivergedError, match="is the first, in forward order, whose"):
        _train(folder, 3, {"rank": 1, "steps": [3]})
    run = newest_run(folder)
    assert [step for step, _ in checkpoint.checkpoints(run.checkpoints)] == [2]
    assert not _records(run, "skip") + _records(run, "rollback")


def test_skip_leaves_a_step_out_and_a_resume_goes_on_alike(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = {"rank": 1, "steps": [0, 3, 6]}
    _train(folder, 2, bad, "on_nonfinite=skip", f"output={folder}/whole")
    said = whole_lines(capsys.readouterr().out)
    for words in (
        "step 4 skipped: layer ",
        "(on rank 1 of 2)",
        "3 of 10 steps were skipped because of values that were not finite",
    ):
        assert words in said
    whole = newest_run(folder, "whole")
    assert [(record["step"], record["sources"]) for record in _records(whole, "skip")] == [(1, [1]), (4, [1]), (7, [1])]
    assert len(_records(whole, "interval")) == 10
    assert newest_checkpoint(folder, "whole").meta["position"]["skipped"] == 3
    _train(folder, 2, bad, "on_nonfinite=skip", steps=4)
    _train(folder, 2, bad, "on_nonfinite=skip", resume="auto")
    assert "3 of 10 steps were skipped" in capsys.readouterr().out
    assert_same(newest_checkpoint(folder), newest_checkpoint(folder, "whole"))


def test_too_many_skips_in_a_row_end_the_run(folder: Path) -> None:
    words = "4 consecutive steps were not finite and were skipped. In the last one, step 6, layer"
    with pytest.raises(DivergedError, match=words):
        _train(folder, 2, {"rank": 0, "steps": [2, 3, 4, 5]}, "on_nonfinite.action=skip", "on_nonfinite.most=3")
    assert len(_records(newest_run(folder), "skip")) == 4


def _assert_went_back(folder: Path, said: str) -> None:
    (record,) = _records(newest_run(folder), "rollback")
    assert (record["step"], record["from_step"], record["samples"], record["order"]) == (6, 9, BATCH, 1)
    assert "went back from step 9 to step 6, continuing with order 1 of the samples: Layer" in whole_lines(said)
    assert [record["step"] for record in _records(newest_run(folder), "interval")] == list(range(1, 11))
    assert newest_checkpoint(folder).meta["position"]["reorderings"] == [[1, BATCH, 1]]


@pytest.mark.parametrize("ranks", [2, 3])
def test_rollback_goes_back_and_on_in_another_order(folder: Path, ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Inside an epoch: what was seen of it stays, the rest comes in another order, each sample once."""
    seen = _train(folder, ranks, _meet(8), "on_nonfinite=rollback", "checkpoint.every_steps=3")
    _assert_went_back(folder, capsys.readouterr().out)
    steps = [[sample for _, ids in sorted(seen[1, step].items()) for sample in ids] for step in range(5, 10)]
    assert sorted(sample for step in steps for sample in step) == list(range(SAMPLES))
    sampler = Sampler(SAMPLES, BATCH, SEED)
    sampler.reorder([Reordering(1, BATCH, 1)])
    assert steps == [sampler.ids(1, step).tolist() for step in range(5)]


# The program; images are NaN on the rank that reads two samples at once in some epoch.
POISONED = """
import json, os, runpy
from dataclasses import replace
import numpy as np
from hpctrain.training.step import TrainingStep
run, bad = TrainingStep.run, json.loads(os.environ["BAD"])
def poisoned(self, batch, global_step, lr):
    if batch.epoch == bad["epoch"] and set(bad["pair"]) <= set(batch.sample_ids.tolist()):
        batch = replace(batch, x=np.full_like(batch.x, np.nan))
    run(self, batch, global_step, lr)
TrainingStep.run = poisoned
runpy.run_module("hpctrain", run_name="__main__", alter_sys=True)
"""


def test_real_ranks_go_back_together(job: Callable[..., Outcome], folder: Path) -> None:
    (folder / "poisoned.py").write_text(POISONED)
    words = ["poisoned.py", "train", "tiny.yaml", "on_nonfinite=rollback", "checkpoint.every_steps=3"]
    outcome = job(2, words, cwd=folder, env={"BAD": json.dumps(_meet(8))})
    assert outcome.code == 0, outcome.output
    _assert_went_back(folder, outcome.stdout)


@pytest.mark.parametrize("averager", ["sharded", "{name: lazy, layers: 2, max_interval: 3, check_every: 1}"])
def test_rollback_has_the_same_bits_again_and_across_a_resume(folder: Path, averager: str) -> None:
    """Two runs have the same bits, and so has a run that is stopped after the rollback, in the next epoch, and goes on."""
    options = ("on_nonfinite=rollback", f"averager={averager}", "epochs=3")
    for output in ("first", "second"):
        _train(folder, 2, _meet(3), *options, f"output={folder}/{output}")
    assert_same(newest_checkpoint(folder, "first"), newest_checkpoint(folder, "second"))
    _train(folder, 2, _meet(3), *options, steps=9)
    assert len(_records(newest_run(folder), "rollback")) == 1
    _train(folder, 2, _meet(3), *options, resume="auto")
    assert_same(newest_checkpoint(folder), newest_checkpoint(folder, "first"))
    whole, parts = (_records(newest_run(folder, name), "rollback") for name in ("first", "runs"))
    assert [{**record, "time": 0} for record in whole] == [{**record, "time": 0} for record in parts]


def test_without_a_checkpoint_it_goes_back_to_the_start(folder: Path) -> None:
    _train(folder, 2, _meet(2), "on_nonfinite=rollback", "checkpoint.every_steps=0", "checkpoint.every_epochs=0")
    run = newest_run(folder)
    assert [step for step, _ in checkpoint.checkpoints(run.checkpoints)] == [0]
    (record,) = _records(run, "rollback")
    assert (record["step"], record["order"]) == (0, 1)
    assert [r["step"] for r in _records(run, "interval")] == list(range(1, 11))


def test_rollback_ends_the_run_if_no_order_helps(folder: Path) -> None:
    words = "The run has gone back to step 6 2 times, each time with another order of samples, without reaching"
    with pytest.raises(DivergedError, match=words):
        _train(folder, 2, {"rank": 1, "steps": [6]}, "on_nonfinite.action=rollback", "on_nonfinite.most=2")
    records = _records(newest_run(folder), "rollback")
    assert [(record["step"], record["order"]) for record in records] == [(6, 1), (6, 2)]
    assert all(a["time"] < b["time"] for a, b in pairwise(records))


def test_a_resume_says_a_rollback_once(folder: Path) -> None:
    """From the checkpoint that the run went back to: it goes back again, and that line is there once."""
    for _ in range(2):
        with pytest.raises(DivergedError):
            _train(folder, 2, {"rank": 1, "steps": [6]}, "on_nonfinite={action: rollback, most: 1}", resume="auto")
        assert [record["step"] for record in _records(newest_run(folder), "rollback")] == [6]
        shutil.rmtree(newest_run(folder).path / "owners")  # as this process, which owns the run, does not end


#: 75 samples of which a step takes 16: five steps of an epoch, ten in all
HASHES_CONFIG = """
{{name: tiny, seed: 7, backend: numpy, progress: test, model: {{name: small, channels: [4, 6], hidden: 5, dropout: 0.2}},
 data: {{train: {folder}/train.h5}}, batch: 16, epochs: 2, optimizer: {{name: sgd, lr: 0.05, momentum: 0.9}},
 schedule: constant, ema: {{decay: 0.5}}, checkpoint: {{every_steps: 3, keep: 99}}, hashes: {{every_steps: 2}},
 deadline_seconds: 60, output: {folder}/runs}}
"""
#: steps with hashes of an undisturbed run
STEPS = [0, 2, 4, 6, 8, 10]
RANKS = 2


def write_run(folder: Path) -> Path:
    write_images(folder / "train.h5", SAMPLES, shape=(7, 6, 1))
    (folder / "tiny.yaml").write_text(HASHES_CONFIG.format(folder=folder))
    return folder / "tiny.yaml"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_run(tmp_path)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return trained(write_run(tmp_path_factory.mktemp("undisturbed")))


def newest(file: Path) -> RunDirectory:
    return next(iter(runs(file.parent / "runs", "tiny")))


def trained(file: Path, *overrides: str, ranks: int = RANKS, **options: Any) -> RunDirectory:
    train_virtual(ranks, file, *overrides, **options)
    return newest(file)


def digests(run: RunDirectory) -> dict[int, dict[str, str]]:
    """The hashes of a run, each step of which is in its file once."""
    found = read_hashes(run.hashes_path)
    assert run.hashes_path.read_text().count('"step"') == len(found)
    return {step: record.by_key() for step, record in found.items()}


def assert_of_checkpoint(run: RunDirectory, step: int) -> None:
    """What a run has kept of a step is of the checkpoint of that step."""
    record = read_hashes(run.hashes_path)[step]
    tensors = read(checkpoint_path(run.checkpoints, step)).tensors
    assert record.by_key() == {key: hash_of(values) for key, values in tensors.items()}
    assert record.whole == hash_of_all(record.by_key())


def parting(*of: RunDirectory) -> SameBits:
    (bits,) = compared([run.path for run in of]).bits
    return bits


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("averager=blocking", "micro_batches=2"),
        ("averager={name: sharded, wire_parameters: bfloat16}",),
        ("grid.rows=2", "plan.classifier.*=model"),
    ],
    ids=["sharded", "blocking", "rounded", "model"],
)
def test_hashes_are_those_of_checkpoints_and_change_no_bit(file: Path, overrides: tuple[str, ...]) -> None:
    run = trained(file, *overrides)
    assert list(digests(run)) == STEPS
    assert_of_checkpoint(run, 6)
    assert_of_checkpoint(run, 10)
    without = trained(file, *overrides, "hashes.every_steps=0")
    assert not without.hashes_path.exists()
    for step, path in checkpoints(run.checkpoints):
        tensors, others = (read(other).tensors for other in (path, checkpoint_path(without.checkpoints, step)))
        assert {key: values.tobytes() for key, values in tensors.items()} == {
            key: values.tobytes() for key, values in others.items()
        }


@pytest.mark.parametrize("step", [4, 5])
def test_a_resume_has_each_step_once(file: Path, undisturbed: RunDirectory, step: int) -> None:
    """It ends at a step with hashes, and at others; the hashes are those of a run that does not end."""
    first = trained(file, steps=step)
    assert list(digests(first)) == [at for at in STEPS if at <= step]
    train_virtual(RANKS, file, resume=str(first.path))
    assert digests(first) == digests(undisturbed)


def test_steps_after_the_checkpoint_of_a_killed_run_are_done_again(file: Path, undisturbed: RunDirectory) -> None:
    """Hashes of steps 4 to 8 are there, the newest checkpoint is that of step 3; then none is but that of the end."""
    killed = trained(file, steps=8)
    for step, path in checkpoints(killed.checkpoints):
        if step > 3:
            path.unlink()
    train_virtual(RANKS, file, resume=str(killed.path))
    assert digests(killed) == digests(undisturbed)


def test_a_resume_with_another_interval_goes_on_with_that(file: Path) -> None:
    run = trained(file, steps=5)
    train_virtual(RANKS, file, "hashes.every_steps=3", resume=str(run.path))
    assert list(digests(run)) == [0, 2, 4, 6, 9]


def test_a_run_that_goes_back_has_each_step_once(file: Path, undisturbed: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of step 9 are NaN the first time; the run goes back to step 5, and steps 6 and 8 come again in another order."""
    run_step, poisoned = TrainingStep.run, set[int]()

    def once(self: TrainingStep, batch: Batch, global_step: int, lr: float) -> None:
        if global_step == 8 and id(self) not in poisoned:
            poisoned.add(id(self))
            batch = replace(batch, x=np.full_like(batch.x, np.nan))
        run_step(self, batch, global_step, lr)

    expected = digests(undisturbed)
    monkeypatch.setattr(TrainingStep, "run", once)
    run = trained(file, "on_nonfinite=rollback", "checkpoint.every_steps=0")
    assert len(poisoned) == RANKS
    found = digests(run)
    assert (list(found), {step: found[step] == expected[step] for step in STEPS}) == (STEPS, {step: step <= 4 for step in STEPS})
    assert_of_checkpoint(run, 10)


def test_the_parameter_that_alone_has_another_bit_is_reported(file: Path, undisturbed: RunDirectory, monkeypatch) -> None:
    """One bit of one bias, of the last layer, which no gradient of others shows before the next step."""
    keep = RunHashes.read_state

    def flipped(self: RunHashes, position: Any) -> None:
        if position.global_step == 8:
            self._replica.drain()
            parameters: Mapping[str, Any] = self._replica.network.parameters
            last = next(reversed(parameters.values()))
            last.data.view(np.uint32)[-1] ^= np.uint32(1)
        keep(self, position)

    monkeypatch.setattr(RunHashes, "read_state", flipped)
    second = trained(file, "checks.every_steps=0")
    bits = parting(undisturbed, second)
    assert (bits.step, bits.same_step, bits.by) == (8, 6, "hashes")
    assert len(bits.different) == 1
    assert bits.different[0].endswith(".bias")


def test_the_same_run_twice_and_another_seed(file: Path, undisturbed: RunDirectory) -> None:
    assert parting(undisturbed, trained(file)) == SameBits(1, 10, by="hashes")
    other = trained(file, "seed=8")
    bits = parting(undisturbed, other)
    assert (bits.step, bits.same_step) == (0, None)


SHARDS_CONFIG = """
{name: tiny, model: {name: small, channels: [4, 6], hidden: 5, dropout: 0.2},
 data: {train: train.h5, test: train.h5, augment: [flip]}, batch: 16, epochs: 2,
 optimizer: {name: sgd, lr: 0.1, momentum: 0.9}, schedule: cosine, checkpoint: {every_steps: 1, keep: 20},
 exact: {shards: 12}, threads: 1}
"""


@pytest.fixture
def sharded_file(tmp_path: Path) -> Path:
    write_images(tmp_path / "train.h5", SAMPLES, shape=(7, 6, 1))
    (tmp_path / "tiny.yaml").write_text(SHARDS_CONFIG.replace("train.h5", f"{tmp_path}/train.h5"))
    return tmp_path / "tiny.yaml"


def _last_checkpoint(sharded_file: Path, name: str) -> CheckpointContent:
    run = latest(sharded_file.parent / name, "tiny")
    return read(checkpoint_path(run.checkpoints, 10))


@pytest.mark.sample(1)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", ["numpy", "onednn"])
def test_a_run_has_the_bits_of_one_rank_and_goes_on_with_them(sharded_file: Path, backend: str, precision: str) -> None:
    if (fault := machine_fault(backend, precision)) is not None:
        pytest.skip(fault)

    def train(name: str, ranks: int, *overrides: str, resume: str | None = None, steps: int = 0) -> None:
        keys = (f"output={sharded_file.parent / name}", f"backend={backend}", f"precision={precision}", *overrides)
        train_virtual(ranks, sharded_file, *keys, resume=resume, steps=steps)

    train("alone", 1)
    train("four", 4, "averager=bucketed")
    assert_same(_last_checkpoint(sharded_file, "four"), _last_checkpoint(sharded_file, "alone"))
    train("other", 3, steps=3)
    train("other", 2, "averager.bucket_bytes=100", "checkpoint.layout=sharded", resume="auto", steps=4)
    train("other", 1, "averager=blocking", "checkpoint.layout=single", resume="auto")
    assert_same(_last_checkpoint(sharded_file, "other"), _last_checkpoint(sharded_file, "alone"))


@pytest.mark.parametrize("backend", ["numpy", "onednn"])
def test_a_training_in_bfloat16_has_nearly_the_losses_of_float32(folder: Path, backend: str) -> None:
    """Weights, sums and updates are not in bfloat16, in which small steps of the parameters are lost."""
    if (fault := machine_fault(backend, "bfloat16")) is not None:
        pytest.skip(fault)
    losses = {}
    for ranks, precision in ((1, "float32"), (1, "bfloat16"), (2, "bfloat16")):
        output, options = f"{precision}-{ranks}", ("optimizer.lr=0.002", "model={name: small, channels: [4, 6]}", "epochs=8")
        train_virtual(
            ranks, folder / "tiny.yaml", f"backend={backend}", f"precision={precision}", f"output={folder}/{output}", *options
        )
        losses[output] = np.array([record["loss"] for record in _records(newest_run(folder, output), "epoch")])
    exact = losses["float32-1"]
    assert exact[0] - exact[-1] > 0.05
    for output in ("bfloat16-1", "bfloat16-2"):
        assert np.abs(losses[output] - exact).max() < 0.01, (output, losses[output] - exact)


@pytest.mark.job
@pytest.mark.mpi_differs
def test_activations_in_bfloat16_travel_between_real_ranks(job: Callable[..., Outcome], folder: Path) -> None:
    """Messages arrive although MPI has no bfloat16, and MPI neither rounds nor sums any."""
    split = ("precision=bfloat16", "grid.rows=2", "plan.stage*=domain", "plan.classifier.*=model", "epochs=1")
    outcome = job(2, ["-m", "hpctrain", "train", "tiny.yaml", *split, f"output={folder}/real"], cwd=folder)
    assert outcome.code == 0, outcome.output
    assert "numpy, bfloat16" in outcome.output
    train_virtual(2, folder / "tiny.yaml", *split, f"output={folder}/virtual")
    assert_same(newest_checkpoint(folder, "real"), newest_checkpoint(folder, "virtual"))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("exact.shards=6", "exact.shards: 12 -> 6 .may not change: all bits depend on it"),
        ("exact=false", "exact.shards: 12 -> not set .may not change"),
    ],
)
def test_a_resume_with_another_order_is_refused(sharded_file: Path, override: str, words: str) -> None:
    output = f"output={sharded_file.parent / 'runs'}"
    train_virtual(1, sharded_file, output, steps=2)
    with pytest.raises(CheckpointError, match=words):
        train_virtual(2, sharded_file, output, override, resume="auto")


def test_ranks_that_cannot_share_the_shards_out_are_refused(sharded_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"exact\.shards is 12, which 5 ranks cannot share evenly; start a number"):
        train_virtual(5, sharded_file, f"output={sharded_file.parent / 'runs'}")


OWN = {"kernels": "numpy", "numpy": "2.0", "threads": "2"}


def test_the_promise_names_kernels_libraries_and_threads() -> None:
    kernels = OnednnKernelSet()
    assert reproducibility_record(kernels, ThreadPlan(3, 4, "asked for"))["kernels"] == f"onednn {kernels.version}"
    found = reproducibility_record(NumpyKernelSet(), ThreadPlan(3, 4, "asked for"))
    assert (found["kernels"], found["threads"]) == ("numpy", "3")


@pytest.mark.parametrize("name", OWN)
def test_ranks_that_differ_are_refused_on_all_of_them(name: str) -> None:
    with pytest.raises(ConfigError, match=f"same {name}, but rank 0 has {OWN[name]} and rank 2 has other; use that of rank 0"):
        run_virtual(3, lambda comm: check_same_record(comm, {**OWN, name: "other"} if comm.rank == 2 else OWN))
    run_virtual(3, lambda comm: check_same_record(comm, OWN))


@pytest.mark.parametrize("name", OWN)
def test_a_resume_with_something_else_is_refused(name: str) -> None:
    meta = {EXACT_META: {**OWN, name: "other"}}
    with pytest.raises(CheckpointError, match=f"cannot resume from there with {name}: other -> {OWN[name]}, as its results"):
        run_virtual(2, lambda comm: check_kept_record(comm, meta, OWN, "there"))
    run_virtual(2, lambda comm: check_kept_record(comm, {EXACT_META: OWN}, OWN, "there"))
    with pytest.raises(CheckpointError, match=f"{name}: unknown -> {OWN[name]}"):
        run_virtual(
            2, lambda comm: check_kept_record(comm, {EXACT_META: {key: OWN[key] for key in OWN if key != name}}, OWN, "there")
        )
