"""How a command ends when it fails: a user's error as one sentence from rank 0, a bug as one traceback, the job always ended."""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
from collections.abc import Callable, Iterator

import click

from hpctrain.errors import HpctrainError

USER_ERROR = 2
BUG = 1

# An error that every rank raises is rank 0's to print. A rank that is alone with its error is still alive after this time (rank 0
# has not ended the job), and prints it itself.
_ALONE_AFTER_SECONDS = 1.5


@contextlib.contextmanager
def job_ends_on_error(rank: Callable[[], int], abort: Callable[[int], None]) -> Iterator[None]:
    """Turn any exception into the end of the whole job with a non-zero exit code.

    Args:
        rank: this process's rank (0 before there is one). abort: ends the job; may return where there is one process only.
    """
    try:
        yield
    except HpctrainError as error:
        if rank() != 0:
            time.sleep(_ALONE_AFTER_SECONDS)
        click.echo(f"hpctrain: {type(error).__name__}: {error}", err=True)
        _leave(abort, USER_ERROR)
    except KeyboardInterrupt:
        _leave(abort, 130)
    except Exception:
        sys.stderr.write(f"[rank {rank()}] {traceback.format_exc()}")
        _leave(abort, BUG)


def _leave(abort: Callable[[int], None], code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    abort(code)
    sys.exit(code)
