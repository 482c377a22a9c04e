"""How a command ends when it fails: a user's error in sentences, once per job; a bug in a traceback; the job always ended.

This is the only place where an exception becomes text. Commands and what they call raise errors; they neither catch nor print
them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from hpctrain.core import log
from hpctrain.core.errors import HpctrainError, LaunchError, RankLostError
from hpctrain.core.text import colours
from hpctrain.core.text import sentence as sentence_of
from hpctrain.flight.start_records import hint
from hpctrain.launch import process_end
from hpctrain.launch.launcher import EXPECT_RANKS, detect, environment_fault, place_of

_PACKAGE = Path(__file__).resolve().parents[1]

USER_ERROR = process_end.USER_ERROR
BUG = process_end.BUG

# Rank 0 prints an error that every rank raises. A rank that alone has an error is still alive after this time (rank 0 has not
# ended the job), and prints it itself.
_ALONE_AFTER_SECONDS = 1.5
# The same if another rank is known to have the error, too: if ranks share cores, that rank may be late.
_REPORTED_SECONDS = 30.0

#: is called with a sentence and the ranks that caused the error, if known
Failed = Callable[[str, Sequence[int]], None]

# Of an error without a file's name, such as a write to a file that is already open.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Commands(click.Group):
    """A group of commands. An error that the user can fix ends a command with sentences on standard error and exit code 2."""

    group_class = type  # groups inside are of this class too

    def invoke(self, ctx: click.Context) -> Any:
        with user_errors_end_in_sentences():
            return super().invoke(ctx)


@contextlib.contextmanager
def user_errors_end_in_sentences(
    rank: Callable[[], int] | None = None,
    abort: Callable[[int], None] = lambda code: None,
    failed: Failed = lambda sentence, ranks: None,
) -> Iterator[None]:
    """Print the sentences of a user's error and leave with exit code 2; let every other exception pass.

    Args:
        rank: returns this process's rank in its job; None for a command that needs no other ranks. abort: ends the job; may
            return if there is one process only. failed: is called with the error at once, before other ranks report theirs.
    """
    try:
        yield
    except (HpctrainError, OSError) as error:
        sentences = _sentences(error)
        if not sentences:
            raise
        failed(" ".join(sentences), error.ranks if isinstance(error, HpctrainError) else ())
        if rank is not None:
            log.tee("\n".join(sentences), last=True)
            time.sleep(_silent_seconds(error, rank()))
        if not _is_reported_by_another(error, in_job=rank is not None):
            for sentence in sentences:
                _say(sentence, rank)
        _leave(abort, BUG if isinstance(error, RankLostError) else USER_ERROR)  # another start may end well


@contextlib.contextmanager
def job_ends_on_error(
    rank: Callable[[], int], abort: Callable[[int], None], failed: Failed = lambda sentence, ranks: None
) -> Iterator[None]:
    """Turn any exception into the end of the whole job with a non-zero exit code.

    Args:
        rank: returns this process's rank (0 before there is one). abort: ends the job; may return if there is one process only.
        failed: is called with the error at once.
    """
    try:
        with user_errors_end_in_sentences(rank, abort, failed):
            yield
    except KeyboardInterrupt:
        sentence = "KeyboardInterrupt inside of a run ends the job."
        failed(sentence, ())
        if rank():  # Ctrl-C reaches all ranks: rank 0 reports it and ends the job
            time.sleep(_ALONE_AFTER_SECONDS)
        process_end.say_last_words(rank(), [sentence, *hint()], sys.stderr, stacks=False)
        _leave(abort, 130)
    except _Left:
        raise
    except SystemExit as left:
        call = "sys.exit()" if left.code is None else f"sys.exit({left.code!r})"
        failed(f"{call} inside of a run", ())
        # MPI would wait in this rank for the others to end, and they in a step for this one.
        process_end.say_last_words(
            rank(),
            [*traceback.format_exc().splitlines(), f"{call} inside of a run ends the job.", *hint()],
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
    except BrokenPipeError:  # as in `hpctrain train ... | head`: the output has no reader
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  as long as the process
        _leave(abort, BUG)
    except Exception as error:
        failed(f"{type(error).__name__}: {error}", ())
        process_end.say_last_words(rank(), [*traceback.format_exc().splitlines(), *hint()], sys.stderr, stacks=False)
        _leave(abort, BUG)


def _silent_seconds(error: Exception, rank: int) -> float:
    """Return how long a rank waits for another one to print an error and to end the job."""
    said_by = error.said_by if isinstance(error, HpctrainError) else None
    if rank == (said_by or 0):
        return 0.0
    return _ALONE_AFTER_SECONDS if said_by is None else _REPORTED_SECONDS


def _say(sentence: str, rank: Callable[[], int] | None) -> None:
    """Print one line, in red on a terminal; with the rank's place unless it is the first rank."""
    place = place_of(rank()) if rank is not None and rank() else ""
    line = f"hpctrain: {place}{sentence_of(sentence)}"
    click.echo(click.style(line, fg="red") if colours(2, os.environ) else line, err=True)


def _out_of_memory(error: MemoryError, rank: int) -> str:
    """Return one sentence: where memory ran out, what was requested, and what the plan has."""
    from hpctrain.train.passes import planned

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _PACKAGE in Path(frame.filename).parents]
    place = f", in {Path(frames[-1].filename).relative_to(_PACKAGE.parent)}, line {frames[-1].lineno}" if frames else ""
    request = " ".join(str(error).split()).rstrip(".") or "an allocation of unknown size was refused"
    plan = planned()
    return (
        f"Memory ran out on rank {rank} ({platform.node()}): {request}{place}; the process had {peak / 1e9:.3f} GB at most"
        f"{'' if plan is None else f', {plan}'}; set a smaller batch, more micro_batches or data.cache to false, "
        "or give the job more memory."
    )


def _sentences(error: HpctrainError | OSError) -> list[str]:
    """Return the lines to print; none if the user cannot fix the error."""
    if isinstance(error, HpctrainError):
        return [line for line in str(error).split("\n") if line]
    if isinstance(error, BrokenPipeError) or error.strerror is None:
        return []
    if error.filename is not None:
        return [f"{os.fsdecode(error.filename)} cannot be used: {error.strerror}."]
    return [f"A file cannot be written: {error.strerror}."] if error.errno in _FULL else []


def _is_reported_by_another(error: Exception, *, in_job: bool) -> bool:
    """Return whether another rank finds the same error without communicating.

    `srun hpctrain config check` is the same command on each rank. All ranks of a node fail in the same way if they cannot start.
    """
    if environment_fault(os.environ) is not None:  # there are no other ranks
        return False
    launcher = detect({name: value for name, value in os.environ.items() if name != EXPECT_RANKS})  # which may be wrong
    if not in_job:
        return bool(launcher.rank)
    return isinstance(error, LaunchError) and bool(launcher.local_rank)


class _Left(SystemExit):
    """The end of a process that has printed the reason."""


def _leave(abort: Callable[[int], None], code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    abort(code)
    raise _Left(code)
