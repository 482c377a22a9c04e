"""Lazy averaging: front layers accumulate their gradients locally and are averaged every few steps. It changes the optimisation.

Lee, Kang, Al-Bahrani, Agrawal, Choudhary and Liao, "Improving scalability of parallel CNN training by adaptively adjusting
parameter update frequency", JPDC 2022. The messages of front layers are sent last, when no backward computation remains that
could hide them.

The lazy parameters lie in separate slices at the front of the flat buffers. In a step that averages, the sum G of their gradients
since the last averaging replaces the latest gradient f. In a step that compares f and G, a second reduce-scatter of these slices
sums f over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from hpctrain.averaging.base import Agreement, AveragerSetup, GradientAverager, PlannedGroup, StrategyCosts, check_at_least_one
from hpctrain.averaging.collective_schedule import EventKind, OperationKind, Stream
from hpctrain.averaging.reduce_scatter import ReduceScatterAverager
from hpctrain.averaging.strategies.sharded import Sharded, ShardedOptions
from hpctrain.comm.base import Array, Communicator, Complete, Handle
from hpctrain.comm.progress import Dependency, ProgressEngine, Ticket
from hpctrain.nn.parameter import Parameter

_ADDED = "lazy_gradient"
_NUMBERS = 3  # |f|^2, |G|^2 and |f - G|^2


def next_interval(interval: int, steps: int, latest: float, total: float, difference: float, most: int) -> int:
    """Return the next interval, given the squared norms of one averaging.

    It grows by one, up to `most`, if |f - G|^2 + |f|^2 <= |G|^2 and steps |f|^2 <= |G|^2, as in the paper. If neither holds, it
    shrinks by one, down to 1.

    Args:
        steps: number of gradients that were accumulated.
        latest: |f|^2 over all ranks; f is the last of these gradients.
        total: |G|^2 over all ranks; G is their sum.
        difference: |f - G|^2.
    """
    angle = difference + latest <= total
    magnitude = steps * latest <= total
    if angle and magnitude:
        return min(interval + 1, most)
    return max(interval - 1, 1) if not angle and not magnitude else interval


@dataclass(frozen=True)
class LazyStep:
    """Work of one step on the lazy layers.

    Attributes:
        averages: whether the step averages them.
        compares: whether the step also compares f and G.
    """

    averages: bool
    compares: bool


class LazyInterval:
    """Number of steps between two averagings of the lazy layers, shared by the averagers of all groups.

    Every rank sums the squares of f and G over the elements that it owns in any group, so each element of the network is counted
    on exactly one rank. One small allgather per comparison distributes these numbers. All ranks add them in rank order and come
    to the same decision. The allgather has a separate communicator. It starts once all groups of a rank have contributed, during
    any wait of the rank; a rank that owns nothing contributes zeros. The decision after one averaging applies from the next
    averaging on, so no rank waits for it within a step. Creation is collective over `comm`.

    Args:
        comm: communicator of all ranks that hold a part or a copy of the network.
        members: number of parameter groups.
        check_every: number of averagings from one comparison to the next.

    Attributes:
        interval: current interval, the same on every rank.
    """

    def __init__(
        self, comm: Communicator, progress: ProgressEngine, members: int = 1, *, max_interval: int, check_every: int
    ) -> None:
        copied = comm.split(0, comm.rank, f"{comm.name} interval")
        assert copied is not None
        self._comm, self._progress, self._queue = copied, progress, progress.queue(copied)
        self._max_interval, self._check_every = max_interval, check_every
        self._begun = [0] * members
        self._joined = 0
        self._step = LazyStep(averages=True, compares=False)
        self._squares = np.zeros((copied.size, _NUMBERS), np.float64)
        self._missing = 0  # members that have not contributed yet
        self._ticket: Ticket | None = None
        self._compared_steps = 0
        self._steps = self._averagings = 0
        self.interval = self._decided = 1

    def join(self) -> int:
        """Add a parameter group to the members, and return its index."""
        self._joined += 1
        assert self._joined <= len(self._begun), "there are more groups of parameters than members of the interval"
        return self._joined - 1

    def begin_step(self, member: int) -> LazyStep:
        """Begin this member's step. All members must begin a step before any member begins the next.

        A step that averages waits for the comparison of an earlier step.
        """
        if self._begun[member] == max(self._begun):
            self._step = self._next_step()
        self._begun[member] += 1
        assert self._begun[member] == max(self._begun), "a group of parameters has skipped a step"
        return self._step

    def _next_step(self) -> LazyStep:
        self._steps += 1
        if self._steps < self.interval:
            return LazyStep(averages=False, compares=False)
        self.settle()
        self.interval = self._decided
        steps, self._steps = self._steps, 0
        compares = self._max_interval > 1 and self._averagings % self._check_every == 0
        self._averagings += 1
        if not compares:
            return LazyStep(averages=True, compares=False)
        if steps == 1:  # f is G
            self._decided = next_interval(self.interval, 1, 1.0, 1.0, 0.0, self._max_interval)
            return LazyStep(averages=True, compares=False)
        self._squares[...] = 0.0
        self._compared_steps, self._missing = steps, len(self._begun)
        return LazyStep(averages=True, compares=True)

    def compare(self, add_squares: Callable[[np.ndarray], None], after: Sequence[Dependency]) -> None:
        """Queue one member's part of a comparison, without waiting. Every member must call it once in a step that compares.

        Args:
            add_squares: function that adds |f|^2, |G|^2 and |f - G|^2 of this rank's elements to an array (3,).
            after: tickets that must be complete first.
        """
        assert self._missing, "every group of parameters must contribute once"
        self._queue.post(partial(self._add, add_squares), "squares of gradients that were held back", after)
        self._missing -= 1
        if not self._missing:
            counts = [_NUMBERS] * self._comm.size
            everyone = self._squares.reshape(-1)
            self._ticket = self._queue.post(lambda: self._comm.iallgather(None, everyone, counts), "interval of averaging")

    def _add(self, add_squares: Callable[[np.ndarray], None]) -> Handle:
        add_squares(self._squares[self._comm.rank])
        return Complete()

    def settle(self) -> None:
        """Wait for the comparison in progress, if any, and decide on the interval. All ranks call it between the same steps."""
        if self._ticket is None:
            return
        self._progress.wait(self._ticket)
        self._ticket = None
        latest, total, difference = (sum(column) for column in self._squares.T.tolist())
        self._decided = next_interval(self.interval, self._compared_steps, latest, total, difference, self._max_interval)

    def counters(self) -> dict[str, int]:
        """Return numbers, by name, on which later steps depend. Call it after `settle`."""
        return {"interval": self.interval, "decided": self._decided, "steps": self._steps, "averagings": self._averagings}

    def load_counters(self, counters: Mapping[str, int]) -> None:
        """Load the numbers that `counters` returned, limited to the current maximum interval."""
        self.interval = min(counters.get("interval", 1), self._max_interval)
        self._decided = min(counters.get("decided", self.interval), self._max_interval)
        self._steps, self._averagings = counters.get("steps", 0), counters.get("averagings", 0)


class LazyAverager(ReduceScatterAverager):
    """Averager that averages all parameters in every step, except lazy parameters, which it averages every few steps.

    A step that averages the lazy parameters uses the sum of their gradients since the last averaging. Other steps neither sum,
    update nor gather their slices.

    Args:
        lazy: parameters of the front layers; no slice contains both lazy and other parameters.
    """

    pending = _ADDED

    def __init__(
        self, setup: AveragerSetup, agreement: Agreement, *, lazy: Collection[str], interval: LazyInterval, **others: Any
    ) -> None:
        super().__init__(setup, agreement, **others)
        slices = self.schedule.slices
        self._lazy, self._interval, self._place = lazy, interval, interval.join()
        self._lazy_slices = frozenset(k for k, piece in enumerate(slices) if piece.parameters[0] in lazy)
        stop = max((self.group.segment(name).stop for name in lazy), default=0)
        self._arithmetic = self.group.arithmetic
        self._added = self._arithmetic.zeros(stop, self.group.dtype)
        self.holders = self.comm.size
        self._now = LazyStep(averages=True, compares=False)
        alone = self._comm.size == 1
        #: latest gradient f of this rank and, by slice, the owned part of its sum over the ranks; empty on a single rank
        self._latest = self._arithmetic.zeros(0 if alone else stop, self.group.dtype)
        self._latest_sums: dict[int, Array] = {}
        for k in () if alone else sorted(self._lazy_slices, reverse=True):
            owned = slices[k].owned_size(self._comm.rank, self._comm.size)
            self._latest_sums[k] = self._arithmetic.zeros(owned, self.group.dtype)
        self._sums_of = self._comm if agreement.sums is None else agreement.sums
        self._squares_alone = np.zeros(3, np.float64)

    @property
    def interval(self) -> int:
        """Number of steps from one averaging of the front layers to the next, the same on every rank."""
        return self._interval.interval

    # -- a step --------------------------------------------------------------------------------------------------------------

    def begin_step(self, lr: float, counts: Sequence[int] | None = None) -> None:
        self._now = self._interval.begin_step(self._place)
        super().begin_step(lr, counts)
        if self._now.compares:
            self._queue_comparison()

    def left_out_slices(self) -> frozenset[int]:
        return frozenset() if self._now.averages else self._lazy_slices

    def grad_ready(self, parameter: Parameter) -> None:
        if parameter.size and parameter.name in self._lazy:
            segment = self.group.segment(parameter.name)
            place = slice(segment.start, segment.stop)
            gradient, added = self.group.grad[place], self._added[place]
            if not self._now.averages:
                self._arithmetic.add(added, gradient)
            elif not self._now.compares:
                self._arithmetic.add(gradient, added)
                self._arithmetic.fill(added, 0.0)
            else:
                self._add_up_and_keep(place, gradient, added)
        super().grad_ready(parameter)

    def _add_up_and_keep(self, place: slice, gradient: Array, added: Array) -> None:
        """Replace f by G in the gradient. Keep f, or its squared norms on a single rank, for the comparison."""
        if self._latest_sums:
            self._arithmetic.copy(self._latest[place], gradient)
            self._arithmetic.add(gradient, added)
        else:
            latest, difference = self._arithmetic.square_sums((gradient, added))  # `added` is G - f
            self._arithmetic.add(gradient, added)
            self._squares_alone += (latest, self._arithmetic.square_sums((gradient,))[0], difference)
        self._arithmetic.fill(added, 0.0)

    def drain(self) -> None:
        super().drain()
        self._interval.settle()

    # -- the comparison of f and G -------------------------------------------------------------------------------------------

    def _queue_comparison(self) -> None:
        """Queue the sums of the latest gradients f, then this group's part of the comparison."""
        assert self.step is not None
        self._arithmetic.fill(self._latest, 0.0)
        self._squares_alone[...] = 0.0
        events = self.step.events[EventKind.GRADIENT]
        after: list[Dependency] = []
        for k in sorted(self._lazy_slices, reverse=True):
            piece = self.schedule.slices[k]
            ready: list[Dependency] = [events[name] for name in piece.parameters]
            if k in self._latest_sums:
                text = f"reduce-scatter of the latest gradient of {piece.name}"
                latest, counts = self._latest[piece.start : piece.stop], piece.counts(self._comm.size)
                start = partial(self._sums_of.ireduce_scatter, latest, self._latest_sums[k], counts)
                ready = [self.queues[Stream.GRADIENTS].post(start, text, ready)]
            after += ready
        for ticket, (operation, _, _) in zip(self.step.tickets, self.posting, strict=True):
            if operation.kind is OperationKind.REDUCE_SCATTER and operation.slice in self._lazy_slices:
                after.append(ticket)
        self._interval.compare(self._add_squares, after)

    def _add_squares(self, squares: np.ndarray) -> None:
        """Add |f|^2, |G|^2 and |f - G|^2 of the elements that this rank owns to `squares`."""
        squares += self._squares_alone
        for k, latest in self._latest_sums.items():
            total = self.operations.sums[k]
            latest_square, total_square = self._arithmetic.square_sums((latest, total))
            self._arithmetic.subtract(latest, total)
            squares += (latest_square, total_square, self._arithmetic.square_sums((latest,))[0])

    # -- gradients that are not averaged yet ---------------------------------------------------------------------------------

    def held_gradients(self) -> Mapping[str, Array]:
        segments = (self.group.segment(name) for name in self._lazy)
        return {segment.parameter: self._added[segment.start : segment.stop] for segment in segments}

    def changed(self) -> Sequence[Array]:
        return [*super().changed(), self._added]

    def full_state(self, parameter: Parameter) -> dict[str, np.ndarray]:
        """Return the state that the base returns and, by rank, the gradients accumulated since the last averaging. Collective."""
        state = super().full_state(parameter)
        if parameter.name in self._lazy:
            segment = self.group.segment(parameter.name)
            added = np.ascontiguousarray(self._arithmetic.to_host(self._added[segment.start : segment.stop]))
            by_rank = np.empty((self.holders, segment.size), added.dtype)
            handle = self.comm.iallgather(added, by_rank.reshape(-1), [segment.size] * self.holders)
            self.progress.wait_handle(handle, f"{_ADDED} of {parameter.name}")
            state[_ADDED] = by_rank
        return state

    def state_names(self, parameter: Parameter) -> Collection[str]:
        return (*super().state_names(parameter), *((_ADDED,) if parameter.name in self._lazy else ()))

    def load_state(self, parameter: Parameter, state: Mapping[str, np.ndarray]) -> None:
        super().load_state(parameter, state)
        if parameter.name in self._lazy:
            segment = self.group.segment(parameter.name)
            self._arithmetic.from_host(self._added[segment.start : segment.stop], state[_ADDED][self.comm.rank])

    def counters(self) -> dict[str, int]:
        return {**super().counters(), **self._interval.counters()}

    def load_counters(self, counters: Mapping[str, int]) -> None:
        super().load_counters(counters)
        self._interval.load_counters(counters)


