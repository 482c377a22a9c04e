"""Memory shared by the ranks of a node.

The memory is a file without a name (`memfd_create`), which the other ranks open through the first rank's descriptor. It is freed
if ranks are killed, and the size of /dev/shm, which is 64 MB in many containers, does not limit it. MPI's shared windows, in
contrast, are files in /dev/shm. If space runs out there, MPICH ends the process by SIGBUS at the first access, and Open MPI does
not create the window.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading

import numpy as np

from hpctrain.comm.base import Communicator

_TOKEN_BYTES = 16
# Size of the head, so that the memory begins on a page.
_HEAD_BYTES = mmap.PAGESIZE


class SharedMemory:
    """Bytes shared by the ranks of a node, freed with the last reference to `array`.

    Attributes:
        array: (n,) uint8, initially zero.
        denied: reason why each rank has separate memory instead; empty if the memory is shared.
    """

    def __init__(self, array: np.ndarray, denied: str = "") -> None:
        self.array, self.denied = array, denied
        self._order = threading.Lock()

    def fence(self) -> None:
        """Order all memory accesses before this call before all accesses after it, as seen by all ranks.

        Accesses from both sides may move into the block of a single lock and be reordered there. With two consecutive locks, the
        first prevents earlier accesses from moving after its end, and the second prevents later accesses from moving before its
        beginning.
        """
        for _ in range(2):
            with self._order:
                pass


def share(node: Communicator, size_bytes: int) -> SharedMemory:
    """Allocate memory shared by all ranks of a node, or separate memory on each rank if the system denies it.

    Collective; at start-up only. Untouched pages take no memory.

    Args:
        size_bytes: size of the memory, the same on all ranks.
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
    if descriptor >= 0:  # all ranks have opened it
        os.close(descriptor)
    if array is None or reasons:
        return SharedMemory(np.zeros(size_bytes, np.uint8), reasons[0])
    return SharedMemory(array)


def _create(size_bytes: int) -> tuple[int, bytes]:
    """Create a file without a name. Return its descriptor and the random token that it begins with."""
    if not hasattr(os, "memfd_create"):
        raise OSError("this system does not support memory files")
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
    """Open a file of another process by its descriptor there.

    Args:
        place: process ID, descriptor, and token at the file's beginning.

    Raises:
        OSError: the file cannot be opened, or it is a different file because the processes have separate PID namespaces, as in
            containers.
    """
    process, number, token = place
    descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    with contextlib.suppress(OSError):
        if os.fstat(descriptor).st_size == _HEAD_BYTES + size_bytes and os.pread(descriptor, _TOKEN_BYTES, 0) == token:
            return descriptor
    os.close(descriptor)
    raise OSError("the ranks of the node cannot access each other's processes")


def _mapped(descriptor: int, size_bytes: int) -> np.ndarray:
    """Return the bytes of the file after its head. The file is unmapped when the last view of the bytes is freed."""
    return np.frombuffer(mmap.mmap(descriptor, _HEAD_BYTES + size_bytes), np.uint8, size_bytes, _HEAD_BYTES)
