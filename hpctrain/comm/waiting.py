"""Rules for waits and polls, a thread that drives messages, and a deadline for phases without polls.

`WaitPolicy` defines when a wait sleeps between polls. `ProgressThread` passes over the queues while kernels run. Both are
used by `progress.py`. `guard` sets a deadline for phases without polls, such as the start of MPI or opening a file on a network
file system.
"""

from __future__ import annotations

import contextlib
import contextvars
import faulthandler
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from threadpoolctl import threadpool_limits

from hpctrain.launch import keeper, process_end


@dataclass(frozen=True)
class WaitPolicy:
    """Rules by which a wait changes from polling to sleeping. All times are in seconds.

    A wait first polls and yields its core after each poll, for `offering_seconds`; this is as fast as spinning if no other
    process needs the core. Then it sleeps between polls, so that a slow rank can use the core.

    Attributes:
        offering_seconds: duration of polling without sleep.
        sleep_seconds: minimum sleep between polls.
        growing_share: sleep divided by the time waited so far; the minimum and the maximum still apply.
        longest_seconds: maximum sleep.
    """

    offering_seconds: float = 1e-3
    sleep_seconds: float = 50e-6
    growing_share: float = 0.0
    longest_seconds: float = 10e-3

    def sleeps(self, waited_seconds: float) -> bool:
        """Return whether a wait that has lasted `waited_seconds` sleeps before its next poll."""
        return waited_seconds > self.offering_seconds

    def next_sleep(self, waited_seconds: float) -> float:
        """Return the duration of the sleep before the next poll, for a wait that has lasted `waited_seconds`."""
        return max(self.sleep_seconds, min(self.growing_share * waited_seconds, self.longest_seconds))


#: policy for start-up with more ranks than cores on a node; if 63 ranks poll every 50 us, the rank that they wait for is slow
MORE_RANKS_THAN_CORES = WaitPolicy(growing_share=0.02)


#: time between two passes; shorter intervals take time from kernels, longer ones leave the link idle between parts of a message
INTERVAL_SECONDS = 200e-6


class ProgressThread:
    """Thread that calls `one_pass` repeatedly inside its `with` block, and never outside.

    Blocks must not nest. A pass runs in the context of the block's owner, for example with its handling of floating-point errors.
    After an exception, the thread makes no more passes in that block. `raise_failure`, or the end of the block, raises the
    exception in the owner.

    Args:
        one_pass: function that makes one pass over all queues.
        lock: lock held during each pass; every other thread must also hold it to call the transport.
        interval_seconds: time between two passes.

    Attributes:
        inside: whether the block is open; cleared under the lock.
    """

    def __init__(
        self, one_pass: Callable[[], None], lock: AbstractContextManager[Any], interval_seconds: float = INTERVAL_SECONDS
    ) -> None:
        self._one_pass = one_pass
        self._lock = lock
        self._interval_seconds = interval_seconds
        self._open, self._closed = threading.Event(), threading.Event()
        self.inside = False
        self._context = contextvars.copy_context()
        self._ended = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="hpctrain-progress", daemon=True)
        self._thread.start()

    def raise_failure(self) -> None:
        """Raise the exception of a failed pass, if any. Each exception is raised once."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def __enter__(self) -> None:
        assert not self.inside, "blocks of a progress thread must not nest"
        self._context = contextvars.copy_context()
        self.inside = True
        self._open.set()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._open.clear()
        with self._lock:  # a pass in progress ends first; the next one finds the block closed
            self.inside = False
        if error is None:
            self.raise_failure()

    def close(self) -> None:
        """End the thread. Call it outside the block."""
        assert not self.inside
        self._ended = True
        self._open.set()
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        # Otherwise, OpenMP would start a second team for this thread's updates, which competes with the team that runs kernels.
        threadpool_limits(limits=1, user_api="openmp")
        while True:
            self._open.wait()
            if self._ended:
                return
            try:
                with self._lock:
                    if self.inside:
                        self._context.run(self._one_pass)
            except BaseException as failure:  # raised in the block's owner
                self._failure = failure
                self._open.clear()
            self._closed.wait(self._interval_seconds)


# A phase that holds the interpreter lock stops the printing thread; faulthandler, which needs no lock, then ends the process.
_BACKSTOP_SECONDS = 2.0


@contextlib.contextmanager
def guard(phase: str, deadline_seconds: float, *, rank: int | None = None) -> Iterator[None]:
    """End this process if the block takes longer than the deadline; the launcher then ends the job.

    At the deadline, the rank, the phase and all stacks are printed on stderr; the exit code is 124. If the phase holds the
    interpreter lock, the process exits with 1 instead, which its keeper, if any, turns into 124. Blocks must not nest because a
    process has one such timer.

    Args:
        phase: name of the phase, as the subject of the message.
        rank: rank of this process; None: not known yet.
    """
    assert sys.__stderr__ is not None
    timer = threading.Timer(deadline_seconds, _give_up, (phase, deadline_seconds, rank))
    timer.daemon = True
    backstop = deadline_seconds + process_end.turn_seconds(rank or 0, deadline_seconds) + _BACKSTOP_SECONDS
    faulthandler.dump_traceback_later(backstop, exit=True, file=sys.__stderr__)
    keeper.current_keeper().pulse.guard(True)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        keeper.current_keeper().pulse.guard(False)
        faulthandler.cancel_dump_traceback_later()


def _give_up(phase: str, deadline_seconds: float, rank: int | None) -> None:
    process_end.await_turn(rank, deadline_seconds)
    process_end.say_last_words(
        rank, [f"{phase} did not end within the deadline of {deadline_seconds:g} s; stacks of all threads:"]
    )
    os._exit(process_end.DEADLINE)
