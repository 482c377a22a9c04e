"""Help texts: every option is described in a sentence, and every command in one that fits its line of the list."""

import inspect
from collections.abc import Iterator

import click
import pytest

from hpctrain.cli.main import cli
from hpctrain.config.faults import known_paths, section_at
from hpctrain.config.source import KeyPath, dotted

#: words that make a text a piece of a sentence
_PIECES = ("Of ", "That ", "Such ", "By default", "As ", "Also ", "Who ", "What ", "Which ", "How ")


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        assert command is not None
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


ALL = [pytest.param(command, id=" ".join(path)) for path, command in commands(cli)]


@pytest.mark.parametrize("command", ALL)
def test_every_option_has_a_sentence(command: click.Command) -> None:
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            _check(str(parameter.help), parameter.opts[0])


@pytest.mark.parametrize("command", ALL)
def test_every_command_has_a_sentence_that_its_list_does_not_cut(command: click.Command) -> None:
    assert not command.get_short_help_str(limit=60).endswith("..."), command.help
    for paragraph in inspect.cleandoc(str(command.help)).split("\n\n"):
        _check(paragraph.replace("\n", " "), str(command.name))


@pytest.mark.parametrize("path", list(known_paths()), ids=dotted)
def test_every_key_has_a_sentence(path: KeyPath) -> None:
    section = section_at(path[:-1])
    assert section is not None
    _check(str(section.model_fields[str(path[-1])].description), dotted(path))


def _check(text: str, name: str) -> None:
    assert text.endswith(".") and text[0].isupper(), f"{name}: {text!r} is no sentence"  # noqa: PT018
    assert not text.startswith(_PIECES), f"{name}: {text!r} is a piece of a sentence"
    assert len(text.split()) >= 3, f"{name}: {text!r} says too little"
