"""A user's own model, averager, optimizer, schedule, augmentation and reporter, from a file and from an installed package."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import yaml
from click.testing import CliRunner

from hpctrain.cli.main import cli
from hpctrain.core import user_code
from hpctrain.models import sizes
from hpctrain_testing.run import Outcome
from tests.core.test_registry import offer
from tests.support.here import run_here
from tests.support.tiny_runs import newest_run, write_images

Job = Callable[..., Outcome]

OWN = '''
"""All that a user may bring."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.data.augmentations.base import Augmentation
from hpctrain.nn.layers import AdaptiveAveragePool, Conv2d, Flatten, Linear, ReLU, Sequential
from hpctrain.optim.base import Optimizer
from hpctrain.optim.schedules import LearningRateSchedule
from hpctrain.training.metrics import Reporter


def model(classes: int, channels_in: int, features: int = 6):
    """One convolution.

    Args:
        features: Channels of the convolution.
    """
    return Sequential({
        "conv": Conv2d(channels_in, features, 3, padding=1), "relu": ReLU(), "pool": AdaptiveAveragePool(2),
        "flatten": Flatten(), "fc": Linear(4 * features, classes, image_shape=(2, 2, features)),
    })


class SignDescent(Optimizer):
    """Steps of one length in each direction, by the sign of the gradient."""

    def __init__(self, *, scale: float = 0.1):
        if scale <= 0:
            raise ValueError(f"scale {scale} must be above 0")
        self.scale = scale

    def bind(self, group, owned):
        self.group = group

    def update(self, segments, lr, norms):
        for segment in segments:
            part = slice(segment.start, segment.stop)
            self.group.data[part] -= lr * self.scale * np.sign(self.group.grad[part])

    def state(self, segment):
        return {}


class Table: ...


class Odd(SignDescent):
    """With keywords that no configuration can hold."""

    def __init__(self, *, scale: float = 0.1, table: Table = Table(), other=np.zeros(2), **more):
        super().__init__(scale=scale)


class Average(Blocking):
    """Blocking averaging under a name of its own."""


