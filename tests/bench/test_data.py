"""What `hpctrain bench data` measures: every stage for every number of threads, and the sentence that follows from it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hpctrain.bench import data
from hpctrain.bench.data import AUGMENT, NORMALISE, READ, WHOLE, DataRates, StageRate
from hpctrain.config.load import parse
from hpctrain.config.schema import Config
from hpctrain.data import format as data_format

CONFIG = """
model: {{name: small, channels: [4, 6], hidden: 9}}
data: {{train: {train}, augment: [{augment}]}}
batch: {batch}
epochs: 1
optimizer: {{name: sgd, lr: 0.05}}
schedule: constant
backend: numpy
"""


def _config(train: object, augment: str = "flip", batch: int = 4) -> Config:
    return parse(CONFIG.format(train=train, augment=augment, batch=batch))[0]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "_LEAST_SECONDS", 1e-4)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("batch", [4, 11, 99])
def test_stages_are_timed_for_each_number_of_threads(tmp_path: Path, batch: int) -> None:
    images = np.random.default_rng(0).integers(0, 256, (11, 9, 9, 3), np.uint8)
    data_format.write(tmp_path / "train.h5", 11, (9, 9, 3), ["a", "b"], [(images, np.arange(11) % 2)])
    rates = data.measure(_config(tmp_path / "train.h5", batch=batch), (1, 3), 1)
    assert (rates.images, rates.shape, rates.decodes) == (min(batch, 11), (9, 9, 3), False)
    assert (rates.names, rates.threads) == ((READ, AUGMENT, NORMALISE, WHOLE), (1, 3))
    of = {(each.stage, each.threads) for each in rates.stages}
    assert of == {(READ, 1), *((stage, count) for stage in (AUGMENT, NORMALISE, WHOLE) for count in (1, 3))}
    assert all(each.images_per_second > 0 and each.cpu_seconds >= 0 for each in rates.stages)
    assert rates.rate(READ, 3) == rates.rate(READ, 1)
    assert rates.needed is not None


@pytest.mark.usefixtures("quick")
def test_made_up_images_without_augmentation_have_no_such_stage() -> None:
    rates = data.measure(_config("synthetic", augment=""), (1,), 1, times_step=False)
    assert rates.names == (READ, NORMALISE, WHOLE)
    assert rates.needed is None


def _rates(whole: float, needed: float | None, *, read: float = 9000.0) -> DataRates:
    stages = {(READ, 1): read, (AUGMENT, 1): 1000.0, (AUGMENT, 2): 1900.0, (NORMALISE, 1): 5000.0, (NORMALISE, 2): 9900.0}
    stages |= {(WHOLE, 1): whole, (WHOLE, 2): 2 * whole}
    found = tuple(StageRate(stage, count, rate, 0.0) for (stage, count), rate in stages.items())
    return DataRates(4, (9, 9, 3), False, found, "resnet20", needed, 1)


def test_what_takes_longest_limits_where_steps_need_more_than_is_made() -> None:
    limited = _rates(910.0, 2400.0)
    assert limited.sentence(1) == "augment limits: 1 thread makes 910 images/s, a resnet20 step with 1 thread needs 2,400"
    assert limited.sentence(2) == "augment limits: 2 threads make 1,820 images/s, a resnet20 step with 1 thread needs 2,400"
    enough = "data do not limit: 2 threads make 1,820 images/s, a resnet20 step with 1 thread needs 400 (augment takes longest)"
    assert _rates(910.0, 400.0).sentence(2) == enough
    assert _rates(910.0, None).sentence(1) == "augment takes longest: 1 thread makes 910 images/s"
    assert _rates(910.0, None, read=950.0).sentence(1) == "read takes longest: 1 thread makes 910 images/s"
