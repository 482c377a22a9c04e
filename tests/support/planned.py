"""Jobs for the planner from trainings on made-up data, and what virtual ranks do in a step of theirs, in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from hpctrain.averaging.averagers import AveragerChoice
from hpctrain.averaging.base import GradientAverager, PlannedGroup, Strategy
from hpctrain.averaging.collective_schedule import EventKind
from hpctrain.backend.operators import Array
from hpctrain.nn.parameter import Parameter
from hpctrain.planner.costs.machine import Link, LinkSegment, Machine, OperatorRate
from hpctrain.planner.job import Candidate, Job
from hpctrain.planner.planned_run import state_arrays, update_factor
from hpctrain.planner.simulation.tasks import BeginExchange, EndBackward, Happens, Merge, NeedsParameters, StepMessage, Task
from hpctrain.training.replica import Replica
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.counters import Counters, CountingCommunicator
from hpctrain_testing.virtual.run import run_virtual, virtual_engine
from tests.support import simulated, training
from tests.support.averaging import Forwarding

_STATISTICS = {"statistics": "all", "split statistics": "split", "data statistics": "data"}
UNCOUNTED = ("messages", "messages sums", "samples norms", "data norms")
#: (kind, what or whose, bytes or "")
Event = tuple[str, str, int]


def machine(ranks_per_node: int = 2, memory_bytes: int = 4 << 30) -> Machine:
    """Links and rates of round numbers."""
    link = Link((LinkSegment(0, 2e-6, 1e-9),), operation_seconds=1e-5)
    rate = OperatorRate(5e10, 1e10, 1e-5)
    return simulated.machine(link, link, rate=rate, ranks_per_node=ranks_per_node, nodes=4096, memory_bytes=memory_bytes)


def job_of(task: training.Task) -> Job:
    """The training of a task, as the planner knows it."""
    optimizer = task.optimizer()
    arrays = state_arrays(optimizer)
    return replace(
        simulated.job_of(task.model(), task.image_shape, task.batch, kernels=task.kernels, dtype=task.dtype),
        norms_needed=optimizer.norms_needed,
        state_arrays=arrays + (task.ema is not None),
        update_factor=update_factor(optimizer, arrays),
        shards=task.exact_shards,
    )


def candidate_of(task: training.Task, averager: str, options: Mapping[str, Any]) -> Candidate:
    """The grid and plan of a task with an averager."""
    return Candidate(task.plan, AveragerChoice(averager, options), task.micro_batches)


def events_of(tasks: Sequence[Task]) -> list[Event]:
    """The events of tasks that a run shows as well."""
    events: list[Event] = []
    for task in tasks:
        match task:
            case NeedsParameters():
                events += [("needs", name, 0) for name in task.parameters]
            case Happens():
                events.append((str(task.event.kind), task.event.parameter, 0))
            case BeginExchange():
                events.append(("exchange", "", task.exchange.sent_bytes))
            case Merge():
                events.append(("merge", task.ranks, task.bytes))
            case EndBackward():
                events.append(("end of backward", "", 0))
            case StepMessage():
                events.append(("message", "", task.bytes))
            case _:
                pass
    return events


@dataclass
class Observed:
    """The events of a rank's first step, and the bytes that it handed over for others in it, norms and message left out."""

    events: list[Event] = field(default_factory=list)
    exchanged_bytes: int = 0


def observe(task: training.Task, averager: str, options: Mapping[str, Any], ranks_per_node: int | None = None) -> list[Observed]:
    """A step of a task on virtual ranks, by position."""

    def on_rank(comm: ThreadCommunicator) -> Observed:
        observed = Observed()
        counters = _Recorder(observed.events, comm.size)
        strategy = partial(_observed_strategy, observed.events, averager, options)
        counted = CountingCommunicator(comm, counters)
        replica = training.replica_of(task, counted, virtual_engine(comm), strategy, nominal_batch=task.batch)
        _one_step(task, replica, comm.size, counters, observed)
        return observed

    return run_virtual(task.plan.rows * task.plan.cols, on_rank, ranks_per_node=ranks_per_node)


def _one_step(task: training.Task, replica: Replica, ranks: int, counters: _Recorder, observed: Observed) -> None:
    (batch, *_) = training.batches(task, replica.groups.position, ranks, replica.tiles)
    before = counters.snapshot()
    counters.on = True
    replica.step(batch, task.lr)
    counters.on = False
    replica.drain()
    replica.settle()
    counts = counters.since(before)
    observed.exchanged_bytes = sum(counts[name, kind].exchanged_bytes for name, kind in counts if name not in UNCOUNTED)


class _Recorder(Counters):
    """Counts, and writes down exchanges, merges and the step's message."""

    def __init__(self, events: list[Event], ranks: int) -> None:
        super().__init__()
        self._events, self._ranks = events, ranks
        self.on = False

    def add(self, communicator: str, operation: str, payload_bytes: int = 0, exchanged_bytes: int = 0) -> None:
        super().add(communicator, operation, payload_bytes, exchanged_bytes)
        if not self.on:
            return
        if (communicator, operation) == ("split", "ialltoall"):
            self._events.append(("exchange", "", exchanged_bytes))
        elif communicator in _STATISTICS and exchanged_bytes:
            # All ranks send as much: the payload is that of all.
            self._events.append(("merge", _STATISTICS[communicator], payload_bytes - exchanged_bytes))
        elif communicator == "messages":
            self._events.append(("message", "", payload_bytes))


class _Observed(Forwarding):
    """Writes down what a step announces, and passes it on."""

    def __init__(self, inner: GradientAverager, events: list[Event]) -> None:
        super().__init__(inner)
        self._events, self.schedule = events, inner.schedule

    def _note(self, kind: str, name: str = "") -> None:
        self._events.append((kind, name, 0))

    def before_forward(self, parameters: Sequence[Parameter]) -> None:
        for parameter in parameters:
            self._note("needs", parameter.name)
        super().before_forward(parameters)

    def input_ready(self, parameters: Sequence[Parameter], x: Array) -> None:
        self._note(EventKind.INPUTS, parameters[0].name)
        super().input_ready(parameters, x)

    def error_ready(self, parameters: Sequence[Parameter], dy: Array) -> None:
        self._note(EventKind.GRADIENT, parameters[0].name)
        super().error_ready(parameters, dy)

    def grad_ready(self, parameter: Parameter) -> None:
        if parameter.size:
            self._note(EventKind.GRADIENT, parameter.name)
        super().grad_ready(parameter)

    def data_free(self, parameter: Parameter) -> None:
        if parameter.size:
            self._note(EventKind.LAST_READ, parameter.name)
        super().data_free(parameter)

    def end_backward(self) -> None:
        if not self._events or self._events[-1][0] != "end of backward":
            self._note("end of backward")
        super().end_backward()


def _observed_strategy(events: list[Event], averager: str, options: Mapping[str, Any], group: PlannedGroup) -> Strategy:
    strategy = AveragerChoice(averager, options).strategy(group)
    make = strategy.averager
    strategy.averager = lambda setup, agreement: _Observed(make(setup, agreement), events)  # type: ignore[method-assign]
    return strategy
