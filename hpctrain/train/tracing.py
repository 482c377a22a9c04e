"""The tracing of a training step: operators, everything between them, updates, and whole steps with their loading."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import closing

import numpy as np

from hpctrain.backend.operators import Array
from hpctrain.comm.progress import ProgressEngine
from hpctrain.data.loader import Batch
from hpctrain.nn.hooks import StepHooks
from hpctrain.nn.parameter import FlatGroup, Parameter, Segment
from hpctrain.optim.base import Norms, NormsNeeded, Optimizer
from hpctrain.trace.tracer import HOOKS, Category, Tracer

_PHASES: Mapping[str, Category] = {
    "forward": Category.FORWARD,
    "parameters": Category.PARAMETERS,
    "input": Category.INPUT,
}


class TracingHooks(StepHooks):
    """Hands every event of a step on to `inner`, and records operators and what lies between them, without gaps.

    An operator begins where the last hook before it ended. `begin` starts the clock, `lap` ends a stretch of other work.
    """

    def __init__(self, inner: StepHooks, trace: Tracer) -> None:
        self._inner = inner
        self._trace = trace
        self._clock_ns = trace.clock_ns
        self._recorded = 0  # everything before this instant is recorded
        self._ready = 0  # when the last hook ended

    def begin(self) -> None:
        """Begin to record."""
        self._recorded = self._ready = self._clock_ns()

    def lap(self, category: Category, name: str) -> None:
        """Everything since the last record was this."""
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


class TimedOptimizer(Optimizer):
    """An optimiser whose updates are told to the engine's account, and recorded where there is a tracer."""

    def __init__(self, inner: Optimizer, progress: ProgressEngine) -> None:
        self._inner = inner
        self._account, self._trace = progress.account, progress.trace
        self.clip_norm = inner.clip_norm
        self.momentum = inner.momentum
        self.prepares_norms = inner.prepares_norms

    @property
    def norms_needed(self) -> NormsNeeded:
        return self._inner.norms_needed

    def bind(self, group: FlatGroup, owned: Sequence[Segment]) -> None:
        self._inner.bind(group, owned)

    def begin_step(self, left_out: Collection[str] = ()) -> None:
        self._inner.begin_step(left_out)

    def counters(self) -> dict[str, int]:
        return self._inner.counters()

    def load_counters(self, counters: Mapping[str, int]) -> None:
        self._inner.load_counters(counters)

    def prepare_norms(self, segments: Sequence[Segment]) -> None:
        if self.prepares_norms:
            self._timed(segments, lambda: self._inner.prepare_norms(segments))

    def update(self, segments: Sequence[Segment], lr: float, norms: Norms | None) -> None:
        self._timed(segments, lambda: self._inner.update(segments, lr, norms))

    def _timed(self, segments: Sequence[Segment], write: Callable[[], None]) -> None:
        begin_ns = self._account.clock_ns()
        write()
        stop_ns = self._account.clock_ns()
        self._account.updated(begin_ns, stop_ns)
        if segments and self._trace is not None:
            self._trace.add(Category.UPDATE, segments[0].parameter, begin_ns, stop_ns)

    def state(self, segment: Segment) -> dict[str, np.ndarray]:
        return self._inner.state(segment)


class _TimedLayerwiseOptimizer(TimedOptimizer):
    """The same for one that needs each layer's norms."""

    layer_norms = True


def timed_optimizer(inner: Optimizer, progress: ProgressEngine) -> Optimizer:
    """`inner`, with its updates told apart from the time that messages take."""
    return _TimedLayerwiseOptimizer(inner, progress) if inner.layer_norms else TimedOptimizer(inner, progress)


def traced_steps(batches: Generator[Batch, None, None], trace: Tracer | None) -> Generator[Batch, None, None]:
    """The same batches; the time until each was there is recorded, and the step that its user makes of it.

    A step begins where its batch is asked for, and ends where the next one is, or where the generator is closed.
    """
    with closing(batches):
        if trace is None:
            yield from batches
            return
        while True:
            begin = trace.clock_ns()
            batch = next(batches, None)
            if batch is None:
                return
            trace.add(Category.LOADING, "data loading", begin, trace.clock_ns())
            try:
                yield batch
            finally:
                trace.add(Category.STEP, "step", begin, trace.clock_ns(), "", batch.step)
