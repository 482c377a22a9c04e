"""Rules for waits and polls, a thread that drives messages, and a deadline for phases without polls.

`WaitPolicy` defines when a wait sleeps between polls. `FurtherPolls` limits the polls after an operator. `ProgressThread` passes
over the queues while kernels run. All three are used by `progress.py`. `guard` sets a deadline for phases without polls, such as
the start of MPI or opening a file on a network file system.
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

from hpctrain.launch import keeper, process_end


@dataclass(frozen=True)
class WaitPolicy:
    """How a wait changes from polling to sleeping, in seconds.

    A wait polls, offering its core to others after each poll for `offering_seconds`: as quick as a spin where it has the core to
    itself. Later it sleeps for `sleep_seconds` between polls, so that a slow rank gets the core; or for `growing_share` of the
    time waited so far where that is longer, up to `longest_seconds`.
    """

    offering_seconds: float = 1e-3
    sleep_seconds: float = 50e-6
    growing_share: float = 0.0
    longest_seconds: float = 10e-3

    def sleeps(self, waited_seconds: float) -> bool:
        """Return whether a wait that has lasted `waited_seconds` sleeps before its next poll."""
        return waited_seconds > self.offering_seconds

    def next_sleep(self, waited_seconds: float) -> float:
        """Return the seconds that a wait which has lasted `waited_seconds` sleeps before its next poll."""
        return max(self.sleep_seconds, min(self.growing_share * waited_seconds, self.longest_seconds))


#: for ranks that share a core: one that polls takes it from the rank that it waits for
SLEEPS_AT_ONCE = WaitPolicy(offering_seconds=0.0)

#: for start-up with more ranks on a node than cores: polls every 50 us of 63 ranks leave little to the one that they wait for
MORE_RANKS_THAN_CORES = WaitPolicy(growing_share=0.02)


class FurtherPolls:
    """Further polls at the end of an operator, as long as they take no more than a share of the operator's time.

    A message that moves in many small pieces, as over TCP, moves by one piece for each look. A poll is expected to take as long
    as the one before; so an operator is followed by one poll at least, and by a second one only where it lasted `1 / share` times
    as long as both.

    Args:
        share: of an operator's time that all polls after it may take, 0 .. 1.
    """

    def __init__(self, share: float) -> None:
        assert 0 <= share <= 1
        self._share = share
        self._ended_seconds: float | None = None
        self._begin_seconds = self._latest_seconds = self._allowed_seconds = 0.0

    def begin(self, now: float) -> None:
        """Note that an operator has ended at this instant of any clock; the first poll begins."""
        operator_seconds = 0.0 if self._ended_seconds is None else now - self._ended_seconds
        self._allowed_seconds = self._share * operator_seconds
        self._begin_seconds = self._latest_seconds = now

    def another(self, now: float) -> bool:
        """Return whether one more poll may begin. The last one has ended at this instant."""
        poll_seconds, self._latest_seconds = now - self._latest_seconds, now
        return now - self._begin_seconds + poll_seconds <= self._allowed_seconds

    def end(self, now: float) -> None:
        """Note that the last poll has ended; the next operator begins."""
        self._ended_seconds = now


#: between two passes. Shorter ones take time from the kernels, longer ones leave the wire idle between a message's parts.
INTERVAL_SECONDS = 200e-6


class ProgressThread:
    """A thread that calls `one_pass` again and again inside of its `with` block, and never outside of it.

    A block does not nest. A pass runs in the context of its owner, such as the handling of floating-point errors there. After an
    exception the thread makes no more passes in that block; its owner gets it from `raise_failure`, or at the block's end.

    Args:
        one_pass: over all queues. lock: held during each pass; every other thread that talks to the transport holds it, too.
        interval_seconds: between two passes, unless somebody calls `wake`.

    Attributes:
        inside: the block is open; changed under the lock.
    """

    def __init__(
        self, one_pass: Callable[[], None], lock: AbstractContextManager[Any], interval_seconds: float = INTERVAL_SECONDS
    ) -> None:
        self._one_pass = one_pass
        self._lock = lock
        self._interval_seconds = interval_seconds
        self._open, self._called = threading.Event(), threading.Event()
        self.inside = False
        self._context = contextvars.copy_context()
        self._ended = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="hpctrain-progress", daemon=True)
        self._thread.start()

    @property
    def identifier(self) -> int | None:
        """The thread's number, as `threading.get_ident` returns it."""
        return self._thread.ident

    def wake(self) -> None:
        """Make the next pass at once, if a block is open."""
        self._called.set()

    def raise_failure(self) -> None:
        """Raise here, once, what a pass has raised."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def __enter__(self) -> None:
        assert not self.inside, "the block of a progress thread does not nest"
        self._context = contextvars.copy_context()
        self.inside = True
        self._open.set()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._open.clear()
        with self._lock:  # a pass under way ends first; the next one finds the block closed
            self.inside = False
        if error is None:
            self.raise_failure()

    def close(self) -> None:
        """End the thread; outside of the block."""
        assert not self.inside
        self._ended = True
        self._open.set()
        self._called.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._open.wait()
            if self._ended:
                return
            self._called.clear()  # a call from here on is for the pass after this one
            try:
                with self._lock:
                    if self.inside:
                        self._context.run(self._one_pass)
            except BaseException as failure:  # the block's owner gets it
                self._failure = failure
                self._open.clear()
            self._called.wait(self._interval_seconds)


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
