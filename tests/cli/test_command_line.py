"""The command line as a whole: its commands, arguments, outputs, completion, versions, lists and environment."""

from __future__ import annotations

import functools
import inspect
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml
from click.testing import CliRunner

from hpctrain.assembly import options
from hpctrain.cli.arguments import FilePath, Finite, OutputFile, complete_sites, examples, keys
from hpctrain.cli.config import KINDS
from hpctrain.cli.main import cli
from hpctrain.config.load import known_paths, section_at
from hpctrain.core.errors import ConfigError
from hpctrain.core.yaml_source import dotted
from hpctrain.models import sizes
from hpctrain.site import profile
from hpctrain.version import __version__
from hpctrain_testing.run import clean_environment
from tests.run.test_grids_and_image_sizes import BATCH_NORM_CONFIG as CONFIG
from tests.support.data_files import make_node
from tests.support.job_scripts import SITES

#: words that make a text a piece of a sentence
_PIECES = ("Of ", "That ", "Such ", "By default", "As ", "Who ", "What ", "Which ", "How ")


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    """(name, command) for all commands and groups of the command line."""
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        assert command is not None
        yield " ".join((*path, name)), command
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


ALL = dict(commands(cli))
PARAMETERS = {(name, str(parameter.name)): parameter for name, command in ALL.items() for parameter in command.params}


@pytest.mark.parametrize("name", ALL)
def test_a_command_and_its_options_have_sentences_that_their_list_does_not_cut(name: str) -> None:
    command = ALL[name]
    assert not command.get_short_help_str(limit=60).endswith("..."), command.help
    for paragraph in inspect.cleandoc(str(command.help)).split("\n\n"):
        _check(paragraph.replace("\n", " "), name)
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            _check(str(parameter.help), parameter.opts[0])


def test_every_key_has_a_sentence() -> None:
    for path in known_paths():
        section = section_at(path[:-1])
        assert section is not None
        _check(str(section.model_fields[str(path[-1])].description), dotted(path))


def _check(text: str, name: str) -> None:
    assert text.endswith(".") and text[0].isupper(), f"{name}: {text!r} is no sentence"  # noqa: PT018
    assert not text.startswith(_PIECES), f"{name}: {text!r} is a piece of a sentence"
    assert len(text.split()) >= 3, f"{name}: {text!r} says too little"


_PARAMETER = click.Option(["--any"])

_CONTEXT = click.Context(click.Command("any"))


def test_every_key_is_reached_by_the_tab_key_from_its_first_letters() -> None:
    for path in known_paths():
        for depth in range(1, len(path) + 1):
            typed = dotted(path[:depth])
            assert any(word.rstrip("=.") == typed for word in keys(_CONTEXT, _PARAMETER, typed)), typed


@pytest.mark.parametrize("typed", ["nothing", "optimizer.lr.", "checkpoint.x"])
def test_no_word_is_made_up(typed: str) -> None:
    assert keys(_CONTEXT, _PARAMETER, typed) == []


def test_names_begin_as_was_typed() -> None:
    assert complete_sites(_CONTEXT, _PARAMETER, "perl") == ["perlmutter-cpu", "perlmutter-gpu"]
    assert "configs/quickstart.yaml" in examples(_CONTEXT, _PARAMETER, "configs/quick")
    assert examples(_CONTEXT, _PARAMETER, "quick") == []


#: texts that may be a path
_PATHS = {
    ("train", "resume"),
    ("eval", "checkpoint"),
    ("predict", "checkpoint"),
}


def test_every_path_and_time_of_the_command_line_is_read_by_one_type() -> None:
    types = {key: parameter.type for key, parameter in PARAMETERS.items()}
    assert all(isinstance(each, FilePath) for each in types.values() if isinstance(each, click.Path))
    taken = {key for key, each in types.items() if isinstance(each, FilePath)}
    assert taken >= _PATHS | {key for key in types if key[1] == "machine"}
    unbounded = {key for key, each in types.items() if each is click.FLOAT or type(each) is click.FloatRange}
    unbounded = {key for key in unbounded if key[1] != "value_range"}  # its two numbers are checked
    assert not unbounded


def test_variables_of_a_path_are_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("NOWHERE", raising=False)
    assert FilePath(path_type=Path).convert("~/x", None, None) == Path("/home/me/x")
    assert FilePath().convert("auto", None, None) == "auto"
    result = CliRunner().invoke(cli, ["config", "check", "$NOWHERE/x.yaml"])
    assert result.exit_code == 2
    assert "$NOWHERE/x.yaml cannot be expanded: the variable NOWHERE is not set here" in result.output


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "0"])
def test_a_time_is_finite(text: str) -> None:
    with pytest.raises(click.BadParameter):
        Finite(min=1).convert(text, None, None)


