"""Communicator over MPI. This is the only module that imports mpi4py, and it does so only when MPI is loaded or started.

Arrays are sent by MPI's nonblocking operations with plain datatypes and built-in reductions. One thread of a process calls MPI at
a time, so MPI is started at thread level "serialized"; "multiple" disables fast paths in several MPI libraries. To use MPI's
progress thread (MPICH_ASYNC_PROGRESS=1, which requires "multiple"), set MPI4PY_RC_THREAD_LEVEL=multiple. Picklable values are
sent by buffer operations, so that they wait with the deadline; they are for start-up and shut-down only.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hpctrain.backend.cuda.device import DeviceArray
from hpctrain.comm.base import Array, Communicator, Handle, piece
from hpctrain.comm.progress import ProgressEngine
from hpctrain.comm.waiting import WaitPolicy, guard
from hpctrain.core.errors import MissingLibraryError
from hpctrain.core.text import spans
from hpctrain.flight.recorder import FlightRecorder
from hpctrain.launch import keeper
from hpctrain.launch.process_end import flush_to_reader

if TYPE_CHECKING:
    from mpi4py import MPI


Wait = Callable[[Handle, str], None]


def allgather_object(comm: Communicator, value: Any, wait: Wait) -> list[Any]:
    """Return every rank's value, in rank order. Collective; waits by calling `wait(handle, purpose)`."""
    pickled = np.frombuffer(pickle.dumps(value), np.uint8)
    sizes = np.zeros(comm.size, np.int64)
    sizes[comm.rank] = pickled.size
    wait(comm.iallgather(None, sizes, [1] * comm.size), "sizes of gathered objects")
    counts = [int(size) for size in sizes]
    gathered = np.empty(sum(counts), np.uint8)
    wait(comm.iallgather(pickled, gathered, counts), "gathered objects")
    ends = np.cumsum(sizes)
    return [pickle.loads(gathered[end - size : end].tobytes()) for size, end in zip(sizes, ends, strict=True)]


def broadcast_object(comm: Communicator, value: Any, root: int, wait: Wait) -> Any:
    """Return `root`'s value; on `root`, the object itself. Collective; waits by calling `wait(handle, purpose)`."""
    data = np.frombuffer(pickle.dumps(value), np.uint8).copy() if comm.rank == root else np.empty(0, np.uint8)
    size = np.array([data.size], np.int64)
    wait(comm.ibroadcast(size, root), "size of a broadcast object")
    if comm.rank != root:
        data = np.empty(int(size[0]), np.uint8)
    wait(comm.ibroadcast(data, root), "broadcast object")
    return value if comm.rank == root else pickle.loads(data.tobytes())


def translated(comm: MPI.Comm, world: MPI.Comm) -> tuple[int, ...]:
    """Return the world ranks of `comm`, in the order of `comm`. Not collective."""
    group, of_all = comm.Get_group(), world.Get_group()
    try:
        return tuple(group.Translate_ranks(list(range(group.size)), of_all))
    finally:
        group.Free()
        of_all.Free()


#: NumPy's character codes of device dtypes; bfloat16 travels as its bits
_CHARS = {"float32": "f", "float64": "d", "bfloat16": "H", "uint8": "B"}


class MpiBuffers:
    """Buffer arguments for the module `mpi4py.MPI`. Device arrays require a library that accesses device memory."""

    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        self._types = {
            "f": mpi.FLOAT,
            "d": mpi.DOUBLE,
            "i": mpi.INT32_T,
            "l": mpi.INT64_T,
            "q": mpi.INT64_T,
            "B": mpi.UINT8_T,
            "H": mpi.UINT16_T,
        }

    def whole(self, array: Array) -> tuple[Any, Any]:
        """Return all elements of a C-contiguous array, with their MPI datatype."""
        if isinstance(array, DeviceArray):
            return self._mpi.buffer.fromaddress(array.pointer, array.nbytes), self._types[_CHARS[array.dtype]]
        assert array.flags.c_contiguous, "a buffer must be C-contiguous"
        return array, self._types[array.dtype.char]

    def others_parts(self, array: Array, counts: Sequence[int], rank: int) -> tuple[Any, tuple[list[int], list[int]], Any]:
        """Return the pieces of a buffer for the other ranks, as arguments of MPI calls.

        The piece of rank `rank` has no elements; the offsets of the other pieces are unchanged.
        """
        buffer, datatype = self.whole(array)
        places = list(accumulate(counts, initial=0))[:-1]
        return buffer, ([0 if other == rank else count for other, count in enumerate(counts)], places), datatype


