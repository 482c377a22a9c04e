"""Turn exceptions of commands into text and exit codes, and end the job.

An error that the user can fix is printed as sentences, once per job. An error of the user's code is printed as a sentence and the
frames of this code, a bug with its traceback. In all cases all ranks end. This is the only module that turns an exception into
text. Commands and the functions that they call raise errors, and neither catch nor print them.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import platform
import re
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from hpctrain.core import log, user_code
from hpctrain.core.errors import HpctrainError, LaunchError
from hpctrain.core.text import choices, colours, counted, escaped, size_text, synonyms, wrapped
from hpctrain.core.text import sentence as sentence_of
from hpctrain.flight.start_records import hint
from hpctrain.launch import process_end
from hpctrain.launch.launcher import EXPECT_RANKS, detect, environment_fault, place_of
from hpctrain.launch.process_start import STANDARD_OUTPUT

_PACKAGE = Path(__file__).resolve().parents[1]

USER_ERROR = process_end.USER_ERROR
BUG = process_end.BUG

#: sentence of a command that Ctrl-C ends
INTERRUPTED = "Interrupted by Ctrl-C."

# If every rank raises an error, rank 0 prints it and ends the job. A rank that is still alive after this time is the only one
# with its error, and prints it.
_ALONE_AFTER_SECONDS = 1.5
# The time if another rank is known to raise the same error; it may be late if ranks share cores.
_REPORTED_SECONDS = 30.0

#: callback with the message of an error and the ranks that caused it, if known
Failed = Callable[[str, Sequence[int]], None]

# Error numbers that are reported even without a file name, as for a write to an open file.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Error numbers of a removed working directory. Only the errors of os.getcwd have no file name.
_GONE = (errno.ENOENT, errno.ESTALE)


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
                _say(INTERRUPTED, None)
                raise _Left(process_end.SIGNALLED + signal.SIGINT) from None
            except click.NoSuchOption as error:
                raise _as_override(error) from None
            except click.BadOptionUsage as error:
                command = None if ctx.invoked_subcommand is None else self.get_command(ctx, ctx.invoked_subcommand)
                raise (
                    error if command is None else _with_values(error, click.Context(command, ctx, ctx.invoked_subcommand))
                ) from None
            except click.UsageError as error:
                raise _of_several_paths(error) from None

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


def _of_several_paths(error: click.UsageError) -> click.UsageError:
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


@contextlib.contextmanager
def user_errors_end_in_sentences(
    rank: Callable[[], int] | None = None,
    abort: Callable[[int], None] = lambda code: None,
    failed: Failed = lambda sentence, ranks: None,
) -> Iterator[None]:
    """Print the sentences of a user's error and exit with code 2; let every other exception pass.

    The traceback is also written to the log of the rank (--log-ranks).

    Args:
        rank: callback that returns this process's rank in its job; None for a command that needs no other ranks.
        abort: callback that ends the job; it may return if there is only one process.
        failed: callback, called with the error at once, before other ranks report theirs.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, BrokenPipeError) and error.filename == STANDARD_OUTPUT:  # as in `hpctrain list models | head`
            _leave(abort, BUG)
        sentences = _sentences(error)
        if not sentences:
            raise
        failed(
            " ".join(line for line in sentences if not _continues(line)), error.ranks if isinstance(error, HpctrainError) else ()
        )
        if rank is not None:
            log.tee(traceback.format_exc(), logging.DEBUG)
            log.tee("\n".join(sentences), last=True)
            time.sleep(_silent_seconds(error, rank()))
        if not _is_reported_by_another(error, in_job=rank is not None):
            for sentence in sentences:
                _say(sentence, rank)
        _leave(abort, USER_ERROR)