#: parameters that name what is read, or a directory in which files are made
READ = frozenset(
    {"checkpoint", "directory", "file", "hostfile", "images", "labels", "machine", "names_file", "path", "places"}
) | {*("resume", "run", "runs", "source", "stage")}

MADE_INSIDE = {
    ("config copy", "directory"),
    ("data fetch", "out"),
}


def _identity(path: Path) -> tuple[int, int, int]:
    status = os.lstat(path)
    return status.st_mode, status.st_ino, status.st_rdev


OUTPUTS = {" ".join(key): parameter for key, parameter in PARAMETERS.items() if isinstance(parameter.type, OutputFile)}


def test_every_path_is_read_or_is_an_output() -> None:
    """Every path parameter has the type `OutputFile`, or its name is in one of the lists above. Add a new parameter there."""
    for key, parameter in PARAMETERS.items():
        if isinstance(parameter.type, click.Path) and not isinstance(parameter.type, OutputFile):
            reads = key[1] in READ and not {"--out", "--to", "--write"} & set(parameter.opts)
            assert reads or key in MADE_INSIDE, key
    commands_with = {key.rpartition(" ")[0] for key in OUTPUTS}
    assert commands_with >= {"train", "predict", "report", "calibrate", "weights export", "data convert idx"}


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_device_or_a_pipe_is_written_to_or_refused_before_any_work(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameter = OUTPUTS[name]
    output = parameter.type
    assert isinstance(output, OutputFile)
    monkeypatch.setattr(output, "_of_job", False)  # as the first rank of a job checks it
    (tmp_path / "file").touch()
    for kind in ("null", "pipe", "directory", "loop"):
        path = make_node(tmp_path / kind, kind)
        (tmp_path / f"{kind}-link").symlink_to(path)
        for given in (path, tmp_path / f"{kind}-link"):
            before = _identity(given)
            if output.streams and kind in ("null", "pipe"):
                assert output.convert(str(given), parameter, None) == given
            else:
                with pytest.raises((ConfigError, click.BadParameter), match=r"cannot be written|is a directory|symbolic links"):
                    output.convert(str(given), parameter, None)
            assert _identity(given) == before
    (tmp_path / "dangling").symlink_to(tmp_path / "new")
    for given in (tmp_path / "file", tmp_path / "dangling", tmp_path / "other"):
        assert output.convert(str(given), parameter, None) == given
    with pytest.raises(ConfigError, match=r"file/below cannot be written: .*; give another path\."):
        output.convert(str(tmp_path / "file" / "below"), parameter, None)


_TRY = """
eval "$(hpctrain completion bash)"
compopt() { NO_BLANK=$2; }
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_hpctrain_completion hpctrain
echo "${COMPREPLY[*]}" "${NO_BLANK-}"
"""

_ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


@pytest.mark.job
@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("hpctrain trai", "train"),
        ("hpctrain train --stopped", "--stopped-file"),
        ("hpctrain submit x.yaml --site lu", "lumi-c lumi-g"),
        ("hpctrain train x.yaml sched", "schedule. nospace"),
        ("hpctrain train x.yaml checkpoint.every_e", "checkpoint.every_epochs= nospace"),
    ],
)
def test_bash_completes(words: str, completed: str) -> None:
    done = subprocess.run(
        ["bash", "--norc", "-c", _TRY, "try", *words.split()],
        env=_ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )
    assert done.stdout.strip() == completed


@pytest.mark.job
@pytest.mark.sample(1)
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_understands_its_own(shell: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hpctrain", "completion", shell], capture_output=True, text=True, timeout=180, check=True
    )
    assert "_HPCTRAIN_COMPLETE" in done.stdout
    if shutil.which(shell) is not None:
        subprocess.run([shell, "-n"], input=done.stdout, text=True, timeout=180, check=True)


def test_every_kind_is_listed() -> None:
    assert set(KINDS) == set(options.KINDS)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "models"])
