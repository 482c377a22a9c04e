"""Programs of single ranks are timed as a step runs them, with stand-ins for other ranks; times as a run's clock takes them."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import count
from typing import Any

import numpy as np
import pytest

from hpctrain.averaging.collective_schedule import EventKind, LocalEventKey
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.models import catalogue
from hpctrain.nn.compile.compiler import compile_graph
from hpctrain.nn.compile.plan import Action
from hpctrain.nn.network import Network
from hpctrain.nn.parameter import GroupLayout, ParameterSpec
from hpctrain.parallel.groups import merge_moments
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.parallel.partition_graph import partition_graph
from hpctrain.planner.costs.compute_costs import product_key
from hpctrain.planner.costs.machine import OperatorClass, OperatorRate
from hpctrain.planner.costs.operator_times import OperatorTimes, setting_here
from hpctrain.planner.costs.operator_work import FactorProduct, OperatorWork, products_of, time_product
from hpctrain.planner.job import Candidate, Job
from hpctrain.planner.measure import calibration, program_timing
from hpctrain.planner.measure.calibration import RateTask, measure_rates_of, rates_from_timings
from hpctrain.planner.measure.program_timing import (
    FEW_STEPS,
    FakeSplitGroup,
    FakeStatisticsMerger,
    Repeats,
    TimedProgram,
    ensure_measured,
    fake_mergers,
    keys_of,
    rank_programs,
    typical,
)
from hpctrain.planner.program.step_program import times_of
from hpctrain.planner.simulation.tasks import Compute, EndBackward, EndExchange, Happens, NeedsParameters, Task
from hpctrain.trace.time_budget import TimeBudget
from hpctrain.trace.tracer import Category

NETWORK = Network(catalogue.build("resnet20", {"width": 4}), (16, 16, 3), NumpyKernelSet())


def _timed(use: Parallelism | None, network: Network = NETWORK, **options: Any) -> TimedProgram:
    """The program of a lone rank, or of the second of two that split layers by a use."""
    graph, shards, rows = network.graph(4), {}, 1
    if use is not None:
        partitioned = partition_graph(graph, ParallelPlan(2, 1, default=use), (2, 2))
        graph, shards, rows = partitioned.local(1, FakeSplitGroup(1, 2)), partitioned.shards_of(1), 2
    mergers = fake_mergers(rows, 1)
    return TimedProgram(graph, network.kernels, network.parameter_specs, shards=shards, mergers=mergers, **options)


@pytest.mark.slow
@pytest.mark.parametrize("use", [None, *Parallelism], ids=str)
def test_all_laps_of_a_step_are_in_its_sum(use: Parallelism | None) -> None:
    ticks = count()
    timed = _timed(use, clock=lambda: float(next(ticks)))
    plan = timed.plan
    times = timed.measure(Repeats(steps=1))
    assert times is not None
    actions = [*plan.forward, *plan.backward]
    others = times.input + times.update + times.others
    assert others == 5  # input, loss, look, sums, update: each lap is one tick of the clock
    early = [(action, k) for action, k in actions if action is Action.BEGIN]
    assert bool(early) == (use in (Parallelism.DOMAIN, Parallelism.MODEL))
    assert times.actions.keys() == {phase for phase in actions if phase[0] is not Action.BEGIN}
    assert sum(times.actions.values()) == len(actions)


def test_steps_leave_everything_finite_and_the_weights_as_they_are() -> None:
    timed = _timed(Parallelism.DOMAIN)
    before = timed._group.data.copy()
    timed.measure(Repeats(steps=2))
    assert np.isfinite(timed._group.grad).all()
    np.testing.assert_array_equal(before, timed._group.data)


@pytest.mark.parametrize("use", Parallelism, ids=str)
def test_dropout_has_an_id_for_every_sample_of_the_split_group(use: Parallelism) -> None:
    network = Network(catalogue.build("vgg11", {"width": 0.0625}), (32, 32, 3), NumpyKernelSet())
    timed = _timed(use, network)
    timed.measure(Repeats(steps=1))
    assert np.isfinite(timed._group.grad).all()


def test_typical_laps_add_up_to_the_mean_of_undisturbed_steps() -> None:
    laps = np.tile(np.arange(1.0, 10.0), (5, 1))
    for number, lap in enumerate(laps):
        lap[number] += (9.0, 10.0, 11.0, 20.0, 45.0)[number]  # the last two are disturbed, no lap in most of them
    steps = typical(laps)
    assert steps.sum() == pytest.approx(45.0 + 10.0)
    np.testing.assert_allclose(steps / steps[0], np.arange(1.0, 10.0))
    np.testing.assert_array_equal(typical(np.ones((3, 4))), np.ones(4))
    np.testing.assert_array_equal(typical(np.zeros((3, 4))), np.zeros(4))


SMALL_NETWORK = Network(catalogue.build("small", {"channels_in": 3}), (16, 16, 3), NumpyKernelSet())
MEMORY = 1 << 40


def _job(batch: int = 6) -> Job:
    def no_strategy(*_: object) -> None:
        raise AssertionError("times need no averager")

    network = SMALL_NETWORK
    of_network = (network.graph, network.parameter_specs, network.kernels, "float32", (16, 16, 3))
    return Job("small", *of_network, batch, False, no_strategy)  # type: ignore[arg-type]


def _candidate(rows: int, cols: int, use: Parallelism = Parallelism.BATCH, micro_batches: int = 1) -> Candidate:
    return Candidate(ParallelPlan(rows, cols, default=use), micro_batches=micro_batches)


def _times() -> OperatorTimes:
    return OperatorTimes(setting_here(SMALL_NETWORK.kernels, 1, 1))


@pytest.mark.parametrize("use", list(Parallelism), ids=str)
def test_all_that_a_candidate_computes_is_known_afterwards(use: Parallelism) -> None:
    times, candidate = _times(), _candidate(2, 1, use)
    coverage = ensure_measured(_job(), [candidate], times, budget=TimeBudget(), memory_bytes=MEMORY)
    assert coverage.programs >= 1
    assert coverage.covered == (candidate,)
    assert {work.kind for work, _ in coverage.timings} == {kind for kind in OperatorClass if kind is kind.of_dtype("float32")}
    for program in rank_programs(_job(), candidate):
        assert all(times.seconds(key) is not None for key in keys_of(program.plan).values())
        assert program.products
        assert all(times.measured(product_key(product)) for product in program.products)
    again = ensure_measured(_job(), [candidate], times, budget=TimeBudget(), memory_bytes=MEMORY)
    assert (again.programs, again.covered, again.timings) == (0, (candidate,), coverage.timings)


def test_nothing_is_measured_without_time_or_memory_and_all_ranks_decide_alike() -> None:
    times, asked = _times(), []
    nothing = ensure_measured(_job(), [_candidate(1, 1)], times, budget=TimeBudget(), memory_bytes=1)
    assert (nothing.programs, nothing.covered, len(times)) == (0, (), 0)

    def refuse(go_on: bool) -> bool:
        asked.append(go_on)
        return False

    candidates = [_candidate(1, 1), _candidate(1, 2)]
    refused = ensure_measured(_job(), candidates, times, budget=TimeBudget(1e9, refuse), memory_bytes=MEMORY)
    assert (refused.programs, refused.covered, asked) == (0, (), [True, True])


def test_a_disturbance_of_the_first_program_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Find a default that seems slow, and thus loses to a slower choice, because the machine was busy for a second."""
    steps, run = iter([100.0] * 3), TimedProgram._run
    monkeypatch.setattr(TimedProgram, "_run", lambda self: (np.array(run(self)) + next(steps, 0.0)).tolist())
    times, candidates = _times(), [_candidate(2, 1, use) for use in (Parallelism.BATCH, Parallelism.MODEL)]
    arguments = {"budget": TimeBudget(), "memory_bytes": MEMORY, "repeats": FEW_STEPS, "basis": 1}
    coverage = ensure_measured(_job(), candidates, times, **arguments)
    assert sum(seconds for _, seconds in coverage.timings) < 100.0


