"""Runs that keep hashes: each step once whatever interrupts them, of what checkpoints hold, and they tell where two runs part."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.data import format as data_format
from hpctrain.data.loader import Batch
from hpctrain.experiment.run_hashes import RunHashes
from hpctrain.report.comparison import SameBits, compared
from hpctrain.storage.checkpoint import checkpoint_path, checkpoints, read
from hpctrain.storage.hash_file import read_hashes
from hpctrain.storage.run_directory import RunDirectory, runs
from hpctrain.train.element_hash import hash_of, hash_of_all
from hpctrain.train.step import TrainingStep
from tests.support.virtual_runs import train_virtual

pytestmark = pytest.mark.slow

#: 75 samples of which a step takes 16: five steps of an epoch, ten in all
CONFIG = """
name: tiny
seed: 7
backend: numpy
progress: test
model: {{name: small, channels: [4, 6], hidden: 5, dropout: 0.2}}
data: {{train: {folder}/train.h5}}
batch: 16
epochs: 2
optimizer: {{name: sgd, lr: 0.05, momentum: 0.9}}
schedule: constant
ema: {{decay: 0.5}}
checkpoint: {{every_steps: 3, keep: 99}}
hashes: {{every_steps: 2}}
deadline_seconds: 60
output: {folder}/runs
"""
#: steps with hashes of an undisturbed run
STEPS = [0, 2, 4, 6, 8, 10]
RANKS = 2


def prepared(folder: Path) -> Path:
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (75, 7, 6, 1), dtype=np.uint8)
    data_format.write(folder / "train.h5", 75, (7, 6, 1), ["a", "b", "c"], [(images, random.integers(0, 3, 75))])
    (folder / "tiny.yaml").write_text(CONFIG.format(folder=folder))
    return folder / "tiny.yaml"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return prepared(tmp_path)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return trained(prepared(tmp_path_factory.mktemp("undisturbed")))


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


@pytest.mark.sample(2)
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


def test_what_lies_behind_the_checkpoint_of_a_killed_run_is_done_again(file: Path, undisturbed: RunDirectory) -> None:
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


def test_a_run_that_goes_back_has_each_step_once(
    file: Path, undisturbed: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert list(found) == STEPS
    assert {step: found[step] == expected[step] for step in STEPS} == {step: step <= 4 for step in STEPS}
    assert_of_checkpoint(run, 10)


def test_runs_that_part_by_a_changed_rate_are_told_apart_at_that_step(file: Path) -> None:
    """Both go on from step 5, one with another learning rate: the checkpoints of step 6 lie behind it, hashes tell as much."""
    first = trained(file, steps=5)
    second = RunDirectory(first.path.with_name("tiny-copy"))
    shutil.copytree(first.path, second.path)
    train_virtual(RANKS, file, resume=str(first.path))
    train_virtual(RANKS, file, "optimizer.lr=0.04", resume=str(second.path))
    bits = parting(first, second)
    assert (bits.step, bits.same_step, bits.by) == (6, 5, "hashes")
    assert bits.different[0] == "parameters/stage1.conv.weight"
    assert "first difference by step 6 in stage1.conv.weight" in bits.sentence(("a", "b"))
    shutil.rmtree(first.checkpoints)
    assert (parting(first, second).step, parting(first, second).same_step) == (6, 4)


def test_the_parameter_is_told_that_alone_has_another_bit(
    file: Path, undisturbed: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bit of one bias, of the last layer, which no gradient of others shows before the next step."""
    keep = RunHashes.keep

    def flipped(self: RunHashes, position: Any) -> None:
        if position.global_step == 8:
            self._replica.drain()
            parameters: Mapping[str, Any] = self._replica.network.parameters
            last = next(reversed(parameters.values()))
            last.data.view(np.uint32)[-1] ^= np.uint32(1)
        keep(self, position)

    monkeypatch.setattr(RunHashes, "keep", flipped)
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


def test_other_bits_of_dropout_from_a_step_on(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the third step on masks are those of other steps."""
    run_step = TrainingStep.run

    def other_masks(self: TrainingStep, batch: Batch, global_step: int, lr: float) -> None:
        run_step(self, batch, global_step + 100 * (global_step >= 2), lr)

    first = trained(file, "hashes.every_steps=1")
    monkeypatch.setattr(TrainingStep, "run", other_masks)
    bits = parting(first, trained(file, "hashes.every_steps=1"))
    assert (bits.step, bits.same_step) == (3, 2)
