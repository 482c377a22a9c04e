"""Groups and arguments of commands: unknown words, paths, overrides and completion. Imports nothing heavy at the top."""

from __future__ import annotations

import functools
import math
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hpctrain.core.errors import ConfigError
from hpctrain.core.files import expanded
from hpctrain.core.text import choices, counted, echo, synonyms, wrapped
from hpctrain.launch import process_end
from hpctrain.launch.launcher import detect
from hpctrain.process.ends import INTERRUPTED, Left, say, user_errors_end_in_sentences
from hpctrain.process.start import NO_RANK

if TYPE_CHECKING:
    from hpctrain.runs.directory import RunDirectory


_Command = TypeVar("_Command", bound=Callable[..., Any])


class FilePath(click.Path):
    """Path whose `~` and `$VARIABLE` are expanded, as in configurations: shells do not expand the `~` in --out=~/x."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str):
            try:
                value = expanded(value)
            except ValueError as error:
                self.fail(f"{value} is not a path: {error}.", param, ctx)
        return super().convert(value, param, ctx)


class OutputFile(FilePath):
    """File to write. A file that cannot be written is refused before the command starts its work.

    Args:
        streams: whether pipes, terminals and other character devices are accepted next to regular files.
        makes_directory: whether a missing directory of the file is created.
        of_job: whether rank 0 of a job writes the file. Its directory need exist on that rank's node only, so the job checks it.
    """

    def __init__(self, *, streams: bool = False, makes_directory: bool = False, of_job: bool = False) -> None:
        super().__init__(dir_okay=False, path_type=Path)
        self.streams, self._makes_directory, self._of_job = streams, makes_directory, of_job

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = super().convert(value, param, ctx)
        if self._of_job:
            return path
        if not (self._makes_directory and not os.path.lexists(path.parent)):
            check_output(path, param.opts[0] if isinstance(param, click.Option) else "", streams=self.streams)
        return path


def check_output(path: Path, option: str = "", *, streams: bool = False) -> None:
    """Raise unless a file can be written; see `OutputFile`.

    Args:
        option: option that names the file; empty if an argument names it.

    Raises:
        ConfigError: the file cannot be written; the message has the option, the path and the reason.
    """
    from hpctrain.storage.atomic_write import check_target

    try:
        check_target(path, streams=streams)
    except OSError as error:
        named = f"{option} {path}".lstrip()
        raise ConfigError(f"{named} cannot be written: {error.strerror}; give another path.") from None


class OneOf(click.Choice):
    """A choice of words. The error for another word names the nearest one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            self.fail(f'there is no "{value}"; {choices(str(value), self.choices)}.', param, ctx)


class Finite(click.FloatRange):
    """Finite number in a range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        seconds = super().convert(value, param, ctx)
        if not math.isfinite(seconds):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return seconds


def keys(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the completions of a key: complete keys followed by "=", and sections followed by "."."""
    from hpctrain.config.load import known_paths, section_at
    from hpctrain.core.yaml_source import dotted

    depth = incomplete.count(".") + 1
    paths = [path for path in known_paths() if len(path) == depth and dotted(path).startswith(incomplete)]
    return [f"{dotted(path)}{'=' if section_at(path) is None else '.'}" for path in paths]


