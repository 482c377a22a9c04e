"""The core of allreduce-based averaging that overlaps: nonblocking allreduces in backward, the whole update on every rank."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from hpctrain.averaging import planning
from hpctrain.averaging.base import GradientAverager
from hpctrain.averaging.collective_schedule import CollectiveSchedule, Operation, OperationKind, Stream, agree
from hpctrain.averaging.local_event import LocalEvent
from hpctrain.averaging.norms import JointNorms, JointStep, fill_share
from hpctrain.averaging.slices import Slice, fingerprint
from hpctrain.comm.base import Communicator, Handle
from hpctrain.comm.link import LinkModel, calibrate
from hpctrain.comm.progress import ProgressEngine, Ticket
from hpctrain.comm.single import Complete
from hpctrain.nn.parameter import FlatGroup, Parameter
from hpctrain.optim.base import Norms, Optimizer


@dataclass
class ReductionStep:
    """What belongs to one step: its gates, and the tickets of slices that have not been updated."""

    lr: float
    ready: dict[str, LocalEvent]
    operations: tuple[Operation, ...]
    pending: dict[int, Ticket] = field(default_factory=dict)
    joint: JointStep | None = None
    norms_complete: bool = False


class _Several:
    """Operations that are complete together."""

    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = handles

    def test(self) -> bool:
        self._handles = [handle for handle in self._handles if not handle.test()]
        return not self._handles

    def __str__(self) -> str:
        return ", ".join(map(str, self._handles))


class AllreduceAverager(GradientAverager):
    """Each slice is summed by one allreduce, in place, from when its last gradient is ready.

    It is updated on every rank in the next `before_forward` of a parameter of it, or in `drain`. Slices hold whole parameters.
    """

    #: sizes follow from a link: None: from none, "rule": from one that is always the same, "measured"
    _sizes: planning.Sizes | None = None
    #: a very large slice travels in several operations, posted together
    _cuts_large = True

    def __init__(
        self,
        group: FlatGroup,
        optimizer: Optimizer,
        comm: Communicator,
        progress: ProgressEngine,
        *,
        norms: JointNorms | None = None,
    ) -> None:
        super().__init__(group, optimizer, comm, progress, norms)
        optimizer.bind(group, group.segments)
        self._norms = Norms(group) if optimizer.needs_norms and self._joint is None else None
        self._names = tuple(name for name, parameter in group.parameters.items() if parameter.size)
        self._step: ReductionStep | None = None
        self._previous: ReductionStep | None = None

    @abstractmethod
    def _request(self) -> str:
        """The strategy and its options, in words: what a stored schedule must have been made for."""

    @abstractmethod
    def _slices(self, link: LinkModel | None) -> tuple[Slice, ...]:
        """Slices of all parameters, in forward order. link: what sizes follow from, where they do from any."""

    def agree(self, stored: CollectiveSchedule | None = None) -> None:
        comm = self.comm.split(0, self.comm.rank, f"{self.comm.name} gradients")
        assert comm is not None
        self._comm = comm
        self._queue = self.progress.queue(comm)
        usable = stored if self.accepts(stored) else None
        measures = any(comm.allgather_object(self._sizes == "measured" and usable is None))  # the same on every rank
        link = calibrate(comm, self.progress) if measures else None
        self.schedule = self.plan(link) if usable is None else usable
        agree(comm, self.schedule)
        super().agree(stored)
        self._touching = {
            name: [k for k, each in enumerate(self.schedule.slices) if name in each.parameters] for name in self.group.parameters
        }
        self._segments = [tuple(self.group.segment(name) for name in each.parameters) for each in self.schedule.slices]

    def plan(self, link: LinkModel | None) -> CollectiveSchedule:
        slices = self._slices(planning.RULE_LINK if self._sizes == "rule" else link)
        order = (Operation(OperationKind.ALLREDUCE, k, Stream.GRADIENTS) for k in reversed(range(len(slices))))
        return CollectiveSchedule(self.request(), self.comm.size, slices, tuple(order))

    def request(self) -> str:
        return f"{self._request()}; {fingerprint(self.group)}"

    def begin_step(self, lr: float, counts: Sequence[int] | None = None) -> None:
        if self.schedule is None:
            self.agree()
        assert self.schedule is not None
        self._previous = self._step
        gates = {name: LocalEvent(f"gradient of {name}") for name in self._names}
        step = self._step = ReductionStep(lr, gates, self._operations_of_step())
        for operation in step.operations:
            k, each = operation.slice, self.schedule.slices[operation.slice]
            after = [step.ready[name] for name in each.parameters]
            step.pending[k] = self._queue.post(partial(self._start, k), f"{operation.kind} of {each.name}", after)
        if self._joint is not None:
            step.joint = self._joint.begin_step(self._member)
            own_sums = tuple(step.pending.values())
            self._queue.post(partial(self._contribute, step.joint), "squares of all gradients", own_sums)

    def _operations_of_step(self) -> tuple[Operation, ...]:
        """What the step that begins posts, in the schedule's order; slices that it leaves out are not updated."""
        assert self.schedule is not None
        return self.schedule.operations

    def grad_ready(self, parameter: Parameter) -> None:
        if parameter.size:
            assert self._step is not None
            assert self._is_settled(parameter), f"{parameter.name} was used before it was waited for"
            self._step.ready[parameter.name].open()
            self.progress.poll()

    def end_backward(self) -> None:
        """Parameters that this step did not use are announced here, with whatever gradient they hold."""
        assert self._step is not None
        self._settle(self._previous)
        for gate in self._step.ready.values():
            gate.open()
        self.progress.poll()

    def before_forward(self, parameters: Sequence[Parameter]) -> None:
        for parameter in parameters:
            for k in self._touching[parameter.name]:
                self._update(self._previous, k)

    def drain(self) -> None:
        self._settle(self._previous)
        self._settle(self._step)

    def _start(self, k: int) -> Handle:
        assert self.schedule is not None
        each = self.schedule.slices[k]
        whole = self.group.grad[each.start : each.stop]
        parts = planning.parts_of(whole.size, whole.itemsize, self._comm.size) if self._cuts_large else [(0, whole.size)]
        if len(parts) == 1:
            return self._comm.iallreduce(whole)
        return _Several([self._comm.iallreduce(whole[begin:end]) for begin, end in parts])

    def _is_settled(self, parameter: Parameter) -> bool:
        previous = self._previous
        return previous is None or not any(k in previous.pending for k in self._touching[parameter.name])

    def _settle(self, step: ReductionStep | None) -> None:
        if step is None:
            return
        for k in list(step.pending):
            self._update(step, k)
        if step.joint is not None:  # where this rank updates nothing, too: others wait for its part
            step.joint.complete()

    def _update(self, step: ReductionStep | None, k: int) -> None:
        """Wait for a slice's sum and update it, unless that has been done."""
        if step is None or k not in step.pending:
            return
        norms = self._complete_norms(step, k)
        self.progress.wait(step.pending.pop(k))
        self.optimizer.update(self._segments[k], step.lr, norms)

    def _complete_norms(self, step: ReductionStep, k: int) -> Norms | None:
        """What the update of a slice needs: its own norms (LARS), or all (clipping, several groups), which waits for all."""
        if step.joint is not None:
            step.joint.complete()
            return step.joint.norms[self._member]
        norms = self._norms
        if norms is None:
            return None
        if self.optimizer.clip_norm is None:
            self.progress.wait(step.pending[k])
            for segment in self._segments[k]:
                norms.squares[norms.index[segment.parameter]] = 0.0
            norms.add_partial(self.group, self._segments[k])
        elif not step.norms_complete:
            self.progress.wait(step.pending.values())
            norms.squares[...] = 0.0
            for operation in step.operations:
                norms.add_partial(self.group, self._segments[operation.slice])
            step.norms_complete = True
        return norms

    def _contribute(self, joint: JointStep) -> Handle:
        """Give this rank's part in the norms of all groups; the engine calls it once all sums are there."""
        fill_share(joint.norms[self._member], self.group, self.comm, self._names)
        joint.contribute(self._member)
        return Complete()
