"""Words that complete arguments: known ones alone, each that begins so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from hpctrain.cli.arguments import OVERRIDES, FilePath, Seconds, examples, keys, sites
from hpctrain.cli.main import cli
from hpctrain.config.faults import known_paths
from hpctrain.config.source import dotted

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
    assert sites(_CONTEXT, _PARAMETER, "perl") == ["perlmutter-cpu", "perlmutter-gpu"]
    assert "configs/quickstart.yaml" in examples(_CONTEXT, _PARAMETER, "configs/quick")
    assert examples(_CONTEXT, _PARAMETER, "quick") == []


def test_the_commands_use_them() -> None:
    @click.command()
    @OVERRIDES
    def any_command(overrides: tuple[str, ...]) -> None:
        """Do nothing."""

    (argument,) = any_command.params
    assert [item.value for item in argument.shell_complete(_CONTEXT, "epo")] == ["epochs="]


def _parameters(command: click.Command, context: click.Context) -> Iterator[tuple[str, click.Parameter]]:
    """Return (command, parameter) for all parameters of a command and of its subcommands."""
    for parameter in command.params:
        yield f"{context.command_path} {parameter.name}", parameter
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from _parameters(inner, click.Context(inner, parent=context, info_name=name))


#: texts that may be a path
_PATHS = {"train resume", "train schedule_from", "eval checkpoint", "eval confusion", "predict checkpoint"}


def test_every_path_and_time_of_the_command_line_is_read_by_one_type() -> None:
    found = dict(_parameters(cli, click.Context(cli, info_name="hpctrain")))
    plain = {name for name, one in found.items() if isinstance(one.type, click.Path) and not isinstance(one.type, FilePath)}
    assert not plain
    taken = {name.removeprefix("hpctrain ") for name, one in found.items() if isinstance(one.type, FilePath)}
    machines = {name.removeprefix("hpctrain ") for name in found if name.endswith(" machine")}
    assert taken >= _PATHS | machines
    unbounded = {name for name, one in found.items() if one.type is click.FLOAT or type(one.type) is click.FloatRange}
    assert unbounded <= {"hpctrain plan simulate jitter"}  # which has an upper bound


def test_variables_of_a_path_are_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("NOWHERE", raising=False)
    assert FilePath(path_type=Path).convert("~/x", None, None) == Path("/home/me/x")
    assert FilePath().convert("auto", None, None) == "auto"
    result = CliRunner().invoke(cli, ["config", "check", "$NOWHERE/x.yaml"])
    assert result.exit_code == 2
    assert "$NOWHERE/x.yaml is no path: the variable NOWHERE in it is not set here" in result.output


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "0"])
def test_a_time_is_finite(text: str) -> None:
    with pytest.raises(click.BadParameter):
        Seconds(min=1).convert(text, None, None)
