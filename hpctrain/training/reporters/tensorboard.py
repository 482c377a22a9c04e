"""Reporter that writes TensorBoard event files."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpctrain.core.errors import ConfigError
from hpctrain.training.metrics import Reporter

_FLUSH_SECONDS = 120.0
# Maximum number of events that are queued for a new file after a disk error.
_MOST_WAITING = 100_000
# TensorBoard draws the curves of a tag in several directories in one chart.
_TRAIN, _TEST = "train", "test"
_CURVES = ("loss", "top1", "top5")
_AVERAGE = "ema_"


class TensorBoard(Reporter):
    """Reporter that writes all recorded numbers to TensorBoard event files in the run directory. It requires the extra `export`.

    The loss and the accuracies of all sets share one chart each. The directories below `tensorboard` are train, validation and
    test and, with averaged weights, validation-averaged and test-averaged.

    Args:
        done_steps: number of steps done by earlier parts of this run; TensorBoard hides records of these parts after this step.

    Raises:
        ConfigError: tensorboardX cannot be imported.
    """

    def __init__(self, directory: Path, done_steps: int = 0) -> None:
        tensorboard_writer()
        self._directory = directory / "tensorboard"
        self._done_steps = done_steps
        earlier = [place.name for place in self._directory.glob("*/")] if done_steps else []
        self._files = {name: self._file(name) for name in earlier}

    def record(self, kind: str, values: Mapping[str, Any]) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import scalar

        step = int(values.get("step", 0))
        for name, value in values.items():
            if isinstance(value, int | float) and name != "step":
                directory, tag = _place(kind, name, str(values.get("set", _TEST)))
                if directory not in self._files:
                    self._files[directory] = self._file(directory)
                self._files[directory].add(Event(wall_time=time.time(), step=step, summary=scalar(tag, value)))
        with _first_error() as attempt:
            for file in self._files.values():
                attempt(file.write_some)

    def close(self) -> None:
        with _first_error() as attempt:
            for file in self._files.values():
                attempt(file.close)

    def _file(self, name: str) -> EventFile:
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        # This event makes TensorBoard hide records of earlier files from its step on.
        takeover = Event(wall_time=time.time(), step=self._done_steps + 1, session_log=SessionLog(status=SessionLog.START))
        return EventFile(self._directory / name, [takeover] if self._done_steps else [])


def _place(kind: str, name: str, split: str) -> tuple[str, str]:
    """Return the directory and the tag of a number in a record.

    Args:
        split: evaluated set, if the record is an evaluation.
    """
    if kind in ("interval", "epoch"):  # the means of an epoch continue the curve of its intervals
        return _TRAIN, name if name in _CURVES else f"train/{name}"
    if kind in ("evaluation", "test"):
        measure, directory = name.removeprefix(_AVERAGE), f"{split}-averaged" if name.startswith(_AVERAGE) else split
        return directory, measure if measure in _CURVES else f"{split}/{measure}"
    return _TRAIN, f"{kind}/{name}"


class EventFile:
    """Growing file of events in a directory; after each disk error, writing continues in a new file.

    tensorboardX's own writer has a thread that ends at the first disk error. Its queue then fills up, and the training would wait
    for it forever. Therefore this class writes the events itself. After an error, it writes the events that may not have reached
    the disk, at most the latest 100,000, to a new file.

    Args:
        directory: directory of the file, created with the first file.
        waiting: events to be written before all others.
    """

    def __init__(self, directory: Path, waiting: list[Any]) -> None:
        self._directory = directory
        self._file: Any = None
        self._files = 0
        self._flushed = float("-inf")
        self._written = 0  # number of queued events that are in the file
        self._waiting = waiting

    def add(self, event: Any) -> None:
        """Queue an event for the next write."""
        self._waiting.append(event)

    def write_some(self) -> None:
        """Write the queued events, and flush them to the disk periodically.

        Raises:
            OSError: the write failed; the next call starts a new file.
        """
        self._write(flush=time.monotonic() - self._flushed >= _FLUSH_SECONDS)

    def close(self) -> None:
        """Write all queued events and close the file.

        Raises:
            OSError: the write failed.
        """
        if self._file is not None or self._waiting:
            self._write(flush=True)
        self._forget()

    def _write(self, *, flush: bool) -> None:
        """Write the queued events. They stay in the queue until they are flushed to the disk."""
        try:
            if self._file is None:
                self._files += 1
                self._directory.mkdir(parents=True, exist_ok=True)
                suffix = f".{self._files}" if self._files > 1 else ""
                self._file = tensorboard_writer()(str(self._directory / "events"), suffix)
            for event in self._waiting[self._written :]:
                self._file.write_event(event)
                self._written += 1
            if flush:
                self._file.flush()
                self._waiting, self._written, self._flushed = [], 0, time.monotonic()
        except OSError:
            self._forget()
            del self._waiting[:-_MOST_WAITING]
            raise

    def _forget(self) -> None:
        with contextlib.suppress(OSError):
            if self._file is not None:
                self._file.close()
        self._file, self._written, self._flushed = None, 0, float("-inf")


@contextlib.contextmanager
def _first_error() -> Iterator[Any]:
    """Yield a function that calls its argument. The first OSError of all these calls is raised at the end of the block."""
    errors: list[OSError] = []

    def attempt(call: Any) -> None:
        try:
            call()
        except OSError as error:
            errors.append(error)

    yield attempt
    if errors:
        raise errors[0]


def tensorboard_writer() -> Any:
    """Return the class that writes TensorBoard files.

    Call it before MPI starts as well: tensorboardX imports PyTorch if it is installed, and PyTorch starts processes.

    Raises:
        ConfigError: tensorboardX cannot be imported.
    """
    try:
        from tensorboardX.event_file_writer import EventsWriter
    except ImportError as error:
        raise ConfigError(
            f"The reporter tensorboard (metrics.tensorboard) needs tensorboardX, which cannot be imported ({error}); "
            "install hpctrain[export], or disable the reporter."
        ) from error
    return EventsWriter
