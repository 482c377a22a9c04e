"""Memory that the ranks of a node have in common.

It is a file without a name (`memfd_create`), which the others open through the first one's descriptor. So nothing of it is left
where ranks are killed, and the size of /dev/shm does not limit it, which is 64 MB in many containers. MPI's shared windows are
files there: MPICH ends a process that touches what has no room by SIGBUS, and Open MPI refuses the window.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading

import numpy as np

from hpctrain.comm.base import Communicator

_TOKEN_BYTES = 16
# In front of the memory itself, so that it begins on a page.
_HEAD_BYTES = mmap.PAGESIZE


class SharedMemory:
    """Bytes that the ranks of a node share; they are freed with the last reference to `array`.

    Attributes:
        array: (n,) uint8, zeros at first. denied: why each rank has memory of its own instead; empty: they have it in common.
    """

    def __init__(self, array: np.ndarray, denied: str = "") -> None:
        self.array, self.denied = array, denied
        self._order = threading.Lock()

    def fence(self) -> None:
        """Order all reads and writes before it before those after it, for all ranks.

        One lock may let both sides into its block, where they can change places; of two locks, one after the other, the first
        keeps the one side before its end, and the second the other side after its begin.
        """
        for _ in range(2):
            with self._order:
                pass


def share(node: Communicator, size_bytes: int) -> SharedMemory:
    """Make memory of all ranks of a node; each rank has some of its own if the system denies it. Collective; start-up only.

    Args:
        node: ranks of one node. size_bytes: the same on all of them. Untouched pages take no memory.
    """
    descriptor, array, denied = -1, None, ""
    place: tuple[int, int, bytes] | None = None
    if node.rank == 0:
        try:
            descriptor, token = _create(size_bytes)
            place = os.getpid(), descriptor, token
        except OSError as error:
            denied = error.strerror or str(error)
    place = node.broadcast_object(place)
    if place is not None:
        try:
            descriptor = descriptor if node.rank == 0 else _open(place, size_bytes)
            array = _mapped(descriptor, size_bytes)
        except (OSError, ValueError, OverflowError) as error:
            denied = str(error)
    reasons = [reason for reason in node.allgather_object(denied) if reason]
    if descriptor >= 0:  # all that open it have done so
        os.close(descriptor)
    if array is None or reasons:
        return SharedMemory(np.zeros(size_bytes, np.uint8), reasons[0])
    return SharedMemory(array)


def _create(size_bytes: int) -> tuple[int, bytes]:
    """Create a file without a name; return its descriptor and the token that it begins with."""
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no memory files")
    descriptor = os.memfd_create("hpctrain-samples", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, _HEAD_BYTES + size_bytes)
        token = os.urandom(_TOKEN_BYTES)
        os.pwrite(descriptor, token, 0)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor, token


def _open(place: tuple[int, int, bytes], size_bytes: int) -> int:
    """Open the file of a descriptor of another process.

    place: the process's number, that of the descriptor, and what the file begins with.

    Raises:
        OSError: it cannot be opened; or it is another file, as where processes of a node are numbered apart, in containers.
    """
    process, number, token = place
    descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    with contextlib.suppress(OSError):
        if os.fstat(descriptor).st_size == _HEAD_BYTES + size_bytes and os.pread(descriptor, _TOKEN_BYTES, 0) == token:
            return descriptor
    os.close(descriptor)
    raise OSError("the ranks of the node do not see each other's processes")


def _mapped(descriptor: int, size_bytes: int) -> np.ndarray:
    """Return the bytes of the file after its head; they are unmapped with the last view of them."""
    return np.frombuffer(mmap.mmap(descriptor, _HEAD_BYTES + size_bytes), np.uint8, size_bytes, _HEAD_BYTES)
