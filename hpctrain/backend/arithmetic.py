"""Arithmetic on activations, parameters and gradients outside of operators, wherever they lie: the service of a kernel set.

Nothing but kernel sets and transports touches elements of such arrays by other means. On a GPU all of it is enqueued, in the
order of the calls and together with operators; only `to_host`, `square_sums` and a `Fetch`'s `result` wait.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from hpctrain.backend.device_messages import DeviceMessages
from hpctrain.backend.mirrors import HostMirrors
from hpctrain.core.intervals import Box

Array = Any  # numpy.ndarray or DeviceArray: the kernel set decides


class Fetch(Protocol):
    """Values on their way to the host."""

    def result(self) -> np.ndarray:
        """Wait for them, and give them; they are read only, and valid until the next `fetch` but one of the same array."""
        ...


@dataclass(frozen=True)
class UpdateRun:
    """Elements [start, stop) of the flat buffers that are updated alike: g' = gradient_scale * g + decay * w.

    offset: to add to a place in the flat buffers to get the place in the state.
    """

    start: int
    stop: int
    gradient_scale: float
    decay: float
    offset: int = 0


class Descent(Protocol):
    """Momentum descent on flat buffers, bound to them at set-up."""

    def update(self, runs: Iterable[UpdateRun], lr: float) -> None:
        """m := momentum * m + g'; w := w - lr * m, or w - lr * (g' + momentum * m) with Nesterov's. The gradient is read only."""
        ...


@dataclass(frozen=True)
class MomentRule:
    """The constants of a descent by two moments of the gradient: those of Adam (Kingma and Ba, ICLR 2015).

    beta1, beta2: shares of the first and the second moment that are kept. epsilon: is added to the root of the second one.
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
    """Checksums of the same arrays, whatever they hold, bound to them at set-up."""

    def fetch(self) -> Fetch:
        """Fetch the checksum of each array at this point of the work; uint32 (arrays,)."""
        ...


class ArrayGuard(Protocol):
    """Notices arrays that have changed where nothing should have written, bound to them at set-up; by sums of 32-bit words.

    Every change within one word shows; two changes with the same sum do not.
    """

    def remember(self) -> None:
        """Take the arrays as they are at this point of the work for right."""
        ...

    def compare(self) -> None:
        """Mark the arrays that are not, at this point of the work, as they are remembered."""
        ...

    def fetch_changed(self) -> Fetch:
        """Whether each array was ever marked; bool (arrays,)."""
        ...


class WatchedArrays(Protocol):
    """Flat arrays of whole 32-bit words, which may have several dtypes: what notices changes of their bits. For set-up only."""

    def checksums(self) -> ArrayChecksums:
        """Return the CRC-32 of each array's bytes."""
        ...

    def sums(self) -> ArrayChecksums:
        """Return the sum of each array's 32-bit words, modulo 2^32, at a tenth of the cost of a CRC-32 on the host.

        Detects every change within one word, but not several changes that cancel in the sum.
        """
        ...

    def guard(self) -> ArrayGuard:
        """A guard of what the arrays hold, in which they are remembered."""
        ...


class Arithmetic(ABC):
    """The service. Arrays of one call have one dtype and one size unless it is said; targets come first.

    Attributes:
        on_host: the arrays are NumPy's: nothing is enqueued, and `fetch` and `to_host` give the very array.
    """

    on_host: ClassVar[bool] = False

    def mirrors(self) -> HostMirrors | None:
        """Mirrors of such arrays on the host, for transports that read that alone; None where the arrays lie there."""
        return None

    def messages(self) -> DeviceMessages | None:
        """The service for transports that reach such arrays themselves; None where these lie on the host."""
        return None

    @abstractmethod
    def zeros(self, size: int, dtype: str) -> Array:
        """A flat array of zeros. For set-up only."""

    @abstractmethod
    def copy(self, target: Array, source: Array) -> None:
        """target := source, rounded where the dtypes differ."""

    @abstractmethod
    def fill(self, target: Array, value: float) -> None:
        """Every element := value."""

    @abstractmethod
    def add(self, target: Array, source: Array) -> None:
        """target := target + source."""

    @abstractmethod
    def subtract(self, target: Array, source: Array) -> None:
        """target := target - source."""

    @abstractmethod
    def average_into(self, target: Array, source: Array, kept: float) -> None:
        """target := kept * target + (1 - kept) * source, computed as (target - source) * kept + source."""

    @abstractmethod
    def copy_box(self, target: Array, target_box: Box, source: Array, source_box: Box, *, accumulate: bool = False) -> None:
        """target[target_box] := source[source_box], or += with `accumulate`.

        Both arrays have up to four dims and one dtype, both boxes one shape, each inside its array; the two share no memory.
        """

    @abstractmethod
    def sum_pixels(self, target: Array, source: Array, scale: float) -> None:
        """target (N, 1, 1, C) := scale * the sum over the pixels of source (N, H, W, C): zeros where there are none."""

    @abstractmethod
    def spread_pixels(self, target: Array, source: Array, scale: float) -> None:
        """target (N, H, W, C) := scale * source (N, 1, 1, C) at every pixel."""

    @abstractmethod
    def square_sums(self, arrays: Sequence[Array]) -> np.ndarray:
        """Sums of squares, float64 (len(arrays),); squares of float32 are summed in float64. Waits."""

    @abstractmethod
    def fetch_finite(self, arrays: Sequence[Array]) -> Fetch:
        """For each array whether all its elements are finite at this point of the work, bool (len(arrays),)."""

    @abstractmethod
    def watched(self, arrays: Sequence[Array]) -> WatchedArrays:
        """Flat arrays of whole 32-bit words, which may have several dtypes, to be watched. For set-up only."""

    @abstractmethod
    def fetch(self, array: Array) -> Fetch:
        """The elements, as they are at this point of the work. Nothing writes there before the result is asked for."""

    @abstractmethod
    def to_host(self, array: Array) -> np.ndarray:
        """The elements in an array of the host, which may be the very same one: it is read only. Waits."""

    @abstractmethod
    def from_host(self, target: Array, source: np.ndarray) -> None:
        """target := source, an array of the host of the same shape, rounded to the target's dtype.

        The source may change afterwards.
        """

    @abstractmethod
    def descent(
        self, data: Array, gradient: Array, momentum: Array, *, factor: float, nesterov: bool, shadow: Array | None = None
    ) -> Descent:
        """Momentum descent of flat `data` by flat `gradient`, of one size; `momentum` holds the state, empty where factor is 0.

        Args:
            shadow: bfloat16, of the size of `data`: is written with the rounded data of all that is updated.
        """

    @abstractmethod
    def moment_descent(
        self, data: Array, gradient: Array, first: Array, second: Array, rule: MomentRule, *, shadow: Array | None = None
    ) -> MomentDescent:
        """Descent of flat `data` by two moments of flat `gradient`, of one size; `first` and `second` hold these, alike packed.

        Args:
            shadow: as in `descent`.
        """
