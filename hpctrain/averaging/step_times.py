"""Times at which gradients become ready and parameters are needed in a step, as measured, and over all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np


@dataclass(frozen=True)
class Times:
    """Seconds since a step's begin, of the compute alone: what a rank waited is taken out.

    ready: by parameter, when its gradient (or the error of its layer) is announced. free: when its data is let go. needed: when
    forward reads it; empty where that is unknown. end_seconds: when backward ends.
    """

    ready: Mapping[str, float]
    free: Mapping[str, float]
    needed: Mapping[str, float] = field(default_factory=dict)
    end_seconds: float = 0.0

    def longest_gap(self) -> float:
        """Seconds between two gradients that become ready one after the other."""
        return max((later - earlier for earlier, later in pairwise(sorted(self.ready.values()))), default=0.0)

    def late(self) -> Times:
        """As if all became ready one gradient later. What a single queue sends next must be ready then, or all behind it wait."""
        later = self.longest_gap()
        ready, free = ({name: at + later for name, at in times.items()} for times in (self.ready, self.free))
        return Times(ready, free, self.needed, self.end_seconds)

    def looks(self) -> list[float]:
        """The instants at which the program surely looks at messages, ascending: where a parameter's part of the work ends."""
        read = (self.end_seconds + at for at in self.needed.values())  # of the next step
        return sorted({*self.ready.values(), *self.free.values(), *read})

    @staticmethod
    def unknown(parameters: Sequence[str]) -> Times:
        """Backward as if each parameter took 1 s, from the last one to the first; data is let go when it ends."""
        last = float(len(parameters))
        ready = {name: last - position for position, name in enumerate(parameters)}
        return Times(ready, dict.fromkeys(parameters, last + 1.0))

    def to_array(self, parameters: Sequence[str]) -> np.ndarray:
        """Float64 (3 n + 1,), of n parameters: ready, free, needed (NaN where unknown), then the end."""
        of_kinds = (of_kind.get(name, np.nan) for of_kind in (self.ready, self.free, self.needed) for name in parameters)
        return np.array([*of_kinds, self.end_seconds])

    @staticmethod
    def from_array(parameters: Sequence[str], values: np.ndarray) -> Times:
        """The times that `to_array` gave."""
        *of_kinds, end_seconds = values.tolist()
        ready, free, needed = (
            {name: at for name, at in zip(parameters, of_kind, strict=True) if not math.isnan(at)}
            for of_kind in np.reshape(of_kinds, (3, len(parameters))).tolist()
        )
        return Times(ready, free, needed, end_seconds)


def upper_medians(seconds: np.ndarray) -> np.ndarray:
    """(ranks, events) -> (events,): of each event the upper median over the ranks that know it; NaN where none does.

    Of two ranks it is the later one, as a collective starts when both have posted it; of many no odd one matters, be it a rank
    that something disturbed while it measured. A maximum would follow that one, and a mean in part.
    """
    ordered = np.sort(seconds, axis=0)  # NaN last
    known = np.count_nonzero(~np.isnan(seconds), axis=0)
    medians: np.ndarray = np.take_along_axis(ordered, known[np.newaxis] // 2, axis=0)[0]
    return medians
