"""Words that complete arguments: known ones alone, each that begins so."""

from __future__ import annotations

import click
import pytest

from hpctrain.cli.arguments import OVERRIDES, examples, keys, sites
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
