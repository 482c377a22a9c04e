"""Pinned memory of planned runs: what is not known before a run is said to be unknown, and a host pins none.

Plans and runs are compared in integers in tests/cli/test_train_cuda.py.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hpctrain.backend.cuda.choose import DEVICE_VARIABLE
from hpctrain.comm.link import LinkModel
from hpctrain.config.load import parse
from hpctrain.data import format as data_format
from hpctrain.experiment.dry_run import group_schedules, prepare
from hpctrain.experiment.pinned_memory import PlannedPinnedMemory, pinned_memory
from tests.support.emulated import EmulatedDeviceFactory

CONFIG = """
backend: cuda
model: {name: small, channels: [4, 6], hidden: 9}
data: {train: train.h5}
batch: 12
epochs: 1
optimizer: {name: sgd, lr: 0.1}
schedule: constant
"""


pytestmark = pytest.mark.usefixtures("device")


@pytest.fixture
def device(emulated_device: EmulatedDeviceFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(DEVICE_VARIABLE, "emulated")
    monkeypatch.chdir(tmp_path)


def _planned(*overrides: str, ranks: int = 2, per_node: int | None = None) -> PlannedPinnedMemory | None:
    config, _ = parse(CONFIG, overrides=overrides)
    task = prepare(config, ranks)
    return pinned_memory(task, group_schedules(task, LinkModel(1e-5, 1e-9), per_node))


def _write(count: int) -> None:
    images = np.zeros((count, 9, 8, 1), np.uint8)
    data_format.write(Path("train.h5"), count, (9, 8, 1), ["a", "b"], [(images, np.zeros(count, np.int64))])


def test_without_data_files_images_are_not_known() -> None:
    planned = _planned()
    assert planned is not None
    assert planned.images is None
    assert planned.messages is not None


@pytest.mark.parametrize(
    ("overrides", "ranks", "per_node"),
    [
        (("averager=lazy",), 2, None),
        (("averager=sparse",), 4, 2),
        (("averager=sharded",), 4, 2),
        (("transport=mpi",), 2, None),
        (("transport=nccl",), 2, None),
    ],
)
def test_what_depends_on_the_steps_is_not_told(overrides: tuple[str, ...], ranks: int, per_node: int | None) -> None:
    _write(24)
    planned = _planned(*overrides, ranks=ranks, per_node=per_node)
    assert planned is not None
    assert planned.messages is None
    assert planned.images is not None


def test_a_batch_is_no_larger_than_its_file() -> None:
    found = []
    for count in (24, 12, 7):
        _write(count)
        planned = _planned()
        assert planned is not None
        found.append(planned.images)
    full, same, less = found
    assert full == same
    assert full is not None
    assert less is not None
    assert less[0] < full[0]
    assert less[1] < less[0]


def test_a_host_pins_nothing() -> None:
    assert _planned("backend=numpy") is None
