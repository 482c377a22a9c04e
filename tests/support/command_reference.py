"""docs/commands.md: every command with its help, arguments and options, from the program itself."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import click

from hpctrain.cli.main import cli

_HEAD = """# Commands

`hpctrain --help`, and `--help` behind each command, print the same. `hpctrain completion bash` makes the tab key complete them.
Those that train or measure are started on ranks, as `mpiexec -n 4 python -m mpi4py -m hpctrain train ...`; the others are one
process.

This page is written by `make docs`, from the program itself.
"""


def commands_page() -> str:
    """The whole page."""
    context = click.Context(cli, info_name="hpctrain")
    return "\n".join([_HEAD, *(line for name in cli.list_commands(context) for line in _lines(context, name, "##"))])


def _lines(parent: click.Context, name: str, heading: str) -> Iterator[str]:
    group = parent.command
    assert isinstance(group, click.Group)
    command = group.get_command(parent, name)
    assert command is not None
    context = click.Context(command, info_name=name, parent=parent)
    yield from (f"{heading} {context.command_path}", "")
    arguments = [piece for piece in command.collect_usage_pieces(context) if piece != "[OPTIONS]"]
    if arguments and not isinstance(command, click.Group):
        yield from (f"Arguments: `{' '.join(arguments)}`", "")
    yield from (_escaped(inspect.cleandoc(command.help or "")), "")
    options = [option for option in command.params if isinstance(option, click.Option)]
    if options:
        yield from ("| option | meaning |", "|---|---|", *(_option(option, context) for option in options), "")
    if isinstance(command, click.Group):
        for inner in command.list_commands(context):
            yield from _lines(context, inner, f"{heading}#")


def _option(option: click.Option, context: click.Context) -> str:
    names, meaning = option.get_help_record(context) or ("", "")
    return f"| `{_escaped(names)}` | {_escaped(' '.join(meaning.split()))} |"


def _escaped(text: str) -> str:
    """Words of a help text that Markdown would take for a tag or a column."""
    return text.replace("<", "&lt;").replace("|", "\\|")
