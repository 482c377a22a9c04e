"""Signals of a process that computes: they are blocked in every thread, and one thread waits for them in the kernel.

No handler may run on a thread that computes. The kernels that oneDNN generates use the stack pointer as a register, so a
handler's frame would be written to an arbitrary address and the process would crash. The mask is set before NumPy, MPI or any
thread exists, so every thread inherits it. A thread that waits in `sigwaitinfo` costs a step nothing, and still responds while
other threads hang.

From SIGTERM to exit code 85: the thread of `SignalWatch` notes the signal. The training loop (`Trainer`) reads the request before
it posts the message of a step (`Replica.post`), which carries it to all ranks. One step later every rank reads the message
(`LoopState.take`) and leaves the loop. `run_training` writes a checkpoint and returns the reason, and `hpctrain train` ends the
process with `STOPPED` (85) by `RankProcess.leave`, after MPI has ended on all ranks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from signal import Signals

from hpctrain.core import log
from hpctrain.launch import process_end
from hpctrain.launch.launcher import place_of
from hpctrain.launch.process_end import SIGNALLED, STOPPED
from hpctrain.launch.process_start import OF_PROGRAMS, STACKS, STOPS, hold

# One request may arrive several times: from the terminal, the launcher and the parent process. A later signal is another request.
AGAIN_SECONDS = 3.0
# A person at a terminal repeats a request by this signal. Schedulers and launchers may send the others any number of times.
_AT_ONCE = Signals.SIGINT
_STACKS_SECONDS = 1.0
# A rank that ends alone is still alive after this time; otherwise rank 0 has ended the job.
_ALONE_SECONDS = 0.5

_OF_PROCESS: list[SignalWatch] = []


def of_process(watch: SignalWatch) -> None:
    """Register the watch that `taken_signals` uses in this process."""
    _OF_PROCESS[:] = [watch]


#: answers to a request: of a training, and of a program with a loop of its own
_TRAINING_ENDS = "the run ends with a checkpoint as soon as a step is complete"
_PROGRAM_ASKED = "the program is asked to save a checkpoint and to end"


@contextlib.contextmanager
def taken_signals(rank: int, *, trains: bool = False) -> Iterator[SignalWatch]:
    """Note requests to stop during the block. Call it in the main thread, before the threads that compute are created.

    Args:
        trains: whether the block is a training, which ends with a checkpoint; otherwise it is the loop of a program.
    """
    answer = _TRAINING_ENDS if trains else _PROGRAM_ASKED
    if _OF_PROCESS:
        _OF_PROCESS[0].remember(answer)
        yield _OF_PROCESS[0]
        return
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    handlers = {number: signal.getsignal(number) for number in OF_PROGRAMS}
    held = hold(OF_PROGRAMS)
    watch = SignalWatch(held, rank=rank, answer=answer).start()
    try:
        yield watch
    finally:
        watch.close()
        for number in held:
            if handlers[number] is not None:  # None: not set by Python
                signal.signal(number, handlers[number])
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def deliver_again(request: Signals) -> None:
    """Repeat a request to stop, to which a training has responded, for the program that contains the training.

    If a watch is registered, it receives all signals; KeyboardInterrupt (SIGINT) or SystemExit is then raised instead.
    """
    if not _OF_PROCESS:
        signal.raise_signal(request)
    elif request == Signals.SIGINT:
        raise KeyboardInterrupt
    else:
        raise SystemExit(STOPPED)


class SignalWatch:
    """Receiver of signals, which notes the first one that requests the end of this process.

    Args:
        held: signals to wait for, blocked by `hold`; empty: no signal is received.
        at_once: whether a request ends the process at once with code 128 + n, because there is nothing to save. Otherwise the
            request is noted, and only an interrupt at least AGAIN_SECONDS after the first request ends the process without a
            checkpoint.
        answer: reaction of the process to a request, printed at the first one.

    Attributes:
        request: first signal that requested the end of this process; None if none did.
    """

    def __init__(
        self,
        held: frozenset[Signals] = frozenset(),
        *,
        rank: int | None = None,
        at_once: bool = False,
        answer: str = _TRAINING_ENDS,
    ) -> None:
        self.request: Signals | None = None
        self._answer = answer
        self._kept: Callable[[], str] = lambda: ""
        self._held, self._rank, self._at_once = held, rank, at_once
        self._since = self._stacks_at = float("-inf")
        self._thread: threading.Thread | None = None
        self._closed = self._patience_asked = False

    def start(self) -> SignalWatch:
        """Start the thread that waits for signals. Call it in the main thread, after `hold`."""
        for number in self._held:  # a thread older than the mask may get one: the default would end the process
            signal.signal(number, lambda received, frame: self.take(Signals(received)))
        self._thread = threading.Thread(target=self._run, name="hpctrain-signals", daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        """End the thread; later signals stay pending. At exit, the interpreter must not have a thread that a signal can wake."""
        self._closed = True
        if self._thread is not None:
            signal.pthread_kill(self._thread.ident or 0, min(self._held))
            self._thread.join(1.0)

    def keeps(self, kept: Callable[[], str]) -> None:
        """Set a callback that returns a clause about the existing checkpoint, for the last sentence of this process."""
        self._kept = kept

    def asked(self) -> bool:
        """Return whether a signal has asked this process to stop."""
        return self.request is not None

    def end_at_once(self) -> None:
        """Declare that there is nothing to save any more. A request, even an earlier one, then ends the process."""
        self._at_once = True
        if self.request is not None:
            self._end(self.request)

    def remember(self, answer: str) -> None:
        """Declare that a checkpoint can be saved. Requests then no longer end the process; the first one prints `answer`."""
        self._at_once, self._answer = False, answer

    def take(self, number: Signals) -> None:
        """Process one signal. The call returns unless the signal ends the process."""
        now = time.monotonic()
        if number in STOPS:
            self._stop(number, now)
        elif number == STACKS and now - self._stacks_at >= _STACKS_SECONDS:
            self._stacks_at = now
            process_end.say_last_words(self._rank, [f"{number.name} received, the run continues; stacks of all threads:"])

    def _run(self) -> None:
        while not self._closed:
            number = signal.sigwaitinfo(self._held).si_signo
            if not self._closed:
                self.take(Signals(number))

    def _stop(self, number: Signals, now: float) -> None:
        first = self.request is None
        if first:
            self.request, self._since = number, now
        if self._at_once or (number == _AT_ONCE and now - self._since >= AGAIN_SECONDS):
            self._end(number)
        if self._rank:
            return
        if first:
            self._say(
                f"{number.name} received: {self._answer}; SIGINT (Ctrl-C) after {AGAIN_SECONDS:g} s more ends it at once, "
                f"without a checkpoint."
            )
        elif not self._patience_asked and now - self._since >= AGAIN_SECONDS:
            self._patience_asked = True
            self._say(
                f"{number.name} received again: the checkpoint is not written yet; SIGINT (Ctrl-C) ends the run without it."
            )

    def _end(self, number: Signals) -> None:
        again = "" if self._at_once else " again"
        kept = "" if self._rank else self._kept()
        if self._rank:  # all ranks get the signal of a person or a scheduler: rank 0 reports it, and the job ends
            time.sleep(_ALONE_SECONDS)
        self._say(f"{number.name} received{again}: this process ends at once and writes no checkpoint{kept}.")
        os._exit(SIGNALLED + number)

    def _say(self, sentence: str) -> None:
        # Bypasses Python's streams, whose locks a thread that hangs may hold. Clears a progress bar in the line.
        place = place_of(self._rank) if self._rank else ""
        clear = "\r\x1b[2K" if os.isatty(2) else ""
        with contextlib.suppress(OSError):
            os.write(2, f"{clear}hpctrain: {place}{sentence}\n".encode())
        log.tee(sentence, logging.WARNING, last=True)
