"""One training step: forward, loss and backward of each micro-batch. Gradients are announced as they become final.

If a step is traced, `TracingHooks` records operators and the time between them. `StepGuard` undoes steps with non-finite values.
All ranks agree on each step before any rank continues: the step updates the parameters as usual, slice by slice. After its last
update every rank checks the values that it has updated, and the ranks sum one number. If any rank has found a non-finite value,
each restores its copy from before the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from hpctrain.averaging.averager_state import UndoCopy
from hpctrain.averaging.base import GradientAverager
from hpctrain.backend.arithmetic import Fetch
from hpctrain.backend.operators import Array, LossHandle, MixedLabels, StepContext
from hpctrain.comm.base import Communicator
from hpctrain.comm.progress import ProgressEngine
from hpctrain.data.loader import Batch
from hpctrain.nn.network import Network
from hpctrain.nn.parameter import FlatGroup, Parameter
from hpctrain.nn.program import StepHooks
from hpctrain.trace.tracer import HOOKS, Category, Tracer
from hpctrain.training.finiteness import Cause, FiniteCheck, Finiteness
from hpctrain.training.metrics import StepReduction
from hpctrain.training.passes import MicroBatch, Passes, micro_batches_of
from hpctrain.training.weight_watch import WeightWatch

_PHASES: Mapping[str, Category] = {
    "forward": Category.FORWARD,
    "parameters": Category.PARAMETERS,
    "input": Category.INPUT,
}


class TracingHooks(StepHooks):
    """Hooks that pass every event of a step to `inner`, and record operators and the time between them, without gaps.

    An operator begins at the end of the last hook before it. `begin` starts the clock, and `lap` ends a stretch of other work.
    """

    def __init__(self, inner: StepHooks, trace: Tracer) -> None:
        self._inner = inner
        self._trace = trace
        self._clock_ns = trace.clock_ns
        self._recorded = 0  # time up to which everything is recorded
        self._ready = 0  # time at which the last hook ended

    def begin(self) -> None:
        """Start recording."""
        self._recorded = self._ready = self._clock_ns()

    def lap(self, category: Category, name: str) -> None:
        """Record the time since the last record under a category and a name."""
        now = self._clock_ns()
        self._trace.add(category, name, self._recorded, now)
        self._recorded = self._ready = now

    def operator_done(self, name: str, phase: str) -> None:
        now = self._clock_ns()
        if self._ready > self._recorded:
            self._trace.add(Category.AVERAGING, HOOKS, self._recorded, self._ready)
        self._trace.add(_PHASES[phase], name, self._ready, now)
        self._recorded = now
        self._inner.operator_done(name, phase)
        self._ready = self._clock_ns()

    def before_forward(self, parameters: Sequence[Parameter]) -> None:
        self._inner.before_forward(parameters)
        self._ready = self._clock_ns()

    def takes_sufficient_factors(self, parameters: Sequence[Parameter]) -> bool:
        return self._inner.takes_sufficient_factors(parameters)

    def input_ready(self, parameters: Sequence[Parameter], x: Array) -> None:
        self._inner.input_ready(parameters, x)
        self._ready = self._clock_ns()

    def error_ready(self, parameters: Sequence[Parameter], dy: Array) -> None:
        self._inner.error_ready(parameters, dy)
        self._ready = self._clock_ns()

    def grad_ready(self, parameter: Parameter) -> None:
        self._inner.grad_ready(parameter)
        self._ready = self._clock_ns()

    def data_free(self, parameter: Parameter) -> None:
        self._inner.data_free(parameter)
        self._ready = self._clock_ns()


class Sum(Protocol):
    """Interface of the sum of one group's gradients over the parts of a step, each with some of its samples."""

    def buffer_for(self, parameter: Parameter, part: int) -> Array:
        """Return the buffer for the gradient of one parameter over a part."""
        ...

    def start(self) -> None:
        """Begin a step."""

    def add(self, parameter: Parameter, part: int) -> None:
        """Add the gradient of one parameter over a part other than the last to the sum."""

    def end_pass(self) -> None:
        """End the pass over a part other than the last."""

    def complete(self, parameter: Parameter) -> None:
        """Add the sum over the other parts to the gradient of one parameter over the last part."""


