"""Write checkpoints from all ranks, synchronously or in the background, with the same view of the progress on every rank.

A rank cannot see whether the other ranks have written their parts or have failed. Each rank adds its flag to the small message of
a step (`status_flag`). If the sum shows a flag, all ranks exchange their states (`exchange_status`). `BackgroundWriter` runs each
task of a rank in a thread.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hpctrain.comm.base import Communicator, on_ranks, raise_on_all_ranks
from hpctrain.core.errors import CheckpointError, CheckpointRemovedError, RunOwnedError
from hpctrain.flight.recorder import FlightNotes
from hpctrain.storage import checkpoint
from hpctrain.storage.atomic_write import partial_path
from hpctrain.storage.checkpoint import CheckpointContent
from hpctrain.storage.hdf5_store import ShardFacts
from hpctrain.storage.shards import Part, publish, write_shard
from hpctrain.training.metrics import Reporter

#: increase of the writing thread's nice value over that of the process
_NICENESS = 10


def _nothing() -> None:
    return None


class BackgroundWriter:
    """Runner of background tasks, each in a new thread. All methods must be called from one thread.

    The thread is a daemon: it ends with the process even if its task is not finished. Call `wait` to wait for the task.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._outcome: tuple[Any, Exception | None] = (None, None)

    @property
    def busy(self) -> bool:
        """Whether a task is in progress."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, work: Callable[[], Any]) -> None:
        """Start a task. No other task may be in progress."""
        assert not self.busy, "another task is in progress"
        self._outcome = None, None
        self._thread = threading.Thread(target=self._run, args=(work,), name="hpctrain-checkpoint", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` for the end of the task. Return True if no task is in progress."""
        if self._thread is not None:
            self._thread.join(seconds)
        return not self.busy

    def result(self) -> Any:
        """Return the result of the latest task, which must be finished, or raise the exception that ended it."""
        assert not self.busy, "the task is not finished"
        result, error = self._outcome
        if error is not None:
            raise error
        return result

    def _run(self, work: Callable[[], Any]) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS)
        try:
            self._outcome = work(), None
        except Exception as error:  # `result` raises it
            self._outcome = None, error


#: interval at which the states of all ranks are polled while the program waits for a checkpoint
_POLL_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 60.0
#: number of immediate attempts to write a checkpoint while another process removes its files
_ATTEMPTS = 5


@dataclass(frozen=True)
class Writing:
    """Checkpoint to be written.

    Args:
        step: number of steps done.
        path: final path.
        own: function that writes this rank's part and returns the facts that rank 0 needs to publish it; None: this rank writes
            nothing.
        publish: function that makes the checkpoint visible, called on rank 0 with the results of `own` on all ranks; None: the
            checkpoint is visible once `own` has returned.
        discard: function that deletes what is left of a checkpoint that is given up.
    """

    step: int
    path: Path
    own: Callable[[], Any] | None
    publish: Callable[[Sequence[Any]], None] | None = None
    discard: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class _State:
    """State of a rank's part: in progress, done with a result, or failed.

    Attributes:
        busy: whether the part is in progress.
        result: result of `Writing.own` or of the publication.
        failure: error message of a failed part.
        seconds: seconds since the start.
        removed: whether the part failed because another process removed its files.
    """

    busy: bool
    result: Any
    failure: str | None
    seconds: float
    removed: bool = False

    @property
    def done(self) -> bool:
        return not self.busy and self.failure is None