def dtype_char(array: Array) -> str:
    """Return NumPy's character code of an array's dtype; for bfloat16, the code of uint16."""
    return _CHARS[array.dtype] if isinstance(array, DeviceArray) else str(array.dtype.char)


def not_empty(array: Array) -> Array:
    """Return the array, or a distinct empty array in its place if it has no elements.

    Open MPI interprets equal addresses as "in place", even those of empty buffers.
    """
    if array.size:
        return array
    dtype = dtype_char(array)
    return np.empty(1, dtype)[:0]


# Names of dtypes by character code, computed in advance because each posted operation formats one.
_DTYPES = {char: np.dtype(char).name for char in "fdilqBH"}


# Maximum number of MPI calls of one test. With TCP, each call moves at most 64 KiB of each message.
_MOST_CALLS = 64
# A call that moves data takes a system call and a copy, at least this many times as long as the shortest call.
_MOVING = 4


class MpiHandle:
    """A posted MPI operation. It holds its buffers until it is complete.

    A test calls MPI repeatedly while the calls move data, which their duration shows. A transport with small buffers would
    otherwise idle during the next operator, because a call moves only what is in the buffers.

    Args:
        request: MPI request of mpi4py.
        operation: name of the operation.
        buffer: buffer whose number of elements is included in messages; None: no number.
    """

    __slots__ = ("_dtype", "_elements", "_operation", "_request")
    _shortest_ns: ClassVar[int] = 1 << 62

    def __init__(self, request: Any, operation: str, buffer: Array | None = None) -> None:
        self._request, self._operation = request, operation
        self._elements: int = 0 if buffer is None else buffer.size
        self._dtype: str = "" if buffer is None else dtype_char(buffer)

    def test(self) -> bool:
        """Drive messages while MPI moves data, and return whether the operation is complete."""
        now = time.perf_counter_ns()
        for _ in range(_MOST_CALLS):
            if self._request.Test():
                return True
            begin, now = now, time.perf_counter_ns()
            if now - begin <= _MOVING * MpiHandle._shortest_ns:
                MpiHandle._shortest_ns = min(MpiHandle._shortest_ns, now - begin)
                break
        return False

    def __str__(self) -> str:
        return f"{self._operation} of {self._elements} {_DTYPES[self._dtype]} elements" if self._dtype else self._operation


# MPI_Abort needs the network and may hang if a link is down.
_ABORT_SECONDS = 10.0

_USUAL_WAITS = WaitPolicy()


def world(
    deadline_seconds: float, flight: FlightRecorder | None = None, wait_policy: WaitPolicy = _USUAL_WAITS
) -> MpiCommunicator:
    """Start MPI and return a communicator of all ranks of the job. Collective; once per process.

    Args:
        deadline_seconds: maximum duration of start-up, of splits and of object operations.
        flight: flight recorder for these waits.
        wait_policy: rules for these waits.

    Raises:
        MissingLibraryError: there is no MPI library that mpi4py can load.
    """
    if "mpi4py.MPI" in sys.modules:
        return _world(deadline_seconds, flight, wait_policy)
    with guard("The start of MPI", deadline_seconds):
        import mpi4py

        if "MPI4PY_RC_THREAD_LEVEL" not in os.environ:
            mpi4py.rc.thread_level = "serialized"
        return _world(deadline_seconds, flight, wait_policy)


def _load() -> None:
    try:
        from mpi4py import MPI  # noqa: F401
    except (ImportError, RuntimeError) as error:  # no mpi4py, or no library for it
        reason = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
        raise MissingLibraryError(
            f"MPI cannot be started ({reason}); load the site's MPI (module load ...), install one in this Python environment by "
            f"`pip install mpich`, or set MPI4PY_LIBMPI=/path/libmpi.so."
        ) from error


def _world(deadline_seconds: float, flight: FlightRecorder | None, wait_policy: WaitPolicy) -> MpiCommunicator:
    _load()
    from mpi4py import MPI

    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_SERIALIZED)
    comm = MPI.COMM_WORLD.Dup()
    return MpiCommunicator(comm, "world", deadline_seconds, flight, _Origin(comm, wait_policy))


def free(world: Communicator) -> None:
    """Free the communicators of a world, whose number is limited. No operation may be in flight. Collective."""
    if isinstance(world, MpiCommunicator):
        for comm in reversed(world.origin.parts):
            comm.Free()
        world.comm.Free()


