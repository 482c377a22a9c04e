"""A job as programs have it: what its methods refuse, and what its replicas share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpctrain
from hpctrain.data import format as data_format
from hpctrain.errors import ConfigError, ShapeError
from hpctrain.experiment.job import Stopped
from hpctrain.models import interchange
from hpctrain.storage import weights_file
from hpctrain.storage.weights_file import WeightsFile
from tests.support import nets
from tests.test_api import alone_without_a_launcher as alone_without_a_launcher

IMAGES, LABELS = np.random.default_rng(0).standard_normal((16, 9, 7, 3)), np.arange(16) % 4


@pytest.mark.usefixtures("alone_without_a_launcher")
@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"checks_every_steps": -1}, "checks_every_steps is -1, but must be 0 or more; 10 is usual"),
        ({"on_nonfinite": "skipp"}, "on_nonfinite is 'skipp', but must be"),
        ({"on_nonfinite": {"action": "skip", "most": 0}}, "where most is 1 or more"),
        ({"on_nonfinite": "rollback"}, "catch DivergedError and `load` a checkpoint"),
    ],
)
def test_answers_that_there_are_not_are_refused(given: dict[str, Any], sentence: str) -> None:
    with hpctrain.start(batch=8) as job, pytest.raises(hpctrain.HpctrainError, match=sentence):
        job.replica(nets.plain(), (9, 7, 3), **given)


@pytest.mark.usefixtures("alone_without_a_launcher")
@pytest.mark.parametrize(
    ("mixing", "sentence"),
    [
        ({"mixupp": 1.0}, 'The mixing of images has no option "mixupp"; the nearest is "mixup"'),
        ({"mixup": "much"}, 'Option "mixup" of the mixing of images is "much", but must be a number'),
        ({"cutmix": 5.0}, "mixing.cutmix 5.0 is outside"),
        ({"mixup": 1.0, "seed": 3}, 'Option "seed" of the mixing of images is set by the program'),
    ],
)
def test_mixing_that_there_is_not_is_refused(mixing: dict[str, Any], sentence: str) -> None:
    with hpctrain.start(batch=8) as job:
        replica = job.replica(nets.plain(), (9, 7, 3), backend="numpy")
        with pytest.raises(ConfigError, match=sentence):
            job.array_loader(replica, IMAGES, LABELS, mixing=mixing)


@pytest.mark.usefixtures("alone_without_a_launcher")
def test_images_of_a_file_are_mixed(tmp_path: Path) -> None:
    stored = np.random.default_rng(1).integers(0, 256, (16, 9, 7, 3), dtype=np.uint8)
    data_format.write(tmp_path / "train.h5", 16, (9, 7, 3), list("abcd"), [(stored, LABELS)])
    with hpctrain.start(batch=8) as job:
        replica = job.replica(nets.plain(), (9, 7, 3), backend="numpy")
        loader = job.loader(replica, tmp_path / "train.h5", mixing={"mixup": 1.0})
        assert all(batch.mixed is not None for batch in loader.epoch(0))


@pytest.mark.usefixtures("alone_without_a_launcher")
def test_nobody_asks_to_stop_without_signals(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), hpctrain.start(batch=8) as job:
        _ = job.stop_requested
    assert "give `start` signals=True" in capsys.readouterr().err


@pytest.mark.usefixtures("alone_without_a_launcher")
def test_stopping_passes_through_what_takes_ordinary_errors() -> None:
    def asks() -> None:
        with hpctrain.start(batch=8) as job:
            try:
                job.stop()
            except Exception as error:
                pytest.fail(f"taken for an error: {error}")
        pytest.fail("the program has gone on")

    assert not issubclass(Stopped, Exception)
    with pytest.raises(SystemExit) as left:
        asks()
    assert left.value.code == 85


@pytest.mark.usefixtures("alone_without_a_launcher")
@pytest.mark.parametrize("background", [False, True])
def test_counts_of_skipped_steps_are_kept(background: bool, tmp_path: Path) -> None:
    images = IMAGES.copy()
    with hpctrain.start(batch=8) as job:
        replica = job.replica(nets.plain(), (9, 7, 3), on_nonfinite={"action": "skip", "most": 3})
        for batch in job.array_loader(replica, images, LABELS, shuffle=False).epoch(0):
            batch.x[...] = np.nan if replica.global_step == 1 else batch.x
            replica.step(batch, 0.1)
        job.save(replica, tmp_path / "net.h5", background=background, seen=16)
        again = job.replica(nets.plain(), (9, 7, 3), on_nonfinite="skip")
        assert job.load(again, tmp_path / "net.h5") == {"seen": 16}
        assert (again.global_step, again.loop.skipped, again.loop.skipped_in_a_row) == (2, 1, 1)


@pytest.mark.usefixtures("alone_without_a_launcher")
def test_a_wrong_weight_is_seen_before_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def flips() -> None:
        with hpctrain.start(batch=8) as job:
            replica = job.replica(nets.plain(), (9, 7, 3))
            for batch in job.array_loader(replica, IMAGES, LABELS).epoch(0):
                replica.step(batch, 0.1)
            replica.drain()
            next(iter(replica.network.parameters.values())).data.reshape(-1)[0] += 1
            job.save(replica, tmp_path / "net.h5")

    with pytest.raises(SystemExit):
        flips()
    said = capsys.readouterr().err
    assert "changed between two updates" in said
    assert "replica.parameters_written()" in said
    assert not (tmp_path / "net.h5").exists()


@pytest.mark.usefixtures("alone_without_a_launcher")
def test_a_replica_starts_from_weights_and_trains_what_is_not_frozen(tmp_path: Path) -> None:
    with hpctrain.start(batch=8) as job:
        first = job.replica(nets.residual(), (9, 7, 3), seed=5)
        weights_file.write(tmp_path / "w.safetensors", WeightsFile(interchange.export(first.network)))
        replica = job.replica(nets.residual(classes=4), (9, 7, 3), frozen=["*conv*", "*bn*", "layer2.downsample.*"])
        with pytest.raises(hpctrain.HpctrainError, match=r'leave such layers out, as in ignore=\["fc\.\*"\]'):
            job.load_weights(replica, tmp_path / "w.safetensors")
        job.load_weights(replica, tmp_path / "w.safetensors", ignore=["fc.*"])
        by_seed = replica.network.parameters["fc.weight"].data.copy()
        for batch in job.array_loader(replica, IMAGES, LABELS).epoch(0):
            replica.step(batch, lr=0.1)
        replica.settle()
        replica.require_alike()
        for name, parameter in replica.network.parameters.items():
            if name.startswith("fc."):
                continue
            np.testing.assert_array_equal(parameter.data, first.network.parameters[name].data)
        assert not np.array_equal(replica.network.parameters["fc.weight"].data, by_seed)


@pytest.mark.usefixtures("alone_without_a_launcher")
def test_images_of_a_file_have_sizes_by_epoch(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (16, 9, 7, 3), np.uint8)
    data_format.write(tmp_path / "train.h5", 16, (9, 7, 3), list("abcde"), [(pixels, LABELS)])
    with hpctrain.start(batch=8) as job:
        replica = job.replica(nets.residual(), (9, 7, 3), backend="numpy")
        loader = job.loader(replica, tmp_path / "train.h5", sizes=[(0, 5), (1, 7)])
        for epoch, shape in enumerate([(6, 5, 3), (9, 7, 3)]):
            for batch in loader.epoch(epoch):
                assert batch.x.shape[1:] == shape
                replica.step(batch, 0.1)
        assert replica.settle() is not None
        with pytest.raises(ConfigError, match="the smallest value is 1"):
            job.loader(replica, tmp_path / "train.h5", sizes=[(0, 5), (0, 7)])
        plain = job.replica(nets.plain(), (9, 7, 3), backend="numpy")
        with pytest.raises(ShapeError, match="another size of this training or its evaluation: Layer fc1"):
            job.loader(plain, tmp_path / "train.h5", sizes=[(0, 5), (1, 7)])
