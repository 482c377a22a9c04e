"""README.md, the first page of the site and docs/tutorial.md: each command runs as it is written, and prints what the page says.

hpctrain is installed from its wheel into an environment of its own, which has nothing of the checkout, and each page is followed
in an empty directory. Data are small files in the format of those that the pages fetch; all else is shortened by words after a
command (`SHORTENED`). Commands that are not run are in `EXCEPTIONS`.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hpctrain.data.fetch import FASHION_MNIST
from hpctrain.data.writer import write_data_file
from hpctrain_testing.run import find_mpiexec
from tests.docs.test_blocks import BEGINNINGS, Block, blocks
from tests.support import stand_ins, wheel

_MARKS = (
    pytest.mark.job,
    pytest.mark.slow,
    pytest.mark.skipif(wheel.SETUPTOOLS_IS_OLD, reason=wheel.NO_BUILD),
    pytest.mark.skipif(find_mpiexec() is None, reason="there is no mpiexec, neither next to this Python nor on PATH"),
)


def installed_alone(test: Callable[..., None]) -> Callable[..., None]:
    """A test that installs the wheel."""
    for mark in _MARKS:
        test = mark(test)
    return test


#: pattern of a command -> why it is not run
EXCEPTIONS = {
    r"git clone ": "needs a network; the photographs are made up by this test",
    r"python3 -m venv |\. \.venv/bin/activate|pip install ": "the environment has been made, offline, with the wheel in it",
    r"make ": "for work in a clone; test_blocks.py checks that the targets exist",
    r"ssh ": "needs another host; tests/jobs/test_two_hosts.py has two",
    r"(scancel|squeue) ": "needs a job in a queue; tests/site/test_on_slurm.py has some",
}
#: pattern of a command -> words after it with which it takes seconds
SHORTENED = {
    r".* train .*--steps ": "--steps 2",
    r".* train .*trace=true --steps ": "--steps 3",  # of which the first one is left out
    r"mpiexec -n 2 .* train configs/quickstart.yaml$": "epochs=2",
    r".* train photos.yaml": "epochs=2 batch=16",
    r".*submit .*--site hostfile": "--dry-run",  # tests/jobs/test_two_hosts.py submits on two hosts
}
#: a word of a command that cannot end with 0 everywhere -> its codes: what is refused, the findings of the doctor
CODES = {"optimizer.lr=0,1": (2,), "doctor": (0, 1, 2)}
#: a word in a ```text block -> why its lines are not compared
NOT_PRINTED = {"on hostfile:": "the job is not submitted"}
CLASSES = ("dress", "hat", "longsleeve", "outwear", "pants", "shirt", "shoes", "shorts", "skirt", "t-shirt")
_MOST_RANKS = re.compile(r"mpiexec -n [3-9]")  # on a machine of two cores


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environment."""
    directory = tmp_path_factory.mktemp("environment")
    wheel.install(wheel.build(tmp_path_factory.mktemp("build")), directory)
    return directory


class Follower:
    """Somebody who does in a directory what a page says. output: all that the commands since the last ```text block printed."""

    def __init__(self, installed: Path, folder: Path) -> None:
        self.folder = folder
        self.output = ""
        variables = stand_ins.install(folder / "stand-ins")
        (folder / "stand-ins" / "bin" / "mpiexec").unlink()
        (folder / "stand-ins" / "bin" / "python").unlink()
        environment = wheel.environment(installed, folder / "home")
        programs, _, others = environment["PATH"].partition(":")
        path = f"{programs}:{folder / 'stand-ins' / 'bin'}:{others}"
        self._environment = {**environment, "CALLS": variables["CALLS"], "PATH": path}

    def run(self, command: str) -> None:
        """Run a line of a page in a shell; it must end as it should."""
        shortened = [words for pattern, words in SHORTENED.items() if re.match(pattern, command)]
        line = " ".join([_MOST_RANKS.sub("mpiexec -n 2", command), *shortened])
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=self.folder / "work",
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        codes = next((codes for word, codes in CODES.items() if word in command.split()), (0,))
        assert done.returncode in codes, f"{line}\n{done.stdout}"
        self.output += done.stdout

    def compare(self, block: Block) -> None:
        """Each line of the block was printed, but for numbers and names of classes; "..." stands for any ending."""
        printed = {form(line) for line in self.output.splitlines()}
        for line in filter(None, map(form, block.text.splitlines())):
            beginning = line.removesuffix("...").rstrip()
            alike = any(other.startswith(beginning) for other in printed) if line.endswith("...") else line in printed
            assert alike, f"{block}: {line!r} is not among\n{self.output}"
        self.output = ""


