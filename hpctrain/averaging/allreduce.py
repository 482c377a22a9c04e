"""Strategies that sum each slice of the gradients by one allreduce, and their averager: the whole update on every rank."""

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
from hpctrain.averaging.slicing import Sizes, Slice, fingerprint
from hpctrain.comm.base import Complete, Handle
from hpctrain.comm.groups import Levels, levels
from hpctrain.comm.link import LinkModel
from hpctrain.comm.progress import LocalEvent, Ticket
from hpctrain.comm.sums import Wire
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
    """Sum each slice by one allreduce, in place, once its last gradient is ready.

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
            settled = self._previous.pending.keys().isdisjoint(self._touching[parameter.name])
            assert settled, f"{parameter.name} was used before it was waited for"
            self._step.events[parameter.name].happen()
            self.progress.poll()

    def end_backward(self) -> None:
        """Announce parameters that this step did not use, with whatever gradient they hold."""
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
        """Post the sum of a slice; called by the progress engine when the slice's turn has come."""
        piece = self.schedule.slices[k]
        if not self._cuts_large:
            return self._sums.iallreduce(self._terms(piece.start, piece.stop))
        parts = slicing.parts_of(piece.size, self.group.item_bytes, self._comm.size)
        handles = [self._sums.iallreduce(self._terms(piece.start + begin, piece.start + end)) for begin, end in parts]
        return handles[0] if len(handles) == 1 else _Several(handles)

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
        """Return the norms for the update of a slice.

        Its own (LARS), or all (clipping, several groups), which waits for all sums.
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
        """Give this rank's part in the norms of all groups; the engine calls it once all sums are there."""
        for segments in self._segments:
            self.optimizer.prepare_norms(segments)
        fill_share(joint.norms[self._member], self.group, self.comm, self._names)
        joint.contribute(self._member)
        return Complete()


class AllreduceStrategy(Strategy):
    """The base of strategies with one allreduce per slice, in backward's order. A strategy defines `words` and `slices`.

    Attributes:
        cuts_large: a very large slice travels in several operations, posted together.
    """

    adds_norms = True
    sums_shards = True
    streams: ClassVar[tuple[Stream, ...]] = (Stream.GRADIENTS,)
    cuts_large: ClassVar[bool] = True

    @abstractmethod
    def words(self) -> str:
        """Return the strategy and its options, as a stored schedule names what it was made for: other words, another schedule."""

    @abstractmethod
    def slices(self, link: LinkModel | None) -> tuple[Slice, ...]:
        """Return slices of all parameters, in forward order; each holds whole parameters.

        Args:
            link: what sizes follow from, by `sizes`; None if they follow from none.
        """

    def least_elements(self, link: LinkModel | None) -> int:
        """Return the least elements of a bucket.

        By the option `bucket_bytes`, which the options must have; if that is None, the best for the link.

        An allreduce has twice the steps and moves twice the bytes of a reduce-scatter, so the best size is the same.
        """
        size_bytes: int | None = self.options.bucket_bytes
        if size_bytes is None:
            size_bytes = slicing.bucket_bytes(self.group.total_bytes, self.group.ranks, link)
        return max(1, size_bytes // self.group.layout.item_bytes)

    @property
    def sizes(self) -> Sizes | None:
        """The rule for sizes that are not given; None if no size follows from a link."""
        return getattr(self.options, "sizes", None)

    @property
    def levels(self) -> Levels | None:
        """The levels of sums in 16 bits, by the option `two_level`; all other sums are the MPI's allreduce, which uses nodes."""
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

    def needs_link(self, usable: CollectiveSchedule | None) -> bool:
        return self.sizes == "measured" and usable is None

    def plan(self, link: LinkModel | None) -> CollectiveSchedule:
        slices = self.slices(slicing.RULE_LINK if self.sizes == "rule" else link)
        order = (Operation(OperationKind.ALLREDUCE, k, Stream.GRADIENTS) for k in reversed(range(len(slices))))
        return CollectiveSchedule(self.request(), self.group.ranks, slices, tuple(order), rounding=self.rounding)

    def averager(self, setup: AveragerSetup, agreement: Agreement) -> GradientAverager:
        return AllreduceAverager(setup, agreement, cuts_large=self.cuts_large)
