"""Memory shared by the ranks of a node.

The memory is a file without a name (`memfd_create`), which the other ranks open through the first rank's descriptor. It is freed
if ranks are killed, and the size of /dev/shm, which is 64 MB in many containers, does not limit it. MPI's shared windows, in
contrast, are files in /dev/shm. If space runs out there, MPICH ends the process by SIGBUS at the first access, and Open MPI does
not create the window.
"""

from __future__ import annotations

import mmap
import os
import threading

import numpy as np

from hpctrain.comm.base import Communicator


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
    if node.rank == 0:
        try:
            descriptor = _create(size_bytes)
        except OSError as error:
            denied = error.strerror or str(error)
    descriptor, denied = shared_descriptor(node, descriptor, denied)
    if not denied:
        try:
            array = _mapped(descriptor, size_bytes)
        except (OSError, ValueError, OverflowError) as error:
            denied = getattr(error, "strerror", None) or str(error)
        os.close(descriptor)
    reasons = [reason for reason in node.allgather_object(denied) if reason]
    if array is None or reasons:
        return SharedMemory(np.zeros(size_bytes, np.uint8), reasons[0])
    return SharedMemory(array)


def shared_descriptor(node: Communicator, descriptor: int, denied: str = "") -> tuple[int, str]:
    """Return this rank's descriptor of the file that rank 0 has opened, and the reason why it cannot be shared, or "".

    Collective; at start-up only. The caller closes the descriptor. With a reason, it is -1, and that of rank 0 is closed.

    Args:
        descriptor: descriptor on rank 0, which the result replaces; ignored on other ranks.
        denied: reason why rank 0 has none; ignored on other ranks.
    """
    process, number = node.broadcast_object((os.getpid(), descriptor))
    if node.rank:
        descriptor, denied = -1, ""
        try:
            descriptor = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            denied = error.strerror or str(error)
    status = os.fstat(descriptor) if descriptor >= 0 else None
    opened = node.allgather_object((denied, status and (status.st_dev, status.st_ino)))
    refused = next((reason for reason, _ in opened if reason), "")
    if not refused and len({file for _, file in opened}) > 1:  # the processes have separate PID namespaces, as in containers
        refused = "they open different files"
    if refused and descriptor >= 0:
        os.close(descriptor)
    return (-1 if refused else descriptor), refused


def _create(size_bytes: int) -> int:
    """Create a file of zeros in memory that has no path, and return its descriptor."""
    if not hasattr(os, "memfd_create"):
        raise OSError("this system does not support memory files")
    descriptor = os.memfd_create("hpctrain-samples", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, size_bytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _mapped(descriptor: int, size_bytes: int) -> np.ndarray:
    """Return the bytes of the file, which is unmapped when the last view of them is freed."""
    return np.frombuffer(mmap.mmap(descriptor, size_bytes), np.uint8, size_bytes)
