"""Thread that monitors progress and ends the job if a data read, a kernel, an evaluation or anything else hangs.

Waits between ranks have their own deadline. This deadline is not enough: if all ranks hang in the same way, no rank waits; and if
one rank hangs before it posts the awaited operation, only the other ranks wait. Time is counted in ticks of this thread, so an
hour in which a scheduler suspended the job does not count. The thread also monitors the keeper, because a stopped keeper could
not report the end of this rank to the launcher.
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
# A thread that hangs while holding the GIL blocks this thread. The pulse then stops, and the keeper ends the process this many
# seconds later than this thread would.
_LATER_SECONDS = 5.0


class Heartbeat:
    """Monitor of the signs of life of this process.

    Args:
        recorder: recorder that counts the signs of life of all threads and stores the result of each tick.
        deadline_seconds: seconds without a sign of life after which the process prints its stacks and calls `abort`.
        abort: callback that ends the whole job with an exit code.
        pulse: signs of life exchanged with the keeper, in both directions.
        end_keeper: callback that ends the keeper, and this process with it.
        explain: callback that returns further lines, from the records of all ranks.
        stream: output of the report; default: stderr.
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
        """End the thread. Hangs are not detected afterwards."""
        self._pulse.rest()
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join()

    def look(self) -> None:
        """Run one tick: record whether something has progressed since the last one, and act if the deadline is reached."""
        beats = self._recorder.beats
        moved = beats != self._beats
        before, self._beats = self._still_seconds, beats
        self._still_seconds = 0.0 if moved else before + self._tick_seconds
        self._recorder.looked(moved=moved)
        if self._reaches_half(before, self._still_seconds) or self._reaches_half(*self._waited()):
            self._recorder.flush()  # other nodes may read the record soon
        if self._still_seconds >= self._deadline_seconds:
            self._give_up()
        if self._pulse.look_at_keeper(self._tick_seconds):
            self.end_keeper()

    def _waited(self) -> tuple[float, float]:
        """Return the seconds of the current wait, before this tick and after it; 0 without a wait."""
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
        sentence = "the parent process of this rank was stopped or hung; both processes are ended"
        self._recorder.ended(End.FAILED, sentence)
        process_end.say_last_words(self._rank, [f"{sentence}."], self._stream, stacks=False)
        self._end_keeper()

    def _give_up(self) -> None:
        """Print the current phase and the stacks of all threads, then end the job."""
        sentence = f"no progress within the deadline of {self._deadline_seconds:g} s, in {self._recorder.doing}"
        self._recorder.ended(End.DEADLINE, sentence)
        if self._stream is None:
            process_end.await_turn(self._rank, self._deadline_seconds)
        process_end.say_last_words(self._rank, [f"{sentence}; stacks of all threads:"], self._stream)
        process_end.say_last_words(self._rank, self._explain(), self._stream, stacks=False)
        self._abort(DEADLINE)
        os._exit(DEADLINE)