@contextlib.contextmanager
def job_ends_on_error(
    rank: Callable[[], int], abort: Callable[[int], None], failed: Failed = lambda sentence, ranks: None
) -> Iterator[None]:
    """End the whole job with a non-zero exit code after any exception.

    Args:
        rank: callback that returns this process's rank (0 before it has one).
        abort: callback that ends the job; it may return if there is only one process.
        failed: callback, called with the error at once.
    """
    try:
        with user_errors_end_in_sentences(rank, abort, failed):
            yield
    except KeyboardInterrupt:
        launcher = detect({name: value for name, value in os.environ.items() if name != EXPECT_RANKS})
        sentence = "KeyboardInterrupt during a run ends the job." if launcher.starts_mpi else INTERRUPTED
        failed(sentence, ())
        if rank():  # Ctrl-C reaches all ranks: rank 0 reports it and ends the job
            time.sleep(_ALONE_AFTER_SECONDS)
        process_end.say_last_words(rank(), [sentence, *hint()], sys.stderr, stacks=False)
        _leave(abort, 130)
    except _Left:
        raise
    except SystemExit as left:
        call = "sys.exit()" if left.code is None else f"sys.exit({left.code!r})"
        failed(f"{call} during a run", ())
        # Leaving alone would hang: MPI waits here until the other ranks end, and they wait in a step for this one.
        process_end.say_last_words(
            rank(),
            [*traceback.format_exc().splitlines(), f"{call} during a run ends the job.", *hint()],
            sys.stderr,
            stacks=False,
        )
        _leave(abort, BUG)
    except MemoryError as error:
        sentence = _out_of_memory(error, rank())
        failed(sentence, ())
        log.tee(sentence, last=True)
        _say(sentence, None)
        _leave(abort, USER_ERROR)
    except Exception as error:
        failed(f"{type(error).__name__}: {error}", ())
        process_end.say_last_words(rank(), [*traceback.format_exc().splitlines(), *hint()], sys.stderr, stacks=False)
        _leave(abort, BUG)


def _silent_seconds(error: Exception, rank: int) -> float:
    """Return the time that a rank waits for another one to print an error and to end the job."""
    reported_by = error.reported_by if isinstance(error, HpctrainError) else None
    if rank == (reported_by or 0):
        return 0.0
    return _ALONE_AFTER_SECONDS if reported_by is None else _REPORTED_SECONDS


def _say(sentence: str, rank: Callable[[], int] | None) -> None:
    """Print one line, in red on a terminal. It begins with the rank and its host unless it is the first rank.

    Lines that continue a sentence, such as frames of user code, are printed as they are.
    """
    if _continues(sentence):
        click.echo(escaped(sentence), err=True)
        return
    place = place_of(rank()) if rank is not None and rank() else ""
    line = f"hpctrain: {place}{sentence_of(sentence)}"
    click.echo(click.style(line, fg="red") if colours(2, os.environ) else line, err=True)


def _continues(line: str) -> bool:
    """Return whether a line of a message continues the sentence above it, such as a frame of user code (`user_code.fault`)."""
    return line.startswith("  ")


def _out_of_memory(error: MemoryError, rank: int) -> str:
    """Return one sentence: where memory ran out, the size of the request, and the planned memory."""
    from hpctrain.training.passes import planned

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _PACKAGE in Path(frame.filename).parents]
    place = f", in {Path(frames[-1].filename).relative_to(_PACKAGE.parent)}, line {frames[-1].lineno}" if frames else ""
    request = " ".join(str(error).split()).rstrip(".") or "an allocation of unknown size was refused"
    plan = planned()
    return (
        f"Memory ran out on rank {rank} ({platform.node()}): {request}{place}; the process used at most {size_text(peak)}"
        f"{'' if plan is None else f', {plan}'}; set a smaller batch, more micro_batches or data.cache to false, "
        "or give the job more memory."
    )


def _sentences(error: Exception) -> list[str]:
    """Return the lines to print; empty if the user cannot fix the error."""
    stated = error if isinstance(error, HpctrainError) else user_code.fault(error)
    if stated is not None:
        return [line for line in str(stated).split("\n") if line]
    if not isinstance(error, OSError) or error.strerror is None:
        return []
    name = "the working directory" if error.filename is None and error.errno in _GONE else error.filename
    if name is not None:
        return [f"{os.fsdecode(name)} cannot be used: {error.strerror}."]
    return [f"A file cannot be written: {error.strerror}; free disk space, or use another disk."] if error.errno in _FULL else []


def _is_reported_by_another(error: Exception, *, in_job: bool) -> bool:
    """Return whether another rank raises the same error without communication and prints it.

    `srun hpctrain config check` runs the same command on each rank. All ranks of a node fail alike if they cannot start.
    """
    if environment_fault(os.environ) is not None:  # there is no other rank to report it
        return False
    launcher = detect({name: value for name, value in os.environ.items() if name != EXPECT_RANKS})  # its value may be wrong
    if not in_job:
        return bool(launcher.rank)
    return isinstance(error, LaunchError) and bool(launcher.local_rank)


class _Left(SystemExit):
    """Exit of a process that has printed the reason."""


def _leave(abort: Callable[[int], None], code: int) -> None:
    process_end.flush_to_reader(0.0)
    abort(code)
    raise _Left(code)