def form(line: str) -> str:
    """A line without what differs from run to run: numbers and classes; and without spare blanks."""
    for name in sorted((*FASHION_MNIST.class_names, *CLASSES), key=len, reverse=True):
        line = re.sub(rf"(?<![\w/-]){re.escape(name)}(?![\w/-])", "CLASS", line)
    return " ".join(re.sub(r"\d[\d.,:]*(e-\d+)?", "0", line).split())


def commands(block: Block) -> list[str]:
    """The commands of a ```bash block, as they are written, without comments; a backslash goes on."""
    lines = (re.sub(r"(^|\s+)# .*", "", line) for line in block.text.replace("\\\n", " ").splitlines())
    return [line for line in lines if line]


def named_file(block: Block, text: str) -> str:
    """The file that the text before a block names as the one that holds it."""
    before = "\n".join(text.splitlines()[: block.line - 1])
    return re.findall(r"`([\w./~-]+\.(?:yaml|py))`", before)[-1]


def make_data(folder: Path) -> None:
    """Small data, as `hpctrain data fetch` and the clone of the photographs leave them."""
    numbers = np.random.default_rng(0)
    (folder / "data" / "fashion-mnist").mkdir(parents=True)
    for split in ("train", "test"):
        images, labels = numbers.integers(0, 256, (300, 28, 28, 1), np.uint8), np.arange(300) % 10
        path = folder / "data" / "fashion-mnist" / f"{split}.h5"
        write_data_file(path, 300, (28, 28, 1), FASHION_MNIST.class_names, [(images, labels)])
    for split in ("train", "validation", "test"):
        for name in CLASSES:
            (folder / "photos" / split / name).mkdir(parents=True)
            for index in range(2):
                pixels = numbers.integers(0, 256, (40, 32, 3), np.uint8)
                Image.fromarray(pixels).save(folder / "photos" / split / name / f"{index:04}.jpg")


@pytest.fixture
def follower(installed: Path, tmp_path: Path) -> Follower:
    for name in ("work", "home", "stand-ins"):
        (tmp_path / name).mkdir()
    make_data(tmp_path / "work")
    return Follower(installed, tmp_path)


@installed_alone
@pytest.mark.sample(1)
@pytest.mark.parametrize("page", BEGINNINGS)
def test_a_page_is_followed(page: str, follower: Follower) -> None:
    text = (Path(__file__).parents[2] / page).read_text(encoding="utf-8")
    follower.run("hpctrain config copy")
    for block in blocks(page, "bash", "text", "yaml", "python"):
        if block.language in ("yaml", "python"):
            path = named_file(block, text).replace("~", str(follower.folder / "home"))
            (follower.folder / "work" / path).parent.mkdir(parents=True, exist_ok=True)
            (follower.folder / "work" / path).write_text(block.text)
        elif block.language == "bash":
            for command in commands(block):
                if not any(re.match(pattern, command) for pattern in EXCEPTIONS):
                    follower.run(command)
        elif not any(words in block.text for words in NOT_PRINTED):
            follower.compare(block)


@installed_alone
def test_the_first_lines_of_readme_train_with_the_wheel_and_not_the_checkout(follower: Follower, installed: Path) -> None:
    """Finds a package that pyproject.toml lacks, regardless of which pages the level of tests draws."""
    follower.run("python -c 'import hpctrain; print(hpctrain.__file__)'; command -v hpctrain mpiexec; hpctrain --version")
    package, program, launcher, version, *_ = follower.output.splitlines()
    assert Path(package).is_relative_to(installed)
    assert Path(program) == installed / "bin" / "hpctrain"
    assert os.access(launcher, os.X_OK)
    assert version.startswith("hpctrain ")
    for block in blocks("README.md", "bash")[:2]:
        for command in commands(block):
            if not any(re.match(pattern, command) for pattern in EXCEPTIONS):
                follower.run(command)
    assert "epoch 2/2: train loss" in follower.output
