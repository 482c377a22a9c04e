"""Lazy averaging: front layers add up their gradients locally and are averaged every few steps only. It changes the optimisation.

Lee, Kang, Al-Bahrani, Agrawal, Choudhary and Liao, "Improving scalability of parallel CNN training by adaptively adjusting
parameter update frequency", JPDC 2022. The messages of front layers leave last, when no backward is left to hide them under.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from hpctrain.averaging import planning
from hpctrain.averaging.collective_schedule import Operation
from hpctrain.averaging.local_event import LocalEvent
from hpctrain.averaging.norms import JointNorms
from hpctrain.averaging.reduction import AllreduceAverager, ReductionStep
from hpctrain.averaging.slices import Slice, fused
from hpctrain.comm.base import Communicator, Handle
from hpctrain.comm.link import LinkModel
from hpctrain.comm.progress import ProgressEngine, Ticket
from hpctrain.errors import ConfigError
from hpctrain.nn.parameter import FlatGroup, Parameter
from hpctrain.optim.base import Optimizer, square_sum

_ADDED = "lazy_gradient"


@dataclass
class _Check:
    """One comparison of f and G: in which step, of how many steps, sums so far, and what is still to come by slice."""

    step: ReductionStep
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


class Lazy(AllreduceAverager):
    """Bucketed averaging that sums the gradients of front layers over several steps: it changes the optimisation.

    Overlapped, fused allreduces; those of the front layers every `interval` steps, of the sum since the last time. In between
    these layers keep their parameters. The interval starts at 1 and adapts (see `next_interval`): what one averaging finds holds
    from the next one on. Finding out costs a second allreduce of these layers, so it is done every `check_every` averagings
    only. With `max_interval` 1 this is `bucketed`.

    Args:
        layers: Number of layers, counted from the input, whose gradients are summed over several steps.
        max_interval: Most steps between two averagings of these layers; 1 makes it `bucketed`.
        check_every: Number of averagings from one check of the interval to the next.
        bucket_bytes: Least size of a bucket, in bytes; null chooses it as `sizes` says.
        sizes: How sizes that are not given are found: "rule" takes the same ones in every run on as many ranks, so that runs
            repeat bit by bit; "measured" follows the link, which is measured at the start.

    Raises:
        ConfigError: a value below 1, or a network with several groups of parameters.
    """

    pending = _ADDED

    def __init__(
        self,
        group: FlatGroup,
        optimizer: Optimizer,
        comm: Communicator,
        progress: ProgressEngine,
        *,
        norms: JointNorms | None = None,
        layers: int = 8,
        max_interval: int = 8,
        check_every: int = 4,
        bucket_bytes: int | None = None,
        sizes: planning.Sizes = "rule",
    ) -> None:
        if norms is not None:
            raise ConfigError(
                "The averager lazy holds back the first layers of one group of parameters, but this network has several, as its "
                "layers are split over grid.rows ranks; choose sharded, or set grid.rows to 1."
            )
        super().__init__(group, optimizer, comm, progress)
        self._layers = planning.check_positive("layers", layers)
        self._max_interval = planning.check_positive("max_interval", max_interval)
        self._check_every = planning.check_positive("check_every", check_every)
        self._bucket_bytes = planning.check_optional("bucket_bytes", bucket_bytes)
        self._sizes = planning.check_sizes(sizes, "bucket_bytes", bucket_bytes)
        self._lazy = _front(group, layers)
        stop = max((group.segment(name).stop for name in self._lazy), default=0)
        self._added = np.zeros_like(group.grad, shape=(stop,))
        self._latest = np.zeros_like(group.grad, shape=(stop,))
        self._decision = np.ones(1, np.int64)
        self._decided: Ticket | None = None
        self._check: _Check | None = None
        self._averages = True
        self._steps = 0
        self._averagings = 0
        self.interval = 1

    def _request(self) -> str:
        return f"lazy, layers {self._layers}, bucket_bytes {self._bucket_bytes}{planning.in_request(self._sizes)}"

    def _slices(self, link: LinkModel | None) -> tuple[Slice, ...]:
        group = self.group
        size_bytes = self._bucket_bytes
        if size_bytes is None:
            assert link is not None
            size_bytes = planning.bucket_bytes(group.grad.nbytes, self.comm.size, link)
        least = max(1, size_bytes // group.grad.itemsize)
        eager = [name for name in group.parameters if name not in self._lazy]
        return (*fused(group, least, eager), *fused(group, least, self._lazy))

    def begin_step(self, lr: float, counts: Sequence[int] | None = None) -> None:
        self._steps += 1
        self._averages = self._steps >= self.interval
        if self._averages:
            self._adopt()
        super().begin_step(lr, counts)
        if self._averages:
            if self._max_interval > 1 and self._averagings % self._check_every == 0 and self._check is None:
                self._begin_check()
            self._averagings += 1

    def _adopt(self) -> None:
        """The interval that an earlier averaging has led to; the same on every rank."""
        if self._decided is not None:
            self.progress.wait(self._decided)
            self._decided = None
            self.interval = int(self._decision[0])

    def _operations_of_step(self) -> tuple[Operation, ...]:
        operations = super()._operations_of_step()
        return operations if self._averages else tuple(each for each in operations if not self._is_lazy(each.slice))

    def _is_lazy(self, k: int) -> bool:
        assert self.schedule is not None
        return self.schedule.slices[k].parameters[0] in self._lazy

    def grad_ready(self, parameter: Parameter) -> None:
        if parameter.size and parameter.name in self._lazy:
            segment = self.group.segment(parameter.name)
            gradient = self.group.grad[segment.start : segment.stop]
            added = self._added[segment.start : segment.stop]
            if not self._averages:
                added += gradient
            else:
                if self._check is not None:
                    self._latest[segment.start : segment.stop] = gradient
                gradient += added
                added[...] = 0
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

    def _begin_check(self) -> None:
        """Queue the sums of the last gradients alone, behind what the update waits for."""
        assert self.schedule is not None
        assert self._step is not None
        if self._steps == 1:  # f is G
            self._decision[0] = next_interval(self.interval, 1, 1.0, 1.0, 0.0, self._max_interval)
            self._decided = LocalEvent("interval of averaging")
            self._decided.open()
            return
        slices = [operation.slice for operation in self._step.operations if self._is_lazy(operation.slice)]
        self._check = check = _Check(self._step, self._steps)
        self._latest[...] = 0
        for k in slices:
            start, what = partial(self._start_latest, k), f"latest gradient of {self.schedule.slices[k].name}"
            check.tickets[k] = self._queue.post(start, what, [self._step.pending[k]])

    def _start_latest(self, k: int) -> Handle:
        assert self.schedule is not None
        each = self.schedule.slices[k]
        return self._comm.iallreduce(self._latest[each.start : each.stop])

    def _update(self, step: ReductionStep | None, k: int) -> None:
        check = self._check
        if check is not None and check.step is step and k in check.tickets:
            self.progress.wait((step.pending[k], check.tickets.pop(k)))
            self._compare(check, k)
            if not check.tickets:
                self._decide(check)
        super()._update(step, k)

    def _compare(self, check: _Check, k: int) -> None:
        """Add one slice's |f|^2, |G|^2 and |f - G|^2."""
        assert self.schedule is not None
        each = self.schedule.slices[k]
        total, latest = self.group.grad[each.start : each.stop], self._latest[each.start : each.stop]
        check.latest += square_sum(latest)
        check.total += square_sum(total)
        np.subtract(latest, total, out=latest)
        check.difference += square_sum(latest)

    def _decide(self, check: _Check) -> None:
        """Rank 0 decides, as sums may differ in their last bits from rank to rank."""
        self._check = None
        self._decision[0] = next_interval(
            self.interval, check.steps, check.latest, check.total, check.difference, self._max_interval
        )
        self._decided = self._queue.post(lambda: self._comm.ibroadcast(self._decision, 0), "interval of averaging")

    def held_gradients(self) -> Mapping[str, np.ndarray]:
        segments = (self.group.segment(name) for name in self._lazy)
        return {segment.parameter: self._added[segment.start : segment.stop] for segment in segments}

    # -- what is not averaged yet, in a checkpoint ------------------------------------------------------------------------------

    def full_state(self, parameter: Parameter) -> dict[str, np.ndarray]:
        """Also the gradient added up since the last averaging, over all ranks. Collective."""
        state = dict(self.optimizer.state(self.group.segment(parameter.name)))
        if parameter.name in self._lazy:
            segment = self.group.segment(parameter.name)
            added = self._added[segment.start : segment.stop].copy()
            self.progress.wait_handle(self.comm.iallreduce(added), f"{_ADDED} of {parameter.name}")
            state[_ADDED] = added
        return state

    def load_state(self, parameter: Parameter, state: Mapping[str, np.ndarray]) -> None:
        """Rank 0 takes the added gradient. The interval starts at 1 again."""
        super().load_state(parameter, state)
        if parameter.name in self._lazy:
            segment = self.group.segment(parameter.name)
            self._added[segment.start : segment.stop] = state[_ADDED] if self.comm.rank == 0 else 0
            self.interval, self._steps = 1, 0


def _front(group: FlatGroup, layers: int) -> frozenset[str]:
    """The parameters of the first so many layers: names that differ in what follows the last dot belong to one layer."""
    owners = list(dict.fromkeys(name.rpartition(".")[0] for name in group.parameters))
    front = set(owners[:layers])
    return frozenset(name for name in group.parameters if name.rpartition(".")[0] in front)
