"""Runs a schedule of allreduces that overlap with backward: the whole update on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

from hpctrain.averaging import slice_sizes
from hpctrain.averaging.base import Agreement, AveragerSetup, GradientAverager
from hpctrain.averaging.collective_schedule import CollectiveSchedule, Stream
from hpctrain.averaging.dependencies import EventKind, LocalEventKey, dependencies
from hpctrain.averaging.local_event import LocalEvent
from hpctrain.averaging.group_sums import JointStep, fill_share
from hpctrain.comm.base import Handle
from hpctrain.comm.posting_queue import Ticket
from hpctrain.comm.single import Complete
from hpctrain.nn.parameter import Parameter
from hpctrain.optim.base import Norms


@dataclass
class AllreduceStep:
    """The state of one step.

    events: by parameter, that its gradient is ready. pending: the tickets of slices that have not been updated.
    """

    lr: float
    events: dict[str, LocalEvent]
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

    Args:
        cuts_large: a very large slice travels in several operations, posted together.
    """

    schedule: CollectiveSchedule

    def __init__(self, setup: AveragerSetup, agreement: Agreement, *, cuts_large: bool = True) -> None:
        super().__init__(setup)
        assert agreement.schedule is not None
        self.schedule = agreement.schedule
        self._comm = agreement.streams[Stream.GRADIENTS]
        self._sums = self._comm if agreement.sums is None else agreement.sums
        self._queue = self.progress.queue(self._comm)
        self._cuts_large, self._terms = cuts_large, setup.terms
        self.optimizer.bind(self.group, self.group.segments)
        self._names = tuple(name for name, parameter in self.group.parameters.items() if parameter.size)
        self._event_texts = {name: str(LocalEventKey(EventKind.GRADIENT, name)) for name in self._names}
        operations = zip(self.schedule.operations, dependencies(self.schedule), strict=True)
        # By slice: the text of its operation, and the parameters whose gradients it comes after.
        self._posting = {
            operation.slice: (self.schedule.text(operation), [event.parameter for event in needs.events])
            for operation, needs in operations
        }
        slices = self.schedule.slices
        self._touching = {
            name: [k for k, piece in enumerate(slices) if name in piece.parameters] for name in self.group.parameters
        }
        self._segments = [tuple(self.group.segment(name) for name in piece.parameters) for piece in slices]
        self.read_parts, self.update_parts = (self.group.segments,), self._segments  # updates follow `end_backward`
        self._step = self._previous = AllreduceStep(0.0, {})  # before the first step nothing is pending

    def begin_step(self, lr: float, counts: Sequence[int] | None = None) -> None:
        """Queue all operations of the step; each starts once the gradients of its slice are ready."""
        self._previous = self._step
        self.optimizer.begin_step()
        events = {name: LocalEvent(text) for name, text in self._event_texts.items()}
        step = self._step = AllreduceStep(lr, events)
        for operation in self.schedule.operations:
            text, names = self._posting[operation.slice]
            after = [events[name] for name in names]
            step.pending[operation.slice] = self._queue.post(partial(self._start, operation.slice), text, after)
        if self._joint is not None:
            step.joint = self._joint.begin_step(self._member)
            self._queue.post(partial(self._contribute, step.joint), "squares of all gradients", tuple(step.pending.values()))

    def grad_ready(self, parameter: Parameter) -> None:
        if parameter.size:
            assert self._is_settled(parameter), f"{parameter.name} was used before it was waited for"
            self._step.events[parameter.name].happen()
            self.progress.poll()

    def end_backward(self) -> None:
        """Parameters that this step did not use are announced here, with whatever gradient they hold."""
        self._settle(self._previous)
        for event in self._step.events.values():
            event.happen()
        self.progress.poll()

    def before_forward(self, parameters: Sequence[Parameter]) -> None:
        for parameter in parameters:
            for k in self._touching[parameter.name]:
                self._update(self._previous, k)

    def drain(self) -> None:
        self._settle(self._previous)
        self._settle(self._step)

    def _start(self, k: int) -> Handle:
        """Called by the progress engine when the slice's turn has come: post its sum."""
        piece = self.schedule.slices[k]
        if not self._cuts_large:
            return self._sums.iallreduce(self._terms(piece.start, piece.stop))
        parts = slice_sizes.parts_of(piece.size, self.group.item_bytes, self._comm.size)
        handles = [self._sums.iallreduce(self._terms(piece.start + begin, piece.start + end)) for begin, end in parts]
        return handles[0] if len(handles) == 1 else _Several(handles)

    def _is_settled(self, parameter: Parameter) -> bool:
        return not any(k in self._previous.pending for k in self._touching[parameter.name])

    def _settle(self, step: AllreduceStep) -> None:
        for k in list(step.pending):
            self._update(step, k)
        if step.joint is not None:  # where this rank updates nothing, too: others wait for its contribution
            step.joint.complete()

    def _update(self, step: AllreduceStep, k: int) -> None:
        """Wait for a slice's sum and update it, unless that has been done."""
        if k not in step.pending:
            return
        norms = self._complete_norms(step, k)
        self.progress.wait(step.pending.pop(k))
        self.optimizer.update(self._segments[k], step.lr, norms)

    def _complete_norms(self, step: AllreduceStep, k: int) -> Norms | None:
        """The norms for the update of a slice: its own (LARS), or all (clipping, several groups), which waits for all sums."""
        if step.joint is not None:
            step.joint.complete()
            return step.joint.norms[self._member]
        norms = self._norms
        if norms is None:
            return None
        if self.optimizer.clip_norm is None:
            self.progress.wait(step.pending[k])
            places = slice(norms.index[self._segments[k][0].parameter], norms.index[self._segments[k][-1].parameter] + 1)
            norms.clear(places)
            self.optimizer.prepare_norms(self._segments[k])
            norms.add_partial(self.group, self._segments[k])
            norms.complete(places)
        elif not step.norms_complete:
            self.progress.wait(step.pending.values())
            norms.clear(slice(None))
            for segments in self._segments:
                self.optimizer.prepare_norms(segments)
            norms.add_partial(self.group, tuple(chain.from_iterable(self._segments)))
            norms.complete(slice(None))
            step.norms_complete = True
        return norms

    def _contribute(self, joint: JointStep) -> Handle:
        """Give this rank's part in the norms of all groups; the engine calls it once all sums are there."""
        for segments in self._segments:
            self.optimizer.prepare_norms(segments)
        fill_share(joint.norms[self._member], self.group, self.comm, self._names)
        joint.contribute(self._member)
        return Complete()