class GradientSum:
    """Sum of one group's gradients over consecutive micro-batches.

    All parameters are added at once at the end of each micro-batch.
    """

    def __init__(self, group: FlatGroup) -> None:
        self._group = group
        self._total: Array = group.arithmetic.zeros(group.size, group.dtype)

    def buffer_for(self, parameter: Parameter, part: int) -> Array:
        """Return the gradient buffer of the group, which all micro-batches share."""
        return parameter.grad

    def start(self) -> None:
        """Begin a step: set the sum to zero."""
        self._group.arithmetic.fill(self._total, 0.0)

    def add(self, parameter: Parameter, part: int) -> None:
        """Do nothing; `end_pass` adds all parameters at once."""

    def end_pass(self) -> None:
        """Add the gradients of a micro-batch other than the last from the group's buffer."""
        self._group.arithmetic.add(self._total, self._group.grad)

    def complete(self, parameter: Parameter) -> None:
        """Add the sum of the preceding micro-batches to the last gradient of one parameter."""
        segment = self._group.segment(parameter.name)
        self._group.arithmetic.add(parameter.grad.reshape(-1), self._total[segment.start : segment.stop])


class AveragingHooks(StepHooks):
    """Hooks that pass the events of a step to the averager of each parameter's group, and let messages progress meanwhile.

    A step may have several parts, each a pass over some of its samples. The gradients of all parts but the last are summed in
    separate buffers. These sums are added to the last part's gradient just before it is announced, so that averagers receive one
    gradient per step. With shards, averagers also receive the partial sums that this rank cannot add to each other in the fixed
    order.
    """

    def __init__(self, averagers: Mapping[str, GradientAverager], progress: ProgressEngine, parts: int) -> None:
        self._owner = {name: averager for averager in averagers.values() for name in averager.group.parameters}
        self._progress, self._parts = progress, parts
        self._sums: list[Sum] = []
        if parts > 1:
            self._sums = [averager.gradients or GradientSum(averager.group) for averager in averagers.values()]
        self._sum_of = {
            name: total
            for averager, total in zip(averagers.values(), self._sums, strict=False)
            for name in averager.group.parameters
        }
        self._part, self.last = 0, True

    def buffer_for(self, parameter: Parameter, part: int) -> Array:
        """Return the buffer to which the program of a part writes the gradient of a parameter."""
        return self._sum_of[parameter.name].buffer_for(parameter, part) if self._sums else parameter.grad

    def start(self) -> None:
        """Begin a step."""
        for total in self._sums:
            total.start()

    def turn(self, part: int) -> None:
        """Assign the following events to `part`."""
        self._part, self.last = part, part == self._parts - 1

    def end_pass(self) -> None:
        """End the pass over the current part and the parts computed side by side with it."""
        if not self.last:
            for total in self._sums:
                total.end_pass()

    def before_forward(self, parameters: Sequence[Parameter]) -> None:
        self._owner[parameters[0].name].before_forward(parameters)

    def takes_sufficient_factors(self, parameters: Sequence[Parameter]) -> bool:
        return self._owner[parameters[0].name].takes_sufficient_factors(parameters)

    def input_ready(self, parameters: Sequence[Parameter], x: Array) -> None:
        self._owner[parameters[0].name].input_ready(parameters, x)

    def error_ready(self, parameters: Sequence[Parameter], dy: Array) -> None:
        self._owner[parameters[0].name].error_ready(parameters, dy)

    def grad_ready(self, parameter: Parameter) -> None:
        if not self.last:
            self._sum_of[parameter.name].add(parameter, self._part)
            return
        if self._sums:
            self._sum_of[parameter.name].complete(parameter)
        self._owner[parameter.name].grad_ready(parameter)

    def data_free(self, parameter: Parameter) -> None:
        if self.last:
            self._owner[parameter.name].data_free(parameter)

    def operator_done(self, name: str, phase: str) -> None:
        if phase != "parameters" or not self.last:  # the gradients of parameters are announced next, with a poll
            self._progress.operator_done()


