"""Strategies that sum each slice of the gradients by one allreduce, and their averager. Every rank updates all parameters."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any, ClassVar

from hpctrain.averaging import slicing
from hpctrain.averaging.base import (
    FORWARD_SHARE,
    Agreement,
    AveragerSetup,
    GradientAverager,
    Strategy,
    StrategyCosts,
    words_of_shards,
)
from hpctrain.averaging.collective_schedule import (
    CollectiveSchedule,
    EventKind,
    LocalEventKey,
    Operation,
    OperationKind,
    Stream,
    dependencies,
)
from hpctrain.averaging.group_sums import JointStep, fill_share
from hpctrain.averaging.sixteen_bits import Rounding, words_of_rounding
from hpctrain.averaging.slicing import Slice, fingerprint
from hpctrain.comm.base import Complete, Handle
from hpctrain.comm.groups import Levels, levels
from hpctrain.comm.link import LinkModel
from hpctrain.comm.progress import LocalEvent, Ticket
from hpctrain.comm.sums import Wire
from hpctrain.nn.parameter import Parameter
from hpctrain.optim.base import Norms


@dataclass
class AllreduceStep:
    """State of one step.

    Attributes:
        events: gradient-ready events by parameter.
        pending: tickets of the slices that have not been updated.
        joint: norms over all groups; None if this group has all parameters or no norms are needed.
        norms_complete: whether the norms of the whole group are complete.
    """

    lr: float
    events: dict[str, LocalEvent]
    pending: dict[int, Ticket] = field(default_factory=dict)
    joint: JointStep | None = None
    norms_complete: bool = False


class _Several:
    """Handle of several operations, complete once all of them are."""

    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = handles

    def test(self) -> bool:
        self._handles = [handle for handle in self._handles if not handle.test()]
        return not self._handles

    def __str__(self) -> str:
        return ", ".join(map(str, self._handles))


class AllreduceAverager(GradientAverager):
    """Averager that sums each slice in place by one allreduce, once the last gradient of the slice is ready.

    Every rank updates a slice in the next `before_forward` of one of its parameters, or in `drain`. Slices hold whole parameters.

    Args:
        cuts_large: whether a very large slice travels in several operations, posted together.
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
        # (text of its operation, parameters whose gradients it waits for), by slice
        self._posting = {
            operation.slice: (self.schedule.text(operation), [event.parameter for event in needs.events])
            for operation, needs in operations
        }
        slices = self.schedule.slices
        self._touching = {
            name: [k for k, piece in enumerate(slices) if name in piece.parameters] for name in self.group.parameters
        }
        self._segments = [tuple(self.group.segment(name) for name in piece.parameters) for piece in slices]
        self.update_parts = self._segments
        self.reads = setup.read_sums((self.group.segments,))  # updates follow `end_backward`
        self._step = self._previous = AllreduceStep(0.0, {})  # before the first step nothing is pending

    def begin_step(self, lr: float, counts: Sequence[int] | None = None) -> None:
        """Queue all operations of the step. Each starts once all gradients of its slice are ready."""
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
            settled = self._previous.pending.keys().isdisjoint(self._touching[parameter.name])
            assert settled, f"{parameter.name} was used before it was waited for"
            self._step.events[parameter.name].happen()
            self.progress.poll()

    def end_backward(self) -> None:
        """Announce the parameters that this step did not use; the current values of their gradients are averaged."""
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
        """Post the sum of a slice. The progress engine calls it when all gradients of the slice are ready."""
        piece = self.schedule.slices[k]
        if not self._cuts_large:
            return self._sums.iallreduce(self._terms(piece.start, piece.stop))
        parts = slicing.parts_of(piece.size, self.group.item_bytes, self._comm.size)
        handles = [self._sums.iallreduce(self._terms(piece.start + begin, piece.start + end)) for begin, end in parts]
        return handles[0] if len(handles) == 1 else _Several(handles)

    def _settle(self, step: AllreduceStep) -> None:
        for k in list(step.pending):
            self._update(step, k)
        if step.joint is not None:  # even if this rank updates nothing: other ranks wait for its contribution
            step.joint.complete()

    def _update(self, step: AllreduceStep, k: int) -> None:
        """Wait for a slice's sum and update the slice, unless it has been updated."""
        if k not in step.pending:
            return
        norms = self._complete_norms(step, k)
        self.progress.wait(step.pending.pop(k))
        self.optimizer.update(self._segments[k], step.lr, norms)

    def _complete_norms(self, step: AllreduceStep, k: int) -> Norms | None:
        """Return the norms for the update of a slice; None if the optimiser needs none.

        LARS and LAMB need only the norms of the slice. Clipping and several groups need all norms, so the call waits for the sums
        of all slices.
        """
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
        """Contribute this rank's squares to the norms of all groups. The engine calls it once all sums are complete."""
        for segments in self._segments:
            self.optimizer.prepare_norms(segments)
        fill_share(joint.norms[self._member], self.group, self.comm, self._names)
        joint.contribute(self._member)
        return Complete()


