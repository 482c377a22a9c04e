"""The communicator over MPI. The only module that imports mpi4py, and only when the world is started.

Arrays move with MPI's nonblocking collectives on plain datatypes and built-in operations. One thread of a process talks to MPI,
so it is started at level "serialized": "multiple" switches fast paths off in several MPIs. A user who wants MPI's own
progress thread (MPICH_ASYNC_PROGRESS=1, which needs "multiple") sets MPI4PY_RC_THREAD_LEVEL=multiple, and that is respected.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from hpctrain.comm import objects
from hpctrain.comm.base import Array, Handle
from hpctrain.comm.progress import ProgressEngine
from hpctrain.comm.watchdog import guard
from hpctrain.errors import MissingLibraryError
from hpctrain.flight.recorder import FlightRecorder
from hpctrain.launch.streams import flush_to_reader
from hpctrain.rank_spans import spans

if TYPE_CHECKING:
    from mpi4py import MPI

# MPI_Abort itself needs a network: where a link is cut it may hang.
_ABORT_SECONDS = 10.0

# The names of dtypes by their characters, at hand: an operation's text is made as it is posted.
_DTYPES = {char: np.dtype(char).name for char in "fdilqBH"}


def world(deadline_seconds: float, flight: FlightRecorder | None = None) -> MpiCommunicator:
    """Start MPI; the communicator of all ranks of the job, our own copy. Collective; once per process.

    Args:
        deadline_seconds: the longest that start-up, splits and object operations may take. flight: is told of waits for these.

    Raises:
        MissingLibraryError: there is no MPI library that mpi4py can load.
    """
    if "mpi4py.MPI" in sys.modules:
        return _world(deadline_seconds, flight)
    with guard("The start of MPI", deadline_seconds):
        import mpi4py

        if "MPI4PY_RC_THREAD_LEVEL" not in os.environ:
            mpi4py.rc.thread_level = "serialized"
        return _world(deadline_seconds, flight)


def _world(deadline_seconds: float, flight: FlightRecorder | None) -> MpiCommunicator:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # no mpi4py, or no library for it
        reason = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
        raise MissingLibraryError(
            f"MPI cannot be started ({reason}); load the site's MPI (module load ...), or install one beside this Python with "
            f"`pip install mpich`, or name a library with MPI4PY_LIBMPI=/path/libmpi.so."
        ) from error
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_SERIALIZED)
    return MpiCommunicator(MPI.COMM_WORLD.Dup(), "world", deadline_seconds, flight)


def finish(deadline_seconds: float) -> None:
    """End MPI in this process. Collective over the job; nothing may be sent after it."""
    from mpi4py import MPI

    sys.stdout.flush()
    sys.stderr.flush()
    with guard("The end of MPI", deadline_seconds, rank=MPI.COMM_WORLD.Get_rank()):
        MPI.Finalize()


def describe() -> str:
    """The MPI library's name and version and its thread level, on one line, for logs and run directories. After `world`."""
    from mpi4py import MPI

    levels = {
        MPI.THREAD_SINGLE: "single",
        MPI.THREAD_FUNNELED: "funneled",
        MPI.THREAD_SERIALIZED: "serialized",
        MPI.THREAD_MULTIPLE: "multiple",
    }
    name = " ".join(MPI.Get_library_version().rstrip("\0").split("\n")[0].replace("\t", " ").split())
    return f"{name}, thread level {levels[MPI.Query_thread()]}"


def threads_may_call() -> bool:
    """True where several threads of a process may call MPI, one at a time. After `world`."""
    from mpi4py import MPI

    return bool(MPI.Query_thread() >= MPI.THREAD_SERIALIZED)


def send_to_itself(source: int, target: int, size_bytes: int) -> None:
    """Send so many bytes from one address to another of this process, be they on the host or on a device. After `world`.

    An MPI that knows nothing of the device ends the process, or brings other bytes.
    """
    from mpi4py import MPI

    sent, received = (MPI.buffer.fromaddress(address, size_bytes) for address in (source, target))
    MPI.COMM_SELF.Sendrecv((sent, MPI.BYTE), 0, 0, (received, MPI.BYTE), 0, 0)


class MpiHandle:
    """A posted MPI operation; holds its buffers until it is complete."""

    __slots__ = ("_dtype", "_elements", "_operation", "_request")

    def __init__(self, request: MPI.Request, operation: str, buffer: Array | None = None) -> None:
        self._request = request
        self._operation = operation
        self._elements: int = 0 if buffer is None else buffer.size
        self._dtype: str = "" if buffer is None else buffer.dtype.char

    def test(self) -> bool:
        complete: bool = self._request.Test()
        return complete

    def __str__(self) -> str:
        return f"{self._operation} of {self._elements} {_DTYPES[self._dtype]} elements" if self._dtype else self._operation


def _world_ranks(comm: MPI.Comm, world: MPI.Comm) -> tuple[int, ...]:
    """The ranks of `comm` in `world`, in its order. Not collective."""
    group, of_all = comm.Get_group(), world.Get_group()
    try:
        return tuple(group.Translate_ranks(list(range(group.size)), of_all))
    finally:
        group.Free()
        of_all.Free()


