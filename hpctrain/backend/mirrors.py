"""Host memory beside arrays that lie elsewhere: the service of an arithmetic that transports between processes send through.

MPI reads and writes memory of the host. Where kernels compute on a device, an array that travels is copied to a mirror, and back
from one, beside computation: the host enqueues copies, asks whether they are done, and never waits for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

Array = Any  # numpy.ndarray or DeviceArray


class Transit(Protocol):
    """The way of one operation's arrays to the host and back."""

    def on_host(self) -> bool:
        """True once the mirrors hold all that was copied to them. Never waits."""
        ...


@dataclass
class StagedBytes:
    """Bytes that were copied so far: to the host, and from it."""

    to_host: int = 0
    from_host: int = 0


@dataclass(frozen=True)
class PinnedBytes:
    """Pinned memory of the host that a rank's device copies from and to, in bytes; small fixed buffers beside it left out.

    Attributes:
        messages: mirrors of arrays that travel between processes. images: batches of stored pixels.
    """

    messages: int
    images: int

    @property
    def total(self) -> int:
        return self.messages + self.images


class HostMirrors(Protocol):
    """Makes mirrors and copies; used by the thread that enqueues the device's work.

    Each array has one mirror, made when it first travels and kept: so there is as much memory as there are arrays that do. Arrays
    inside of one that is covered share its mirror.

    Attributes:
        copied: bytes so far. pinned_bytes: of all mirrors.
    """

    copied: StagedBytes
    pinned_bytes: int

    def mirror(self, array: Array) -> np.ndarray:
        """The flat mirror of an array that is in no other operation; whatever it holds is nobody's any more.

        Waits where the array's operation before has come so far that only its copies back are not done.
        """
        ...

    def cover(self, array: Array, instead_of: Array | None = None) -> None:
        """Make one mirror for all arrays inside of this one that travel later, one operation after the other. For set-up only.

        Args:
            instead_of: an array that was covered before, in which no operation is on its way, and none will be: its mirror goes.
                Waits where copies from it are not done.
        """
        ...

    def leave(self, copies: Sequence[tuple[np.ndarray, Array]]) -> Transit:
        """Enqueue mirror := array for each pair, behind all work of kernels so far. An operation without any begins so, too."""
        ...

    def arrive(self, transit: Transit, array: Array, intervals: Sequence[tuple[int, int]]) -> None:
        """Enqueue array := mirror for intervals of the flat elements.

        The copy runs after the work of kernels before `leave`, and before all work that is enqueued from now on. Call it once
        for each transit. Without intervals nothing is copied.
        """
        ...
