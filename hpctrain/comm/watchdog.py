"""A deadline for phases in which nobody polls: MPI's start, a file opened on a network file system."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
from collections.abc import Iterator

from hpctrain.comm.progress import TIMEOUT_EXIT_CODE
from hpctrain.launch import keeper, process_end

# A phase that holds the interpreter lock stops the thread that prints. Then faulthandler, which needs no lock, ends the process.
_BACKSTOP_SECONDS = 2.0


@contextlib.contextmanager
def guard(phase: str, deadline_seconds: float, *, rank: int | None = None) -> Iterator[None]:
    """End this process if the block takes longer than the deadline; the launcher then ends the job.

    Prints rank, phase and all stacks on stderr. The exit code is 124. If the phase holds the interpreter lock, the process itself
    leaves with 1, which its keeper, if any, turns into 124. Do not nest: a process has one such timer.
    """
    assert sys.__stderr__ is not None
    timer = threading.Timer(deadline_seconds, _give_up, (phase, deadline_seconds, rank))
    timer.daemon = True
    backstop = deadline_seconds + process_end.turn_seconds(rank or 0, deadline_seconds) + _BACKSTOP_SECONDS
    faulthandler.dump_traceback_later(backstop, exit=True, file=sys.__stderr__)
    keeper.own().pulse.guard(True)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        keeper.own().pulse.guard(False)
        faulthandler.cancel_dump_traceback_later()


def _give_up(phase: str, deadline_seconds: float, rank: int | None) -> None:
    process_end.await_turn(rank, deadline_seconds)
    process_end.say(rank, [f"{phase} did not end within the deadline of {deadline_seconds:g} s; stacks of all threads:"])
    os._exit(TIMEOUT_EXIT_CODE)
