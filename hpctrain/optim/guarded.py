"""An optimiser that notices where what it has written is another when it is about to write there again.

Sums of 32-bit words are taken where the memory is in a cache anyway: right after an update, and right before the next one. Every
change within one word shows; two changes with the same sum do not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from hpctrain.backend.arithmetic import Array, ArrayGuard, Fetch
from hpctrain.nn.parameter import FlatGroup, Segment
from hpctrain.optim.base import Norms, NormsNeeded, Optimizer


@dataclass
class _Update:
    """The guard of all between two updates of the same segments. names: of its arrays. guard: None where there are none.

    remembered: the guard knows what is right there.
    """

    segments: tuple[Segment, ...]
    names: list[str]
    guard: ArrayGuard | None
    remembered: bool = False

    def remember(self) -> None:
        """Remember the current values as correct."""
        if self.guard is not None:
            self.guard.remember()
        self.remembered = True


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
        self._updates: dict[int, _Update] = {}  # by the place of the first segment
        self._owned_size = 0
        self._asked: list[tuple[list[str], Fetch]] = []

    @property
    def norms_needed(self) -> NormsNeeded:
        return self._inner.norms_needed

    def watch(self, *, parameters: bool, updates: Iterable[Sequence[Segment]] = ()) -> None:
        """From now on compare; after `bind`.

        Args:
            parameters: the values of the updated parameters stay as they are until the next update, too.
            updates: the segments of each update of a step, if they are known before the first one; their initial values are then
                compared as well.
        """
        assert self._group is not None, "the optimiser is not bound"
        self._on, self._with_parameters = True, parameters
        for segments in updates:
            if segments:
                self._known(tuple(segments))

    def forget(self) -> None:
        """Something else has written: compare from the next updates on."""
        for update in self._updates.values():
            update.remembered = False

    def look(self) -> None:
        """Ask what comparisons have found so far; `tell` waits for the answer, where arrays are not on the host."""
        self._ask(self._updates.values())

    def tell(self) -> None:
        """Bring `found` up to the latest `look`."""
        for names, fetch in self._asked:
            changed = tuple(name for name, is_changed in zip(names, fetch.result(), strict=True) if is_changed)
            self.found = self.found or changed
        self._asked = []

    def verify(self) -> None:
        """Compare everything now and wait for the result. Call it between steps, while no update is under way.

        Remembers the current values of arrays that were not updated since the start or since `forget`.
        """
        for update in self._updates.values():
            self._compare(update)
            if not update.remembered:
                update.remember()
        self.look()
        self.tell()

    @property
    def vouches(self) -> bool:
        """Whether every owned parameter is known to hold the values of its last update, or else is in `found`."""
        remembered = (update.segments for update in self._updates.values() if update.remembered)
        known = sum(segment.size for segments in remembered for segment in segments)
        return self._on and self._with_parameters and known == self._owned_size

    def bind(self, group: FlatGroup, owned: Sequence[Segment]) -> None:
        self._group, self._owned_size = group, sum(segment.size for segment in owned)
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
        update = self._known(tuple(segments))
        if update is None:
            write()
            return
        self._compare(update)
        write()
        update.remember()

    def _known(self, segments: tuple[Segment, ...]) -> _Update | None:
        """The update of these segments; None where updates are not of the same segments in every step, which nobody watches."""
        known = self._updates.get(segments[0].start)
        if known is not None and known.segments == segments:
            return known
        others = [place for place, update in self._updates.items() if _meet(segments, update.segments)]
        if any(self._updates[place].remembered for place in others):
            self._on = False
            self._updates.clear()
            return None
        for place in others:
            del self._updates[place]
        update = self._updates[segments[0].start] = self._update_of(segments)
        return update

    def state(self, segment: Segment) -> dict[str, Array]:
        return self._inner.state(segment)

    def _compare(self, update: _Update) -> None:
        assert self._group is not None
        if update.guard is None or not update.remembered:
            return
        update.guard.compare()
        if self._group.arithmetic.on_host:  # the answer is there
            self._ask([update])
            self.tell()

    def _ask(self, updates: Iterable[_Update]) -> None:
        self._asked = [(update.names, update.guard.fetch_changed()) for update in updates if update.guard is not None]

    def _update_of(self, segments: tuple[Segment, ...]) -> _Update:
        """With a guard of all that belongs to the segments, in the order in which it lies in memory."""
        assert self._group is not None
        by_kind = dict[str, list[tuple[str, Array]]]()
        for segment in segments:
            if not segment.size:
                continue
            views = self._inner.state(segment)
            if self._with_parameters:
                views = {**views, "": self._group.data[segment.start : segment.stop]}
            for kind, view in views.items():
                name = f"the {kind} of {segment.parameter}" if kind else f"parameter {segment.parameter}"
                by_kind.setdefault(kind, []).append((name, view))
        named = [array for arrays in by_kind.values() for array in arrays]
        guard = self._group.arithmetic.watched([array for _, array in named]).guard() if named else None
        return _Update(segments, [name for name, _ in named], guard)


def _meet(segments: Sequence[Segment], others: Sequence[Segment]) -> bool:
    return any(a.start < b.stop and b.start < a.stop for a in segments for b in others)


class _GuardedLayerwiseOptimizer(GuardedOptimizer):
    """The same for one that needs each layer's norms."""

    layer_norms = True


def guarded(inner: Optimizer) -> GuardedOptimizer:
    """`inner`, not watched yet."""
    return _GuardedLayerwiseOptimizer(inner) if inner.layer_norms else GuardedOptimizer(inner)