def complete_sites(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the sites whose names begin with the incomplete word."""
    from hpctrain.site import profile

    return [name for name in profile.profile_paths() if name.startswith(incomplete)]


def examples(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Return the installed configurations and job scripts whose names begin with the incomplete word."""
    from hpctrain.config import examples

    return [name for name in examples.names() if name.startswith(incomplete)]


FILE = click.argument("file", type=FilePath(path_type=Path))
OVERRIDES = click.argument("overrides", nargs=-1, shell_complete=keys)


def options(*added: Callable[[_Command], _Command]) -> Callable[[_Command], _Command]:
    """Return a decorator that adds arguments and options to a command, which its help lists in this order."""
    return lambda command: functools.reduce(lambda decorated, add: add(decorated), reversed(added), command)


PASS_STYLE = click.option(
    "--progress",
    "style",
    type=OneOf(["bar", "none"]),
    help="Show the progress as a bar on stderr, or not at all; default: a bar on a terminal, nothing elsewhere.",
)


#: default directory of runs
RUNS = Path("runs")


def newest_runs(
    count: int = 1, directory: Path = RUNS, *, trained: bool = False, prefers: Callable[[RunDirectory], bool] | None = None
) -> list[Path]:
    """Return the newest `count` runs in a directory, oldest first: the default of commands that read runs.

    Print the choice on stderr if there are runs of other names. Other arguments and errors are those of `directory.newest_runs`.

    Args:
        prefers: function that returns whether a run is preferred to newer ones; None: the newest runs are returned.
    """
    from hpctrain.runs import directory as run_directory

    newest = [run.path for run in run_directory.newest_runs(directory, count, trained=trained)]
    if prefers is not None:
        readable = (run.open() for run in run_directory.listed_runs(directory, None) if run.fault is None)
        newest = [next((run.path for run in readable if prefers(run)), newest[0])]
    if (note := run_directory.choice_note(directory, newest[-1])) and not detect(os.environ).rank:
        echo(note, err=True)
    return newest


def or_newest_trained(ctx: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """Return the path of an argument; if it is missing, that of the newest run with a checkpoint (callback of click)."""
    return newest_runs(trained=True)[0] if path is None and not ctx.resilient_parsing else path


def log_ranks_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the option --log-ranks to a command; the argument is `log_ranks`."""
    return click.option(
        "--log-ranks",
        default=NO_RANK,
        metavar="all|none|0,3,8-15",
        help="Ranks whose full log, with times, errors and stack traces, is written to logs/rank-NNNN.log in the run directory.",
    )(command)


class Commands(click.Group):
    """Group of commands. An error that the user can fix ends the command with sentences on standard error and exit code 2."""

    group_class = type  # subgroups have the same class

    def main(self, *arguments: Any, **options: Any) -> Any:
        """Run the command line, and flush standard output, so that a failed write ends the command as any other error."""
        with user_errors_end_in_sentences():
            try:
                return super().main(*arguments, **options)
            finally:
                sys.stdout.flush()

    def invoke(self, ctx: click.Context) -> Any:
        with user_errors_end_in_sentences():
            try:
                return super().invoke(ctx)
            except KeyboardInterrupt:
                say(INTERRUPTED, None)
                raise Left(process_end.SIGNALLED + signal.SIGINT) from None
            except click.NoSuchOption as error:
                raise _as_override(error) from None
            except click.BadOptionUsage as error:
                command = None if ctx.invoked_subcommand is None else self.get_command(ctx, ctx.invoked_subcommand)
                raise (
                    error if command is None else _with_values(error, click.Context(command, ctx, ctx.invoked_subcommand))
                ) from None
            except click.UsageError as error:
                raise _with_path_advice(error) from None

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command as click does. Raise if it is unknown, naming the nearest one, or if an option has no value."""
        name = args[0]
        if name not in self.list_commands(ctx) and not name.startswith("-") and not ctx.resilient_parsing:
            if name == "help":
                words = " ".join([ctx.command_path, *args[1:], "--help"])
                raise click.UsageError(f'There is no command "help"; use `{words}`.', ctx)
            deeper = " or ".join(f'"{words}"' for words in _below(self, ctx) if words.split()[-1] == name)
            advice = f"the nearest is {deeper}" if deeper else choices(name, self.list_commands(ctx))
            message = f'There is no command "{name}"; {advice}.'
            raise click.UsageError(message if deeper else wrapped(message, shutil.get_terminal_size().columns), ctx)
        word, command, rest = super().resolve_command(ctx, args)
        if command is not None and not isinstance(command, click.Group) and not ctx.resilient_parsing:
            check_values(click.Context(command, ctx, word, **command.context_settings), rest)
        return word, command, rest


def _below(group: click.Group, ctx: click.Context) -> Iterator[str]:
    """Yield the commands of all nested groups with their words, such as "config check"."""
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        if isinstance(command, click.Group):
            yield from (f"{name} {inner}" for inner in (*command.list_commands(ctx), *_below(command, ctx)))


def check_values(ctx: click.Context, words: Sequence[str]) -> None:
    """Raise if an option of a command is followed by another option instead of its value.

    click would use the second option as the value of the first, such as --steps as the path of --resume. A value that begins with
    -- can be given as --option=VALUE.

    Args:
        ctx: context of the command.
        words: words after the command.

    Raises:
        click.BadOptionUsage: an option has no value. The message names it, its legal values and the next word.
    """
    options = {name: one for one in ctx.command.params if isinstance(one, click.Option) for name in one.opts}
    rest = list(words)
    while rest and rest[0] != "--" and (ctx.allow_interspersed_args or rest[0].startswith("-")):
        name = rest.pop(0)
        option = options.get(name)
        if option is None or option.is_flag or option.count:
            continue
        if isinstance(option.flag_value, str) and rest and rest[0].startswith("-") and rest[0] != "-":
            continue  # the value is optional, and click takes this word as the next option
        wrong = next((word for word in rest[: option.nargs] if word.startswith("--")), None)
        if wrong is not None:
            raise click.BadOptionUsage(
                name,
                f"{name} needs a value ({_values(option, ctx)}), but the next word is the option {wrong}; write the value after "
                f"{name}, or leave {name} out.",
                ctx,
            )
        del rest[: option.nargs]


def _values(option: click.Parameter, ctx: click.Context) -> str:
    """Return the legal values of an option, such as "auto, best or PATH"; without a list, its metavariable."""
    values = option.make_metavar(ctx).strip("[]").removesuffix(" RANGE")
    first, _, last = values.replace("|", ", ").rpartition(", ")
    return f"{first} or {last}" if first else last


def _with_values(error: click.BadOptionUsage, ctx: click.Context) -> click.UsageError:
    """Return the error of an option without its value, with the legal values if the option names them."""
    option = next((one for one in ctx.command.params if error.option_name in one.opts), None)
    if option is None or "|" not in option.make_metavar(ctx) or not error.message.endswith("requires an argument."):
        return error
    return click.BadOptionUsage(error.option_name, f"{error.option_name} needs a value: {_values(option, ctx)}.", ctx)


def _with_path_advice(error: click.UsageError) -> click.UsageError:
    """Return the error for unexpected words with advice if they are paths, as after a pattern of the shell such as runs/*."""
    unexpected = re.fullmatch(r"Got unexpected extra arguments? \((.*)\)", error.message)
    words = [] if unexpected is None else unexpected[1].split(" ")
    if not words or not all(os.path.lexists(word) for word in words):
        return error
    one = f"name one of them, such as {words[0]}"
    return click.UsageError(f"{counted(len(words), 'path')} too many, as after a pattern that matches several; {one}.", error.ctx)


def _as_override(error: click.NoSuchOption) -> click.UsageError:
    """Return the error with advice if the unknown option means a key that the command accepts as OVERRIDE."""
    from hpctrain.config.schema import Config

    key = error.option_name.lstrip("-").replace("-", "_")
    takes = error.ctx is not None and any(parameter.name == "overrides" for parameter in error.ctx.command.params)
    meant = (known for known in [key, *synonyms(key)] if known.partition(".")[0] in Config.model_fields)
    known = next(meant, None) if takes else None
    if known is None:
        return error
    return click.UsageError(f"{error.option_name} is no option, but a key of the configuration; write {known}=VALUE.", error.ctx)