class AllreduceStrategy(Strategy):
    """Base of strategies with one allreduce per slice, in the order of backward. A subclass must define `words` and `slices`.

    Attributes:
        cuts_large: whether a very large slice travels in several operations, posted together.
    """

    adds_norms = True
    sums_shards = True
    streams: ClassVar[tuple[Stream, ...]] = (Stream.GRADIENTS,)
    cuts_large: ClassVar[bool] = True

    @abstractmethod
    def words(self) -> str:
        """Return the name and the options of the strategy as text, which is part of a stored schedule's request."""

    @abstractmethod
    def slices(self, link: LinkModel | None) -> tuple[Slice, ...]:
        """Return slices of all parameters, in forward order. Each slice holds whole parameters.

        Args:
            link: link for which the sizes are best, `slicing.RULE_LINK` in a plan.
        """

    def least_elements(self, link: LinkModel | None) -> int:
        """Return the minimum number of elements of a bucket.

        The options must have `bucket_bytes`; if it is None, the size is the best one for the link. An allreduce has twice the
        steps of a reduce-scatter and moves twice the bytes, so the same size is best for both.
        """
        size_bytes: int | None = self.options.bucket_bytes
        if size_bytes is None:
            size_bytes = slicing.bucket_bytes(self.group.total_bytes, self.group.ranks, link)
        return max(1, size_bytes // self.group.layout.item_bytes)

    @property
    def levels(self) -> Levels | None:
        """Levels of sums in 16 bits, by the option `two_level`; None: one level.

        All other sums are allreduces of the MPI library, which itself takes nodes into account.
        """
        options = self.options
        in_levels = getattr(options, "two_level", False) and getattr(options, "wire", "float32") != "float32"
        return levels(self.group.nodes) if in_levels and self.group.nodes is not None else None

    @classmethod
    def costs(cls, options: Any) -> StrategyCosts:
        wire: Wire = getattr(options, "wire", "float32")
        return StrategyCosts(
            (OperationKind.ALLREDUCE,),
            partial(slicing.fused_bytes, getattr(options, "bucket_bytes", None)),
            FORWARD_SHARE,
            in_levels=wire != "float32" and getattr(options, "two_level", False),
            gradients=wire,
        )

    @property
    def rounding(self) -> Rounding | None:
        rounding = super().rounding
        return None if rounding is None else replace(rounding, cuts_allreduces=self.cuts_large)

    def request(self) -> str:
        rounding, two = words_of_rounding(self.rounding), self.levels
        shards = words_of_shards(self.group.shards)
        return f"{self.words()}{shards}{rounding}; {fingerprint(self.group.layout)}{'' if two is None else two.words}"

    def plan(self, link: LinkModel | None) -> CollectiveSchedule:
        slices = self.slices(slicing.RULE_LINK)
        order = (Operation(OperationKind.ALLREDUCE, k, Stream.GRADIENTS) for k in reversed(range(len(slices))))
        return CollectiveSchedule(self.request(), self.group.ranks, slices, tuple(order), rounding=self.rounding)

    def averager(self, setup: AveragerSetup, agreement: Agreement) -> GradientAverager:
        return AllreduceAverager(setup, agreement, cuts_large=self.cuts_large)
