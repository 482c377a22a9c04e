"""Optimisers that time their updates and detect changes of their arrays between two updates, such as flipped bits.

The check compares sums of 32-bit words, computed while the memory is in a cache anyway: directly after an update, and directly
before the next one. It detects every change within one word; two changes that cancel in the sum are not detected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hpctrain.backend.arithmetic import Array, ArrayGuard, Fetch
from hpctrain.comm.progress import ProgressEngine
from hpctrain.nn.parameter import FlatGroup, Segment
from hpctrain.optim.base import ForwardingOptimizer, Norms, Optimizer
from hpctrain.trace.tracer import Category


@dataclass
class _Update:
    """An update of the same segments in every step, with a guard of the arrays that it writes.

    Attributes:
        segments: segments of the update.
        names: names of the guarded arrays.
        guard: guard of these arrays; None if there are none.
        remembered: whether the guard has the sums after the last update.
    """

    segments: tuple[Segment, ...]
    names: list[str]
    guard: ArrayGuard | None
    remembered: bool = False

    def remember(self) -> None:
        """Remember the sums of the current values as correct."""
        if self.guard is not None:
            self.guard.remember()
        self.remembered = True


class GuardedOptimizer(ForwardingOptimizer):
    """`inner` with timed updates. After `watch`, it also detects changes of its arrays that no update made.

    Args:
        inner: optimiser that computes the updates.
        progress: engine that accounts for the time of each update, and records it if the engine traces; None: updates are not
            timed.

    Attributes:
        changed_arrays: names of the arrays in the first detected change between two updates; empty if there is none.
    """

    def __init__(self, inner: Optimizer, progress: ProgressEngine | None = None) -> None:
        super().__init__(inner)
        self._progress = progress
        self.changed_arrays: tuple[str, ...] = ()
        self._group: FlatGroup | None = None
        self._on = self._with_parameters = False
        self._updates: dict[int, _Update] = {}  # by start of the first segment
        self._owned_size = 0
        self._pending: list[tuple[list[str], Fetch]] = []

    def watch(self, *, parameters: bool, updates: Iterable[Sequence[Segment]] = ()) -> None:
        """Start comparing the arrays between updates. Call it after `bind`.

        Args:
            parameters: whether to watch the updated parameters, too; no other code may then write them between updates.
            updates: segments of each update of a step, if they are known before the first one. Their initial values are then
                compared as well.
        """
        assert self._group is not None, "the optimiser is not bound"
        self._on, self._with_parameters = True, parameters
        for segments in updates:
            if segments:
                self._known(tuple(segments))

    def forget(self) -> None:
        """Discard the remembered sums after a write by other code. Comparing resumes after the next updates."""
        for update in self._updates.values():
            update.remembered = False

    def fetch_findings(self) -> None:
        """Request the results of all comparisons. If the arrays are not on the host, `read_findings` waits for them."""
        updates = self._updates.values()
        self._pending = [(update.names, update.guard.fetch_changed()) for update in updates if update.guard is not None]

    def read_findings(self) -> None:
        """Update `changed_arrays` with the result of the latest `fetch_findings`."""
        for names, fetch in self._pending:
            self._found(names, fetch)
        self._pending = []

    def _found(self, names: Sequence[str], fetch: Fetch) -> None:
        changed = fetch.result()
        if any(changed.tolist()) and not self.changed_arrays:
            self.changed_arrays = tuple(name for name, is_changed in zip(names, changed, strict=True) if is_changed)

    def verify(self) -> None:
        """Compare all arrays and wait for the result. Call it between steps, while no update is running.

        Arrays that were not updated since the start or since `forget` cannot be compared; their current values are remembered.
        """
        for update in self._updates.values():
            self._compare(update)
            if not update.remembered:
                update.remember()
        self.fetch_findings()
        self.read_findings()

    @property
    def guards_all_parameters(self) -> bool:
        """Whether every owned parameter is known to hold the values of its last update, or is in `changed_arrays`."""
        remembered = (update.segments for update in self._updates.values() if update.remembered)
        known = sum(segment.size for segments in remembered for segment in segments)
        return self._on and self._with_parameters and known == self._owned_size

    def bind(self, group: FlatGroup, owned: Sequence[Segment]) -> None:
        self._group, self._owned_size = group, sum(segment.size for segment in owned)
        super().bind(group, owned)

    def prepare_norms(self, segments: Sequence[Segment]) -> None:
        if self.prepares_norms:
            self._write(segments, lambda: self.inner.prepare_norms(segments))

    def update(self, segments: Sequence[Segment], lr: float, norms: Norms | None) -> None:
        self._write(segments, lambda: self.inner.update(segments, lr, norms))

    def _write(self, segments: Sequence[Segment], write: Callable[[], None]) -> None:
        """Call `write`, with comparison and timing. The time includes the comparison."""
        if self._progress is None:
            self._compared(segments, write)
            return
        account, trace = self._progress.account, self._progress.trace
        begin_ns = account.clock_ns()
        self._compared(segments, write)
        stop_ns = account.clock_ns()
        account.updated(begin_ns, stop_ns)
        if segments and trace is not None:
            trace.add(Category.UPDATE, segments[0].parameter, begin_ns, stop_ns)

    def _compared(self, segments: Sequence[Segment], write: Callable[[], None]) -> None:
        """Compare the arrays, call `write`, and remember the new sums. Only `write` may write to the state of `segments`."""
        update = self._known(tuple(segments)) if self._on and segments else None
        if update is None:
            write()
            return
        self._compare(update)
        write()
        update.remember()

    def _known(self, segments: tuple[Segment, ...]) -> _Update | None:
        """Return the update of these segments; None if updates do not have the same segments in every step."""
        known = self._updates.get(segments[0].start)
        if known is not None and known.segments == segments:
            return known
        others = [
            place
            for place, update in self._updates.items()
            if any(a.start < b.stop and b.start < a.stop for a in segments for b in update.segments)
        ]
        # If updates overlap, the sums of one would report the writes of the other as damage, so watching ends.
        if any(self._updates[place].remembered for place in others):
            self._on = False
            self._updates.clear()
            return None
        for place in others:
            del self._updates[place]
        update = self._updates[segments[0].start] = self._update_of(segments)
        return update

    def _compare(self, update: _Update) -> None:
        assert self._group is not None
        if update.guard is None or not update.remembered:
            return
        update.guard.compare()
        if self._group.arithmetic.on_host:  # the result needs no wait
            self._found(update.names, update.guard.fetch_changed())

    def _update_of(self, segments: tuple[Segment, ...]) -> _Update:
        """Return the update of `segments` with a guard of all their arrays, in the order in which they lie in memory."""
        assert self._group is not None
        by_kind = dict[str, list[tuple[str, Array]]]()
        for segment in segments:
            if not segment.size:
                continue
            views = self.inner.state(segment)
            if self._with_parameters:
                views = {**views, "": self._group.data[segment.start : segment.stop]}
            for kind, view in views.items():
                name = f"the {kind} of {segment.parameter}" if kind else f"parameter {segment.parameter}"
                by_kind.setdefault(kind, []).append((name, view))
        named = [array for arrays in by_kind.values() for array in arrays]
        guard = self._group.arithmetic.watched([array for _, array in named]).guard() if named else None
        return _Update(segments, [name for name, _ in named], guard)
