"""Interfaces of a kernel set's services outside of operators: arithmetic on arrays, and access to arrays for transports.

`Arithmetic` works on activations, parameters and gradients. Only kernel sets and transports access the elements of these arrays
by other means. On a GPU every call is enqueued, in the order of the calls and together with operators. Only `to_host`,
`square_sums` and `Fetch.result` wait for this work; `from_host` may wait for earlier copies.

`HostMirrors` serve transports that can read only the host's memory, such as MPI. If kernels compute on a device, an array is
copied to a mirror in the host's memory before it is sent, and from the mirror after it is received, while the device computes.
The host enqueues the copies and polls for their completion. It waits only before it reuses or frees a mirror.

`DeviceMessages` serve transports that access a device's memory directly, without mirrors. There are two kinds: MPI libraries that
read device memory, for which the host polls whether the kernels are done, and groups of devices that exchange arrays in the order
of a stream, as NCCL does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from hpctrain.core.intervals import Box

Array = Any  # numpy.ndarray or DeviceArray


class Transit(Protocol):
    """The copies of one operation's arrays to the host and back."""

    def on_host(self) -> bool:
        """Return whether all copies to the mirrors are complete, without waiting."""


class HostMirrors(Protocol):
    """Mirrors of a device's arrays in the host's memory, and the copies to and from them.

    Only the thread that enqueues the device's work may call the methods. Each array has one mirror, which is allocated at its
    first transfer and reused for later ones, so mirrors take as much memory as the arrays that travel. Arrays inside a covered
    array share its mirror.

    Attributes:
        pinned_bytes: bytes of all mirrors.
    """

    pinned_bytes: int

    def mirror(self, array: Array) -> np.ndarray:
        """Return the flat mirror of an array, which the caller may overwrite. No other pending operation may use the array.

        The call waits for the copies from the mirror that the array's previous operation enqueued.
        """

    def cover(self, array: Array, instead_of: Array | None = None) -> None:
        """Make one mirror for all arrays inside `array`, which only one operation at a time may use. For set-up only.

        Args:
            instead_of: array covered earlier that no operation uses any more. Its mirror is freed after pending copies from it
                are done.
        """

    def leave(self, copies: Sequence[tuple[np.ndarray, Array]]) -> Transit:
        """Enqueue mirror := array for each pair, after all kernels enqueued so far.

        Every operation begins with this call, even without pairs.
        """

    def arrive(self, transit: Transit, array: Array, intervals: Sequence[tuple[int, int]]) -> None:
        """Enqueue array := mirror for intervals of the flat elements.

        The copy runs after all kernels enqueued before `leave`, and before all kernels enqueued after this call. Call it once for
        each transit. Without intervals nothing is copied.
        """


class WorkMark(Protocol):
    """A position in a device's queue of work."""

    @property
    def done(self) -> bool:
        """Whether all work before the mark is done; once true, it stays true. Reading it never waits."""


class Peers(Protocol):
    """Communicator of the processes whose devices form a group, reserved for the group. Its ranks number the devices.

    Devices that cannot reach each other directly, such as emulated ones, exchange arrays of the host through it.
    """

    rank: int
    size: int

    def broadcast_object(self, value: Any, root: int = 0) -> Any: ...

    def iallgather(self, send: Any, recv: Any, counts: Any) -> Any: ...

    def isend(self, buffer: Any, dest: int, tag: int) -> Any: ...

    def irecv(self, buffer: Any, source: int, tag: int) -> Any: ...


class DeviceLinks(Protocol):
    """The links of one device to the other devices of a group. All calls are enqueued on the stream of the links.

    All devices of a group enqueue the same collectives in the same order, and one receive for each send. The arrays of a
    collective have the same size and dtype on all devices. Sums require float32 or float64; the other calls move bytes of any
    dtype.
    """

    def together(self) -> AbstractContextManager[None]:
        """Enqueue all calls inside this context as one operation, at the context's end. The calls may depend on each other."""

    def send(self, array: Array, to: int) -> None: ...

    def receive(self, array: Array, source: int) -> None: ...

    def broadcast(self, array: Array, root: int) -> None:
        """Copy `root`'s array to all devices."""

    def sum_to_all(self, array: Array) -> None:
        """Replace each device's array by the sum over all devices."""

    def sum_to_one(self, send: Array, recv: Array, root: int) -> None:
        """Write the sum of all devices' `send` to `root`'s `recv`; other devices' `recv` is not used."""

    def fault(self) -> str | None:
        """Return an asynchronous failure of the links, as a clause; None if there is none."""

    def abort(self) -> None:
        """Abandon all pending work. No method may be called afterwards."""


