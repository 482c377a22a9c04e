"""The services of a kernel set outside of operators: arithmetic on arrays wherever they lie, and what transports need.

`Arithmetic` works on activations, parameters and gradients. Nothing but kernel sets and transports touches elements of such
arrays by other means. On a GPU all of it is enqueued, in the order of the calls and together with operators; only `to_host`,
`square_sums` and a `Fetch`'s `result` wait.

`HostMirrors` serve transports that read memory of the host alone. MPI is one of them: where kernels compute on a device, an
array that travels is copied to a mirror, and back from one, next to computation. The host enqueues copies, asks whether they
are done, and never waits for them.

`DeviceMessages` serve transports that reach a device's memory themselves, without mirrors. There are two kinds: MPI libraries
that read such memory, for which the host asks whether the work of kernels is done, and groups of devices that move arrays
between each other in the order of a stream, as NCCL does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from hpctrain.core.intervals import Box

Array = Any  # numpy.ndarray or DeviceArray


class Transit(Protocol):
    """The way of one operation's arrays to the host and back."""

    def on_host(self) -> bool:
        """Return whether the mirrors hold everything that was copied to them. Never waits."""
        ...


@dataclass
class StagedBytes:
    """Bytes that were copied so far: to the host, and from it."""

    to_host: int = 0
    from_host: int = 0


@dataclass(frozen=True)
class PinnedBytes:
    """Pinned memory of the host that a rank's device copies from and to, in bytes, without small fixed buffers.

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

    Each array has one mirror, made when it first travels, and kept: mirrors take as much memory as the arrays that travel. Arrays
    inside of one that is covered share its mirror.

    Attributes:
        copied: bytes copied so far. pinned_bytes: bytes of all mirrors.
    """

    copied: StagedBytes
    pinned_bytes: int

    def mirror(self, array: Array) -> np.ndarray:
        """Return the flat mirror of an array that is in no other operation; its contents may be overwritten.

        Waits for the copies back of the array's previous operation, if these are not done.
        """
        ...

    def cover(self, array: Array, instead_of: Array | None = None) -> None:
        """Make one mirror for all arrays inside of this one that travel later, one operation after the other. For set-up only.

        Args:
            instead_of: an array that was covered before, and is in no operation any more: its mirror is freed. Waits for copies
                from it that are not done.
        """
        ...

    def leave(self, copies: Sequence[tuple[np.ndarray, Array]]) -> Transit:
        """Enqueue mirror := array for each pair, after all work of kernels so far. Operations without pairs begin so, too."""
        ...

    def arrive(self, transit: Transit, array: Array, intervals: Sequence[tuple[int, int]]) -> None:
        """Enqueue array := mirror for intervals of the flat elements.

        The copy runs after the work of kernels before `leave`, and before all work that is enqueued from now on. Call it once
        for each transit. Without intervals nothing is copied.
        """
        ...


class WorkMark(Protocol):
    """A place in a device's work."""

    @property
    def done(self) -> bool:
        """Whether all work before the mark is done; once true it stays true. Never waits."""
        ...


class Peers(Protocol):
    """The processes whose devices form a group, in order: a communicator that nothing else uses.

    Devices that cannot reach each other by themselves, such as emulated ones, exchange arrays of the host through it.
    """

    rank: int
    size: int

    def broadcast_object(self, value: Any, root: int = 0) -> Any: ...

    def iallgather(self, send: Any, recv: Any, counts: Any) -> Any: ...

    def isend(self, buffer: Any, dest: int, tag: int) -> Any: ...

    def irecv(self, buffer: Any, source: int, tag: int) -> Any: ...


class DeviceLinks(Protocol):
    """The links of one device to the others of a group. All calls are enqueued on the stream that the links were made with.

    All devices of a group enqueue the same collectives in the same order, and a receive for each send. Arrays of collectives have
    the same size and dtype everywhere. Sums are of float32 or float64; all else moves bytes.
    """

    def together(self) -> AbstractContextManager[None]:
        """Enqueue the calls inside this context together at its end; they may depend on each other."""
        ...

    def send(self, array: Array, to: int) -> None: ...

    def receive(self, array: Array, source: int) -> None: ...

    def broadcast(self, array: Array, root: int) -> None:
        """Copy `root`'s array to all devices."""
        ...

    def sum_to_all(self, array: Array) -> None:
        """Replace each device's array by the sum of all."""
        ...

    def sum_to_one(self, send: Array, recv: Array, root: int) -> None:
        """Write the sum of all devices' `send` to `root`'s `recv`; other devices' `recv` is not used."""
        ...

    def fault(self) -> str | None:
        """Return a failure in the background, in one clause; None if there is none."""
        ...

    def abort(self) -> None:
        """Give up all pending work. Nothing is called afterwards."""
        ...