def _labels(batch: Batch, own: slice) -> np.ndarray | MixedLabels:
    """Return the labels of a slice of the batch; two per image if the images are mixed."""
    if batch.mixed is None:
        return batch.y[own]
    return MixedLabels(batch.y[own], batch.mixed.labels[own], batch.mixed.weight)


class TrainingStep:
    """Runner of the steps of one rank. Collective: every rank runs each step, with an empty batch if it has no samples.

    If the engine has a tracer, the whole step is recorded.

    If the kernels run on a device, a step waits for it once, after all of backward is enqueued: for the sums of the loss, the
    batch statistics and the check of finite parameters. It also waits for norms if the optimiser needs them, for synchronised
    batch norms in both passes, and with `sparse`, `lazy`, `fc_exchange: always` and `on_nonfinite: skip`.

    Args:
        message: message of the step, to which the sums are added.
        counts_of: function from a parameter group and the sample counts of all ranks to the counts of the ranks that average the
            group.
        watch: checksums of parameters and other state that ranks must hold alike; None: no checks.
        checks_finite: whether to check the parameters that the previous step produced; False if they were checked already.

    Attributes:
        finiteness: check of this rank's values, once per step; the message informs the other ranks.
        facts: values of the latest step that must be equal on all ranks, by name.
    """

    def __init__(
        self,
        network: Network,
        averagers: Mapping[str, GradientAverager],
        progress: ProgressEngine,
        message: StepReduction,
        passes: Passes | None = None,
        counts_of: Callable[[str, Sequence[int]], Sequence[int]] = lambda group, counts: counts,
        *,
        watch: WeightWatch | None = None,
        checks_finite: bool = True,
    ) -> None:
        self._network, self._watch = network, watch
        self._counts_of = counts_of
        self._averagers = averagers
        self._message = message
        self._passes = Passes() if passes is None else passes
        self._checks_finite = checks_finite
        self._progress = progress
        self._hooks = AveragingHooks(averagers, progress, self._passes.micro_batches)
        self.finiteness = Finiteness(network, averagers, progress.rank)
        self._optimizers = [averager.optimizer for averager in averagers.values()]
        self.facts: dict[str, object] = {}
        trace = progress.trace
        self._tracing = None if trace is None else TracingHooks(self._hooks, trace)

    def run(self, batch: Batch, global_step: int, lr: float) -> None:
        """Do one update with learning rate `lr`. This rank's sums are then in the message, which the caller posts."""
        if self._tracing is not None:
            self._tracing.begin()
        for group, averager in self._averagers.items():
            averager.begin_step(lr, self._counts_of(group, batch.counts))
        self._message.clear()
        self._hooks.start()
        self.facts = {"lr": float(lr), "images": batch.global_count}
        parts = list(enumerate(micro_batches_of(batch.share, self._passes.micro_batches)))
        together = self._passes.together
        for first in range(0, len(parts), together):
            self._pass(batch, parts[first : first + together], global_step)
            self._hooks.end_pass()
        if self._watch is not None:
            self._watch.take(global_step)
            self._lap(Category.WORK, "watched weights")
        for averager in self._averagers.values():
            averager.end_backward()
        self._lap(Category.AVERAGING, HOOKS)

    def _pass(self, batch: Batch, parts: Sequence[tuple[int, MicroBatch]], global_step: int) -> None:
        """Run the pass over one part, or over several parts side by side."""
        hooks = self._hooks if self._tracing is None else self._tracing
        self._lap(Category.AVERAGING, HOOKS)
        counts = [part.counts for _, part in parts]
        programs = self._network.side_by_side(counts, image_shape=batch.image_shape, gradient_buffers=self._hooks.buffer_for)
        for program, (_, part) in zip(programs, parts, strict=True):
            # A rank that reads tiles of images has the tiles of all samples of its split group.
            program.set_input(batch.x[part.own if len(batch.x) == len(batch.y) else part.shared])
        self._lap(Category.WORK, "input copy")
        contexts = [StepContext(training=True, step=global_step, sample_ids=batch.sample_ids[part.shared]) for _, part in parts]
        begins = parts[0][0] == 0

        def turn(place: int) -> None:
            self._hooks.turn(parts[place][0])

        with self._progress.computing():
            programs.forward(contexts, hooks, turn)
            self._lap(Category.AVERAGING, HOOKS)
            sums = [
                (
                    program.loss(_labels(batch, part.own), batch.global_count, batch.class_scale),
                    program.fetch_statistics(),
                    sum(part.counts),
                )
                for program, (_, part) in zip(programs, parts, strict=True)
            ]
            self._lap(Category.WORK, "loss")
            check = self.finiteness.begin() if begins and self._checks_finite else None
            self._lap(Category.WORK, "finite numbers")
            for optimizer in self._optimizers if begins else ():  # updates of the previous step are done, none of this one
                self.facts |= optimizer.settings(arguments=True)
            programs.backward(hooks, turn)
            self._lap(Category.AVERAGING, HOOKS)
            for loss, statistics, group_count in sums:
                self._add_to_message(global_step, loss, statistics, check, group_count)
                check = None
            self._lap(Category.WORK, "sums")

    def _add_to_message(
        self, global_step: int, loss: LossHandle, statistics: Fetch, check: FiniteCheck | None, group_count: int
    ) -> None:
        """Wait for the results that were copied to the host during backward, and add them to the message."""
        sums = loss.result()
        terms = self._network.statistics.weighted(sums.count, group_count, statistics.result())
        not_finite = self._network.statistics.not_finite(terms)
        finite = self.finiteness.end(global_step, check, loss=sums.loss, statistics=not_finite)
        self._message.add(sums, terms, finite=finite)

    def _lap(self, category: Category, name: str) -> None:
        if self._tracing is not None:
            self._tracing.lap(category, name)