class DeviceMessages(Protocol):
    """Service for transports that access a device's memory directly: marks of the device's work, and groups of devices.

    All groups of a process share one stream, so that two groups cannot deadlock by waiting for each other.

    Attributes:
        identity: name of the device, unique over all nodes.
    """

    identity: str

    def mark(self) -> WorkMark:
        """Return a mark after all kernels enqueued so far."""

    def wait_for_kernels(self) -> None:
        """Make later work of the links wait for all kernels enqueued so far. The host does not wait."""

    def mark_links(self) -> WorkMark:
        """Return a mark after all work of the links enqueued so far."""

    def group_fault(self) -> str | None:
        """Return the reason why this device cannot join a group, as a clause; None if it can."""

    def join(self, peers: Peers) -> DeviceLinks:
        """Join a group of the peers' devices, and return the links to them and this device. Collective; waits for all peers."""


class Fetch(Protocol):
    """Values that are being copied to the host."""

    def result(self) -> np.ndarray:
        """Wait for the values and return them, read only.

        They stay valid until the second subsequent `fetch` of the same array.
        """


class UpdateRun(NamedTuple):
    """Elements [start, stop) of the flat buffers, updated with one gradient scale and decay: g' = gradient_scale * g + decay * w.

    Attributes:
        offset: index of an element in the optimiser's state minus its index in the flat buffers.
    """

    start: int
    stop: int
    gradient_scale: float
    decay: float
    offset: int = 0


class Descent(Protocol):
    """Gradient descent with momentum on flat buffers, bound to them at set-up."""

    def update(self, runs: Iterable[UpdateRun], lr: float) -> None:
        """Compute m := momentum * m + g'; w := w - lr * m (Nesterov: w - lr * (g' + momentum * m)). The gradient is only read."""


@dataclass(frozen=True)
class MomentRule:
    """Constants of an update from the first and second moments of the gradient, as in Adam (Kingma and Ba, ICLR 2015).

    Attributes:
        beta1, beta2: decay rates of the first and the second moment.
        epsilon: number added to the root of the second moment.
        decoupled: whether decay * w is added to the direction (AdamW), not to the gradient (Adam).
    """

    beta1: float
    beta2: float
    epsilon: float
    decoupled: bool = True


@dataclass(frozen=True)
class Corrections:
    """Factors that correct the bias of moments that start at zero.

    `first` is that of the first moment, `root` that of the square root of the second moment.
    """

    first: float
    root: float


class MomentDescent(Protocol):
    """Descent by two moments on flat buffers, bound to them at set-up.

    With g' = gradient_scale * g of each run: m := beta1 * m + (1 - beta1) * g'; v := beta2 * v + (1 - beta2) * g'^2; the
    direction is u = first * m / (root * sqrt(v) + epsilon) + decay * w. If the rule is not decoupled, decay * w is added to g'
    instead of u.
    """

    def update(self, runs: Iterable[UpdateRun], corrections: Corrections, lr: float) -> None:
        """Update m and v, and compute w := w - lr * u. The gradient is only read."""

    def direct(self, runs: Iterable[UpdateRun], corrections: Corrections) -> None:
        """Update m and v, and compute g := u. The data is only read."""


