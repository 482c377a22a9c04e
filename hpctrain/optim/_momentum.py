"""Momentum descent over runs of flat memory, one pass in cache-sized chunks: what SGD and LARS share."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

import numpy as np

from hpctrain.errors import ConfigError
from hpctrain.nn.parameter import FlatGroup, Segment, whole

DecayExclude = Literal["norm_and_bias", "none"]

#: elements of one chunk: data, gradient, momentum and both work buffers are 640 KiB in float32 and stay in a second-level cache;
#: smaller ones lose more to calls than they win (measured)
CHUNK = 1 << 15


@dataclass(frozen=True)
class Run:
    """Elements [start, stop) of the flat buffers that are updated alike: g' = gradient_scale * g + decay * w."""

    start: int
    stop: int
    gradient_scale: float
    decay: float


def merged(runs: Iterable[Run]) -> list[Run]:
    """The same elements in fewer runs: neighbours that touch and are updated alike become one; empty ones vanish."""
    out: list[Run] = []
    for run in runs:
        if run.start == run.stop:
            continue
        last = out[-1] if out else None
        if last is not None and (last.stop, last.gradient_scale, last.decay) == (run.start, run.gradient_scale, run.decay):
            out[-1] = Run(last.start, run.stop, run.gradient_scale, run.decay)
        else:
            out.append(run)
    return out


class MomentumDescent:
    """m := momentum * m + g'; w := w - lr * m, or w - lr * (g' + momentum * m) with `nesterov`.

    These are torch.optim.SGD's semantics with dampening 0: the state is zeroed at `bind`, so the first m is g'. Sutskever et
    al., ICML 2013, for the Nesterov form. Every element's result depends on that element alone, so any partition of the
    buffers gives the same bits. The gradient is read only. Owns the state of the bound segments, packed: one array of as
    many elements as they have, none where momentum is 0.

    Raises:
        ConfigError: momentum outside [0, 1), nesterov without momentum, negative weight_decay, unknown decay_exclude.
    """

    def __init__(self, momentum: float, nesterov: bool, weight_decay: float, decay_exclude: DecayExclude) -> None:
        if not 0.0 <= momentum < 1.0:
            raise ConfigError(f"momentum {momentum} is outside [0, 1); the usual value is 0.9.")
        if nesterov and momentum == 0.0:
            raise ConfigError("nesterov needs a momentum above 0; the usual value is 0.9.")
        if not (weight_decay >= 0.0 and math.isfinite(weight_decay)):
            raise ConfigError(f"weight_decay {weight_decay} must be a finite number of at least 0; the usual value is 1e-4.")
        if decay_exclude not in get_args(DecayExclude):
            raise ConfigError(f"decay_exclude {decay_exclude!r} is unknown; it is one of {', '.join(get_args(DecayExclude))}.")
        self.momentum = float(momentum)
        self.nesterov = nesterov
        self.weight_decay = float(weight_decay)
        self.decay_exclude = decay_exclude

    def excluded(self, segment: Segment) -> bool:
        """True for a norm's parameters and biases, where `decay_exclude` leaves them out."""
        return self.decay_exclude == "norm_and_bias" and not segment.decay

    def bind(self, group: FlatGroup, owned: Sequence[Segment]) -> None:
        """Allocate zeroed state for the elements of `owned` (which do not overlap, in any order) and the work buffers."""
        ordered = sorted((segment for segment in owned if segment.size), key=lambda segment: segment.start)
        assert all(a.stop <= b.start for a, b in pairwise(ordered)), "owned segments overlap"
        self._data, self._grad = group.data, group.grad
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._offsets: list[int] = []
        size = 0
        for start, stop in whole(ordered):
            self._starts.append(start)
            self._stops.append(stop)
            self._offsets.append(size - start)
            size += stop - start
        # Backends' arrays answer for themselves: the *_like functions make the state where the data is.
        self._momentum = np.zeros_like(group.data, shape=(size if self.momentum else 0,))
        longest = min(CHUNK, size)
        self._work = np.empty_like(group.data, shape=(longest,))
        self._spare = np.empty_like(group.data, shape=(longest,))

    def state(self, segment: Segment) -> dict[str, np.ndarray]:
        """{"momentum": view} of an owned segment or of a part of one; empty where momentum is 0."""
        if not self.momentum:
            return {}
        low = segment.start + (self._offset(segment.start, segment.stop) if segment.size else 0)
        return {"momentum": self._momentum[low : low + segment.size]}

    def _offset(self, start: int, stop: int) -> int:
        """What to add to a place in the flat buffers to get the place in the state."""
        i = bisect_right(self._starts, start) - 1
        owned = i >= 0 and stop <= self._stops[i]
        assert owned, f"elements [{start}, {stop}) are not owned here"
        return self._offsets[i]

    def update(self, runs: Iterable[Run], lr: float) -> None:
        """Update the data of `runs`, each inside owned segments."""
        # A NumPy float64 scalar would turn float32 arithmetic into float64.
        lr = float(lr)
        for run in runs:
            offset = self._offset(run.start, run.stop)
            for low in range(run.start, run.stop, CHUNK):
                self._update_chunk(run, low, min(low + CHUNK, run.stop), offset, lr)

    def _update_chunk(self, run: Run, low: int, high: int, offset: int, lr: float) -> None:
        w, g = self._data[low:high], self._grad[low:high]
        work, spare = self._work[: high - low], self._spare[: high - low]
        if run.gradient_scale != 1.0:
            g = np.multiply(g, run.gradient_scale, out=work)
        if run.decay:
            np.multiply(w, run.decay, out=spare)
            g = np.add(g, spare, out=work)
        if self.momentum:
            m = self._momentum[low + offset : high + offset]
            np.multiply(m, self.momentum, out=m)
            np.add(m, g, out=m)
            if self.nesterov:
                np.multiply(m, self.momentum, out=spare)
                g = np.add(g, spare, out=work)
            else:
                g = m
        np.multiply(g, lr, out=work)
        np.subtract(w, work, out=w)
