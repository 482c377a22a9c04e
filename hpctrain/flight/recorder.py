"""Flight recorder of a process, and the thread that monitors its progress.

The recorder writes operations, phases and waits to the process's ring, in about a microsecond each. `FlightNotes` is the
interface for a program, with or without a recorder. `SourceLines` finds the source line that posts an operation, in a fraction of
a microsecond.

The `Heartbeat` ends the job if a data read, a kernel, an evaluation or anything else hangs. Waits between ranks have their own
deadline. This deadline is not enough: if all ranks hang in the same way, no rank waits; and if one rank hangs before it posts the
awaited operation, only the other ranks wait. The heartbeat counts its own ticks instead of time, so an hour in which a scheduler
suspended the job does not count. It also monitors the keeper, because a stopped keeper could not report the end of this rank to
the launcher.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import StrEnum
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TextIO

from hpctrain.core.text import spans
from hpctrain.flight.autopsy import explanation
from hpctrain.flight.ring import Field, RingWriter, Word, file_name, phase_at, record_at
from hpctrain.launch import process_end
from hpctrain.launch.keeper import Pulse
from hpctrain.launch.process_end import DEADLINE, End

_PACKAGE = Path(__file__).parents[1]  # not resolved, because the paths in code objects are not
# Packages that post operations for their callers.
_INSIDE = (_PACKAGE / "comm", _PACKAGE / "flight")
# Maximum number of cached places. A program that generates code adds places without limit, and the table of names is finite.
_MOST_PLACES = 4096


class SourceLines:
    """Cache of source lines by place in the program. Without it, each lookup would decode a line table and format a text.

    Args:
        name: function that returns the number of a text in the table of names.
    """

    def __init__(self, name: Callable[[str], int]) -> None:
        self._name = name
        #: number of the source line by (code object, instruction); None: in a package that posts for its callers
        self._known: dict[tuple[int, int], int | None] = {}
        self._codes: dict[int, CodeType] = {}  # kept alive, so that no other object gets the same id

    def place(self, frame: FrameType | None) -> int:
        """Return the number of "file:line" of the innermost frame outside `comm` and `flight`, from `frame` outwards.

        The number is 0 if there is no such frame, or if it is new and the cache is full.
        """
        known = self._known
        while frame is not None:
            key = (id(frame.f_code), frame.f_lasti)
            try:
                place = known[key]
            except KeyError:
                place = self._look_up(frame, key)
            if place is not None:
                return place
            frame = frame.f_back
        return 0

    def _look_up(self, frame: FrameType, key: tuple[int, int]) -> int | None:
        if len(self._known) >= _MOST_PLACES:
            return 0
        path = Path(frame.f_code.co_filename)
        place = None if any(folder in path.parents for folder in _INSIDE) else self._name(_text(path, frame.f_lineno))
        self._codes[key[0]] = frame.f_code
        self._known[key] = place
        return place


def _text(path: Path, line: int) -> str:
    """Return "file:line". Files of this package are relative to the package."""
    within = path.relative_to(_PACKAGE) if _PACKAGE in path.parents else path
    return f"{within}:{line}"


class RunPhase(StrEnum):
    """Phase of a run that all ranks enter in the same order. The value is its name in records.

    Ranks in different phases wait for each other without end, or receive messages meant for another phase. Therefore each rank
    counts the phases that it has entered, and an autopsy compares them. Work of a single rank, such as loading data, is not such
    a phase.
    """

    START = "the start of the run"
    FIND = "the search for a checkpoint"
    BUILD = "building the replica"
    WEIGHTS = "reading weights"
    AGREE = "the agreement of ranks"
    LOAD = "loading the checkpoint"
    OPEN = "opening the run directory"
    INTRODUCE = "the description of the run"
    MEASURE = "measuring the start"
    TAKE_UP = "taking up earlier checkpoints"
    CHECK = "checking the state"
    STEP = "a training step"
    ACCOUNT = "the records between epochs"
    EVALUATE = "evaluation"
    SAVE = "a checkpoint"
    STATUS = "the status of a checkpoint"
    READ_STATE = "reading the state"
    GO_BACK = "going back to a checkpoint"
    DRAIN = "draining messages"
    REPORT = "the final report of the run"
    END = "the end of the run"


class FlightRecorder:
    """Recorder of the actions of this rank. One thread at a time posts operations, which the engine's lock ensures.

    Args:
        clock_ns: function that returns nanoseconds since any origin.

    Attributes:
        directory: directory of the record's file; None while it is in memory.
        begun_at: temporary file of the record, removed once it has another file or the process has finished; None: there is none.
        beats: counter that grows while any thread of the process makes progress.
        phase_name: name of the current phase; "" before the first.
        step_begun: number of the latest step that has begun; 0 before the first.
    """

    def __init__(self, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self.directory: Path | None = None
        self.beats = 0
        self.begun_at: Path | None = None
        self._clock_ns = clock_ns
        self._ring = RingWriter()
        self._lines = SourceLines(self._ring.name)
        self._posted = 0
        self.phase_name, self._phases, self.step_begun = "", 0, 0
        now = clock_ns()
        words = self._ring.words
        words[Word.RANKS] = 1
        words[Word.PROCESS] = os.getpid()
        words[Word.HOST] = self._ring.name(platform.node())
        words[Word.CLOCK_AT] = now - time.time_ns()
        words[Word.BEGUN] = words[Word.SEEN] = words[Word.ALIVE] = now

    def join(self, rank: int, ranks: int, job: int, deadline_seconds: float, met_ns: int | None = None) -> None:
        """Record the place of the process in the job.

        Args:
            job: number shared by the ranks of one start, larger than that of any earlier start.
            deadline_seconds: seconds without progress after which the process ends the job.
            met_ns: current time of rank 0's wall clock. All records then use this clock, because the nodes' clocks differ.
        """
        words = self._ring.words
        words[Word.JOB], words[Word.RANK], words[Word.RANKS] = job, rank, ranks
        words[Word.DEADLINE] = int(deadline_seconds * 1e9)
        if met_ns is not None:
            words[Word.CLOCK_AT] = self._clock_ns() - met_ns

    def comes_after(self, job: int) -> None:
        """Raise the job's number above `job`, the number of an earlier start, in case the clock has been set back."""
        self._ring.words[Word.JOB] = max(self._ring.words[Word.JOB], job + 1)

    def keep_in(self, directory: Path) -> Path:
        """Move the ring to a file in `directory`, which is created if it does not exist, and return the file's path.

        Raises:
            OSError: the file cannot be created, or the disk is full. The ring is not moved.
        """
        path = directory / file_name(self._ring.words[Word.RANK])
        self._ring.move(path)
        self.directory = directory
        _remove(self.begun_at)
        self.begun_at = None
        return path

    def keep_nowhere(self) -> None:
        """Move the ring to this process's memory and remove its temporary file."""
        self._ring.leave_file()
        self.directory = None
        _remove(self.begun_at)
        self.begun_at = None

    # -- operations of queues ----------------------------------------------------------------------------------------------

    def queued(self, queue: int, purpose: str, sequence: int, depth: int = 1) -> int:
        """Record that an operation is queued, with the source line of the caller, and return its number.

        Args:
            queue: number of the queue's name, from `queue_of`.
            depth: number of frames from this one to the calling line; 1: the caller.
        """
        self._posted = number = self._posted + 1
        words, at = self._ring.words, record_at(number)
        words[at] = 0
        words[at + Field.QUEUE] = queue
        words[at + Field.PURPOSE] = self._ring.name(purpose)
        words[at + Field.SEQUENCE] = sequence
        words[at + Field.OPERATION] = 0
        words[at + Field.POSTED] = self._clock_ns()
        words[at + Field.STARTED] = 0
        words[at + Field.DONE] = 0
        words[at + Field.LINE] = self._lines.place(sys._getframe(depth))
        words[Word.POSTED] = number
        words[at] = number
        return number

    def queue_of(self, name: str, ranks: Sequence[int]) -> int:
        """Return the number of the text "NAME of RANKS" in the table of names. `ranks` are those of the queue in the job."""
        return self._ring.name(f"{name} of {spans(ranks)}")

    def started(self, number: int, operation: str) -> None:
        """Record that the operation with this number was posted. `operation` is its name and size."""
        words, at = self._ring.words, record_at(number)
        if words[at] == number:
            words[at + Field.OPERATION] = self._ring.name(operation)
            words[at + Field.STARTED] = self._clock_ns()

    def done(self, number: int) -> None:
        """Record that the operation with this number is complete."""
        words, at = self._ring.words, record_at(number)
        if words[at] == number:
            words[at + Field.DONE] = self._clock_ns()

    # -- the program ---------------------------------------------------------------------------------------------------------

    def phase(self, name: str | RunPhase) -> None:
        """Record the beginning of a phase of the program. Phases of all ranks (`RunPhase`) are counted."""
        self.phase_name = str(name)
        self.beats += 1
        words = self._ring.words
        words[Word.PHASE] = place = self._ring.name(self.phase_name)
        words[Word.PHASE_SINCE] = self._clock_ns()
        if isinstance(name, RunPhase):
            self._phases += 1
            words[phase_at(self._phases)] = place
            words[Word.PHASES] = self._phases

    def step(self, epoch: int, step: int) -> None:
        """Record the beginning of a step.

        Args:
            epoch: number of the epoch, from 1.
            step: number of the step in the whole training, from 1.
        """
        words = self._ring.words
        words[Word.EPOCH], words[Word.STEP] = epoch, step
        self.step_begun = step

    @property
    def doing(self) -> str:
        """Current phase, and the step if there is one, in words."""
        phase = self.phase_name or "its start"
        return f"{phase}, step {self.step_begun}" if self.step_begun else phase

    @contextmanager
    def waiting(self, purpose: str, number: int = 0) -> Iterator[None]:
        """Record that the program waits during the block. A wait that ends with an error is kept in the record.

        Args:
            number: number of the awaited operation; 0 if it was not queued.
        """
        self.wait(purpose, number)
        yield
        self._ring.words[Word.WAIT] = 0

    def wait(self, purpose: str, number: int = 0) -> None:
        """Record the beginning of a wait. The arguments are those of `waiting`."""
        words = self._ring.words
        words[Word.WAIT_RECORD] = number
        words[Word.WAIT_SINCE] = self._clock_ns()
        words[Word.WAIT] = self._ring.name(purpose)

    @property
    def wait_since_ns(self) -> int:
        """Beginning of the current wait, in nanoseconds of the clock; 0 if the program does not wait."""
        return self._ring.words[Word.WAIT_SINCE] if self._ring.words[Word.WAIT] else 0

    # -- the heartbeat, and the end ------------------------------------------------------------------------------------------

    def looked(self, *, moved: bool) -> None:
        """Record a tick of the heartbeat. `moved` is whether there was progress since the last tick."""
        words, now = self._ring.words, self._clock_ns()
        words[Word.SEEN] = now
        if moved:
            words[Word.ALIVE] = now

    def ended(self, end: End, sentence: str = "", blamed: Sequence[int] = ()) -> None:
        """Record the end of the process. The first recorded end is kept, except that a finished run may still fail.

        Args:
            blamed: ranks that caused the end, if known.
        """
        words = self._ring.words
        if words[Word.ENDED] == End.RUNNING or (words[Word.ENDED] == End.FINISHED and end is End.FAILED):
            words[Word.SENTENCE] = self._ring.name(sentence)
            words[Word.BLAMED] = self._ring.name(spans(blamed))
            words[Word.SEEN] = self._clock_ns()
            words[Word.ENDED] = end
            self.flush()
        if end is End.FINISHED:
            _remove(self.begun_at)
            self.begun_at = None

    def flush(self) -> None:
        """Write the record to the disk, where other nodes can read it, and wait for the disk."""
        self._ring.flush()


