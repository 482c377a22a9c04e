"""Simulated steps take as long as the averagers themselves do, on virtual ranks with a modelled link and clock."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hpctrain.averaging.dependencies import EventKind, LocalEventKey
from hpctrain.averaging.reduce_scatter_strategy import ReduceScatterStrategy
from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.averaging.strategies.bucketed import Bucketed
from hpctrain.averaging.strategies.priority import Priority
from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.averaging.strategy import PlannedGroup, Strategy
from hpctrain.comm.link import LinkModel
from hpctrain.nn.parameter import GroupLayout, ParameterSpec
from hpctrain.planner.measured_times import times_of
from hpctrain.planner.simulation.simulate import simulate
from hpctrain.planner.tasks import Compute, EndBackward, Happens, NeedsParameters, Task
from hpctrain.trace.tracer import Category
from tests.averaging.test_modelled_time import COMPUTE_SECONDS, FORWARD, SIZES, _step_seconds
from tests.support.simulated import GROUP, link, machine, program

RANKS, ALPHA = 2, 1e-4
CASES: dict[str, tuple[type[Strategy], dict[str, Any]]] = {
    "blocking": (Blocking, {}),
    "bucketed": (Bucketed, {"bucket_bytes": 8000}),
    "sharded": (Sharded, {"fc_exchange": "never", "bucket_bytes": 2000}),
    "priority": (Priority, {"fc_exchange": "never", "slice_parameters": 1000, "window": 12}),
}


def _tasks() -> Iterator[Task]:
    def halves(layer: int, category: Category) -> Iterator[Task]:
        yield from (Compute(f"l{layer}", category, FORWARD[layer] / 2) for _ in range(2))

    for layer in range(len(SIZES)):
        yield NeedsParameters(GROUP, (f"l{layer}.weight",))
        yield from halves(layer, Category.FORWARD)
    for layer in reversed(range(len(SIZES))):
        yield from halves(layer, Category.PARAMETERS)
        yield Happens(GROUP, LocalEventKey(EventKind.GRADIENT, f"l{layer}.weight"))
        yield from halves(layer, Category.INPUT)
        yield Happens(GROUP, LocalEventKey(EventKind.LAST_READ, f"l{layer}.weight"))
    yield EndBackward()


def _simulated(kind: type[Strategy], wire_share: float, options: dict[str, Any]) -> float:
    """The same step as `_step_seconds` runs."""
    specs = {f"l{k}.weight": ParameterSpec((size,), lambda random, shape: np.zeros(shape)) for k, size in enumerate(SIZES)}
    layout, steps = GroupLayout(specs, "float32"), tuple(_tasks())
    beta = wire_share * COMPUTE_SECONDS / (2 * (RANKS - 1) / RANKS * 4 * sum(SIZES))
    strategy = kind(PlannedGroup(layout, RANKS, nominal_batch=4 * RANKS), kind.Options(**options))
    schedule = strategy.plan(LinkModel(ALPHA, beta))
    if schedule is not None and isinstance(strategy, ReduceScatterStrategy):
        schedule = strategy.replan(schedule, times_of(steps, GROUP, layout), LinkModel(ALPHA, beta))
    return simulate(program([(RANKS, steps)], SIZES, schedule), machine(link(ALPHA, beta))).seconds


@pytest.mark.slow
@pytest.mark.parametrize("wire_share", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("case", CASES)
def test_averagers_on_virtual_time_take_as_long(case: str, wire_share: float) -> None:
    kind, options = CASES[case]
    assert _simulated(kind, wire_share, options) == pytest.approx(_step_seconds(kind, wire_share, RANKS, **options), rel=3e-3)
