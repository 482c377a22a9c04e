"""How gradients and parameters travel: as they are, or rounded to 16 bits. Pure data, with the bytes that this saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import get_args

import numpy as np

from hpctrain.averaging.slice_sizes import parts_of
from hpctrain.core.intervals import even
from hpctrain.comm.sums import Caster, Wire
from hpctrain.compress.cast16 import Bits16, Cast16
from hpctrain.core.errors import OptionError

#: bytes of a rounded number
SIXTEEN_BITS = 2


@dataclass(frozen=True)
class Rounding:
    """The numbers of a schedule's messages.

    Attributes:
        gradients, parameters: how they travel in reduce-scatters and allreduces, and in allgathers.
        per_node: ranks of a node that sum gradients in full precision before these cross nodes; 1: everything is rounded.
        cuts_allreduces: large ones travel in several operations, as `parts_of` says.
    """

    gradients: Wire = "float32"
    parameters: Wire = "float32"
    per_node: int = 1
    cuts_allreduces: bool = False

    def sent_share(self, item_bytes: int) -> float:
        """Bytes of a gradient on its way over those in memory, of which an element has `item_bytes`."""
        return 1.0 if self.gradients == "float32" else SIXTEEN_BITS / item_bytes

    def saved_by_reduction(self, counts: Sequence[int], item_bytes: int) -> np.ndarray:
        """Bytes less that each rank exchanges in a reduce-scatter of parts of `counts` elements; int64, by rank."""
        saved = [_saved(count, item_bytes, self.gradients) for count in counts]
        nodes = len(saved) // self.per_node  # ranks of one number on all nodes are neighbours
        return np.concatenate([_of_others(saved[begin : begin + nodes]) for begin in range(0, len(saved), nodes)])

    def saved_by_allreduce(self, size: int, ranks: int, item_bytes: int) -> np.ndarray:
        """As `saved_by_reduction`, in an allreduce of `size` elements, whose sums are gathered in 16 bits, too."""
        saved = np.zeros(ranks, np.int64)
        for begin, end in parts_of(size, item_bytes, ranks) if self.cuts_allreduces else [(0, size)]:
            saved += 2 * self.saved_by_reduction(even(end - begin, ranks), item_bytes)
        return saved

    def saved_by_gather(self, counts: Sequence[int], item_bytes: int) -> np.ndarray:
        """As `saved_by_reduction`, in an allgather of parameters."""
        return _of_others([_saved(count, item_bytes, self.parameters) for count in counts])


def _of_others(by_rank: Sequence[int]) -> np.ndarray:
    """The sum of all ranks' numbers but its own, for each rank."""
    numbers = np.array(by_rank, np.int64)
    return np.sum(numbers) - numbers


def _saved(elements: int, item_bytes: int, wire: Wire) -> int:
    """Bytes by which a message of so many elements is shorter."""
    return elements * item_bytes - wire_bytes(elements, item_bytes, wire)


def wire_bytes(elements: int, item_bytes: int, wire: Wire) -> int:
    """Bytes of a message of so many elements, which have `item_bytes` each in memory."""
    if wire == "float32" or not elements:
        return elements * item_bytes
    return SIXTEEN_BITS * elements + _header_bytes(wire)


@cache
def _header_bytes(wire: Bits16) -> int:
    """Bytes of a message beside its numbers."""
    return Cast16(0, "float32", wire).message_size


def caster(wire: Wire) -> Caster | None:
    """The compressors of messages; None where numbers travel as they are."""
    return None if wire == "float32" else partial(Cast16, bits=wire)


def check_wire(**values: Wire) -> None:
    """Check options that say how numbers travel.

    Raises:
        OptionError: a value that is none of the known ones; the first one.
    """
    for name, value in values.items():
        if value not in get_args(Wire):
            raise OptionError(
                f"{name} is {value!r}, but it is one of {', '.join(get_args(Wire))}; the usual one is float32.", name
            )


def words_of_rounding(rounding: Rounding | None) -> str:
    """The words that it adds to those that a stored schedule is known by; none where nothing is rounded."""
    if rounding is None:
        return ""
    parameters = "" if rounding.parameters == "float32" else f", wire_parameters {rounding.parameters}"
    return f", wire {rounding.gradients}{parameters}"