def _remove(path: Path | None) -> None:
    """Remove a file if it exists, and its directory if it is then empty."""
    if path is not None:
        with contextlib.suppress(OSError):
            path.unlink()
            path.parent.rmdir()


_NOTHING: AbstractContextManager[Any] = nullcontext()


class FlightNotes:
    """Writer of a program's notes to its flight record. Without a recorder, its methods take almost no time.

    Args:
        recorder: recorder of this process; None: ignore all notes.
    """

    __slots__ = ("_recorder",)

    def __init__(self, recorder: FlightRecorder | None) -> None:
        self._recorder = recorder

    def alive(self) -> None:
        """Note progress of the process, for the heartbeat. Waits count as progress, because they have their own deadline."""
        if self._recorder is not None:
            self._recorder.beats += 1

    def phase(self, name: str | RunPhase) -> None:
        """Note the beginning of a phase of the program."""
        if self._recorder is not None:
            self._recorder.phase(name)

    @contextmanager
    def meanwhile(self, name: str) -> Iterator[None]:
        """Note another phase during the block, and the previous one after it."""
        before = None if self._recorder is None else self._recorder.phase_name
        self.phase(name)
        try:
            yield
        finally:
            if before is not None:
                self.phase(before)

    def step(self, epoch: int, step: int) -> None:
        """Note the beginning of a training step."""
        if self._recorder is not None:
            self._recorder.step(epoch, step)
            self._recorder.phase(RunPhase.STEP)

    def waiting(self, purpose: str, number: int) -> AbstractContextManager[Any]:
        """Note that the program waits during the block; see `FlightRecorder.waiting`."""
        return _NOTHING if self._recorder is None else self._recorder.waiting(purpose, number)


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
        stream: TextIO | None = None,
    ) -> None:
        self._recorder = recorder
        self._deadline_seconds, self._abort, self._rank = deadline_seconds, abort, rank
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
        """Return the seconds of the wait at the previous tick, then those of the wait at this tick; 0 where there was none."""
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
        process_end.say_last_words(self._rank, explanation(self._recorder.directory), self._stream, stacks=False)
        self._abort(DEADLINE)
        os._exit(DEADLINE)
