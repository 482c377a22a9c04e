"""Blocking averaging: one allreduce of all gradients after backward, the same update everywhere. The oracle of all others."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.averaging.base import GradientAverager
from hpctrain.comm.base import Communicator
from hpctrain.comm.progress import ProgressEngine
from hpctrain.nn.parameter import FlatGroup, Parameter
from hpctrain.optim.base import Norms, Optimizer


class Blocking(GradientAverager):
    """Every rank holds all parameters and all optimiser state; `end_backward` is collective over `comm` and waits."""

    def __init__(self, group: FlatGroup, optimizer: Optimizer, comm: Communicator, progress: ProgressEngine) -> None:
        super().__init__(group, optimizer, comm, progress)
        optimizer.bind(group, group.segments)
        self._queue = progress.queue(comm)
        self._norms = Norms(group) if optimizer.needs_norms else None
        self._lr = 0.0

    def begin_step(self, lr: float, counts: Sequence[int] | None = None) -> None:
        self._lr = lr

    def grad_ready(self, parameter: Parameter) -> None:
        """Nothing leaves before all gradients are there."""

    def end_backward(self) -> None:
        self.progress.wait(self._queue.post(lambda: self.comm.iallreduce(self.group.grad), "all gradients"))
        if self._norms is not None:
            self._norms.squares[...] = 0.0
            self._norms.add_partial(self.group, self.group.segments)
        self.optimizer.update(self.group.segments, self._lr, self._norms)

    def before_forward(self, parameters: Sequence[Parameter]) -> None:
        """Parameters hold the step's values since `end_backward`."""

    def drain(self) -> None:
        """Nothing is ever on its way between steps."""