class DeviceGroup(Protocol):
    """A device's place in a group. links: links to all devices of the group, itself included, on a stream of this process."""

    links: DeviceLinks

    def wait_for_kernels(self) -> None:
        """Let later work of the links wait for all work of kernels so far; the host does not wait."""
        ...

    def mark(self) -> WorkMark:
        """Mark all work that the links were given so far."""
        ...


class DeviceMessages(Protocol):
    """Marks of a device's work, and its groups.

    Attributes:
        identity: name of the device that no other device has, on any node.
    """

    identity: str

    def mark(self) -> WorkMark:
        """Mark all work of kernels so far."""
        ...

    def group_fault(self) -> str | None:
        """Return the reason why this device cannot join a group, in one clause; None if it can."""
        ...

    def join(self, peers: Peers) -> DeviceGroup:
        """Join a group of the peers' devices, and return this device's place in it. Collective; waits for all of them.

        All groups of a process share one stream, so that no two of them can each hold up what the other one needs.
        """
        ...


class Fetch(Protocol):
    """Values that are being copied to the host."""

    def result(self) -> np.ndarray:
        """Wait for the values and return them, read only; they are valid until the second next `fetch` of the same array."""
        ...


@dataclass(frozen=True)
class UpdateRun:
    """Elements [start, stop) of the flat buffers that are updated alike: g' = gradient_scale * g + decay * w.

    offset: number to add to a place in the flat buffers for the place in the state.
    """

    start: int
    stop: int
    gradient_scale: float
    decay: float
    offset: int = 0


class Descent(Protocol):
    """Momentum descent on flat buffers, bound to them at set-up."""

    def update(self, runs: Iterable[UpdateRun], lr: float) -> None:
        """Compute m := momentum * m + g'; w := w - lr * m, or with Nesterov's w - lr * (g' + momentum * m). Only reads g."""
        ...


@dataclass(frozen=True)
class MomentRule:
    """The constants of a descent by two moments of the gradient: those of Adam (Kingma and Ba, ICLR 2015).

    beta1, beta2: decay rates of the first and the second moment. epsilon: added to the root of the second moment.
    """

    beta1: float
    beta2: float
    epsilon: float


@dataclass(frozen=True)
class Corrections:
    """Factors that make up for moments that began as zeros: of the first moment, and of the root of the second."""

    first: float
    root: float


class MomentDescent(Protocol):
    """Descent by two moments on flat buffers, bound to them at set-up.

    With g' = gradient_scale * g of each run: m := beta1 * m + (1 - beta1) * g'; v := beta2 * v + (1 - beta2) * g'^2; the
    direction is u = first * m / (root * sqrt(v) + epsilon) + decay * w.
    """

    def update(self, runs: Iterable[UpdateRun], corrections: Corrections, lr: float) -> None:
        """Replace m and v; w := w - lr * u. The gradient is read only."""
        ...

    def direct(self, runs: Iterable[UpdateRun], corrections: Corrections) -> None:
        """Replace m and v; g := u. The data is read only."""
        ...


class ArrayChecksums(Protocol):
    """Checksums of arrays, bound to them at set-up."""

    def fetch(self) -> Fetch:
        """Fetch the checksum of each array at this point of the work; uint32 (arrays,)."""
        ...


class ArrayGuard(Protocol):
    """Detects arrays that have changed though nothing should have written there, by sums of 32-bit words. Bound at set-up.

    Detects every change within one word, but not several changes that cancel in the sum.
    """

    def remember(self) -> None:
        """Remember the arrays as they are at this point of the work."""
        ...

    def compare(self) -> None:
        """Mark the arrays that differ, at this point of the work, from what is remembered."""
        ...

    def fetch_changed(self) -> Fetch:
        """Fetch whether each array was ever marked; bool (arrays,)."""
        ...


