"""Graphs of the emulated device: work that was recorded with the places and values of its arguments."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hpctrain.backend.cuda.device import DeviceStream
from hpctrain.backend.cuda.emulator.errors import EmulatedDeviceError
from hpctrain_testing.emulator.streams import Capture, EmulatedStream, StreamTable
from hpctrain.backend.cuda.emulator.work import Work


class EmulatedGraph:
    """Implements `CapturedGraph`. It keeps no memory in use: arrays have to outlive it, as on a GPU."""

    def __init__(self, table: StreamTable, capture: Capture) -> None:
        self._table, self._capture = table, capture

    def launch(self, stream: DeviceStream) -> None:
        """Enqueue all of it as one piece of work."""
        assert isinstance(stream, EmulatedStream), f"{stream!r} is not of this device"
        works = self._capture.works
        if self._capture.open:
            raise EmulatedDeviceError("A graph is launched before its capture has ended.")
        self._table.refuse_in_capture("launch a graph")
        reads = tuple(memory for work in works for memory in work.reads)
        writes = tuple(memory for work in works for memory in work.writes)
        self._table.enqueue(stream, Work("graph", lambda: _do(works), reads=reads, writes=writes))


def _do(works: Sequence[Work]) -> None:
    for work in works:
        if work.action:
            work.action()


@contextmanager
def capturing(table: StreamTable, stream: EmulatedStream) -> Iterator[EmulatedGraph]:
    """Record what is enqueued on `stream`. The calling thread can neither wait nor allocate nor load kernels meanwhile.

    Raises:
        EmulatedDeviceError: this thread or this stream captures already.
    """
    table.refuse_in_capture("begin another capture")
    if stream.capture:
        raise EmulatedDeviceError(f"Stream {stream.name} is captured already.")
    capture = Capture(stream.name)
    stream.capture = table.captures[threading.get_ident()] = capture
    try:
        yield EmulatedGraph(table, capture)
        capture.open = False
    finally:
        stream.capture = None
        del table.captures[threading.get_ident()]