def abort_job(code: int, deadline_seconds: float) -> None:
    """End the job from a rank that may not have started MPI yet. It returns only if MPI has been finalized or cannot be loaded.

    If MPI has not started in this process, this call starts it. The start is collective: it completes because the other ranks
    also start MPI, in `world`. If MPI has started, the call is not collective.

    Args:
        code: exit code.
        deadline_seconds: maximum duration of the start of MPI.
    """
    try:
        with guard("The start of MPI", deadline_seconds):
            from mpi4py import MPI
    except (ImportError, RuntimeError):  # no rank can load MPI, so none waits for this one
        return
    if MPI.Is_initialized() and not MPI.Is_finalized():
        _abort(MPI.COMM_WORLD, code)


def _abort(comm: MPI.Comm, code: int) -> None:
    backstop = threading.Timer(_ABORT_SECONDS, os._exit, (code,))
    backstop.daemon = True
    backstop.start()
    flush_to_reader()
    keeper.current_keeper().pulse.announce_end()
    with contextlib.suppress(OSError):  # MPICH prints a line of its own after our message, which readers would overlook
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    comm.Abort(code)
    # MPICH returns from Abort if it cannot reach its launcher; MPI_Finalize at exit would then wait for the launcher.
    os._exit(code)


def finish(deadline_seconds: float) -> None:
    """Finalize MPI in this process, unless that has been done. Collective over the job; nothing may be sent afterwards."""
    from mpi4py import MPI

    if MPI.Is_finalized():
        return
    flush_to_reader(0.0)
    with guard("The end of MPI", deadline_seconds, rank=MPI.COMM_WORLD.Get_rank()):
        MPI.Finalize()


def describe() -> str:
    """Return the MPI library's name, version and thread level in one line. Call it after `world`."""
    from mpi4py import MPI

    levels = ("single", "funneled", "serialized", "multiple")
    values = (MPI.THREAD_SINGLE, MPI.THREAD_FUNNELED, MPI.THREAD_SERIALIZED, MPI.THREAD_MULTIPLE)
    return f"{_library()}, thread level {levels[values.index(MPI.Query_thread())]}"


def library() -> str:
    """Load MPI without starting it, and return the library's name and version in one line.

    Raises:
        MissingLibraryError: there is no MPI library that mpi4py can load.
    """
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:
        mpi4py.rc.initialize = False
    _load()
    return _library()


def _library() -> str:
    from mpi4py import MPI

    return " ".join(MPI.Get_library_version().rstrip("\0").split("\n")[0].replace("\t", " ").split())


def threads_may_call() -> bool:
    """Return whether several threads of a process may call MPI, one at a time. Call it after `world`."""
    from mpi4py import MPI

    return bool(MPI.Query_thread() >= MPI.THREAD_SERIALIZED)


def send_to_itself(source: int, target: int, size_bytes: int) -> None:
    """Send `size_bytes` from one address of this process to another, on the host or on a device. Call it after `world`.

    An MPI library without support for the device ends the process or delivers wrong bytes.
    """
    from mpi4py import MPI

    sent, received = (MPI.buffer.fromaddress(address, size_bytes) for address in (source, target))
    MPI.COMM_SELF.Sendrecv((sent, MPI.BYTE), 0, 0, (received, MPI.BYTE), 0, 0)


@dataclass(frozen=True)
class _Origin:
    """World from which a communicator is derived, and settings that all derived communicators share.

    Attributes:
        world: MPI communicator of the world.
        wait_policy: rules for the waits of object operations and splits.
        parts: MPI communicators that were split from the world, in the same order on every rank that has them.
    """

    world: MPI.Comm
    wait_policy: WaitPolicy
    parts: list[MPI.Comm] = field(default_factory=list)