class Saver:
    """Writer of the checkpoints of a run, one at a time. All methods except `status_flag` are collective.

    Args:
        world: all ranks.
        reporter: reporter of rank 0.
        asynchronous: whether checkpoints are written in the background. Their arrays must then be copies.
        deadline_seconds: time after which a write is reported as slow; also the maximum wait at the end of a run.

    Attributes:
        last_seconds: duration of the latest write in the background; 0 before the first.
    """

    def __init__(
        self, world: Communicator, notes: FlightNotes, reporter: Reporter, *, asynchronous: bool, deadline_seconds: float
    ) -> None:
        self._world, self._notes, self._reporter = world, notes, reporter
        self.asynchronous, self._deadline_seconds = asynchronous, deadline_seconds
        self.last_seconds = 0.0
        self._writer = BackgroundWriter()
        self._writing: Writing | None = None
        self._work: Callable[[], Any] | None = None
        self._publishes = False
        self._begin_seconds = 0.0
        self._reported: str | None = None  # this rank's failure that was reported
        self._sentence = ""  # the latest failure that was reported
        self._reported_late = False
        self._pause_seconds = 0.0
        self._retry_at = 0.0
        self._missing: str | None = None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._world.size

    @property
    def skipped(self) -> bool:
        """Whether the latest checkpoint was skipped, because the one before it was still being written."""
        return self._missing is not None

    def ready(self, step: int) -> bool:
        """Wait for the previous checkpoint, and return whether a checkpoint of `step` can begin.

        If it cannot, report that it is skipped.
        """
        before = self._writing
        if before is None:
            return True
        written, states = self._advance(self._begin_seconds + self._deadline_seconds)
        if written:
            return True
        if any(state.busy for state in states):
            self._missing = (
                f"The checkpoint of step {step} was skipped, because the checkpoint of step {before.step} was still being written"
            )
            self._warn(step, f"{self._missing}.")
            return False
        self._warn(before.step, f"The checkpoint of step {before.step} is abandoned for the checkpoint of step {step}.")
        self._release(given_up=True)
        return True

    def begin(self, writing: Writing) -> None:
        """Write a checkpoint, or start writing it in the background, after `ready` returned True.

        In the background, a failure is reported and the write is repeated. If another process removes the files of a synchronous
        write, the write is repeated a few times and then given up with a warning.

        Raises:
            CheckpointError, RunOwnedError: a synchronous write has failed; raised on every rank.
        """
        assert self._writing is None, "the previous checkpoint is still being written"
        self._missing = None
        if not self.asynchronous:
            self._write_now(writing)
            return
        self._writing, self._publishes, self._reported_late, self._sentence = writing, False, False, ""
        self._begin_seconds = time.monotonic()
        self._start(writing.own)

    def _write_now(self, writing: Writing) -> None:
        for _ in range(_ATTEMPTS):
            try:
                _write_now(self._world, writing)
                return
            except CheckpointRemovedError as error:  # the same on all ranks
                removed = str(error)
        self._warn(writing.step, f"{removed} The run continues without the checkpoint of step {writing.step}.")

    def status_flag(self) -> int:
        """Return this rank's flag for the step's message.

        It is 1 if this rank's part is written, the number of ranks if all ranks must exchange their states now, and 0 otherwise.
        Ranks exchange their states when the sum of all flags reaches the number of ranks.
        """
        if self._writing is None:
            return 0
        late = time.monotonic() - self._begin_seconds > self._deadline_seconds
        if self._world.rank == 0 and late and not self._reported_late:
            return self._world.size
        if self._writer.busy:
            return 0
        failure = self._state().failure
        if failure is not None and failure == self._reported:
            if time.monotonic() >= self._retry_at:
                self._retry()
            return 0
        return 1 if failure is None else self._world.size

    def exchange_status(self) -> None:
        """Exchange the states of all ranks, report failures, and continue with the next phase if all are done."""
        if self._writing is not None:
            self._exchange_states()

    def settle(self) -> None:
        """Wait for the current checkpoint, at most until the deadline, and ignore its failure."""
        with contextlib.suppress(CheckpointError):
            self.finish()

    def finish(self) -> None:
        """Wait for the current checkpoint, at most until the deadline.

        Raises:
            CheckpointError: the last checkpoint is missing; raised on every rank. If another process removed its files, the
                failure is only reported.
        """
        if self._writing is None:
            _require(self._missing)
            return
        writing, until_seconds = self._writing, time.monotonic() + self._deadline_seconds
        written, states = self._advance(until_seconds)
        if not written and not any(state.busy for state in states):
            if states[self._world.rank].failure is not None:
                self._retry()  # one last time
            written, states = self._advance(until_seconds)
        if written:
            _require(self._missing)
            return
        busy = [rank for rank, state in enumerate(states) if state.busy]
        self._release(given_up=not busy)
        failed = [state for state in states if state.failure is not None]
        if failed and all(state.removed for state in failed):  # a moment later the finished files would have been removed
            self._warn(writing.step, f"{failed[0].failure} The run ends without the checkpoint of step {writing.step}.")
            return
        if failed:
            raise CheckpointError(failed[0].failure or "").of_all_ranks()
        raise CheckpointError(
            f"The checkpoint {writing.path} was not written within the deadline of {self._deadline_seconds:g} s at the end of "
            f"the run{on_ranks(busy, self._world.size)}; check the disk, and resume from the previous checkpoint."
        ).of_all_ranks()

    def _start(self, work: Callable[[], Any] | None) -> None:
        self._work, self._reported, self._pause_seconds = work, None, 0.0
        self._writer.start(work or _nothing)

    def _retry(self) -> None:
        assert self._work is not None
        self._pause_seconds = min(max(1.0, 2 * self._pause_seconds), _LONGEST_PAUSE_SECONDS)
        self._retry_at = time.monotonic() + self._pause_seconds
        self._writer.start(self._work)

    def _state(self) -> _State:
        seconds = time.monotonic() - self._begin_seconds
        if self._writer.busy:
            return _State(True, None, None, seconds)
        try:
            return _State(False, self._writer.result(), None, seconds)
        except CheckpointError as error:
            return _State(False, None, str(error), seconds, isinstance(error, CheckpointRemovedError))

    def _advance(self, until_seconds: float) -> tuple[bool, Sequence[_State]]:
        """Wait until the checkpoint is written, has failed for now, or `until_seconds` is reached on rank 0.

        Returns:
            Whether the checkpoint is written, and the states of all ranks.
        """
        while True:
            self._writer.wait(_POLL_SECONDS)
            self._notes.alive()
            over = self._world.broadcast_object(time.monotonic() >= until_seconds)
            states = self._exchange_states()
            stands = not any(state.busy for state in states) and not all(state.done for state in states)
            if self._writing is None or over or stands:
                return self._writing is None, states

    def _exchange_states(self) -> Sequence[_State]:
        """Exchange the states of all ranks and report failures and slow writes. Start the next phase once all ranks are done."""
        writing = self._writing
        assert writing is not None
        states: list[_State] = self._world.allgather_object(self._state())
        self._report_failures(writing, states)
        self._report_late(writing, states)
        if all(state.done for state in states):
            self._next_phase(writing, [state.result for state in states])
            if self._writing is not None:  # rank 0 is busy again
                return self._world.allgather_object(self._state())
        return states

    def _next_phase(self, writing: Writing, results: Sequence[Any]) -> None:
        publish = writing.publish
        if publish is None or self._publishes:
            self.last_seconds = time.monotonic() - self._begin_seconds
            self._release()
            return
        self._publishes = True
        self._start((lambda: publish(results)) if self._world.rank == 0 else None)

    def _release(self, *, given_up: bool = False) -> None:
        """Release the copied tensors, because the next checkpoint needs as much memory. If `given_up`, discard the files."""
        if given_up and self._writing is not None:
            self._writing.discard()
        self._writing = self._work = None

    def _report_failures(self, writing: Writing, states: Sequence[_State]) -> None:
        """Report each new failure once. This rank retries its own part at the next step, then after growing pauses."""
        own = states[self._world.rank].failure
        if own is not None and own != self._reported:
            self._reported, self._retry_at = own, time.monotonic() + self._pause_seconds
        failed = [rank for rank, state in enumerate(states) if state.failure is not None]
        if not failed:
            return
        sentence = f"{states[failed[0]].failure}{on_ranks(failed, self._world.size)}"
        if sentence != self._sentence:
            self._sentence = sentence
            self._warn(writing.step, f"{sentence} The write is repeated while the run continues.")

    def _report_late(self, writing: Writing, states: Sequence[_State]) -> None:
        """Report once that the disk is slow."""
        seconds = states[0].seconds
        busy = [rank for rank, state in enumerate(states) if not state.done]
        if self._reported_late or seconds <= self._deadline_seconds or not busy:
            return
        self._reported_late = True
        slow = f"is not written after {seconds:.0f} s{on_ranks(busy, self._world.size)}"
        self._warn(writing.step, f"The checkpoint of step {writing.step} {slow}; the run continues.")

    def _warn(self, step: int, sentence: str) -> None:
        self._reporter.warn(f"warning: {sentence}")
        with contextlib.suppress(OSError):  # the metrics may be on the same full disk
            self._reporter.record("checkpoint", {"step": step, "warning": sentence})


