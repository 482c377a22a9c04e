"""The seam between backward and the network: gradients in, agreed parameters out.

An averager turns this rank's gradients into the update of every `Parameter.data` that the whole group agrees on. It sums and
never divides: the loss has divided by the global count of the step. It owns the order of its collectives, which follows from
the step alone and is the same on every rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from hpctrain.averaging.collective_schedule import CollectiveSchedule
from hpctrain.averaging.norms import JointNorms
from hpctrain.comm.base import Array, Communicator
from hpctrain.comm.link import LinkModel
from hpctrain.comm.progress import ProgressEngine
from hpctrain.nn.parameter import FlatGroup, Parameter, Segment
from hpctrain.optim.base import Optimizer


class GradientAverager(ABC):
    """One strategy a file. A step calls, in this order:

    begin_step(lr, counts); per layer in forward: before_forward, input_ready; per layer in backward: error_ready, grad_ready,
    data_free; end_backward(). `drain` may come between steps.

    Args:
        group: the parameters, on this rank. optimizer: unbound; the averager binds it to what this rank owns.
        comm: the group of ranks that hold these parameters. progress: the process's progress engine.
        norms: of all groups, where the network has several; None where this one has all parameters. A strategy that has no such
            keyword adds up no norms, and is refused beside an optimiser that needs them.

    Attributes:
        schedule: what a step posts, once agreed on; None where a strategy has none.
        order: the ranks of `comm` as the schedule counts them; None: as `comm` does.
        pending: the state, named "<strategy>_gradient", of gradients that are added up and not applied yet; None where there is
            none. It is empty at the start, and a checkpoint without it says just that.
    """

    pending: ClassVar[str | None] = None
    schedule: CollectiveSchedule | None = None
    order: tuple[int, ...] | None = None

    def __init__(
        self,
        group: FlatGroup,
        optimizer: Optimizer,
        comm: Communicator,
        progress: ProgressEngine,
        norms: JointNorms | None = None,
    ) -> None:
        self.group = group
        self.optimizer = optimizer
        self.comm = comm
        self.progress = progress
        self._joint = norms if optimizer.needs_norms else None
        self._member = self._joint.join(group) if self._joint is not None else -1

    def agree(self, stored: CollectiveSchedule | None = None) -> None:
        """Fix the schedule, the same on every rank. Collective over `comm`; once, after construction and before all else.

        The first step does it where nobody has.

        Args:
            stored: of an earlier run; used where it was made for the same strategy, options, parameters and ranks (`accepts`).
                Sizes of slices decide which numbers are added first: where they are measured, only this repeats a run bit by bit.
                The order of operations, which changes no bit, is measured where it had not been.

        Raises:
            CollectiveMismatchError: ranks with different schedules, on every rank; the message names the first difference.
        """
        if self._joint is not None:
            self._joint.agree()

    def request(self) -> str | None:
        """The words for what a stored schedule must have been made for; None where a strategy has none. Known before `agree`."""
        return None

    def accepts(self, stored: CollectiveSchedule | None) -> bool:
        """Whether a stored schedule is one for this averager: the same strategy, options and parameters on as many ranks."""
        return stored is not None and (stored.request, stored.ranks) == (self.request(), self.comm.size)

    def plan(self, link: LinkModel | None) -> CollectiveSchedule | None:
        """What the first steps post over a link, from sizes alone; None where a strategy has no schedule. Not collective.

        Args:
            link: None where no size or order follows from it.
        """
        return None

    @abstractmethod
    def begin_step(self, lr: float, counts: Sequence[int] | None = None) -> None:
        """A step starts; its update will use learning rate `lr`. counts: the step's samples on each rank of `comm`."""

    def takes_sufficient_factors(self, parameters: Sequence[Parameter]) -> bool:
        """True where the gradients of a linear layer (weight, and bias if any) are made from exchanged inputs and errors.

        Fixed at set-up from the nominal global batch; such a layer's parameters are not announced by `grad_ready`.
        """
        return False

    def input_ready(self, parameters: Sequence[Parameter], x: Array) -> None:  # noqa: B027  most take gradients only
        """Forward: x (N, in) of a layer that takes factors; copied before this returns. May post, must not wait."""

    def error_ready(self, parameters: Sequence[Parameter], dy: Array) -> None:  # noqa: B027
        """Backward, before the input's gradient: dy (N, out) of such a layer; copied before this returns."""

    @abstractmethod
    def grad_ready(self, parameter: Parameter) -> None:
        """`parameter.grad` is final on this rank, once a step (the last micro-batch). May post, must not wait."""

    def data_free(self, parameter: Parameter) -> None:  # noqa: B027
        """Backward no longer reads `parameter.data`. Nothing writes it before: updates and posted receives included."""

    @abstractmethod
    def end_backward(self) -> None:
        """All gradients of the step are announced."""

    @abstractmethod
    def before_forward(self, parameters: Sequence[Parameter]) -> None:
        """Wait until these parameters hold the values of this step. Nobody reads them earlier."""

    @abstractmethod
    def drain(self) -> None:
        """Everything complete everywhere: before evaluation, checkpoint and hash. Collective."""

    def owned(self) -> Sequence[Segment]:
        """The parts of the group that this rank updates, and whose optimiser state it holds. All of it, unless sharded."""
        return self.group.segments

    def held_gradients(self) -> Mapping[str, np.ndarray]:
        """By parameter, gradients of earlier steps that this rank still keeps back from every update. None, by default."""
        return {}

    def full_state(self, parameter: Parameter) -> dict[str, np.ndarray]:
        """The optimiser's state of one whole parameter, 1-D, by name: what a checkpoint writes. After `drain`.

        Collective where the state is sharded; here it is a view of what this rank holds.
        """
        return self.optimizer.state(self.group.segment(parameter.name))

    def load_state(self, parameter: Parameter, state: Mapping[str, np.ndarray]) -> None:
        """Take this rank's part of one parameter's whole state (1-D, by name), as `full_state` gave it."""
        begin = self.group.segment(parameter.name).start
        for segment in self.owned():
            if segment.parameter == parameter.name and segment.size:
                for name, view in self.optimizer.state(segment).items():
                    view[...] = state[name][segment.start - begin : segment.stop - begin]
