"""Turn exceptions of commands and programs into text and exit codes, and end the job.

An error that the user can fix is printed as sentences, once per job, or once per node if its ranks cannot start. An error of the
user's code is printed as a sentence and the frames of this code, a bug with its traceback. In all cases all ranks end. No other
module turns an exception into text: commands and the functions that they call raise errors, and neither catch nor print them.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import platform
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from hpctrain.core import log, user_code
from hpctrain.core.errors import HpctrainError, LaunchError
from hpctrain.core.text import colours, echo, size_text
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
                say(sentence, rank)
        _leave(abort, USER_ERROR)


@contextlib.contextmanager
def job_ends_on_error(
    rank: Callable[[], int], abort: Callable[[int], None], failed: Failed = lambda sentence, ranks: None
) -> Iterator[None]:
    """End the whole job with a non-zero exit code after any exception.

    Args:
        rank: callback that returns this process's rank (0 before it has one).
        abort, failed: as for `user_errors_end_in_sentences`.
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
    except ReportedExit:
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
        say(sentence, None)
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


def say(sentence: str, rank: Callable[[], int] | None) -> None:
    """Print one line, in red on a terminal. It begins with the rank and its host unless it is the first rank.

    Lines that continue a sentence, such as frames of user code, are printed as they are.
    """
    if _continues(sentence):
        echo(sentence, err=True)
        return
    place = place_of(rank()) if rank is not None and rank() else ""
    line = f"hpctrain: {place}{sentence_of(sentence)}"
    print(f"\x1b[31m{line}\x1b[0m" if colours(2, os.environ) else line, file=sys.stderr, flush=True)


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
    stated = error if isinstance(error, HpctrainError) else user_code.fault(error) or user_code.wrong_call(error)
    if stated is not None:
        return [line for line in str(stated).split("\n") if line]
    if not isinstance(error, OSError) or error.strerror is None:
        return []
    name = "the working directory" if error.filename is None and error.errno in _GONE else error.filename
    if name is not None:
        return [f"{os.fsdecode(name)} cannot be used: {error.strerror}."]
    advice = "" if error.errno == errno.EFBIG else "; free disk space, or use another disk"
    return [f"A file cannot be written: {error.strerror}{advice}."] if error.errno in _FULL else []


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


class ReportedExit(SystemExit):
    """Exit of a process that has printed the reason."""


def _leave(abort: Callable[[int], None], code: int) -> None:
    process_end.flush_to_reader(0.0)
    abort(code)
    raise ReportedExit(code)
