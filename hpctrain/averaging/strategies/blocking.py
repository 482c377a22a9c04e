"""Blocking averaging, the reference of all strategies: one allreduce of all gradients after backward, then the update."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.averaging.base import Agreement, AveragerSetup, GradientAverager, Strategy, WireOptions
from hpctrain.averaging.group_sums import JointStep, fill_share
from hpctrain.nn.parameter import Parameter


class BlockingAverager(GradientAverager):
    """Averager that sums all gradients in `end_backward` and then updates all parameters. `end_backward` is collective and waits.

    All gradients travel in one message of any size. The order of additions is therefore that of the transport and does not depend
    on a rule for cutting messages; this makes the averager the reference for all other strategies. No communication is hidden: in
    addition to forward, backward and the allreduce, a step includes the full update on every rank and the wait for the slowest
    rank. For a message above some 32 MB, MPI may allocate and touch memory in every step. Cutting it as `parts_of` does would
    avoid that, but could change the last bits, because MPI may choose another algorithm.
    """

    def __init__(self, setup: AveragerSetup, agreement: Agreement) -> None:
        super().__init__(setup)
        self._sums, self._terms = self.comm if agreement.sums is None else agreement.sums, setup.terms
        self.optimizer.bind(self.group, self.group.segments)
        self.update_parts = (self.group.segments,)
        self.reads = setup.read_sums(self.update_parts)
        self._queue = self.progress.queue(self.comm)
        self._names = tuple(self.group.parameters)
        self._step: JointStep | None = None
        self._unfinished: JointStep | None = None
        self._lr = 0.0

    def begin_step(self, lr: float, counts: Sequence[int] | None = None) -> None:
        self._update_late()
        self._lr = lr
        self.optimizer.begin_step()
        if self._joint is not None:
            self._step = self._joint.begin_step(self._member)

    def grad_ready(self, parameter: Parameter) -> None:
        """Do nothing, because no message starts before all gradients are ready."""

    def end_backward(self) -> None:
        self.progress.wait(self._queue.post(lambda: self._sums.iallreduce(self._terms(0, self.group.size)), "all gradients"))
        if self.optimizer.needs_norms:
            self.optimizer.prepare_norms(self.group.segments)
        if self._step is not None:  # the update needs norms of groups that have not been summed yet
            fill_share(self._step.norms[self._member], self.group, self.comm, self._names)
            self._step.contribute(self._member)
            self._unfinished = self._step
            self.progress.poll()
            return
        if self._norms is not None:
            self._norms.clear(slice(None))
            self._norms.add_partial(self.group, self.group.segments)
            self._norms.complete(slice(None))
        self.optimizer.update(self.group.segments, self._lr, self._norms)

    def before_forward(self, parameters: Sequence[Parameter]) -> None:
        self._update_late()

    def drain(self) -> None:
        self._update_late()

    def _update_late(self) -> None:
        """Apply the step's update if it had to wait for norms of several groups; otherwise `end_backward` has applied it."""
        step, self._unfinished = self._unfinished, None
        if step is not None:
            self.progress.wait(step.ticket)
            self.optimizer.update(self.group.segments, self._lr, step.norms[self._member])


class Blocking(Strategy):
    """One allreduce of all gradients after backward, and a wait for it: the simplest strategy, and the reference of all others.

    Every rank holds all parameters and all optimiser state. The strategy has no schedule.
    """

    Options = WireOptions
    adds_norms = True
    sums_shards = True

    def averager(self, setup: AveragerSetup, agreement: Agreement) -> GradientAverager:
        return BlockingAverager(setup, agreement)
