"""Every fenced block of the pages is run, or checked as far as possible without minutes, a network or a cluster.

Pages are README.md, CONTRIBUTING.md, docs/ and jobs/README.md. What is said in passing (commands, links, files) must exist.

How a new block is classified: its language says what is done with it.

- ```bash       commands, one a line (a backslash goes on): each must match a line of `KINDS`, which says how it is checked, and
                whether it is run. Commands of one page run in order, in a directory such as a user has after `make train`.
- ```console    a command after "$ ", then exactly what it prints.
- ```yaml       a configuration, or keys of one: must be valid together with one of the files in configs/. A machine (with
                ranks_per_node) must be valid by itself, and so must a site profile (with extends).
- ```python     run; names that the page does not define come from `GIVEN`.
                One that starts a job is a file of its own, run on two ranks.
- ```text       not checked here; test_tutorial.py compares those of the pages that users begin with.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import h5py
import numpy as np
import pytest
import yaml
from click.testing import CliRunner
from PIL import Image

from hpctrain.assembly.faults import check_config
from hpctrain.averaging.averagers import make_averager
from hpctrain.averaging.base import AveragerSetup, PlannedGroup
from hpctrain.averaging.group_sums import JointNorms
from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.backend import specs
from hpctrain.cli import data as data_commands
from hpctrain.cli.main import cli
from hpctrain.comm.progress import ProgressEngine
from hpctrain.config.load import parse
from hpctrain.data.fetch import CIFAR10, FASHION_MNIST
from hpctrain.data.writer import write_data_file
from hpctrain.nn.parameter import FlatGroup
from hpctrain.optim.optimizers import Sgd
from hpctrain.planner.costs import machine_file
from hpctrain.run.result import TrainingResult
from hpctrain.runs.directory import BestRecord
from hpctrain.site import profile
from hpctrain.training.metrics import epoch_values
from hpctrain_testing.virtual.run import lone_rank
from tests.support import how_tos
from tests.support.here import run_here
from tests.support.tiny_runs import Start

ROOT = Path(__file__).parents[2]
#: but docs/index.md, in which there are lists of pages for the site alone
_DOCS = [path for path in sorted(ROOT.glob("docs/**/*.md")) if path != ROOT / "docs" / "index.md"]
FILES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *_DOCS, ROOT / "jobs" / "README.md")
PAGES = [str(path.relative_to(ROOT)) for path in FILES]
LANGUAGES = ("bash", "console", "yaml", "python", "text")
CLASSIFY = f"say in {Path(__file__).relative_to(ROOT)} what is to be done with it (its first lines tell how)"


@dataclass(frozen=True)
class Block:
    """A fenced block: where it stands and what it holds."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str, *languages: str) -> list[Block]:
    """The fenced blocks of a page in these languages, all of them without any, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    matches = re.finditer(r"^( *)```(\S*)\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    found = [Block(page, text.count("\n", 0, m.start()) + 1, m[2], re.sub(f"^{m[1]}", "", m[3], flags=re.M)) for m in matches]
    assert text.count("```") == 2 * len(found), f"{page} has a fence that is not closed"
    return [block for block in found if not languages or block.language in languages]


def all_blocks(*languages: str) -> list[Any]:
    return [pytest.param(block, id=str(block)) for page in PAGES for block in blocks(page, *languages)]


@pytest.mark.parametrize("page", PAGES)
def test_every_block_says_what_it_is(page: str) -> None:
    for block in blocks(page):
        assert block.language in LANGUAGES, f"{block} is of none of the languages {LANGUAGES}; {CLASSIFY}"


# -- commands ----------------------------------------------------------------------------------------------------------------


def lines(block: Block) -> list[list[str]]:
    """The words of each command of a ```bash block; `A && B` are two."""
    joined = block.text.replace("\\\n", " ")
    commands = [command for line in joined.splitlines() for command in re.split(r"\s&&\s", line)]
    return [words for words in (shlex.split(command, comments=True) for command in commands) if words]


def parsed(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line takes these words: the command exists, and has these arguments and options."""
    with monkeypatch.context() as patch:
        for command in leaves(cli):
            patch.setattr(command, "callback", lambda **options: None)
        try:
            cli.main(args=words[:], prog_name="hpctrain", standalone_mode=False)
        except click.ClickException as error:
            pytest.fail(f"hpctrain {shlex.join(words)}: {error.format_message()}")


def leaves(group: click.Group) -> Iterator[click.Command]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from leaves(command)
        else:
            yield command


def program(words: list[str]) -> tuple[int, list[str]]:
    """(ranks, 0 without a launcher; what hpctrain is given) of a command that starts it."""
    for start in (["hpctrain"], ["python", "-m", "hpctrain"]):
        if words[: len(start)] == start:
            return 0, words[len(start) :]
    cut = words.index("hpctrain")
    assert words[cut - 4 : cut] == ["python", "-m", "mpi4py", "-m"], "without -m mpi4py the others wait where a rank fails"
    ranks = next((int(after) for word, after in pairwise(words) if word in ("-n", "-np")), 1)
    return ranks, words[cut + 1 :]


def takes(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    parsed(program(words)[1], monkeypatch)


def is_target(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def is_module(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The module exists, and its text has every option."""
    monkeypatch.syspath_prepend(str(ROOT))
    module = words[words.index("-m") + 1]
    source = importlib.util.find_spec(module)
    assert source is not None, f"there is no module {module}"
    assert source.origin is not None
    text = Path(source.origin).read_text(encoding="utf-8")
    assert all(f'"{word}"' in text for word in words if word.startswith("--")), shlex.join(words)


def is_test(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for path, name in re.findall(r"(\S+\.py)::(\w+)", " ".join(words)):
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), f"{path} has no {name}"


def installs(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Extras and requirement files exist."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in words:
        if match := re.fullmatch(r"(?:\.|hpctrain)\[(.*)\]", word):
            assert set(match[1].split(",")) <= set(extras), word
    for flag, file in pairwise(words):
        assert flag != "-r" or (ROOT / file).is_file(), file


def names_files(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for word in words:
        assert not re.match(r"(configs|jobs)/", word) or (ROOT / word).is_file(), word


def nothing(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing to look at."""


@dataclass(frozen=True)
class Kind:
    """Commands that match a pattern: how they are checked, and why they are not run (empty: they are)."""

    pattern: str
    check: Callable[[list[str], pytest.MonkeyPatch], None]
    not_run: str = ""


#: the first that matches counts
KINDS = (
    Kind(r"mpiexec .* apptainer exec \S+ python -m mpi4py -m hpctrain ", takes, "needs Apptainer and an image"),
    Kind(r"apptainer (build|exec) ", names_files, "needs Apptainer"),
    Kind(r"ssh ", nothing, "needs another host; tests/jobs/test_two_hosts.py has two"),
    Kind(r"hpctrain train .*backend=cuda", takes, "needs a GPU, or minutes; tests/cli trains on the emulated device"),
    Kind(
        r"(hpctrain|mpiexec .*-m hpctrain) "
        r"(autopsy|bench|calibrate|checkpoint|compare|doctor|report|run|script|trace|watch|weights)\b",
        takes,
        "needs a run of this name, or minutes; tests/cli runs each of them small",
    ),
    Kind(r"hpctrain (eval|predict|train) .*(checkpoint|resume) best", takes, "needs evaluations; see tests/cli/test_best.py"),
    Kind(r"hpctrain submit (?!.*--dry-run)", takes, "needs a scheduler; tests/cli/test_submit.py has stand-ins"),
    Kind(r"hpctrain train configs/finetune-(?!.*--smoke)", takes, "needs weights; tests/cli/test_smoke.py tries these files"),
    Kind(r"hpctrain ", takes),
    Kind(r"python -m (hpctrain|benchmarks|tests\.support)\.\S+", is_module, "takes minutes, or is run by a test of its own"),
    Kind(r"python -m hpctrain ", takes),
    Kind(r"python -m pytest ", is_test, "is what runs this test"),
    Kind(r"mpiexec .*-m hpctrain train .*--log-ranks", takes, "trains to the end; tests/cli/test_starting.py does it"),
    Kind(r"mpiexec .*-m mpi4py -m hpctrain ", takes),
    Kind(r"mpiexec .*-m mpi4py \S+\.py$", nothing, "starts the page's program, which a test of its own runs"),
    Kind(r"srun .*-m mpi4py -m hpctrain ", takes, "needs Slurm"),
    Kind(r"make ", is_target, "installs, trains for minutes, or is what runs this test"),
    Kind(r"(python -m )?pip (install|wheel) ", installs, "needs a network"),
    Kind(r"(sbatch|scancel|scontrol|sinfo|qsub|qsig|bash jobs/)", names_files, "needs a scheduler, or minutes"),
    Kind(r"(eval|printf|squeue|tail|grep) ", nothing, "test_tutorial.py runs those of the pages that users begin with"),
    Kind(r"(curl|git clone|apt-get|sudo apt-get) ", nothing, "needs a network"),
    Kind(r"(cd|mkdir|tar|module|export|python3? -m venv) |(\.|source) \S*bin/activate$", nothing, "sets up what the tests have"),
)


def kind_of(words: list[str]) -> Kind:
    line = " ".join(words)
    match = next((kind for kind in KINDS if re.match(kind.pattern, line)), None)
    assert match is not None, f"The command {line!r} is of no kind that is known; {CLASSIFY}."
    return match


@pytest.mark.job
@pytest.mark.parametrize("block", all_blocks("bash"))
def test_commands_exist(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    for words in lines(block):
        kind_of(words).check(words, monkeypatch)


# Real trainings, as small as they can be: the page's own line with these options, on at most two ranks. Plans are for at
# most nine ranks, because the planner's tests cover larger numbers.
_SMALL = ("model.width=0.25", "batch=16", "evaluate.batch=16")
_STEPS = ("--steps", "2")
_MOST_RANKS = 2


def run(words: list[str], folder: Path, start: Start) -> None:
    """Run a command that starts hpctrain; it must end with code 0."""
    ranks, arguments = program(words)
    if arguments[0] in ("train", "eval"):
        arguments = [*arguments[:2], *_SMALL, *arguments[2:]]
    if arguments[0] == "train" and "--smoke" not in arguments:  # which is short by itself
        arguments += _STEPS
    if arguments[0] == "plan" and "--ranks" in arguments:
        place = arguments.index("--ranks") + 1
        arguments[place] = ",".join(dict.fromkeys(re.sub(r"\d{2,}", "8", arguments[place]).split(",")))
    if arguments[0] in ("train", "eval", "predict"):  # which end their process
        outcome = start(min(ranks, _MOST_RANKS), ["-m", "hpctrain", *arguments], cwd=folder)
        assert outcome.code == 0, f"{shlex.join(words)}\n{outcome.output}"
        return
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, f"{shlex.join(words)}\n{result.output}{result.exception!r}"


@pytest.fixture(scope="module")
def after_make_train(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as a user's after `make train`, with small images of the data sets that the pages speak of."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "configs", folder / "configs")
    shutil.copy(ROOT / "configs" / "quickstart.yaml", folder / "my.yaml")
    numbers = np.random.default_rng(0)
    for name, shape, of in (("fashion-mnist", (28, 28, 1), FASHION_MNIST), ("cifar10", (32, 32, 3), CIFAR10)):
        (folder / "data" / name).mkdir(parents=True)
        for split in ("train", "test"):
            images, labels = numbers.integers(0, 256, (40, *shape), np.uint8), np.arange(40) % 10
            write_data_file(folder / "data" / name / f"{split}.h5", 40, shape, of.class_names, [(images, labels)])
    with h5py.File(folder / "theirs.h5", "w") as theirs:
        theirs["x"], theirs["y"] = numbers.integers(0, 256, (4, 3, 9, 9), np.uint8), np.eye(2)[[0, 1, 1, 0]]
    for tree in ("photos/train", "photos/test", "imagenet/train", "imagenet/val"):
        for name in ("ant", "bee"):
            (folder / tree / name).mkdir(parents=True)
            Image.new("RGB", (20, 16), (9, 8, 7)).save(folder / tree / name / "a.jpg")
    return folder


#: test_tutorial.py runs all of their commands, by an installation from the wheel
BEGINNINGS = ("README.md", "docs/index.md", "docs/tutorial.md")


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in PAGES if page not in (*BEGINNINGS, how_tos.OWN_CODE) and blocks(page, "bash", "console")]
)
def test_commands_run(page: str, after_make_train: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(after_make_train, tmp_path / "checkout")
    monkeypatch.chdir(tmp_path / "checkout")
    run_all(page, tmp_path / "checkout", run_here)


def test_the_configuration_with_code_of_ones_own_is_tested() -> None:
    """Without a test set, the reporter of the page writes no file, and the run ends without an accuracy."""
    config, _ = parse(blocks(how_tos.OWN_CODE, "yaml")[0].text)
    assert config.data.test is not None


@pytest.mark.slow
def test_commands_run_with_code_of_ones_own(
    after_make_train: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: Start
) -> None:
    """In processes, since modules that the page writes are imported."""
    shutil.copytree(after_make_train, tmp_path / "checkout")
    monkeypatch.chdir(tmp_path / "checkout")
    how_tos.write_own_code(tmp_path / "checkout")
    run_all(how_tos.OWN_CODE, tmp_path / "checkout", job)


def run_all(page: str, folder: Path, start: Start) -> None:
    """Run the commands of a page, and compare what those of a ```console block print."""
    for block in blocks(page, "bash", "console"):
        if block.language == "console":
            command, _, expected = block.text.partition("\n")
            result = CliRunner().invoke(cli, program(shlex.split(command.removeprefix("$ ")))[1])
            assert result.output == expected, f"{block} should be:\n{command}\n{result.output}"
            continue
        for words in lines(block):
            if not kind_of(words).not_run:
                run(words, folder, start)


# -- configurations and programs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", all_blocks("yaml"))
def test_configurations_are_valid(block: Block, tmp_path: Path) -> None:
    """With one of the shipped files, whose keys of the same names they replace."""
    given = yaml.safe_load(block.text)
    if "extends" in given:
        (tmp_path / "hpctrain" / "sites").mkdir(parents=True)
        (tmp_path / "hpctrain" / "sites" / "ours.yaml").write_text(block.text)
        profile.read_site("ours", {"XDG_CONFIG_HOME": str(tmp_path)})
        return
    if "ranks_per_node" in given:
        machine_file.parse(block.text, str(block))
        return
    refusals = []
    with how_tos.followed(block.page, tmp_path):
        for path in sorted((ROOT / "configs").glob("*.yaml")):
            text = yaml.safe_dump({**yaml.safe_load(path.read_text()), **given}, sort_keys=False)
            try:
                check_config(*parse(text, path.name))
                return
            except Exception as error:
                refusals.append(f"{error}")
    pytest.fail(f"{block} fits none of configs/:\n" + "\n".join(refusals))


def _alone() -> dict[str, Any]:
    """Names of a process that is alone: communicators, a progress engine, arrays, a group of no parameters."""
    world, progress = lone_rank()
    arrays = {"grad": np.ones(3), "shard": np.zeros(3), "data": np.zeros(3), "counts": [3]}
    groups = {"replicated": FlatGroup({}, "float64")}
    return {
        **arrays,
        "world": world,
        "ranks": world,
        "progress": progress,
        "groups": groups,
        "ranks_of": {"replicated": world},
        "optimizer": lambda: Sgd(clip_norm=1.0),
        "ProgressEngine": ProgressEngine,
        "JointNorms": JointNorms,
        "Sharded": Sharded,
        "PlannedGroup": PlannedGroup,
        "AveragerSetup": AveragerSetup,
        "make_averager": make_averager,
    }


def _trained() -> dict[str, Any]:
    """Return the names that the first cell of docs/notebooks.md defines."""
    means = {"loss": 0.5, "top1": 0.9, "top5": 1.0}
    epoch = {"epoch": 1, "step": 3, "lr": 0.1, "images_per_second": 9.0}
    values = epoch_values({**epoch, **means}, means)
    return {"result": TrainingResult(Path("runs/a"), 1, 3, means, BestRecord("c.h5", 3, 1, "top1", 0.9), (values,), None)}


#: page -> what its programs take for granted
GIVEN: dict[str, Callable[[], dict[str, Any]]] = {
    "docs/notebooks.md": _trained,
    "docs/communication.md": _alone,
    "docs/averaging.md": _alone,
    how_tos.OPERATOR: lambda: dict(vars(specs)),
    how_tos.CONVERTER: lambda: dict(vars(data_commands)),
}


def starts_a_job(block: Block) -> bool:
    return "hpctrain.start(" in block.text or "hpctrain.train(" in block.text


#: pages whose programs draw values of their own on each rank, and so run on one
_OF_ONE_RANK = ("docs/sweeps.md",)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("block", [block for block in all_blocks("python") if starts_a_job(block.values[0])])
def test_programs_of_ranks_run(block: Block, after_make_train: Path, tmp_path: Path, job: Start) -> None:
    folder = tmp_path / "checkout"
    shutil.copytree(after_make_train, folder)
    (folder / "train.py").write_text(block.text)
    if importlib.util.find_spec("optuna") is None:
        shutil.copy(ROOT / "tests" / "support" / "small_optuna.py", folder / "optuna.py")
    ranks = 1 if block.page in _OF_ONE_RANK else _MOST_RANKS
    outcome = job(ranks, ["train.py"], cwd=folder, env={"PYTHONPATH": str(ROOT)})
    assert outcome.code == 0, f"{block}\n{outcome.output}"
    losses = [float(loss) for loss in re.findall(r"^[^{]*{'loss': ([\d.]+)", outcome.stdout, re.MULTILINE)]
    assert losses == sorted(losses, reverse=True), f"{block} has a learning rate with which the loss rises:\n{outcome.output}"


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_programs_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole files by themselves, all else in the order of the page, on what the page has made so far."""
    names: dict[str, Any] = {**GIVEN.get(page, dict)(), "__name__": "documentation"}
    with how_tos.followed(page, tmp_path):
        for block in blocks(page, "python"):
            if starts_a_job(block):
                continue
            module = ModuleType("documentation")
            monkeypatch.setitem(sys.modules, "documentation", module)  # dataclasses look their module up
            whole_file = block.text.startswith('"""')
            program = compile("\n" * block.line + block.text, str(ROOT / page), "exec", dont_inherit=True)
            try:
                exec(program, vars(module) if whole_file else names)
            except NameError as error:
                raise AssertionError(f"{block}: {error}; {CLASSIFY}") from error


