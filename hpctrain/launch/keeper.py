"""A small parent process that says how its rank ended, and turns an end without a word into a failure.

A rank that some library ends by `_exit(0)` inside a step leaves nothing behind: MPICH's launcher kills the other ranks and
reports success. Launchers count only the process that they have started, so that one becomes the keeper: it forks before MPI,
NumPy and any thread exist, the child becomes the rank, and the keeper sleeps until the child ends. As it inherits the launcher's
descriptors, the launcher takes the rank for alive until the keeper has spoken. docs/adr/0005 weighs it against other ways.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from signal import Signals
from typing import NoReturn

from hpctrain.launch.exit_codes import BUG, DEADLINE, FINISHED, SIGNALLED, STOPPED, USER_ERROR
from hpctrain.launch.signals import HELD

#: 0 in the environment: no keeper, as for a debugger that follows the process it has started
SWITCH = "HPCTRAIN_KEEPER"

# A rank that leaves with these has said why. A run that a signal has stopped says that it has finished, too: STOPPED promises a
# checkpoint, and jobs are queued again on it.
_EXPLAINED = (BUG, USER_ERROR, DEADLINE)
_FINISHED = b"."
_PR_SET_PDEATHSIG = 1
# A launcher that ends a whole job kills rank and keeper, in either order; only of a rank that was killed alone is there news.
_ALONE_SECONDS = 0.1


def keep(rank: int | None, held: frozenset[Signals]) -> Callable[[], None]:
    """Fork; in the child, return what it calls once its end needs no explanation. The parent does not return.

    Without effect where the process has threads (a child would lack them), or MPI has started, or SWITCH is 0.

    Args:
        rank: of this process, None: unknown. held: signals that are blocked; the parent passes them on.
    """
    if not _possible():
        return lambda: None
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    heard, said = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    keeper = os.getpid()
    child = os.fork()
    if child:
        os.close(said)
        _watch(child, heard, rank, held)
    os.close(heard)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)  # no rank outlives its keeper
    if os.getppid() != keeper:
        os._exit(BUG)
    return lambda: _say_finished(said)


def _possible() -> bool:
    if os.environ.get(SWITCH) == "0" or "mpi4py.MPI" in sys.modules or sys.platform != "linux":
        return False
    return len(os.listdir("/proc/self/task")) == 1


def _say_finished(said: int) -> None:
    os.write(said, _FINISHED)
    os.close(said)


def _watch(child: int, heard: int, rank: int | None, held: frozenset[Signals]) -> NoReturn:
    """Pass signals on until the child ends; then leave as it did, or with an error where it left without a word."""
    while True:
        number = signal.sigwaitinfo(held | {signal.SIGCHLD}).si_signo
        if number != signal.SIGCHLD:
            os.kill(child, number)
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
    os.set_blocking(heard, False)
    try:
        finished = os.read(heard, 1) == _FINISHED
    except BlockingIOError:  # a process that the rank has forked still holds the other end
        finished = False
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        _leave_by(Signals(-code), rank)
    if not finished and code not in _EXPLAINED and code < SIGNALLED:
        _say(rank, f"the process left with exit code {code} before the run was over: something called exit() in it.")
        code = BUG if code in (FINISHED, STOPPED) else code
    os._exit(code)


def _leave_by(number: Signals, rank: int | None) -> NoReturn:
    """End as the child did, so that launchers and shells see the signal; the child has dumped core, if anybody should."""
    if number == signal.SIGKILL:
        time.sleep(_ALONE_SECONDS)
    hint = " (as the kernel does where memory runs out)" if number == signal.SIGKILL else ""
    _say(rank, f"the process was ended by {number.name}{hint} before the run was over.")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)
    os.kill(os.getpid(), number)
    os._exit(SIGNALLED + number)


def _say(rank: int | None, sentence: str) -> None:
    place = "hpctrain: " if rank is None else f"hpctrain: [rank {rank}] "
    os.write(2, f"{place}{sentence}\n".encode())
