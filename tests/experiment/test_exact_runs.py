"""Whole runs with one order of sums: the same checkpoints on any ranks, also where a run goes on with others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hpctrain.data import format as data_format
from hpctrain.errors import CheckpointError, ConfigError
from hpctrain.experiment import exact_promise
from hpctrain.report.comparison import compared
from hpctrain.storage.checkpoint import CheckpointContent, checkpoint_path, read
from hpctrain.storage.run_directory import latest
from tests.support.virtual_runs import train_virtual

pytestmark = pytest.mark.slow

CONFIG = """
name: tiny
model: {name: small, channels: [4, 6], hidden: 5, dropout: 0.2}
data: {train: train.h5, test: train.h5, augment: [flip]}
batch: 16
epochs: 2
optimizer: {name: sgd, lr: 0.1, momentum: 0.9}
schedule: cosine
checkpoint: {every_steps: 1, keep: 20}
exact: {shards: 12}
threads: 1
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (75, 7, 6, 1), dtype=np.uint8)
    data_format.write(tmp_path / "train.h5", 75, (7, 6, 1), ["a", "b", "c"], [(images, random.integers(0, 3, 75))])
    (tmp_path / "tiny.yaml").write_text(CONFIG.replace("train.h5", f"{tmp_path}/train.h5"))
    return tmp_path / "tiny.yaml"


def _end(file: Path, name: str) -> CheckpointContent:
    run = latest(file.parent / name, "tiny")
    assert run is not None
    return read(checkpoint_path(run.checkpoints, 10))


def _same(found: CheckpointContent, expected: CheckpointContent) -> None:
    assert found.meta["position"] == expected.meta["position"]  # sums of the epoch, too
    assert found.tensors.keys() == expected.tensors.keys()
    for name, values in expected.tensors.items():
        assert found.tensors[name].tobytes() == values.tobytes(), name


@pytest.mark.sample(1)
@pytest.mark.parametrize("backend", ["numpy", "onednn"])
def test_a_run_has_the_bits_of_one_rank_and_goes_on_with_them(file: Path, backend: str) -> None:
    def train(name: str, ranks: int, *overrides: str, resume: str | None = None, steps: int = 0) -> None:
        keys = (f"output={file.parent / name}", f"backend={backend}", *overrides)
        train_virtual(ranks, file, *keys, resume=resume, steps=steps)

    train("alone", 1)
    train("four", 4, "averager=bucketed")
    _same(_end(file, "four"), _end(file, "alone"))
    train("other", 3, steps=3)
    train("other", 2, "averager.bucket_bytes=100", "checkpoint.layout=sharded", resume="auto", steps=4)
    train("other", 1, "averager=blocking", "checkpoint.layout=single", resume="auto")
    _same(_end(file, "other"), _end(file, "alone"))


def test_two_runs_are_compared_on_other_ranks_and_part_where_their_orders_do(file: Path) -> None:
    """By hashes of each step; an ordinary run adds up in the order of its ranks, and has other bits from the first step on."""

    def train(name: str, ranks: int, *overrides: str) -> Path:
        keys = (f"output={file.parent / name}", "hashes.every_steps=1", "checkpoint.every_steps=100", *overrides)
        train_virtual(ranks, file, *keys)
        run = latest(file.parent / name, "tiny")
        assert run is not None
        return run.path

    runs = [train("alone", 1), train("three", 3), train("plain", 3, "exact=false")]
    comparison = compared(runs)
    same, parting = comparison.bits
    assert (same.step, same.different, same.by) == (10, (), "hashes")
    assert (parting.same_step, parting.step, parting.by) == (0, 1, "hashes")
    assert parting.different[0] == "parameters/stage1.conv.weight"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("exact.shards=6", "exact.shards: 12 -> 6 .may not change: each bit follows from them"),
        ("exact=false", "exact.shards: 12 -> not set .may not change"),
    ],
)
def test_a_resume_with_another_order_is_refused(file: Path, override: str, words: str) -> None:
    output = f"output={file.parent / 'runs'}"
    train_virtual(1, file, output, steps=2)
    with pytest.raises(CheckpointError, match=words):
        train_virtual(2, file, output, override, resume="auto")


def test_a_resume_with_other_libraries_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = f"output={file.parent / 'runs'}"
    train_virtual(1, file, output, steps=2)
    monkeypatch.setattr(exact_promise, "promise", lambda *things: {"kernels": "others", "numpy": "2", "threads": "9"})
    with pytest.raises(CheckpointError, match=r"with kernels: .* -> others; numpy: .* -> 2; threads: 1 -> 9"):
        train_virtual(2, file, output, resume="auto")


def test_ranks_that_cannot_share_the_shards_out_are_refused(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"exact\.shards is 12, which 5 ranks cannot share out evenly; start 4 or 6 ranks"):
        train_virtual(5, file, f"output={file.parent / 'runs'}")