def one_file(
    world: Communicator,
    content: CheckpointContent,
    step: int,
    path: Path,
    written: Callable[[], None] = _nothing,
    prepare: Callable[[], None] = _nothing,
) -> Writing:
    """Return the `Writing` with which rank 0 writes a checkpoint as a single file. The call itself writes nothing.

    Args:
        content: content of the file; unused on other ranks.
        step: number of steps done.
        written: callback on rank 0 after the checkpoint is written.
        prepare: callback on each rank that writes, before it writes.
    """

    def write() -> None:
        prepare()
        checkpoint.write(path, content)
        written()

    return Writing(step, path, write if world.rank == 0 else None)


def shards(
    world: Communicator,
    parts: Mapping[str, Part],
    meta: Mapping[str, Any],
    step: int,
    path: Path,
    written: Callable[[], None] = _nothing,
    prepare: Callable[[], None] = _nothing,
) -> Writing:
    """Return the `Writing` with which each rank writes a shard to the directory `path`, then rank 0 a manifest. Collective.

    Args:
        written, prepare: see `one_file`.
    """
    rank = world.rank
    growing: Path = world.broadcast_object(partial_path(path, secrets.token_hex(4)))

    def own() -> ShardFacts:
        prepare()
        if rank == 0:
            checkpoint.remove_left(path.parent, growing, of=path)
        return write_shard(growing, rank, parts)

    def publish_all(facts: Sequence[ShardFacts]) -> None:
        prepare()
        if not path.exists() or growing.exists():  # else it was published, and only deleting older checkpoints failed
            publish(growing, path, facts, meta)
        written()

    discard = partial(shutil.rmtree, growing, ignore_errors=True) if rank == 0 else _nothing
    return Writing(step, path, own, publish_all, discard)


def _write_now(world: Communicator, writing: Writing) -> None:
    try:
        result = raise_on_all_ranks(world, writing.own or _nothing)
        publish = writing.publish
        if publish is not None:
            results = world.allgather_object(result)
            raise_on_all_ranks(world, (lambda: publish(results)) if world.rank == 0 else _nothing)
    except (CheckpointError, RunOwnedError):  # the same on all ranks
        writing.discard()
        raise


def _require(missing: str | None) -> None:
    """Raise if the last checkpoint was skipped.

    Args:
        missing: beginning of the message; None: it was not skipped.
    """
    if missing is not None:
        raise CheckpointError(f"{missing}; check the disk, and resume from the previous checkpoint.").of_all_ranks()
