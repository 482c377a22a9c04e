"""Every reader reports two files of one job that were made differently, and reports nothing about files that were made alike."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

import hpctrain
from hpctrain.cli.main import cli
from hpctrain.core.errors import DataError, HpctrainError
from hpctrain.data.convert import arrays, table
from hpctrain.data.convert.common import named_labels
from hpctrain.data.image_file import ImageFile, ImageForm
from hpctrain.data.writer import write_data_file
from hpctrain.run.model_weights import of_checkpoint
from hpctrain.storage import checkpoint
from tests.support.sampling import amount

_CROP = [{"name": "center_crop", "size": 8}]


@dataclass(frozen=True)
class Made:
    """How a file was made."""

    fit: str = "squash"
    value_range: tuple[float, float] | None = (0.0, 4095.0)
    side: int = 8
    scale: float = 1.0
    names: tuple[str, ...] = ("ant", "bee", "cow")

    def write(self, path: Path, seed: int) -> Path:
        """Write images of three classes."""
        draw = np.random.default_rng(seed)
        labels = np.arange(24) % 3
        images = draw.integers(0, 256, (24, self.side, self.side, 1)) * self.scale
        chunk = images.astype(np.uint8), labels
        write_data_file(path, 24, (self.side, self.side, 1), self.names, [chunk], self.fit, self.value_range)
        return path


#: another value of each fact, and the words for both values that a message must contain
CHANGES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "fit": ({"fit": "crop"}, ("crop", "squash")),
    "range": ({"value_range": (0.0, 16383.0)}, ("4095", "16383")),
    "whole range": ({"value_range": None}, ("4095", "255")),
    "size": ({"side": 10}, ("10 x 10", "8 x 8")),
    "scale": ({"scale": 1 / 255}, ("mean", "deviation")),
    "order": ({"names": ("cow", "bee", "ant")}, ("classes",)),
    "names": ({"names": ("ant", "bee", "dog")}, ("'dog'", "'cow'")),
}


class Job:
    """Job on files in a folder. Each method reads another file next to the training file, and returns all messages."""

    def __init__(self, folder: Path, capture: Callable[[], str]) -> None:
        self.folder, self._capture = folder, capture
        self.train = Made().write(folder / "train.h5", 0)
        self.alike = Made().write(folder / "alike.h5", 1)

    def config(self, **data: Path) -> dict[str, Any]:
        """Return the configuration of one epoch."""
        files = {"train": self.train, **data}
        return {
            "name": "made",
            "model": {"name": "small", "channels": [2], "hidden": 3},
            "data": {**{key: str(path) for key, path in files.items()}, "augment": _CROP, "evaluate_augment": _CROP},
            "batch": 12,
            "epochs": 1,
            "optimizer": {"name": "sgd", "lr": 0.05},
            "schedule": "constant",
            "threads": 1,
            "progress": "none",
            "backend": "numpy",
            "flight": "none",
            "output": str(self.folder / "runs"),
        }

    def _trained(self, config: dict[str, Any], **arguments: Any) -> str:
        try:
            hpctrain.train(config, style="lines", **arguments)
        except HpctrainError as error:
            return self._capture() + str(error)
        return " ".join(self._capture().split())

    def test(self, other: Path) -> str:
        return self._trained(self.config(test=other))

    def validation(self, other: Path) -> str:
        return self._trained(self.config(validation=other, test=self.alike))

    def resumed(self, other: Path) -> str:
        self._trained(self.config(test=self.alike))
        return self._trained(self.config(test=other) | {"epochs": 2}, resume="auto")

    def _command(self, command: list[str], **data: Path) -> str:
        file, config = self.folder / "made.yaml", self.config(**data)
        file.write_text(str(config).replace("None", "null"))
        outcome = CliRunner().invoke(cli, [*command, str(file)])
        return outcome.output + str(outcome.exception or "")

    def checked(self, other: Path) -> str:
        return self._command(["config", "check"], test=other)

    def weights(self, other: Path) -> str:
        self._trained(self.config())
        (run,) = (self.folder / "runs").iterdir()
        of_checkpoint(checkpoint.checkpoints(run / "checkpoints")[-1][1]).write(self.folder / "w.safetensors")
        init = {"init": {"weights": str(self.folder / "w.safetensors")}, "epochs": 0}
        return self._trained(self.config(train=other) | init)

    def _loaders(self, other: Path, like: Path | None) -> str:
        try:
            with hpctrain.start(batch=12, threads=1, progress="none") as job:
                replica = job.replica(hpctrain.model("small", channels=[2], hidden=3), (8, 8, 1), backend="numpy")
                for path in (self.train, other):
                    job.loader(replica, path, like=like, augment=_CROP)
        except BaseException:  # the error ends the block of `start` with its message on standard error
            return self._capture()
        return self._capture()

    def loader(self, other: Path) -> str:
        return self._loaders(other, None)

    def loader_like(self, other: Path) -> str:
        return self._loaders(other, self.train)


_READERS = [name for name in vars(Job) if not name.startswith("_") and name != "config"]
#: parts of all sentences on differences
_SAID = ("differently", "other classes", "order of classes")


@pytest.mark.job
@pytest.mark.slow
@pytest.mark.parametrize("reader", _READERS)
def test_every_reader_reports_a_difference(reader: str, tmp_path: Path, capfd: Any, caplog: Any) -> None:
    def capture() -> str:
        text = capfd.readouterr()
        said = " ".join((text.out + text.err + caplog.text).split())
        caplog.clear()
        return said

    draw = random.Random(reader)
    changes = [name for name in CHANGES if (reader, name) != ("weights", "size")]  # weights describe the network's input only
    for number, name in enumerate([None, *draw.sample(changes, amount(3, 6))]):
        (folder := tmp_path / str(number)).mkdir()
        job = Job(folder, capture)
        made = Made() if name is None else replace(Made(), **CHANGES[name][0])
        # weights and loaders normalise with the file's own moments, so an equal file has the same ones
        other = made.write(folder / "other.h5", 2 if name or reader not in ("weights", "loader") else 0)
        said = " ".join(getattr(job, reader)(other).split())
        if name is None:
            assert not any(part in said for part in _SAID), said
        elif name == "order" and reader in ("checked", "loader_like"):  # labels are mapped by name, which is no fault
            assert "Traceback" not in said
        else:
            assert any(part in said for part in _SAID), (name, said)
            assert all(value in said for value in CHANGES[name][1]), (name, said)


@pytest.mark.parametrize("seed", range(20))
def test_a_number_means_the_class_of_this_name_or_is_refused(seed: int) -> None:
    draw = random.Random(seed)
    numbers = [str(number) for number in draw.sample(range(14), draw.randint(2, 12))]
    names = sorted(numbers) if draw.random() < 0.5 else [*numbers, *draw.choice([(), ("other",)])]
    labels = np.array([draw.randrange(14) for _ in range(9)])
    try:
        classes, _ = named_labels(labels, names, "x.npz")
    except DataError as error:
        assert not set(map(str, labels)) <= set(names) or "other" in names, error  # noqa: PT017
        return
    for label, of_class in zip(labels.tolist(), classes.tolist(), strict=True):
        assert not 0 <= of_class < len(names) or names[of_class] == str(label) or str(label) not in names


def test_tables_and_arrays_agree_about_numbers(tmp_path: Path) -> None:
    names = sorted(map(str, range(12)))
    lines = []
    for number in range(12):
        Image.fromarray(np.full((8, 8), number, np.uint8)).save(tmp_path / f"{number}.png")
        lines.append(f"{number}.png,{number}")
    (tmp_path / "t.csv").write_text("\n".join(["file,label", *lines]))
    of_table = [label for _, label in table.scan(tmp_path / "t.csv", class_names=names).files]
    np.savez(tmp_path / "t.npz", x=np.zeros((12, 8, 8), np.uint8), y=np.arange(12))
    arrays.convert(arrays.opened(tmp_path / "t.npz"), tmp_path / "t.h5", names)
    assert ImageFile.open(tmp_path / "t.h5").labels.tolist() == of_table == [names.index(str(number)) for number in range(12)]
    (tmp_path / "t.csv").write_text("file,label\n0.png,0\n1.png,1\n")
    with pytest.raises(DataError, match=r"class of label 0 .* is uncertain"):
        table.scan(tmp_path / "t.csv", class_names=["1", "2", "3"])


@pytest.mark.parametrize(
    ("values", "value_range"),
    [
        ([0.0, 1.0], (0, 1)),
        ([0.25, 0.5], (0, 1)),
        ([0.0, 1.0000001], None),
        ([0.5, 1.02], None),
        ([0.5, 254.5], None),
        ([0.0, 255.0], (0, 255)),
        ([3.0, 200.0], (0, 255)),
        ([0.0, 256.0], None),
        ([-0.1, 1.0], None),
    ],
)
def test_a_range_that_does_not_fit_exactly_is_refused(
    values: list[float], value_range: tuple[int, int] | None, tmp_path: Path
) -> None:
    images = np.resize(np.array(values, np.float32), (4, 6, 6, 3))
    np.savez(tmp_path / "a.npz", x=images, y=np.arange(4) % 2)
    source, out = arrays.opened(tmp_path / "a.npz"), tmp_path / "a.h5"
    if value_range is None:
        with pytest.raises(DataError, match="whose range is unknown; give the values of black and white"):
            arrays.convert(source, out)
        return
    arrays.convert(source, out)
    np.testing.assert_array_equal(ImageFile.open(out).images, np.rint(images * (255 / value_range[1])).astype(np.uint8))


@pytest.mark.job
def test_exports_of_a_checkpoint_have_equal_bytes(tmp_path: Path, capfd: Any) -> None:
    job = Job(tmp_path, lambda: capfd.readouterr().out)
    job.test(job.alike)
    (run,) = (tmp_path / "runs").iterdir()
    path = checkpoint.checkpoints(run / "checkpoints")[-1][1]
    contents = set()
    for name in ("one.safetensors", "two.safetensors", "three.safetensors"):
        of_checkpoint(path).write(tmp_path / name)
        contents.add((tmp_path / name).read_bytes())
    assert len(contents) == 1


@pytest.mark.job
def test_metrics_that_no_training_changes_cause_a_warning(tmp_path: Path, capfd: Any) -> None:
    job = Job(tmp_path, lambda: capfd.readouterr().out)
    base = job.config(test=job.alike)
    assert "always 100 %" not in job._trained(base)
    for section, key in (("checkpoint", "best"), ("early_stop", "metric"), ("schedule", "metric")):
        extra = {"name": "plateau"} if section == "schedule" else {"patience": 9} if section == "early_stop" else {}
        assert f"{section}.{key} is top5, which is always 100 %" in job._trained(base | {section: {key: "top5", **extra}})
    (tmp_path / "link.h5").symlink_to(job.train)
    assert "holds the training images" in job.test(tmp_path / "link.h5")
    labels = np.zeros(24, np.int64)
    write_data_file(tmp_path / "one.h5", 24, (8, 8, 1), ["a", "b"], [(np.ones((24, 8, 8, 1), np.uint8), labels)])
    assert "have only 1 class" in job._trained(job.config(train=tmp_path / "one.h5"))
    with hpctrain.start(batch=12, threads=1, progress="none") as started:
        replica = started.replica(hpctrain.model("small", channels=[2], hidden=3), (8, 8, 1), backend="numpy")
        started.array_loader(replica, np.zeros((24, 8, 8, 1), np.float32), labels)
    assert "have only 1 class" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("stored", "of_pictures"),
    [(None, None), ((-1, 1), None), ((0, 1.02), None), ((-2.1, 2.6), None), ((0, 200), (0, 200)), ((0, 4095), (0, 4095))],
)
def test_pictures_are_not_scaled_from_ranges_of_floating_point_numbers(
    stored: tuple[float, float] | None, of_pictures: tuple[float, float] | None, tmp_path: Path
) -> None:
    file = ImageFile.open(replace(Made(), value_range=stored).write(tmp_path / "made.h5", 0))
    assert file.value_range == stored
    assert ImageForm.of(file).value_range == of_pictures