class WordSums(Protocol):
    """Sums, modulo 2^32, of the 32-bit words of arrays that are fixed at set-up.

    A sum reveals every change within one word, but not several changes that cancel.
    """

    def fetch(self) -> Fetch:
        """Fetch the sum of each array after all work enqueued so far; uint32 (arrays,)."""

    def remember(self) -> None:
        """Record the sums of the arrays after all work enqueued so far."""

    def compare(self) -> None:
        """Mark each array whose sum after all work enqueued so far differs from the recorded one."""

    def fetch_changed(self) -> Fetch:
        """Fetch whether each array was ever marked; bool (arrays,)."""


class Arithmetic(ABC):
    """Arithmetic service of a kernel set. Targets come first; unless noted, all arrays of a call have the same dtype and size.

    Attributes:
        on_host: whether arrays are NumPy arrays. Then no work is enqueued, and `fetch` and `to_host` return the array itself
            (bfloat16: a copy in float32).
    """

    on_host: ClassVar[bool] = False

    def mirrors(self) -> HostMirrors | None:
        """Return mirrors on the host, for transports that read only the host's memory; None if arrays are already there."""
        return None

    def messages(self) -> DeviceMessages | None:
        """Return the service for transports that access a device's memory directly; None if arrays are in the host's memory."""
        return None

    @abstractmethod
    def zeros(self, size: int, dtype: str) -> Array:
        """Return a flat array of `size` zeros of `dtype`. For set-up only."""

    @abstractmethod
    def copy(self, target: Array, source: Array) -> None:
        """Compute target := source, rounded if the dtypes differ."""

    @abstractmethod
    def fill(self, target: Array, value: float) -> None:
        """Set every element of `target` to `value`."""

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

        Both arrays have up to four dims and the same dtype. Both boxes have the same shape, and each lies inside its array. The
        arrays share no memory.
        """

    @abstractmethod
    def sum_pixels(self, target: Array, source: Array, scale: float) -> None:
        """Compute target (N, 1, 1, C) := scale * the sum over the pixels of source (N, H, W, C); 0 if there are no pixels."""

    @abstractmethod
    def spread_pixels(self, target: Array, source: Array, scale: float) -> None:
        """Compute target (N, H, W, C) := scale * source (N, 1, 1, C) at every pixel."""

    @abstractmethod
    def square_sums(self, arrays: Sequence[Array]) -> np.ndarray:
        """Wait, and return the sum of squares of each flat array, (len(arrays),) float64. All sums are computed in float64."""

    @abstractmethod
    def fetch_finite(self, arrays: Sequence[Array]) -> Fetch:
        """Fetch whether all elements of each array are finite after all work enqueued so far; bool (len(arrays),)."""

    @abstractmethod
    def word_sums(self, arrays: Sequence[Array]) -> WordSums:
        """Return the sums of flat arrays of whole 32-bit words, of any dtypes. For set-up only."""

    @abstractmethod
    def fetch(self, array: Array) -> Fetch:
        """Fetch the elements after all work enqueued so far, bfloat16 as float32.

        The caller must not write to the array before it reads the result.
        """

    @abstractmethod
    def to_host(self, array: Array) -> np.ndarray:
        """Wait, and return the elements in a NumPy array, bfloat16 as float32.

        The result may be `array` itself, so the caller must not modify it.
        """

    @abstractmethod
    def from_host(self, target: Array, source: np.ndarray) -> None:
        """Compute target := source, a NumPy array of the same shape, rounded to the target's dtype.

        The source may change afterwards.
        """

    @abstractmethod
    def descent(
        self, data: Array, gradient: Array, momentum: Array, *, factor: float, nesterov: bool, shadow: Array | None = None
    ) -> Descent:
        """Return descent with momentum of flat `data` along flat `gradient`, arrays of one size.

        Args:
            momentum: state of the momentum, empty if `factor` is 0.
            shadow: bfloat16 array of the size of `data`, which receives the rounded data of all updated elements.
        """

    @abstractmethod
    def moment_descent(
        self, data: Array, gradient: Array, first: Array, second: Array, rule: MomentRule, *, shadow: Array | None = None
    ) -> MomentDescent:
        """Return descent of flat `data` by two moments of flat `gradient`, arrays of one size.

        Args:
            first, second: states of the moments.
            shadow: bfloat16 copy, as in `descent`.
        """
