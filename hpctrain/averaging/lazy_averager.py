"""Runs lazy averaging: gradients of front layers are added up on this rank, and averaged every few steps only."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from hpctrain.averaging.allreduce_averager import AllreduceAverager, AllreduceStep
from hpctrain.averaging.base import Agreement, AveragerSetup
from hpctrain.averaging.collective_schedule import Operation
from hpctrain.averaging.local_event import LocalEvent
from hpctrain.comm.base import Array, Handle
from hpctrain.comm.progress import Ticket
from hpctrain.nn.parameter import Parameter

_ADDED = "lazy_gradient"


@dataclass
class _Comparison:
    """One comparison of f and G.

    step: in which it is made. steps: how many G has added up. tickets: of the slices of f that are still to come. latest, total,
    difference: |f|^2, |G|^2 and |f - G|^2 of the slices so far.
    """

    step: AllreduceStep
    steps: int
    tickets: dict[int, Ticket] = field(default_factory=dict)
    latest: float = 0.0
    total: float = 0.0
    difference: float = 0.0


def next_interval(interval: int, steps: int, latest: float, total: float, difference: float, most: int) -> int:
    """The interval that follows from one averaging.

    Both conditions true: one more; both false: one less, at least 1; else the same.

    Args:
        steps: how many gradients were added up. latest: |f|^2, f the last of them, over all ranks. total: |G|^2, G their sum.
        difference: |f - G|^2. most: the largest interval.
    """
    angle = difference + latest <= total
    magnitude = steps * latest <= total
    if angle and magnitude:
        return min(interval + 1, most)
    return max(interval - 1, 1) if not angle and not magnitude else interval


class LazyAverager(AllreduceAverager):
    """Averages the lazy parameters every `interval` steps, the sum of their gradients since the last time; all others always.

    Args:
        lazy: the parameters of the front layers. max_interval: most steps between two averagings of these.
        check_every: averagings from one check of the interval to the next.

    Attributes:
        interval: steps from one averaging of the front layers to the next, the same on every rank.
    """

    pending = _ADDED

    def __init__(
        self, setup: AveragerSetup, agreement: Agreement, *, lazy: Collection[str], max_interval: int, check_every: int
    ) -> None:
        super().__init__(setup, agreement)
        self._lazy, self._max_interval, self._check_every = lazy, max_interval, check_every
        stop = max((self.group.segment(name).stop for name in lazy), default=0)
        self._arithmetic = self.group.arithmetic
        self._added, self._latest = (self._arithmetic.zeros(stop, self.group.dtype) for _ in range(2))
        self.holders = self.comm.size
        self._decision = np.ones(1, np.int64)
        self._decided: Ticket | None = None
        self._comparison: _Comparison | None = None
        self._averages = True
        self._steps = 0
        self._averagings = 0
        self.interval = 1

    def begin_step(self, lr: float, counts: Sequence[int] | None = None) -> None:
        self._steps += 1
        self._averages = self._steps >= self.interval
        if self._averages:
            self._adopt()
        super().begin_step(lr, counts)
        if self._averages:
            if self._max_interval > 1 and self._averagings % self._check_every == 0 and self._comparison is None:
                self._begin_comparison()
            self._averagings += 1

    def _adopt(self) -> None:
        """Take the interval that an earlier averaging has led to; the same on every rank."""
        if self._decided is not None:
            self.progress.wait(self._decided)
            self._decided = None
            self.interval = int(self._decision[0])

    def _operations_of_step(self) -> tuple[Operation, ...]:
        operations = super()._operations_of_step()
        return operations if self._averages else tuple(one for one in operations if not self._is_lazy(one.slice))

    def _is_lazy(self, k: int) -> bool:
        return self.schedule.slices[k].parameters[0] in self._lazy

    def grad_ready(self, parameter: Parameter) -> None:
        if parameter.size and parameter.name in self._lazy:
            segment = self.group.segment(parameter.name)
            gradient = self.group.grad[segment.start : segment.stop]
            added = self._added[segment.start : segment.stop]
            if not self._averages:
                self._arithmetic.add(added, gradient)
            else:
                if self._comparison is not None:
                    self._arithmetic.copy(self._latest[segment.start : segment.stop], gradient)
                self._arithmetic.add(gradient, added)
                self._arithmetic.fill(added, 0.0)
        super().grad_ready(parameter)

    def end_backward(self) -> None:
        super().end_backward()
        if self._averages:
            self._steps = 0

    def drain(self) -> None:
        super().drain()
        if self._decided is not None:
            self.progress.wait(self._decided)

    # -- the interval --------------------------------------------------------------------------------------------------------

    def _begin_comparison(self) -> None:
        """Queue the sums of the last gradients alone, behind what the update waits for."""
        if self._steps == 1:  # f is G
            self._decision[0] = next_interval(self.interval, 1, 1.0, 1.0, 0.0, self._max_interval)
            self._decided = LocalEvent("interval of averaging")
            self._decided.happen()
            return
        slices = [operation.slice for operation in self._step.operations if self._is_lazy(operation.slice)]
        self._comparison = comparison = _Comparison(self._step, self._steps)
        self._arithmetic.fill(self._latest, 0.0)
        for k in slices:
            start, text = partial(self._start_latest, k), f"latest gradient of {self.schedule.slices[k].name}"
            comparison.tickets[k] = self._queue.post(start, text, [self._step.pending[k]])

    def _start_latest(self, k: int) -> Handle:
        piece = self.schedule.slices[k]
        return self._comm.iallreduce(self._latest[piece.start : piece.stop])

    def _update(self, step: AllreduceStep, k: int) -> None:
        comparison = self._comparison
        if comparison is not None and comparison.step is step and k in comparison.tickets:
            self.progress.wait((step.pending[k], comparison.tickets.pop(k)))
            self._compare(comparison, k)
            if not comparison.tickets:
                self._decide(comparison)
        super()._update(step, k)

    def _compare(self, comparison: _Comparison, k: int) -> None:
        """Add one slice's |f|^2, |G|^2 and |f - G|^2."""
        piece = self.schedule.slices[k]
        total, latest = self.group.grad[piece.start : piece.stop], self._latest[piece.start : piece.stop]
        squares = self._arithmetic.square_sums((latest, total))
        comparison.latest += float(squares[0])
        comparison.total += float(squares[1])
        self._arithmetic.subtract(latest, total)
        comparison.difference += float(self._arithmetic.square_sums((latest,))[0])

    def _decide(self, comparison: _Comparison) -> None:
        """Rank 0 decides, as sums may differ in their last bits from rank to rank."""
        self._comparison = None
        self._decision[0] = next_interval(
            self.interval, comparison.steps, comparison.latest, comparison.total, comparison.difference, self._max_interval
        )
        self._decided = self._queue.post(lambda: self._comm.ibroadcast(self._decision, 0), "interval of averaging")

    def held_gradients(self) -> Mapping[str, Array]:
        segments = (self.group.segment(name) for name in self._lazy)
        return {segment.parameter: self._added[segment.start : segment.stop] for segment in segments}

    # -- gradients that are not averaged yet, in a checkpoint ------------------------------------------------------------------

    def full_state(self, parameter: Parameter) -> dict[str, np.ndarray]:
        """Also the gradients added up since the last averaging, each rank's. Collective."""
        state = super().full_state(parameter)
        if parameter.name in self._lazy:
            segment = self.group.segment(parameter.name)
            added = np.ascontiguousarray(self._arithmetic.to_host(self._added[segment.start : segment.stop]))
            by_rank = np.empty((self.holders, segment.size), added.dtype)
            handle = self.comm.iallgather(added, by_rank.reshape(-1), [segment.size] * self.holders)
            self.progress.wait_handle(handle, f"{_ADDED} of {parameter.name}")
            state[_ADDED] = by_rank
        return state

    def load_state(self, parameter: Parameter, state: Mapping[str, np.ndarray]) -> None:
        super().load_state(parameter, state)
        if parameter.name in self._lazy:
            segment = self.group.segment(parameter.name)
            self._arithmetic.from_host(self._added[segment.start : segment.stop], state[_ADDED][self.comm.rank])

    def counters(self) -> dict[str, int]:
        self._adopt()
        return {"interval": self.interval, "steps": self._steps, "averagings": self._averagings}

    def load_counters(self, counters: Mapping[str, int]) -> None:
        self.interval, self._steps = counters.get("interval", 1), counters.get("steps", 0)
        self._averagings = counters.get("averagings", 0)
