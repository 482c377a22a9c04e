"""Measurement of the rates of operator classes: steps of small networks, each phase's time over its work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from hpctrain.backend.operators import KernelSet
from hpctrain.models import catalogue
from hpctrain.nn.layers import Layer
from hpctrain.nn.layers_parts.flatten import Flatten
from hpctrain.nn.layers_parts.linear import Linear
from hpctrain.nn.layers_parts.sequential import Sequential
from hpctrain.nn.network import Network
from hpctrain.planner.machine import OperatorClass, OperatorRate
from hpctrain.planner.operator_work import OperatorWork, work_of
from hpctrain.planner.stand_ins import stand_in_mergers
from hpctrain.planner.program_timing import TimedProgram, clock_of

_STEPS = 4


@dataclass(frozen=True)
class RateTask:
    """A network of which operators are timed, on `batch` images of `pixels` to a side."""

    make: Callable[[], Layer]
    batch: int
    pixels: int


def _linear() -> Layer:
    return Sequential([Flatten(), Linear(12 * 12 * 3, 4096), Linear(4096, 1024), Linear(1024, 100)])


#: convolutions of usual shapes and what lies between them; large linear layers
_LARGE = (RateTask(lambda: catalogue.build("resnet18", {}), 4, 112), RateTask(_linear, 32, 12))
#: operators so small that a call is all that they take
_SMALL = RateTask(lambda: catalogue.build("resnet_small", {"depth": 20, "width": 0.25}), 1, 8)

#: (its work, seconds)
Timing = tuple[OperatorWork, float]


def measure(kernels: KernelSet, threads: int, before: Callable[[], None] = lambda: None) -> dict[OperatorClass, OperatorRate]:
    """The rates of one rank with so many threads. before: a barrier, where several ranks are to compute at the same time."""
    clock = clock_of(threads)
    call_seconds = median(seconds for _, seconds in _timings(_SMALL, kernels, clock, before))
    timings = [timing for task in _LARGE for timing in _timings(task, kernels, clock, before)]
    return rates(timings, call_seconds)


def rates(timings: list[Timing], call_seconds: float) -> dict[OperatorClass, OperatorRate]:
    """Work over time beside calls: operations of convolutions and products, bytes of what memory bounds."""
    memory = _ratio([(work.bytes, seconds) for work, seconds in timings if work.kind is OperatorClass.MEMORY], call_seconds)
    flops = {
        kind: _ratio([(work.flops, seconds) for work, seconds in timings if work.kind is kind], call_seconds)
        for kind in (OperatorClass.CONVOLUTION, OperatorClass.PRODUCT)
    }
    flops[OperatorClass.MEMORY] = flops[OperatorClass.CONVOLUTION]
    return {kind: OperatorRate(flops[kind], memory, call_seconds) for kind in OperatorClass}


def _ratio(works: list[tuple[int, float]], call_seconds: float) -> float:
    seconds = sum(max(0.0, seconds - call_seconds) for _, seconds in works)
    return sum(work for work, _ in works) / seconds


def _timings(task: RateTask, kernels: KernelSet, clock: Callable[[], float], before: Callable[[], None]) -> list[Timing]:
    network = Network(task.make(), (task.pixels, task.pixels, 3), kernels)
    timed = TimedProgram(
        network.graph(task.batch), kernels, network.parameter_specs, shards={}, mergers=stand_in_mergers(1, 1), clock=clock
    )
    times = timed.measure(_STEPS, before)
    timings = []
    for (action, k), seconds in times.actions.items():
        work = work_of(timed.plan.steps[k], action, timed.plan.memory[k])
        if not work.is_nothing:
            timings.append((work, seconds))
    return timings
