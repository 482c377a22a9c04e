"""Timed steps, by a clock that counts its calls: every lap is in the sum once."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest

from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.models import catalogue
from hpctrain.nn.compile.plan import Action
from hpctrain.nn.network import Network
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.parallel.partition_graph import partition_graph
from hpctrain.planner.stand_ins import StandInGroup, stand_in_mergers
from hpctrain.planner.timed_program import TimedProgram, clock_of, typical

NETWORK = Network(catalogue.build("resnet20", {"width": 4}), (16, 16, 3), NumpyKernelSet())


def _timed(use: Parallelism | None) -> TimedProgram:
    ticks = count()
    graph, shards, rows = NETWORK.graph(4), {}, 1
    if use is not None:
        overlapped = frozenset({"layer1.0.conv1"}) if use is Parallelism.DOMAIN else frozenset()
        partitioned = partition_graph(graph, ParallelPlan(2, 1, default=use, overlapped=overlapped), (2, 2))
        graph, shards, rows = partitioned.local(1, StandInGroup(1, 2)), partitioned.shards_of(1), 2
    return TimedProgram(
        graph,
        NETWORK.kernels,
        NETWORK.parameter_specs,
        shards=shards,
        mergers=stand_in_mergers(rows, 1),
        clock=lambda: float(next(ticks)),
    )


@pytest.mark.parametrize("use", [None, *Parallelism], ids=str)
def test_all_laps_of_a_step_are_in_its_sum(use: Parallelism | None) -> None:
    timed = _timed(use)
    plan = timed.plan
    times = timed.measure(1, wholes=True)
    actions = [*plan.forward, *plan.backward]
    assert times.sum == len(actions) + 5  # input, loss, look, sums, update: each lap is one tick of the clock
    early = [(action, k) for action, k in actions if action is Action.BEGIN]
    assert bool(early) == (use in (Parallelism.DOMAIN, Parallelism.MODEL))
    assert times.actions.keys() == {phase for phase in actions if phase[0] is not Action.BEGIN}
    assert sum(times.actions.values()) == len(actions)
    assert times.step > 0.0


def test_steps_leave_everything_finite_and_the_weights_as_they_are() -> None:
    timed = _timed(Parallelism.DOMAIN)
    before = timed._group.data.copy()
    timed.measure(2)
    assert np.isfinite(timed._group.grad).all()
    np.testing.assert_array_equal(before, timed._group.data)


@pytest.mark.parametrize("use", Parallelism, ids=str)
def test_dropout_has_an_id_for_every_sample_of_the_split_group(use: Parallelism) -> None:
    network = Network(catalogue.build("vgg11", {"width": 0.0625}), (32, 32, 3), NumpyKernelSet())
    partitioned = partition_graph(network.graph(4), ParallelPlan(2, 1, default=use), (2, 2))
    timed = TimedProgram(
        partitioned.local(1, StandInGroup(1, 2)),
        network.kernels,
        network.parameter_specs,
        shards=partitioned.shards_of(1),
        mergers=stand_in_mergers(2, 1),
    )
    timed.measure(1)
    assert np.isfinite(timed._group.grad).all()


def test_parameters_are_as_the_dtype_of_activations_has_them() -> None:
    timed = TimedProgram(
        Network(NETWORK.model, (16, 16, 3), NETWORK.kernels, dtype="float64").graph(2),
        NETWORK.kernels,
        NETWORK.parameter_specs,
        shards={},
        mergers=stand_in_mergers(1, 1),
        dtype="float64",
    )
    assert timed.measure(1).sum > 0.0
    assert timed._group.data.dtype == np.float64


def test_others_are_waited_for_before_every_step() -> None:
    calls = []
    _timed(None).measure(3, lambda: calls.append(1), wholes=True)
    assert len(calls) == 10


def test_one_thread_is_timed_by_its_work() -> None:
    assert clock_of(1) is not clock_of(2)
    assert clock_of(1, on_host=False) is clock_of(2)


def test_typical_laps_add_up_to_the_least_disturbed_step() -> None:
    laps = np.tile(np.arange(1.0, 10.0), (5, 1))
    for number, lap in enumerate(laps):
        lap[number] += 9.0 + number  # every step is disturbed somewhere, no lap in most of them
    steps = typical(laps)
    assert steps.sum() == pytest.approx(45.0 + 9.0)
    np.testing.assert_allclose(steps / steps[0], np.arange(1.0, 10.0))
    np.testing.assert_array_equal(typical(np.ones((3, 4))), np.ones(4))
    np.testing.assert_array_equal(typical(np.zeros((3, 4))), np.zeros(4))