class MpiCommunicator:
    """The ranks of one MPI communicator.

    Sums have one order for given rank and element counts: a run repeats bit by bit on the same ranks of the same nodes.
    Object operations and splits wait by themselves, with the deadline, and drive nothing else: start-up and shut-down only.
    """

    def __init__(self, comm: MPI.Comm, name: str, deadline_seconds: float, flight: FlightRecorder | None = None) -> None:
        from mpi4py import MPI

        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.name = name
        self._comm = comm
        self._mpi = MPI
        self._types = {
            "f": MPI.FLOAT,
            "d": MPI.DOUBLE,
            "i": MPI.INT32_T,
            "l": MPI.INT64_T,
            "q": MPI.INT64_T,
            "B": MPI.UINT8_T,
            "H": MPI.UINT16_T,
        }
        self.world_ranks = _world_ranks(comm, MPI.COMM_WORLD)
        self._deadline_seconds, self._flight = deadline_seconds, flight
        self._place = f"communicator {name} of ranks {spans(self.world_ranks)}"
        self._waits = ProgressEngine(
            rank=MPI.COMM_WORLD.Get_rank(), deadline_seconds=deadline_seconds, abort=self.abort, flight=flight
        )

    def iallreduce(self, buffer: Array) -> Handle:
        request = self._comm.Iallreduce(self._mpi.IN_PLACE, self._whole(buffer), op=self._mpi.SUM)
        return MpiHandle(request, "allreduce", buffer)

    def ireduce_scatter(self, send: Array, recv: Array, counts: Sequence[int]) -> Handle:
        assert (len(counts), send.size, recv.size) == (self.size, sum(counts), counts[self.rank])
        assert send.dtype == recv.dtype
        request = self._comm.Ireduce_scatter(self._whole(send), self._whole(recv), list(counts), op=self._mpi.SUM)
        return MpiHandle(request, "reduce-scatter", send)

    def iallgather(self, send: Array | None, recv: Array, counts: Sequence[int]) -> Handle:
        assert (len(counts), recv.size) == (self.size, sum(counts))
        if send is None:
            source: Any = self._mpi.IN_PLACE
        else:
            assert (send.size, send.dtype) == (counts[self.rank], recv.dtype)
            source = self._whole(send)
        return MpiHandle(self._comm.Iallgatherv(source, self._parts(recv, counts)), "allgather", recv)

    def ialltoall(self, send: Array, recv: Array, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Handle:
        assert len(send_counts) == len(recv_counts) == self.size
        assert (send.size, recv.size, send.dtype) == (sum(send_counts), sum(recv_counts), recv.dtype)
        # Open MPI takes equal addresses for "in place", also of an empty buffer that begins where the other one does.
        send, recv = (buffer if buffer.size else np.empty(1, buffer.dtype)[:0] for buffer in (send, recv))
        # A rank's piece for itself is copied here: through shared memory libraries can take many times as long for it.
        self._own_piece(recv, recv_counts)[...] = self._own_piece(send, send_counts)
        request = self._comm.Ialltoallv(self._others_parts(send, send_counts), self._others_parts(recv, recv_counts))
        return MpiHandle(request, "all-to-all", send)

    def ibroadcast(self, buffer: Array, root: int) -> Handle:
        return MpiHandle(self._comm.Ibcast(self._whole(buffer), root), f"broadcast from {root}", buffer)

    def ibarrier(self) -> Handle:
        return MpiHandle(self._comm.Ibarrier(), "barrier")

    def isend(self, buffer: Array, dest: int, tag: int) -> Handle:
        return MpiHandle(self._comm.Isend(self._whole(buffer), dest, tag), f"send to {dest}, tag {tag},", buffer)

    def irecv(self, buffer: Array, source: int, tag: int) -> Handle:
        request = self._comm.Irecv(self._whole(buffer), source, tag)
        return MpiHandle(request, f"receive from {source}, tag {tag},", buffer)

    def split(self, color: int | None, key: int, name: str) -> MpiCommunicator | None:
        self._wait(self.ibarrier(), f"split into {name}")  # MPI's split blocks; this waits with the deadline for all to arrive
        group = self._comm.Split(self._mpi.UNDEFINED if color is None else color, key)
        return None if group == self._mpi.COMM_NULL else MpiCommunicator(group, name, self._deadline_seconds, self._flight)

    def split_shared_memory(self, name: str) -> MpiCommunicator:
        self._wait(self.ibarrier(), f"split into {name}")
        group = self._comm.Split_type(self._mpi.COMM_TYPE_SHARED, self.rank)
        return MpiCommunicator(group, name, self._deadline_seconds, self._flight)

    def allgather_object(self, value: Any) -> list[Any]:
        return objects.allgather_object(self, value, self._wait)

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        return objects.broadcast_object(self, value, root, self._wait)

    def abort(self, code: int) -> None:
        """End the whole job, on whatever communicator it is called; does not come back."""
        backstop = threading.Timer(_ABORT_SECONDS, os._exit, (code,))
        backstop.daemon = True
        backstop.start()
        flush_to_reader()
        self._mpi.COMM_WORLD.Abort(code)

    def _wait(self, handle: Handle, purpose: str) -> None:
        self._waits.wait_handle(handle, f"{purpose} ({self._place})")

    def _whole(self, array: Array) -> tuple[Array, MPI.Datatype]:
        assert array.flags.c_contiguous, "a buffer is C-contiguous"
        return array, self._types[array.dtype.char]

    def _parts(self, array: Array, counts: Sequence[int]) -> tuple[Array, list[int], MPI.Datatype]:
        buffer, datatype = self._whole(array)
        return buffer, list(counts), datatype

    def _own_piece(self, array: Array, counts: Sequence[int]) -> Array:
        """The piece of an all-to-all's buffer that stays on this rank."""
        begin = sum(counts[: self.rank])
        return array.reshape(-1)[begin : begin + counts[self.rank]]

    def _others_parts(self, array: Array, counts: Sequence[int]) -> tuple[Array, tuple[list[int], list[int]], MPI.Datatype]:
        """As `_parts`, without the own piece, which keeps its place."""
        buffer, datatype = self._whole(array)
        places = list(accumulate(counts, initial=0))[:-1]
        return buffer, ([0 if rank == self.rank else count for rank, count in enumerate(counts)], places), datatype