@pytest.mark.parametrize("steps", [1, 2, 3, 9])
def test_a_candidate_without_time_for_a_timed_step_has_no_times(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Find operators of which some have times and some do not, from a program that took longer than the budget."""

    class Steps(TimeBudget):
        def allows(self, seconds: float = 0.0) -> bool:
            return self.agree(started < steps)

    started = 0

    def begin() -> None:
        nonlocal started
        started += 1

    times, candidates = _times(), [_candidate(2, 1, use) for use in (Parallelism.BATCH, Parallelism.MODEL)]
    monkeypatch.setattr(program_timing, "products_of", lambda plan, samples: [])
    coverage = ensure_measured(_job(), candidates, times, budget=Steps(), memory_bytes=MEMORY, repeats=FEW_STEPS, before=begin)
    assert coverage.covered == tuple(candidates[: {1: 0, 2: 1, 3: 1, 9: 2}[steps]])
    assert bool(len(times)) is bool(coverage.covered)


def test_programs_are_those_of_all_shares_of_the_batch() -> None:
    batches = [program.graph.tensors[0].shape[0] for program in rank_programs(_job(7), _candidate(1, 3))]
    assert batches == [3, 2]
    batches = [program.graph.tensors[0].shape[0] for program in rank_programs(_job(8), _candidate(1, 2, micro_batches=3))]
    assert batches == [2]


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_merged_moments_are_those_of_equal_ranks(ranks: int) -> None:
    random = np.random.default_rng(0)
    mean, m2 = random.standard_normal(3), random.random(3)
    expected = merge_moments(np.full(ranks, 6.0), np.tile(mean, (ranks, 1)), np.tile(m2, (ranks, 1)))
    merger = FakeStatisticsMerger(ranks)
    assert merger.alone == (ranks == 1)
    total = merger.merge(6, mean, m2)
    assert total == expected[0] == 6 * ranks
    np.testing.assert_allclose(mean, expected[1])
    np.testing.assert_allclose(m2, expected[2])
    values = random.standard_normal(5)
    sums = ranks * values
    merger.sum(values)
    np.testing.assert_allclose(values, sums)


def test_every_linear_layer_has_a_product_of_its_weights_size() -> None:
    network = Network(catalogue.build("vgg11", {"width": 0.0625}), (32, 32, 3), NumpyKernelSet())
    plan = compile_graph(network.graph(2), network.kernels, training=True)
    products = products_of(plan, 8)
    weights = [spec.shape for name, spec in network.parameter_specs.items() if len(spec.shape) == 2]
    assert [(product.inputs, product.outputs) for product in products] == weights
    assert {product.samples for product in products} == {8}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_time_is_of_one_product_after_all_were_waited_for(dtype: str) -> None:
    ticks, calls = count(), []
    seconds = time_product(FactorProduct(2, 3, 4), dtype, 5, lambda: float(next(ticks)), lambda: calls.append(1))
    assert (seconds, len(calls), next(ticks)) == (1.0, 7, 14)


FITTED = {
    OperatorClass.CONVOLUTION: OperatorRate(1e11, 2e10, 1e-5, 1e10, 8e9, 8e10),
    OperatorClass.PRODUCT: OperatorRate(5e10, 2e10, 3e-5, 1.5e10),
    OperatorClass.MEMORY: OperatorRate(1e11, 2e10, 2e-6),
    OperatorClass.CONVOLUTION_BFLOAT16: OperatorRate(2.2e11, 1.5e10, 2e-5, 9e9, 4e9, 1.9e11),
    OperatorClass.PRODUCT_BFLOAT16: OperatorRate(5.5e10, 1.5e10, 5e-5, 1.4e10),
    OperatorClass.MEMORY_BFLOAT16: OperatorRate(2.2e11, 1.5e10, 4e-6),
}


def _calls(kind: OperatorClass) -> list[OperatorWork]:
    """Return works of a class: with many operations and few weights, and the other way round."""
    plain = kind.of_dtype("float32")
    if plain is OperatorClass.MEMORY:
        return [OperatorWork(kind, 0, n_bytes) for n_bytes in (100, 20_000, 3_000_000, 90_000_000)]
    convolution = plain is OperatorClass.CONVOLUTION
    return [
        OperatorWork(kind, flops, 100 + of_weights + transposed, of_weights, transposed, winograd_flops)
        for flops in (900_000, 20_000_000, 500_000_000)
        for of_weights in (1_000, 400_000, 9_000_000)
        for transposed in ((0, 300_000, 8_000_000) if convolution else (0,))
        for winograd_flops in ((0, flops // 2) if convolution else (0,))
    ]


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_rates_come_back_from_the_times_that_they_predict(noise: float) -> None:
    """Find a fit that mixes precisions or kernels, or that counts the bytes or copies of weights as operations."""
    random = np.random.default_rng(0)
    works = [work for kind in FITTED for work in _calls(kind)]
    random.shuffle(works)
    found = rates_from_timings(
        [(work, work.seconds(FITTED[work.kind]) * (1 + noise * random.standard_normal())) for work in works]
    )
    assert set(found) == set(FITTED)
    for work in works:
        assert work.seconds(found[work.kind]) == pytest.approx(work.seconds(FITTED[work.kind]), rel=1e-6 + 3 * noise)
    if not noise:
        for kind, rate in FITTED.items():
            assert asdict(found[kind]).keys() == asdict(rate).keys()
            for name, speed in asdict(rate).items():
                assert getattr(found[kind], name) == (None if speed is None else pytest.approx(speed, rel=1e-6))


def test_noise_does_not_make_a_part_of_a_call_negative() -> None:
    """Find rates that are negative or infinite if larger works took less time."""
    works = [OperatorWork(OperatorClass.CONVOLUTION, flops, 10 * flops, 100, 10) for flops in (1_000, 10_000, 100_000)]
    works += [replace(work, kind=OperatorClass.MEMORY, weight_bytes=0, transposed_bytes=0) for work in works]
    for rate in rates_from_timings([(work, 1.0 / work.flops) for work in works]).values():
        speeds = [speed for name, speed in asdict(rate).items() if name != "call_seconds" and speed is not None]
        assert all(0 < speed < 1e16 for speed in speeds)
        assert 0 <= rate.call_seconds <= 1


@pytest.mark.parametrize("dtypes", [("float32",), ("float32", "bfloat16")])
def test_a_kernel_set_has_a_rate_of_every_class(dtypes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Find a precision that is not measured, or that other ranks do not measure at the same time."""
    small = RateTask(lambda: catalogue.build("resnet_small", {"depth": 20, "width": 0.25}), 1, 8)
    monkeypatch.setattr(calibration, "_TASKS", (small,))
    monkeypatch.setattr(calibration, "_STEPS", 1)
    met = []
    found = measure_rates_of(NumpyKernelSet(), 1, lambda: met.append(1), dtypes)
    assert set(found) == {kind.of_dtype(dtype) for kind in OperatorClass for dtype in dtypes}
    assert all(rate.flops_per_second > 0 and rate.bytes_per_second > 0 and rate.call_seconds >= 0 for rate in found.values())
    assert len(met) == 3 * len(dtypes)  # each task has two warm-up steps


def spec(size: int) -> ParameterSpec:
    return ParameterSpec((size,), lambda random, shape: random.standard_normal(shape))


def test_waits_do_not_count_and_what_is_not_announced_ends_with_backward() -> None:
    def compute(seconds: float) -> Compute:
        return Compute("layer", Category.FORWARD, seconds)

    def happens(kind: EventKind, name: str) -> Happens:
        return Happens("all", LocalEventKey(kind, name))

    tasks: tuple[Task, ...] = (
        NeedsParameters("all", ("a", "empty")),
        compute(1.0),
        EndExchange(0),
        NeedsParameters("all", ("b",)),
        NeedsParameters("model", ("c",)),
        compute(2.0),
        NeedsParameters("all", ("b",)),  # a second micro-batch
        happens(EventKind.GRADIENT, "b"),
        compute(4.0),
        happens(EventKind.LAST_READ, "b"),
        EndBackward(),
        compute(8.0),
    )
    layout = GroupLayout({"a": spec(3), "b": spec(2), "empty": spec(0)}, "float64")
    times = times_of(tasks, "all", layout)
    assert times.needed == {"a": 0.0, "b": 1.0}
    assert times.ready == {"b": 3.0, "a": 7.0}
    assert times.free == {"b": 7.0, "a": 7.0}
    assert times.end_seconds == 7.0
