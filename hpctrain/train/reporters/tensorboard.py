"""TensorBoard event files."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpctrain.errors import ConfigError
from hpctrain.train.metrics import Reporter

_FLUSH_SECONDS = 120.0
# Events that are kept for another file where a disk refuses them.
_MOST_WAITING = 100_000


class TensorBoard(Reporter):
    """Numbers of all records as TensorBoard event files in the run's directory, which needs the extra `export`.

    tensorboardX's own writer has a thread, which ends at the first error of a disk; its queue fills up then, and the training
    would wait for it without end. So events are written from here, and after an error once more, to another file.

    Args:
        directory: of the run. done_steps: of an earlier part of this run; TensorBoard hides what that wrote of later ones.

    Raises:
        ConfigError: tensorboardX is not installed.
    """

    def __init__(self, directory: Path, done_steps: int = 0) -> None:
        tensorboard_writer()
        self._directory = directory / "tensorboard"
        self._file: Any = None
        self._files = 0
        self._flushed = float("-inf")
        self._written = 0  # of those that wait
        self._waiting: list[Any] = _takeover(done_steps + 1) if done_steps else []

    def record(self, kind: str, values: Mapping[str, Any]) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import scalar

        step = int(values.get("step", 0))
        for name, value in values.items():
            if isinstance(value, int | float) and name != "step":
                self._waiting.append(Event(wall_time=time.time(), step=step, summary=scalar(f"{kind}/{name}", value)))
        self._write(flush=time.monotonic() - self._flushed >= _FLUSH_SECONDS)

    def close(self) -> None:
        if self._file is not None or self._waiting:
            self._write(flush=True)
        self._forget()

    def _write(self, *, flush: bool) -> None:
        """Write what waits; it waits on until it is on the disk.

        Raises:
            OSError: the system refuses that; the next call begins another file.
        """
        try:
            if self._file is None:
                self._file = self._next_file()
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

    def _next_file(self) -> Any:
        self._files += 1
        self._directory.mkdir(exist_ok=True)
        suffix = f".{self._files}" if self._files > 1 else ""
        return tensorboard_writer()(str(self._directory / "events"), suffix)

    def _forget(self) -> None:
        with contextlib.suppress(OSError):
            if self._file is not None:
                self._file.close()
        self._file, self._written, self._flushed = None, 0, float("-inf")


def _takeover(step: int) -> list[Any]:
    """The events by which TensorBoard hides what earlier files have from a step on."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    return [Event(wall_time=time.time(), step=step, session_log=SessionLog(status=SessionLog.START))]


def tensorboard_writer() -> Any:
    """The class that writes TensorBoard files.

    To be called before MPI starts, too: tensorboardX loads PyTorch where it is installed, which starts processes.

    Raises:
        ConfigError: tensorboardX is not installed.
    """
    try:
        from tensorboardX.event_file_writer import EventsWriter
    except ImportError as error:
        raise ConfigError(
            "The reporter tensorboard (metrics.tensorboard) is switched on, but tensorboardX is not installed; "
            "install hpctrain[export] or switch it off."
        ) from error
    return EventsWriter
