"""An optimiser that notices where what it has written is another when it is about to write there again.

Sums of 32-bit words are taken where the memory is in a cache anyway: right after an update, and right before the next one. Every
change within one word shows; two changes with the same sum do not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np

from hpctrain.backend.arithmetic import Array
from hpctrain.nn.parameter import FlatGroup, Segment
from hpctrain.optim.base import Norms, NormsNeeded, Optimizer

_WORD = np.dtype(np.uint32)


class _Run:
    """Neighbouring memory of several arrays, 32-bit words. names: of the arrays. starts: of each, in words."""

    def __init__(self, words: np.ndarray, names: Sequence[str], starts: Sequence[int]) -> None:
        self._words, self._names, self._starts = words, names, np.array(starts)
        self._sums = np.zeros(len(names), _WORD)

    def remember(self) -> None:
        """Take what is there now for right."""
        self._sums = self._now()

    def changed(self) -> list[str]:
        """The arrays that are not as they are remembered."""
        now = self._now()
        if now.tobytes() == self._sums.tobytes():
            return []
        return [name for name, a, b in zip(self._names, now, self._sums, strict=True) if a != b]

    def _now(self) -> np.ndarray:
        sums: np.ndarray = np.add.reduceat(self._words, self._starts, dtype=_WORD)
        return sums


class GuardedOptimizer(Optimizer):
    """`inner`, which may be watched: then nothing but its updates may write to its state.

    Attributes:
        found: names of what had changed between two updates, when that was first seen; empty where nothing had.
    """

    def __init__(self, inner: Optimizer) -> None:
        self._inner = inner
        self.clip_norm = inner.clip_norm
        self.momentum = inner.momentum
        self.prepares_norms = inner.prepares_norms
        self.found: tuple[str, ...] = ()
        self._group: FlatGroup | None = None
        self._on = self._with_parameters = False
        #: by the place of the first segment: the segments of an update, and their memory
        self._runs: dict[int, tuple[tuple[Segment, ...], list[_Run]]] = {}

    @property
    def norms_needed(self) -> NormsNeeded:
        return self._inner.norms_needed

    def watch(self, *, parameters: bool) -> None:
        """From now on compare. On the host only; after `bind`.

        Args:
            parameters: the values of the updated parameters stay as they are until the next update, too.
        """
        assert self._group is not None, "the optimiser is not bound"
        self._on, self._with_parameters = self._group.arithmetic.on_host, parameters

    def forget(self) -> None:
        """Something else has written: compare from the next updates on."""
        self._runs.clear()

    def verify(self) -> None:
        """Compare all that is remembered now: between steps, while no update is under way."""
        for _, runs in self._runs.values():
            self._compare(runs)

    def bind(self, group: FlatGroup, owned: Sequence[Segment]) -> None:
        self._group = group
        self._inner.bind(group, owned)

    def begin_step(self, left_out: Collection[str] = ()) -> None:
        self._inner.begin_step(left_out)

    def counters(self) -> dict[str, int]:
        return self._inner.counters()

    def load_counters(self, counters: Mapping[str, int]) -> None:
        self._inner.load_counters(counters)

    def prepare_norms(self, segments: Sequence[Segment]) -> None:
        if self.prepares_norms:
            self._watched(segments, lambda: self._inner.prepare_norms(segments))

    def update(self, segments: Sequence[Segment], lr: float, norms: Norms | None) -> None:
        self._watched(segments, lambda: self._inner.update(segments, lr, norms))

    def _watched(self, segments: Sequence[Segment], write: Callable[[], None]) -> None:
        """Compare before `write`, which alone writes to the state of `segments`, and remember what there is behind it."""
        if not (self._on and segments):
            write()
            return
        known, pieces = self._runs.get(segments[0].start), tuple(segments)
        runs: list[_Run] = []
        if known is not None and known[0] == pieces:
            runs = known[1]
            self._compare(runs)
        elif any(_meet(pieces, others) for others, _ in self._runs.values()):
            self._on = False  # its updates are not of the same pieces in every step
            self._runs.clear()
        else:
            runs = self._runs_of(pieces)
            self._runs[pieces[0].start] = pieces, runs
        write()
        for run in runs:
            run.remember()

    def state(self, segment: Segment) -> dict[str, Array]:
        return self._inner.state(segment)

    def _compare(self, runs: Iterable[_Run]) -> None:
        if not self.found:
            self.found = tuple(name for run in runs for name in run.changed())

    def _runs_of(self, segments: Sequence[Segment]) -> list[_Run]:
        """The memory of an update, in as few runs as it lies in."""
        assert self._group is not None
        to_host, by_kind = self._group.arithmetic.to_host, dict[str, list[tuple[str, np.ndarray]]]()
        for segment in segments:
            if not segment.size:
                continue
            views = self._inner.state(segment)
            if self._with_parameters:
                views = {**views, "": self._group.data[segment.start : segment.stop]}
            for kind, view in views.items():
                name = f"the {kind} of {segment.parameter}" if kind else f"parameter {segment.parameter}"
                by_kind.setdefault(kind, []).append((name, to_host(view)))
        return [run for arrays in by_kind.values() for run in _joined(arrays)]


def _joined(arrays: Sequence[tuple[str, np.ndarray]]) -> list[_Run]:
    """Runs of arrays that follow each other in memory that one array owns."""
    runs: list[_Run] = []
    together: list[tuple[str, np.ndarray]] = []
    for name, array in arrays:
        if together and not _follows(array, together[-1][1]):
            runs.append(_run(together))
            together = []
        together.append((name, array))
    return [*runs, _run(together)] if together else runs


def _follows(array: np.ndarray, before: np.ndarray) -> bool:
    same = isinstance(array.base, np.ndarray) and array.base is before.base and array.base.flags.c_contiguous
    return same and _begin(array) == _end(before)


def _meet(segments: Sequence[Segment], others: Sequence[Segment]) -> bool:
    return any(a.start < b.stop and b.start < a.stop for a in segments for b in others)


def _run(arrays: Sequence[tuple[str, np.ndarray]]) -> _Run:
    first, last = arrays[0][1], arrays[-1][1]
    words = first.reshape(-1).view(_WORD)
    if len(arrays) > 1:
        assert isinstance(first.base, np.ndarray)
        whole = first.base.reshape(-1).view(np.uint8)
        words = whole[_begin(first) - _begin(whole) : _end(last) - _begin(whole)].view(_WORD)
    starts = [(_begin(array) - _begin(first)) // _WORD.itemsize for _, array in arrays]
    return _Run(words, [name for name, _ in arrays], starts)


def _begin(array: np.ndarray) -> int:
    """Address of an array's first byte."""
    return int(array.__array_interface__["data"][0])


def _end(array: np.ndarray) -> int:
    return _begin(array) + array.nbytes


class _GuardedLayerwiseOptimizer(GuardedOptimizer):
    """The same for one that needs each layer's norms."""

    layer_norms = True


def guarded(inner: Optimizer) -> GuardedOptimizer:
    """`inner`, not watched yet."""
    return _GuardedLayerwiseOptimizer(inner) if inner.layer_norms else GuardedOptimizer(inner)
