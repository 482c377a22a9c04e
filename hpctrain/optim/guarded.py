"""Optimisers that time their updates and detect changes of their arrays between two updates, such as flipped bits.

The check compares sums of 32-bit words, computed while the memory is in a cache anyway: directly after an update, and directly
before the next one. It detects every change within one word; two changes that cancel in the sum are not detected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress

from hpctrain.backend.arithmetic import Arithmetic, Array, Fetch
from hpctrain.comm.progress import ProgressEngine
from hpctrain.nn.parameter import FlatGroup, Segment
from hpctrain.optim.base import ForwardingOptimizer, Norms, Optimizer
from hpctrain.trace.tracer import Category


class WriteGuard:
    """Detector of changes of arrays between two writes. All buffers are allocated in the constructor.

    Args:
        arrays: flat arrays of whole 32-bit words, by name, whose current values are correct.
        arithmetic: arithmetic of the memory that holds them.

    Attributes:
        changed: names of the arrays in the first detected change; empty until `read` has found one.
    """

    def __init__(self, arrays: Mapping[str, Array], arithmetic: Arithmetic) -> None:
        sized = {name: array for name, array in arrays.items() if array.size}
        self._names, self._on_host = list(sized), arithmetic.on_host
        self._sums = arithmetic.word_sums(list(sized.values()))
        self._fetch: Fetch | None = None
        self.changed: tuple[str, ...] = ()
        self.remember()

    def remember(self) -> None:
        """Remember the current values as correct. Call it just after they were written."""
        self._sums.remember()

    def compare(self) -> None:
        """Compare the arrays with the remembered values. Call it just before they are written."""
        self._sums.compare()

    def write(self, write: Callable[[], None]) -> None:
        """Compare the arrays, call `write`, which modifies them, and remember the new values."""
        self.compare()
        write()
        self.remember()

    def fetch(self) -> None:
        """Request the findings of all comparisons so far, without waiting."""
        self._fetch = self._sums.fetch_changed()

    def read(self) -> None:
        """Update `changed`: on the host from all comparisons, on a device from those before the last `fetch`. May wait."""
        if self._on_host:
            self.fetch()
        if self._fetch is not None and not self.changed:
            self.changed = tuple(compress(self._names, self._fetch.result().tolist()))
        self._fetch = None


class GuardedOptimizer(ForwardingOptimizer):
    """Optimiser that times the updates of `inner`. After `watch`, it also detects changes of its arrays that no update made.

    Args:
        progress: engine that accounts for the time of each update, and records it if the engine traces; None: updates are not
            timed.
    """

    def __init__(self, inner: Optimizer, progress: ProgressEngine | None = None) -> None:
        super().__init__(inner)
        self._progress = progress
        self._group: FlatGroup | None = None
        self._guards: dict[int | None, WriteGuard] = {}  # by start of an update's first element

    def watch(self, updates: Iterable[Sequence[Segment]], *, parameters: bool) -> list[WriteGuard]:
        """Start comparing arrays between updates; return a guard of each update that writes such arrays. Call it after `bind`.

        Args:
            updates: segments of each update, the same in every step.
            parameters: whether to watch the updated parameters, too; no other code may then write them between updates.
        """
        assert self._group is not None, "the optimiser is not bound"
        for segments in updates:
            if arrays := self._arrays(self._group, segments, parameters=parameters):
                self._guards[_first(segments)] = WriteGuard(arrays, self._group.arithmetic)
        return list(self._guards.values())

    def bind(self, group: FlatGroup, owned: Sequence[Segment]) -> None:
        self._group = group
        super().bind(group, owned)

    def prepare_norms(self, segments: Sequence[Segment]) -> None:
        if self.prepares_norms:
            self._write(segments, lambda: self.inner.prepare_norms(segments))

    def update(self, segments: Sequence[Segment], lr: float, norms: Norms | None) -> None:
        self._write(segments, lambda: self.inner.update(segments, lr, norms))

    def _write(self, segments: Sequence[Segment], write: Callable[[], None]) -> None:
        """Call `write`, with comparison and timing. The time includes the comparison."""
        guard = self._guards.get(_first(segments)) if self._guards else None
        if self._progress is None:
            write() if guard is None else guard.write(write)
            return
        account, trace = self._progress.account, self._progress.trace
        begin_ns = account.clock_ns()
        write() if guard is None else guard.write(write)
        stop_ns = account.clock_ns()
        account.updated(begin_ns, stop_ns)
        if segments and trace is not None:
            trace.add(Category.UPDATE, segments[0].parameter, begin_ns, stop_ns)

    def _arrays(self, group: FlatGroup, segments: Sequence[Segment], *, parameters: bool) -> dict[str, Array]:
        """Return the arrays that an update writes, by name, in the order in which they lie in memory."""
        by_kind = dict[str, dict[str, Array]]()
        for segment in segments if any(segment.size for segment in segments) else ():
            kinds = {f"the {kind} of": view for kind, view in self.inner.state(segment).items()}
            if parameters:
                kinds["parameter"] = group.data[segment.start : segment.stop]
            for kind, view in kinds.items():
                by_kind.setdefault(kind, {})[f"{kind} {segment.parameter}"] = view
        return {name: view for arrays in by_kind.values() for name, view in arrays.items()}


def _first(segments: Sequence[Segment]) -> int | None:
    """Return the start of the first segment that is not empty; None if there is none."""
    return next((segment.start for segment in segments if segment.size), None)