class WatchedArrays(Protocol):
    """Flat arrays of whole 32-bit words, of any dtypes: makes what detects changes of their bits. For set-up only."""

    def checksums(self) -> ArrayChecksums:
        """Return the CRC-32 of each array's bytes."""
        ...

    def sums(self) -> ArrayChecksums:
        """Return the sum of each array's 32-bit words, modulo 2^32, at a tenth of the cost of a CRC-32 on the host.

        Detects every change within one word, but not several changes that cancel in the sum.
        """
        ...

    def guard(self) -> ArrayGuard:
        """Return a guard that remembers what the arrays hold now."""
        ...


class Arithmetic(ABC):
    """The service. Arrays of one call have one dtype and one size unless noted; targets come first.

    Attributes:
        on_host: the arrays are NumPy's: nothing is enqueued, and `fetch` and `to_host` return the array itself.
    """

    on_host: ClassVar[bool] = False

    def mirrors(self) -> HostMirrors | None:
        """Return mirrors of such arrays on the host, for transports that read only its memory; None if the arrays lie there."""
        return None

    def messages(self) -> DeviceMessages | None:
        """Return the service for transports that reach such arrays themselves; None if these lie on the host."""
        return None

    @abstractmethod
    def zeros(self, size: int, dtype: str) -> Array:
        """Return a flat array of zeros. For set-up only."""

    @abstractmethod
    def copy(self, target: Array, source: Array) -> None:
        """Compute target := source, rounded if the dtypes differ."""

    @abstractmethod
    def fill(self, target: Array, value: float) -> None:
        """Set every element to a value."""

    @abstractmethod
    def add(self, target: Array, source: Array) -> None:
        """Compute target := target + source."""

    @abstractmethod
    def subtract(self, target: Array, source: Array) -> None:
        """Compute target := target - source."""

    @abstractmethod
    def average_into(self, target: Array, source: Array, kept: float) -> None:
        """Compute target := kept * target + (1 - kept) * source, as (target - source) * kept + source."""

    @abstractmethod
    def copy_box(self, target: Array, target_box: Box, source: Array, source_box: Box, *, accumulate: bool = False) -> None:
        """Compute target[target_box] := source[source_box], or += with `accumulate`.

        Both arrays have up to four dims and one dtype, both boxes one shape, each inside its array; the two share no memory.
        """

    @abstractmethod
    def sum_pixels(self, target: Array, source: Array, scale: float) -> None:
        """Compute target (N, 1, 1, C) := scale * the sum over the pixels of source (N, H, W, C); zeros without pixels."""

    @abstractmethod
    def spread_pixels(self, target: Array, source: Array, scale: float) -> None:
        """Compute target (N, H, W, C) := scale * source (N, 1, 1, C) at every pixel."""

    @abstractmethod
    def square_sums(self, arrays: Sequence[Array]) -> np.ndarray:
        """Return sums of squares, float64 (len(arrays),); squares of float32 are summed in float64. Waits."""

    @abstractmethod
    def fetch_finite(self, arrays: Sequence[Array]) -> Fetch:
        """Fetch whether all elements of each array are finite at this point of the work, bool (len(arrays),)."""

    @abstractmethod
    def watched(self, arrays: Sequence[Array]) -> WatchedArrays:
        """Watch flat arrays of whole 32-bit words, which may have several dtypes. For set-up only."""

    @abstractmethod
    def fetch(self, array: Array) -> Fetch:
        """Fetch the elements as they are at this point of the work. Nothing may write to the array before the result is read."""

    @abstractmethod
    def to_host(self, array: Array) -> np.ndarray:
        """Return the elements in an array of the host, possibly `array` itself: only read it. Waits."""

    @abstractmethod
    def from_host(self, target: Array, source: np.ndarray) -> None:
        """Compute target := source, an array of the host of the same shape, rounded to the target's dtype.

        The source may change afterwards.
        """

    @abstractmethod
    def descent(
        self, data: Array, gradient: Array, momentum: Array, *, factor: float, nesterov: bool, shadow: Array | None = None
    ) -> Descent:
        """Bind momentum descent of flat `data` by flat `gradient`, of one size; `momentum` holds the state, empty if factor is 0.

        Args:
            shadow: bfloat16 array of the size of `data`, which receives the rounded data of all updated elements.
        """

    @abstractmethod
    def moment_descent(
        self, data: Array, gradient: Array, first: Array, second: Array, rule: MomentRule, *, shadow: Array | None = None
    ) -> MomentDescent:
        """Bind descent of flat `data` by two moments of flat `gradient`, of one size; `first` and `second` hold the moments.

        Args:
            shadow: as in `descent`.
        """