# -- what is said in passing -------------------------------------------------------------------------------------------------


def _spoken(page: str) -> Iterator[list[str]]:
    """Commands in the text: `hpctrain plan show`, `make test`."""
    text = re.sub(r"^ *```.*?^ *```$", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for code in re.findall(r"`((?:hpctrain|make) [^`\n]*)`", text):
        yield code.split()


@pytest.mark.job
@pytest.mark.parametrize("page", PAGES)
def test_commands_in_the_text_exist(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for words in _spoken(page):
        if words[0] == "make":
            if not re.search(r"[<N]", words[1]):
                is_target(words[:2], monkeypatch)
            continue
        command: click.Command = cli
        for word in words[1:]:
            if not isinstance(command, click.Group):
                break
            inner = command.get_command(click.Context(command), word)
            assert inner is not None or word.startswith("-") or word == "...", f"{page}: `{' '.join(words)}`"
            command = inner or command
        options = {option for each in (command, *_below(command)) for parameter in each.params for option in parameter.opts}
        options |= {"--help", "--version"}
        for word in words:
            assert not word.startswith("--") or word in options, f"{page}: `{' '.join(words)}`"


_COMMENTED = [*sorted(ROOT.glob("configs/*.yaml")), *sorted(path for path in ROOT.glob("jobs/*.*") if path.suffix != ".md")]


@pytest.mark.parametrize("path", _COMMENTED, ids=lambda path: path.name)
def test_commands_in_comments_exist(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`# Data: hpctrain data convert ...   (and the same with test)`: up to a remark after three blanks."""
    names = "|".join(cli.list_commands(click.Context(cli)))
    commands = re.findall(rf"^#.*?((?:mpiexec .*)?hpctrain (?:{names}) .*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert commands or path.stem == "quickstart"
    for command in commands:
        for words in map(shlex.split, re.split(r"\s&&\s", command.split("   ")[0])):
            kind_of(words).check(words, monkeypatch)


def _below(command: click.Command) -> Iterator[click.Command]:
    return leaves(command) if isinstance(command, click.Group) else iter(())