def test_names_come_with_a_sentence_each_and_fit_80_columns(kind: str) -> None:
    result = CliRunner().invoke(cli, ["list", kind], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == list(options.names(kind))
    assert max(map(len, lines)) <= 80
    words = result.output.split()
    assert all(word in words for choice in options.choices(kind) for word in choice.sentence.split())


@pytest.mark.slow
def test_models_come_with_their_sizes_and_families_with_a_sentence_in_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "size_of_model", functools.cache(sizes.size_of_model))
    result = CliRunner().invoke(cli, ["list", "models"], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    table, families = result.output.split("\n\n")
    lines = table.splitlines()
    assert max(map(len, result.output.splitlines())) <= 80
    assert lines[0].split() == ["model", "family", "image", "parameters", "GFLOP", "MiB"]
    assert [line.split()[0] for line in lines[1:]] == list(options.names("models"))
    assert next(line for line in lines if line.startswith("resnet50 ")).split()[:7] == [
        *("resnet50", "resnet", "224", "x", "224", "x", "3"),
    ]
    assert " 25,557,032 " in next(line for line in lines if line.startswith("resnet50 "))
    families_only = [choice for choice in options.choices("models") if choice.family == choice.name]
    assert [line.split()[0] for line in families.splitlines() if not line.startswith(" ")] == [one.name for one in families_only]
    listed = json.loads(CliRunner().invoke(cli, ["list", "models", "--json"]).output)
    assert listed.keys() == set(options.names("models"))
    assert (listed["resnet50"]["parameters"], listed["resnet50"]["image_shape"]) == (25_557_032, [224, 224, 3])


def test_json_has_the_options_with_types_and_defaults() -> None:
    listed = json.loads(CliRunner().invoke(cli, ["list", "schedules", "--json"]).output)
    assert listed["step"]["options"]["gamma"]["default"] == 0.1
    assert listed["step"]["options"]["gamma"]["type"] == "number"
    assert listed["step"]["options"]["milestones_epochs"]["needed"]


def _versions(**environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "hpctrain", "--version"],
        env={**clean_environment(), **environment},
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )
    return done.stdout.splitlines()


@pytest.mark.job
def test_mpi_and_kernels_are_named() -> None:
    own, packages, mpi, kernels = _versions()
    assert own == f"hpctrain {__version__}"
    assert "numpy 2." in packages
    assert mpi.startswith(("MPI: MPICH Version: ", "MPI: Open MPI v"))
    assert kernels.startswith(("kernels: onednn 3.", "kernels: numpy. oneDNN cannot be used: "))


@pytest.mark.job
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("variable", "line"),
    [("MPI4PY_LIBMPI", "MPI: none. "), ("HPCTRAIN_ONEDNN_LIBRARY", "kernels: numpy. oneDNN cannot be used: ")],
)
def test_a_library_that_is_not_there_is_reported_and_the_rest_printed(variable: str, line: str) -> None:
    lines = _versions(**{variable: "/nowhere/library.so"})
    assert len(lines) == 4
    assert any(each.startswith(line) for each in lines), lines


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a user's own profiles."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    folder = tmp_path / "hpctrain" / "sites"
    folder.mkdir(parents=True)
    return folder


def test_sites_are_listed_with_where_they_are_from(own: Path) -> None:
    (own / "ours.yaml").write_text("extends: slurm\ndescription: a cluster of ours\n")
    result = CliRunner().invoke(cli, ["sites"], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    names = [line.split()[0] for line in result.output.partition("\n\n")[0].splitlines() if not line.startswith(" ")]
    assert names == sorted([*SITES, "ours"])
    assert str(own / "ours.yaml") in "".join(result.output.split())
    assert result.output.endswith(f"Your own profiles: {own}/NAME.yaml\n")


@pytest.mark.parametrize("site", SITES)
def test_a_site_is_printed_as_an_equivalent_profile(own: Path, site: str) -> None:
    result = CliRunner().invoke(cli, ["sites", site])
    assert result.exit_code == 0, result.output
    assert yaml.safe_load(result.output)["scheduler"]
    (own / "copied.yaml").write_text(result.output)
    assert profile.read_site("copied").profile == profile.read_site(site).profile


# The real user has no entry, the effective one can still read this Python. Each command is given as an exit code and its words.
_PROGRAM = """
import os, sys
os.setresuid(54321, 0, 0)
os.environ.clear()
from click.testing import CliRunner
from hpctrain.cli.main import cli
for line in sys.stdin.read().splitlines():
    code, *words = line.split()
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == int(code), (line, done.exit_code, done.output)
    assert isinstance(done.exception, SystemExit | None), (line, done.exception)
    print(done.output)
"""

_COMMANDS = """0 sites
2 sites nowhere
0 submit c.yaml --site slurm --dry-run
0 config check c.yaml
2 config check c.yaml output=~/runs
2 config check ~/c.yaml
0 list models
0 completion bash
"""


@pytest.mark.job
@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can be a user without an entry in passwd")
def test_no_command_needs_a_home() -> None:
    with tempfile.TemporaryDirectory() as name:  # tmp_path is closed to the real user
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "c.yaml").write_text(CONFIG)
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM], input=_COMMANDS, cwd=folder, env={}, capture_output=True, text=True, timeout=120
        )
    assert done.returncode == 0, done.stderr
    assert "Your own profiles: $XDG_CONFIG_HOME/hpctrain/sites/NAME.yaml" in done.stdout
    assert "HOME is not set, and this user has no entry in passwd; set HOME, or write the path out" in done.stdout