class MpiCommunicator:
    """Communicator over one MPI communicator.

    Sums have a fixed order for given rank and element counts, so a run repeats bit by bit on the same ranks of the same nodes.
    Object operations and splits wait with the deadline and drive no other operations; they are for start-up and shut-down only.
    """

    def __init__(
        self, comm: MPI.Comm, name: str, deadline_seconds: float, flight: FlightRecorder | None, origin: _Origin
    ) -> None:
        from mpi4py import MPI

        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.name = name
        self.comm, self.origin, self.deadline_seconds = comm, origin, deadline_seconds
        self._mpi = MPI
        self._buffers = MpiBuffers(MPI)
        self._whole = self._buffers.whole
        self.world_ranks = translated(comm, origin.world)
        self._flight = flight
        self._place = f"communicator {name} of ranks {spans(self.world_ranks)}"
        self._waits = ProgressEngine(
            rank=origin.world.Get_rank(), deadline_seconds=deadline_seconds, abort=self.abort, flight=flight
        )
        self._waits.wait_policy = origin.wait_policy

    def iallreduce(self, buffer: Array) -> Handle:
        request = self.comm.Iallreduce(self._mpi.IN_PLACE, self._whole(buffer), op=self._mpi.SUM)
        return MpiHandle(request, "allreduce", buffer)

    def ireduce_scatter(self, send: Array, recv: Array, counts: Sequence[int]) -> Handle:
        assert (len(counts), send.size, recv.size) == (self.size, sum(counts), counts[self.rank])
        assert send.dtype == recv.dtype
        request = self.comm.Ireduce_scatter(self._whole(send), self._whole(recv), list(counts), op=self._mpi.SUM)
        return MpiHandle(request, "reduce-scatter", send)

    def iallgather(self, send: Array | None, recv: Array, counts: Sequence[int]) -> Handle:
        assert (len(counts), recv.size) == (self.size, sum(counts))
        if send is None:
            source: Any = self._mpi.IN_PLACE
        else:
            assert (send.size, send.dtype) == (counts[self.rank], recv.dtype)
            source = self._whole(send)
        buffer, datatype = self._whole(recv)
        return MpiHandle(self.comm.Iallgatherv(source, (buffer, list(counts), datatype)), "allgather", recv)

    def ialltoall(self, send: Array, recv: Array, send_counts: Sequence[int], recv_counts: Sequence[int]) -> Handle:
        assert len(send_counts) == len(recv_counts) == self.size
        assert (send.size, recv.size, send.dtype) == (sum(send_counts), sum(recv_counts), recv.dtype)
        if not isinstance(recv, DeviceArray):  # the callers copy a rank's own piece on the device
            # Copied here because MPI libraries can take many times as long by shared memory.
            piece(recv, recv_counts, self.rank)[...] = piece(send, send_counts, self.rank)
        sent = self._buffers.others_parts(not_empty(send), send_counts, self.rank)
        received = self._buffers.others_parts(not_empty(recv), recv_counts, self.rank)
        return MpiHandle(self.comm.Ialltoallv(sent, received), "all-to-all", send)

    def ibroadcast(self, buffer: Array, root: int) -> Handle:
        return MpiHandle(self.comm.Ibcast(self._whole(buffer), root), f"broadcast from {root}", buffer)

    def ibarrier(self) -> Handle:
        return MpiHandle(self.comm.Ibarrier(), "barrier")

    def isend(self, buffer: Array, dest: int, tag: int) -> Handle:
        return MpiHandle(self.comm.Isend(self._whole(buffer), dest, tag), f"send to {dest}, tag {tag},", buffer)

    def irecv(self, buffer: Array, source: int, tag: int) -> Handle:
        return MpiHandle(self.comm.Irecv(self._whole(buffer), source, tag), f"receive from {source}, tag {tag},", buffer)

    def split(self, color: int | None, key: int, name: str) -> MpiCommunicator | None:
        self.wait(self.ibarrier(), f"split into {name}")  # MPI's split blocks; the barrier waits with the deadline
        group = self.comm.Split(self._mpi.UNDEFINED if color is None else color, key)
        return None if group == self._mpi.COMM_NULL else self._part(group, name)

    def split_shared_memory(self, name: str) -> MpiCommunicator:
        self.wait(self.ibarrier(), f"split into {name}")
        return self._part(self.comm.Split_type(self._mpi.COMM_TYPE_SHARED, self.rank), name)

    def allgather_object(self, value: Any) -> list[Any]:
        return allgather_object(self, value, self.wait)

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        return broadcast_object(self, value, root, self.wait)

    def abort(self, code: int) -> None:
        """End the whole job, whichever communicator this is. The call does not return."""
        _abort(self._mpi.COMM_WORLD, code)

    def wait(self, handle: Handle, purpose: str) -> None:
        """Wait for an operation, with the deadline, without driving other operations."""
        self._waits.wait_handle(handle, f"{purpose} ({self._place})")

    def _part(self, comm: MPI.Comm, name: str) -> MpiCommunicator:
        self.origin.parts.append(comm)
        return MpiCommunicator(comm, name, self.deadline_seconds, self._flight, self.origin)