@dataclass(frozen=True, kw_only=True)
class Halving(LearningRateSchedule):
    """The rate halves every few epochs.

    Args:
        every: Epochs from one fall to the next.
    """

    every: float = 1.0

    def after_warmup(self, step, progress):
        return self.base_lr * 0.5 ** (step // (self.every * self.steps_per_epoch))


@dataclass(frozen=True)
class Darken(Augmentation):
    """Images are made darker by a random factor.

    Args:
        least: Smallest factor.
    """

    least: float = 0.5
    draws = 1

    def apply(self, images, u, out):
        factors = self.least + (1 - self.least) * u[:, 0]
        out[...] = images * factors[:, None, None, None]


class Steps(Reporter):
    """Writes every step's loss to a file."""

    def __init__(self, directory: Path, *, file_name: str = "steps.txt"):
        self.file = open(directory / file_name, "a")

    def step(self, epoch, step, sums, lr, images_per_second):
        self.file.write(f"{step} {lr:.6f}\\n")

    def record(self, kind, values):
        if kind == "evaluation":
            self.file.write("evaluated\\n")

    def close(self):
        self.file.write("closed\\n")
        self.file.close()
'''

CONFIG = """
{name: own, seed: 7, backend: numpy, model: {name: "MODULE:model", features: 5}, batch: 16, epochs: 2,
 data: {train: train.h5, test: test.h5, augment: [{name: "MODULE:Darken", least: 0.75}, flip]},
 optimizer: {name: "MODULE:SignDescent", lr: 0.05, scale: 0.2}, schedule: {name: "MODULE:Halving", warmup_epochs: 0.5},
 averager: "MODULE:Average", metrics: {interval_seconds: 0.01, reporters: ["MODULE:Steps"]}, deadline_seconds: 30}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory: two small data files, and the user's code next to his configuration in a directory of its own."""
    write_images(tmp_path / "train.h5", 43)
    write_images(tmp_path / "test.h5", 9, seed=1)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "own_code.py").write_text(OWN)
    (tmp_path / "mine" / "own.yaml").write_text(CONFIG.replace("MODULE", "own_code.py"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(user_code, "_files", {})
    monkeypatch.setattr(user_code, "_config_folders", [])
    yield tmp_path
    sys.modules.pop("own_code", None)


def _command(*words: str) -> str:
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 0, result.output
    return result.output


def _refused(*words: str) -> list[str]:
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 2, f"{result.output} {result.exception!r}"
    return result.stderr.splitlines()


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [0, 2])
def test_code_of_the_users_trains_resumes_and_is_recorded(job: Job, folder: Path, ranks: int) -> None:
    command = ["-m", "hpctrain", "train", "mine/own.yaml"]
    outcome = job(ranks, [*command, "--steps", "2"], cwd=folder)
    assert outcome.code == 0, outcome.output
    run = newest_run(folder, name="own")
    written = yaml.safe_load(run.config())
    assert written["model"] == {"name": "own_code.py:model", "features": 5}
    assert written["optimizer"]["name"] == "own_code.py:SignDescent"
    assert written["schedule"]["every"] == 1.0
    versions = json.loads((run.path / "versions.json").read_text())
    assert versions["own_code.py:Average"] == versions["own_code.py:model"]
    assert versions["own_code.py:model"].startswith("own_code.py sha256 ")

    with (folder / "mine" / "own_code.py").open("a") as file:
        file.write("# another version\n")
    outcome = job(ranks, [*command, "--resume", "auto"], cwd=folder)
    assert outcome.code == 0, outcome.output
    assert "code.own_code.py:model: own_code.py sha256" in " ".join(outcome.stdout.split())
    lines = (run.path / "steps.txt").read_text().splitlines()
    steps = [line.split() for line in lines if line[0].isdigit()]
    assert [int(step) for step, _ in steps] == [1, 2, 3, 4, 5, 6]
    assert float(steps[-1][1]) == pytest.approx(0.05 / 2)
    assert lines.count("closed") == 2
    assert lines.count("evaluated") == 2
    kinds = [line["kind"] for line in run.metrics()]
    assert kinds.count("evaluation") == 2


@pytest.mark.slow
@pytest.mark.parametrize("grid", [(), ("grid.rows=2", "grid.cols=1", "plan.conv=domain", "plan.relu=domain")])
def test_two_ranks_compute_what_one_computes(folder: Path, grid: tuple[str, ...]) -> None:
    """With the user's optimizer, averager, model and augmentation, of which a split grid takes regions."""
    for ranks, overrides in ((0, ()), (2, grid)):
        words = ["-m", "hpctrain", "train", "mine/own.yaml", "dtype=float64", f"output=runs{ranks}", *overrides]
        outcome = run_here(ranks, words, cwd=folder)
        assert outcome.code == 0, outcome.output
    losses = [
        [line["loss"] for line in newest_run(folder, f"runs{ranks}", "own").metrics() if line["kind"] == "evaluation"]
        for ranks in (0, 2)
    ]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-9)


def test_the_commands_know_options_of_the_users_code(folder: Path) -> None:
    assert "ok:" in _command("config", "check", "mine/own.yaml")
    shown = yaml.safe_load(_command("config", "show", "mine/own.yaml"))
    assert shown["data"]["augment"][0] == {"name": "own_code.py:Darken", "least": 0.75}
    assert shown["optimizer"]["scale"] == 0.2
    assert _command("plan", "show", "mine/own.yaml", "--ranks", "2")


def test_a_class_of_another_kind_is_one_sentence(folder: Path) -> None:
    """Other refusals of user code are in tests/golden; these have the name of a module, which is made from its path."""
    for override, words in (
        ("model=own_code.py:Steps", "a model must be a class derived from hpctrain.nn.layers.Layer, or a function"),
        ("optimizer.name=own_code.py:Halving", "an optimizer must be a class derived from hpctrain.optim.base.Optimizer"),
    ):
        (line,) = _refused("config", "check", "mine/own.yaml", override)
        assert words in line


def test_defaults_that_no_configuration_can_hold_are_left_out(folder: Path) -> None:
    shown = yaml.safe_load(_command("config", "show", "mine/own.yaml", "optimizer={name: own_code.py:Odd, lr: 1, more_of: 2}"))
    assert shown["optimizer"] == {"name": "own_code.py:Odd", "lr": 1.0, "scale": 0.1, "more_of": 2}


def test_an_error_at_import_is_reported_once_by_all_ranks(job: Job, folder: Path) -> None:
    (folder / "mine" / "own_code.py").write_text("import numpy\n\nnumpy.zeros(-1)\n")
    outcome = job(2, ["-m", "hpctrain", "train", "mine/own.yaml", "averager=blocking"], cwd=folder)
    assert outcome.code == 2
    lines = [line for line in outcome.stderr.splitlines() if "SignDescent" in line]
    assert len(lines) == 1, outcome.output
    assert "ValueError: negative dimensions are not allowed" in lines[0]
    assert "own_code.py, line 3" in lines[0]
    assert "Traceback" not in outcome.output


FAILS = """
from dataclasses import dataclass

from hpctrain.data.augmentations.base import Augmentation
from hpctrain.nn.custom import ArrayLayer
from hpctrain.nn.layers import AdaptiveAveragePool, Conv2d, Flatten, Linear, Sequential
from hpctrain.training.metrics import Reporter


def twice(number):
    return 2 * number + missing


def unknown_name(classes: int, channels_in: int):
    return Sequential([Flatten(), Linear(twice(3), classes)])


def wrong_call(classes: int, channels_in: int):
    return Sequential([Conv2d(channels_in)])


def wrong_type(classes: int, channels_in: int):
    return Sequential([Conv2d(str(channels_in), 4, 3)])


class Fails(ArrayLayer):
    def __init__(self, where):
        self.where = where

    def output_shape(self, shape):
        return shape if self.where != "shape" else shape + 1

    def forward(self, x, parameters, context, saved):
        return x if self.where != "forward" else x @ x.ravel()[:5]

    def backward(self, x, dy, parameters, saved):
        return dy, {}


def layer(classes: int, channels_in: int, where: str = "shape"):
    return Sequential([Fails(where), AdaptiveAveragePool(1), Flatten(), Linear(channels_in, classes)])


@dataclass(frozen=True)
class WrongArguments(Augmentation):
    draws = 1

    def apply(self, images, u):
        return images


class Records(Reporter):
    def __init__(self, directory):
        self.directory = directory

    def record(self, kind, values):
        values["nothing"]
"""


def _line_of(text: str) -> int:
    return next(number for number, line in enumerate(FAILS.splitlines(), 1) if text in line)


@pytest.mark.parametrize(
    ("override", "words", "line", "functions"),
    [
        (
            "model=fails.py:unknown_name",
            "fails: NameError: name 'missing' is not defined",
            "+ missing",
            ["unknown_name", "twice"],
        ),
        ("model=fails.py:wrong_call", "Conv2d.__init__() missing 2 required", "Conv2d(channels_in)", ["wrong_call"]),
        ("model=fails.py:wrong_type", "channels_in of Conv2d is '3', but must be an integer", "Conv2d(str", []),
        ("model=fails.py:layer", "The code of fails.py fails: TypeError", "shape + 1", ["output_shape"]),
    ],
)
def test_an_error_in_user_code_is_a_sentence_and_the_frames_of_this_code(
    folder: Path, override: str, words: str, line: str, functions: list[str]
) -> None:
    """A traceback through hpctrain would hide the line that the user can correct."""
    (folder / "mine" / "fails.py").write_text(FAILS)
    first, *frames = _refused("config", "check", "mine/own.yaml", override)
    assert first.startswith("hpctrain: ")
    assert words in first
    assert f"{folder / 'mine' / 'fails.py'}, line {_line_of(line)})" in first
    places = [frame for frame in frames if frame.startswith("  File ")]
    assert [place.rpartition(" in ")[2] for place in places] == functions
    assert all("fails.py" in place for place in places)


@pytest.mark.parametrize(
    ("override", "words", "line"),
    [
        ("model={name: fails.py:layer, where: forward}", "ValueError: matmul", "x @ x.ravel()"),
        ("data.augment=[fails.py:WrongArguments]", "WrongArguments.apply() takes 3 positional arguments", "def apply(self"),
        ("metrics.reporters=[fails.py:Records]", "KeyError: 'nothing'", 'values["nothing"]'),
    ],
)
def test_an_error_in_user_code_ends_a_training_with_the_same_sentence(folder: Path, override: str, words: str, line: str) -> None:
    """A method with too few parameters fails in a frame of hpctrain, but is an error of the user, too."""
    (folder / "mine" / "fails.py").write_text(FAILS)
    outcome = run_here(0, ["-m", "hpctrain", "train", "mine/own.yaml", "data.augment=[]", override], cwd=folder)
    assert outcome.code == 2, outcome.output
    assert "Traceback" not in outcome.output
    (sentence,) = [row for row in outcome.stderr.splitlines() if row.startswith("hpctrain: ")]
    assert words in sentence
    assert f"fails.py, line {_line_of(line)})" in sentence


def test_ranks_report_an_error_in_user_code_once(job: Job, folder: Path) -> None:
    """If each rank ended with its own report, a large job would print it thousands of times."""
    (folder / "mine" / "fails.py").write_text(FAILS)
    for override in ("model=fails.py:layer", "model={name: fails.py:layer, where: forward}"):
        outcome = job(2, ["-m", "hpctrain", "train", "mine/own.yaml", override], cwd=folder)
        assert outcome.code == 2, outcome.output
        assert outcome.stderr.count("The code of fails.py fails") == 1, outcome.output
        assert "Traceback" not in outcome.output


@pytest.mark.slow
def test_a_checkpoint_has_nothing_imported(job: Job, folder: Path) -> None:
    """Code that it names is imported where the configuration names it too, and nowhere else."""
    plain = ["model=small", "optimizer={name: sgd, lr: 0.1}", "averager=blocking", "data.augment=[flip]", "metrics.reporters=[]"]
    command = ["-m", "hpctrain", "train", "mine/own.yaml", *plain]
    outcome = job(0, [*command, "--steps", "3"], cwd=folder)  # an epoch
    assert outcome.code == 0, outcome.output
    (folder / "mine" / "own_code.py").write_text("open('imported', 'w')")
    outcome = job(0, [*command, "schedule=constant", "--resume", "auto"], cwd=folder)
    assert outcome.code == 0, outcome.output
    assert "schedule: own_code.py:Halving -> constant" in outcome.stdout
    outcome = job(0, ["-m", "hpctrain", "eval", "mine/own.yaml", *plain, "schedule=constant"], cwd=folder)
    assert outcome.code == 0, outcome.output
    assert not (folder / "imported").exists()


GROUPS: Mapping[str, tuple[str, str]] = {
    "models": ("model", "model"),
    "optimizers": ("optimizer.name", "SignDescent"),
    "schedules": ("schedule", "Halving"),
    "averagers": ("averager", "Average"),
    "augmentations": ("data.augment", "Darken"),
    "reporters": ("metrics.reporters", "Steps"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", GROUPS)
def test_an_installed_package_offers_names(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "size_of_model", functools.cache(sizes.size_of_model))  # which a list of models asks for
    key, name = GROUPS[kind]
    (folder / "site").mkdir()
    (folder / "site" / "own_code.py").write_text(OWN)
    offer(folder / "site", "own-package", f"hpctrain.{kind}", f"fine = own_code:{name}")
    assert "own_code" not in sys.modules
    listed = _command("list", kind)
    assert "fine" in listed
    assert "own-package 1.2" in " ".join(listed.split())
    assert json.loads(_command("list", kind, "--json"))["fine"] == {"package": "own-package 1.2", "reference": f"own_code:{name}"}
    assert '"fine"' in _command("config", "schema")
    assert "own_code" not in sys.modules, "a list imports nothing"
    value = "[fine]" if kind in ("augmentations", "reporters") else "fine"
    _command("config", "check", "mine/own.yaml", f"{key}={value}")
    assert "own_code" in sys.modules


@pytest.mark.slow
def test_an_installed_package_trains_on_two_ranks(job: Job, folder: Path) -> None:
    """Its names, alone in the configuration; its code is found on the import path of each rank."""
    (folder / "site").mkdir()
    (folder / "mine" / "own_code.py").rename(folder / "site" / "own_code.py")
    names = {"model": "own_model", "optimizer": "own_steps", "averager": "own_average"}
    for kind, name in names.items():
        offer(folder / "site", f"package-{kind}", f"hpctrain.{kind}s", f"{name} = own_code:{GROUPS[f'{kind}s'][1]}")
    plain = ["schedule=constant", "data.augment=[flip]", "metrics.reporters=[]", "model.name=own_model"]
    command = ["-m", "hpctrain", "train", "mine/own.yaml", *plain, "optimizer.name=own_steps", "averager=own_average"]
    outcome = job(2, command, cwd=folder, env={"PYTHONPATH": str(folder / "site")})
    assert outcome.code == 0, outcome.output
    versions = json.loads((newest_run(folder, name="own").path / "versions.json").read_text())
    assert versions["own_code:SignDescent"].startswith("own_code.py sha256 ")
    assert yaml.safe_load(newest_run(folder, name="own").config())["optimizer"]["name"] == "own_steps"
