"""A thread that never computes, and ends the job if nothing moves any more, as in a data read, a kernel or an evaluation.

Waits among ranks have their own deadline. But if all ranks hang alike, or one hangs before it posts what the others wait for,
then no rank waits, or only ranks that are not to blame. Time is counted in ticks of the thread: a job that a scheduler suspended
for an hour has not been stuck for an hour. The thread also watches the keeper, because a stopped keeper could not report the end
of this rank to the launcher.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import TextIO

from hpctrain.flight.recorder import FlightRecorder
from hpctrain.launch import process_end
from hpctrain.launch.keeper import Pulse
from hpctrain.launch.process_end import DEADLINE, End

_LONGEST_TICK_SECONDS = 1.0
_TICKS_OF_A_DEADLINE = 20
# A thread that hangs and holds the interpreter's lock keeps this one from running. Then the pulse stands still, and the keeper
# ends the process, a little later than this thread would.
_LATER_SECONDS = 5.0


class Heartbeat:
    """Watches signs of life of this process.

    Args:
        recorder: counts signs of life of all threads, and records what is seen.
        deadline_seconds: without a sign of life, after which the process prints where it hangs and calls `abort`.
        abort: ends the whole job with an exit code. rank: for messages.
        pulse: signs of life shared with the keeper, in both directions. end_keeper: ends the keeper, and this process with it.
        explain: returns lines that say more, from the records of all ranks.
        stream: where the report goes; stderr by default.
    """

    def __init__(
        self,
        recorder: FlightRecorder,
        *,
        deadline_seconds: float,
        abort: Callable[[int], None],
        rank: int,
        pulse: Pulse | None = None,
        end_keeper: Callable[[], None] = lambda: None,
        explain: Callable[[], Sequence[str]] = lambda: (),
        stream: TextIO | None = None,
    ) -> None:
        self._recorder = recorder
        self._deadline_seconds, self._abort, self._rank, self._explain = deadline_seconds, abort, rank, explain
        self._stream, self._pulse, self._end_keeper = stream, Pulse() if pulse is None else pulse, end_keeper
        self._tick_seconds = min(_LONGEST_TICK_SECONDS, deadline_seconds / _TICKS_OF_A_DEADLINE)
        self._still_seconds = self._waited_seconds = 0.0
        self._wait_since_ns = 0
        self._beats = recorder.beats
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hpctrain-heartbeat", daemon=True)

    def start(self) -> Heartbeat:
        """Start the thread."""
        self._pulse.watch(self._deadline_seconds + _LATER_SECONDS)
        self._thread.start()
        return self

    def close(self) -> None:
        """End the thread. A hang is not noticed from now on."""
        self._pulse.rest()
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join()

    def look(self) -> None:
        """Run one tick: record what moved since the last one, and act if nothing has moved for too long."""
        beats = self._recorder.beats
        moved = beats != self._beats
        before, self._beats = self._still_seconds, beats
        self._still_seconds = 0.0 if moved else before + self._tick_seconds
        self._recorder.looked(moved=moved)
        if self._reaches_half(before, self._still_seconds) or self._reaches_half(*self._waited()):
            self._recorder.flush()  # other nodes may soon read the record
        if self._still_seconds >= self._deadline_seconds:
            self._give_up()
        if self._pulse.look_at_keeper(self._tick_seconds):
            self.end_keeper()

    def _waited(self) -> tuple[float, float]:
        """Return the seconds of the current wait, if any, before this tick and after it."""
        since_ns, before = self._recorder.wait_since_ns, self._waited_seconds
        same = since_ns > 0 and since_ns == self._wait_since_ns
        self._wait_since_ns, self._waited_seconds = since_ns, before + self._tick_seconds if same else 0.0
        return before, self._waited_seconds

    def _reaches_half(self, before: float, seconds: float) -> bool:
        """Return whether half of the deadline lies between the two times."""
        return before < self._deadline_seconds / 2 <= seconds

    def _run(self) -> None:
        while not self._closed.wait(self._tick_seconds):
            self._pulse.beat()
            self.look()

    def end_keeper(self) -> None:
        """End a keeper that is stopped or hangs, and this process with it, so that the launcher notices."""
        sentence = "the parent process of this rank was stopped, or hung; both processes are ended"
        self._recorder.ended(End.FAILED, sentence)
        process_end.say_last_words(self._rank, [f"{sentence}."], self._stream, stacks=False)
        self._end_keeper()

    def _give_up(self) -> None:
        """Print where the process hangs, with all stacks, then end the job."""
        sentence = f"nothing has moved for the deadline of {self._deadline_seconds:g} s, in {self._recorder.doing}"
        self._recorder.ended(End.DEADLINE, sentence)
        if self._stream is None:
            process_end.await_turn(self._rank, self._deadline_seconds)
        process_end.say_last_words(self._rank, [f"{sentence}; stacks of all threads:"], self._stream)
        process_end.say_last_words(self._rank, self._explain(), self._stream, stacks=False)
        self._abort(DEADLINE)
        os._exit(DEADLINE)
