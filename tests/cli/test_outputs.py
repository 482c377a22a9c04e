"""Outputs of all commands replace regular files only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from hpctrain.cli.arguments import OutputFile
from hpctrain.cli.main import cli
from hpctrain.errors import ConfigError
from tests.support.nodes import make_node

#: parameters that name what is read, or a directory in which files are made
READ = frozenset(
    {"checkpoint", "directory", "file", "hostfile", "images", "labels", "machine", "names_file", "path", "places"}
) | {*("resume", "run", "runs", "schedule_from", "source", "stage")}
MADE_INSIDE = {
    ("config copy", "directory"),
    ("data fetch", "out"),
    ("report", "png"),
    ("checkpoint convert", "out"),
    ("doctor", "run_directory"),
}


def _commands(group: click.Group, name: str = "") -> Iterator[tuple[str, click.Command]]:
    """Return (name, command) for every command of the command line."""
    context = click.Context(group)
    for word in group.list_commands(context):
        command = group.get_command(context, word)
        assert command is not None
        if isinstance(command, click.Group):
            yield from _commands(command, f"{name}{word} ")
        else:
            yield f"{name}{word}", command


def _paths() -> Iterator[tuple[str, click.Parameter]]:
    for name, command in _commands(cli):
        for parameter in command.params:
            if isinstance(parameter.type, click.Path):
                yield name, parameter


def _identity(path: Path) -> tuple[int, int, int]:
    status = os.lstat(path)
    return status.st_mode, status.st_ino, status.st_rdev


OUTPUTS = [(name, parameter) for name, parameter in _paths() if isinstance(parameter.type, OutputFile)]


def test_every_path_is_read_or_is_an_output() -> None:
    """Every path parameter has the type `OutputFile`, or its name is in one of the lists above. Add a new parameter there."""
    for name, parameter in _paths():
        known = (
            isinstance(parameter.type, OutputFile)
            or (name, parameter.name) in MADE_INSIDE
            or (parameter.name in READ and not {"--out", "--to", "--write"} & set(parameter.opts))
        )
        assert known, (name, parameter.name)
    assert {name for name, _ in OUTPUTS} >= {
        "train",
        "eval",
        "report",
        "compare",
        "calibrate",
        "weights export",
        "data convert idx",
    }


@pytest.mark.parametrize(("name", "parameter"), OUTPUTS, ids=[f"{name} {parameter.name}" for name, parameter in OUTPUTS])
def test_a_device_or_a_pipe_is_written_to_or_refused_before_any_work(
    name: str, parameter: click.Parameter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