@dataclass(frozen=True)
class LazyOptions(ShardedOptions):
    """Options of `lazy`, in addition to those of `sharded`.

    Args:
        layers: Number of layers, counted from the input, whose gradients are summed over several steps; all layers if the network
            has fewer.
        max_interval: Maximum interval between two averagings of these layers, in steps; 1 averages them in every step.
        check_every: Number of averagings between two checks of the interval, each of which may change it by one step.

    Raises:
        OptionError: a value is below 1.
    """

    layers: int = 8
    max_interval: int = 8
    check_every: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least_one(layers=self.layers, max_interval=self.max_interval, check_every=self.check_every)


class Lazy(Sharded):
    """Sharded averaging that sums the gradients of front layers over several steps. It changes the optimisation.

    Slices of the front layers, which contain no other parameters, are reduced, updated and gathered every `interval` steps, with
    the sum of the gradients since the last averaging. In between, parameters and optimiser state of these layers do not change.
    The interval starts at 1 and adapts (see `next_interval`); a change applies from the next averaging on. The comparison costs a
    second reduce-scatter of these layers and is therefore made only every `check_every` averagings.

    Linear layers among the front layers never exchange inputs and errors, because the accumulated values are gradients.
    """

    sums_shards = False
    Options = LazyOptions
    options: LazyOptions

    def __init__(self, group: PlannedGroup, options: LazyOptions | None = None) -> None:
        super().__init__(group, options)
        # Names that differ only after the last dot belong to one layer.
        owners = list(dict.fromkeys(name.rpartition(".")[0] for name in group.network_parameters))
        front = set(owners[: self.options.layers])
        self._lazy = frozenset(name for name in group.layout.specs if name.rpartition(".")[0] in front)
        self.apart = self.accumulated = self._lazy
        self.exchanging = {weight: biases for weight, biases in self.exchanging.items() if weight not in self._lazy}

    @classmethod
    def costs(cls, options: Any) -> StrategyCosts:
        """Return the costs of a step that averages all layers."""
        differ = "Schedules, bytes and steps of lazy are for a step that averages all layers without checking the interval."
        return replace(super().costs(options), note=None if options.max_interval == 1 else differ)

    def words(self) -> str:
        _, _, options = super().words().partition(", ")
        return f"lazy, layers {self.options.layers} with {len(self._lazy)} parameters of this group, {options}"

    def shared(self, comm: Communicator, progress: ProgressEngine, members: int) -> LazyInterval:
        options = self.options
        return LazyInterval(comm, progress, members, max_interval=options.max_interval, check_every=options.check_every)

    def averager(self, setup: AveragerSetup, agreement: Agreement) -> GradientAverager:
        interval: LazyInterval | None = setup.shared
        if interval is None:
            assert not self.group.several_groups, "the groups of a network must share their interval"
            interval = self.shared(setup.comm, setup.progress, 1)
        return LazyAverager(setup, agreement, lazy=self._lazy, interval=interval, **self.averager_arguments(agreement))
