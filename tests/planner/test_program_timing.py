"""Measuring candidates: everything that their programs do is known afterwards, and nothing is measured twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.models import catalogue
from hpctrain.nn.compile.compiler import compile_graph
from hpctrain.nn.network import Network
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.planner.factor_products import products_of
from hpctrain.planner.job import Candidate, Job
from hpctrain.planner.measured_costs import product_key
from hpctrain.planner.operator_times import OperatorTimes
from hpctrain.planner.program_timing import ensure_measured, keys_of, rank_programs, setting_here

NETWORK = Network(catalogue.build("small", {"channels_in": 3}), (16, 16, 3), NumpyKernelSet())
WITHOUT_LIMIT = {"budget_seconds": 1e9, "memory_bytes": 1 << 40}


def _job(batch: int = 6) -> Job:
    def no_strategy(*_: object) -> None:
        raise AssertionError("times need no averager")

    return Job(
        "small", NETWORK.graph, NETWORK.parameter_specs, NETWORK.kernels, "float32", (16, 16, 3), batch, False, no_strategy
    )  # type: ignore[arg-type]


def _candidate(rows: int, cols: int, use: Parallelism = Parallelism.BATCH, micro_batches: int = 1) -> Candidate:
    return Candidate(ParallelPlan(rows, cols, default=use), micro_batches=micro_batches)


def _times() -> OperatorTimes:
    return OperatorTimes(setting_here(NETWORK.kernels, 1, 1))


@pytest.mark.parametrize("use", list(Parallelism), ids=str)
def test_all_that_a_candidate_computes_is_known_afterwards(use: Parallelism) -> None:
    times, candidate = _times(), _candidate(2, 1, use)
    coverage = ensure_measured(_job(), [candidate], times, **WITHOUT_LIMIT)
    assert coverage.programs >= 1
    assert coverage.left == 0
    for program in rank_programs(_job(), candidate):
        plan = compile_graph(program.graph, NETWORK.kernels, training=True)
        assert all(times.measured(key) for key in keys_of(plan).values())
        assert products_of(plan, 6)
        assert all(times.measured(product_key(product)) for product in products_of(plan, 6))
    assert ensure_measured(_job(), [candidate], times, **WITHOUT_LIMIT).programs == 0


def test_nothing_is_measured_without_time_or_memory_and_all_ranks_decide_alike() -> None:
    times, asked = _times(), []
    nothing = ensure_measured(_job(), [_candidate(1, 1)], times, budget_seconds=1e9, memory_bytes=1)
    assert (nothing.programs, nothing.left, len(times)) == (0, 1, 0)

    def refuse(go_on: bool) -> bool:
        asked.append(go_on)
        return False

    refused = ensure_measured(_job(), [_candidate(1, 1), _candidate(1, 2)], times, agree=refuse, **WITHOUT_LIMIT)
    assert (refused.programs, refused.left, asked) == (0, 2, [True, True])


def test_programs_are_those_of_all_shares_of_the_batch() -> None:
    batches = [program.graph.tensors[0].shape[0] for program in rank_programs(_job(7), _candidate(1, 3))]
    assert batches == [3, 2]
    batches = [program.graph.tensors[0].shape[0] for program in rank_programs(_job(8), _candidate(1, 2, micro_batches=3))]
    assert batches == [2]


def test_the_setting_names_the_processor_and_what_computes(tmp_path: Path) -> None:
    setting = setting_here(NETWORK.kernels, 1, 2)
    assert "numpy" in setting.kernels
    assert setting.processor
    assert (setting.threads, setting.concurrency) == (1, 2)