class StepGuard:
    """Copy of the values that a step changes, from which every rank undoes the step if any rank finds a non-finite value.

    Construction is collective.

    Args:
        comm: all ranks that train together; the guard duplicates it.
        finiteness: check of the values that this rank has updated.
        watch: watch to inform of undone steps; None if the replica has no checks.
    """

    def __init__(
        self,
        averagers: Mapping[str, GradientAverager],
        comm: Communicator,
        progress: ProgressEngine,
        finiteness: Finiteness,
        watch: WeightWatch | None,
    ) -> None:
        self._averagers, self._progress, self._finiteness = tuple(averagers.values()), progress, finiteness
        self._watch = watch
        self._copies = [UndoCopy(averager) for averager in self._averagers]
        copied = comm.split(0, comm.rank, "agreement on finite steps")
        assert copied is not None
        self._comm = copied
        self._bad_ranks = np.zeros(1, np.float64)

    def begin(self) -> None:
        """Copy the values that the next step changes."""
        for copy in self._copies:
            copy.keep()

    def end(self, step: int, *, finite: bool) -> Cause | None:
        """Complete the step on every rank. If any rank has found a non-finite value, undo it and return the cause. Collective.

        Args:
            step: number of the step, counted from 1.
            finite: whether this rank's loss and batch statistics are finite.
        """
        for averager in self._averagers:
            averager.drain()
        seen = self._finiteness.begin().faults()
        self._bad_ranks[0] = not finite or bool(seen)
        comm, bad_ranks = self._comm, self._bad_ranks
        queue = self._progress.queue(comm)
        self._progress.wait(queue.post(lambda: comm.iallreduce(bad_ranks), "agreement on a finite step"))
        if not bad_ranks[0]:
            return None
        cause = self._finiteness.cause(step, seen, finite=finite, gather=comm.allgather_object)
        if self._watch is not None:
            self._watch.verify()  # before the copies overwrite values that may be damaged
        for copy in self._copies:
            copy.restore()
        if self._watch is not None:
            self._watch.remember()
        return cause
