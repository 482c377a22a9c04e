"""The times of candidates' operators, measured as they follow each other in a step: alone they would find other caches."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from hpctrain.backend.dtypes import parameter_dtype
from hpctrain.backend.operators import KernelSet
from hpctrain.backend.graph import Graph
from hpctrain.backend.kernels.onednn.library import processor_flags
from hpctrain.core.intervals import even
from hpctrain.data.sampler import counts as counts_over
from hpctrain.nn.compile.compiler import compile_graph
from hpctrain.nn.compile.plan import Action, ExecutionPlan
from hpctrain.nn.distribution import Shard
from hpctrain.parallel.partition_graph import partition_graph
from hpctrain.planner.factor_products import FactorProduct, products_of, time_product
from hpctrain.planner.job import Candidate, Job
from hpctrain.planner.measured_costs import input_key, others_key, product_key, update_key
from hpctrain.planner.operator_key import OperatorKey, operator_key
from hpctrain.planner.operator_times import OperatorTimes, Setting
from hpctrain.planner.stand_ins import StandInGroup, stand_in_mergers
from hpctrain.planner.program_timing import ProgramTimes, TimedProgram, clock_of
from hpctrain.version import __version__

#: instruction sets that kernels are chosen by
_INSTRUCTION_SETS = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "avx_vnni", "amx_tile", "amx_bf16")
_STEPS = 7
_UNTIMED = (Action.BEGIN, Action.FREE)
# Parameters, gradients and momentum, and as many again for temporaries.
_COPIES_OF_PARAMETERS = 4


@dataclass(frozen=True)
class RankProgram:
    """A rank's program. graph: its own, not yet fused. shards: its parts of parameters.

    split_ranks, data_ranks: of its two groups. exchanged_samples: whose inputs and errors it may make gradients of; 0 where none
    are exchanged.
    """

    graph: Graph
    shards: Mapping[str, Shard]
    split_ranks: int
    data_ranks: int
    exchanged_samples: int


@dataclass(frozen=True)
class Coverage:
    """An account of a measurement. programs: that were run. left: that the time or the memory did not allow."""

    programs: int
    left: int
    seconds: float


def setting_here(kernels: KernelSet, threads: int, concurrency: int) -> Setting:
    """The setting of this process: the processor that it runs on, and the versions of all that computes."""
    version = getattr(kernels, "version", "")
    versions = f"{kernels.name} {version}".strip() + f", NumPy {np.__version__}, hpctrain {__version__}"
    return Setting(_processor(), versions, threads, concurrency)


def rank_programs(job: Job, candidate: Candidate) -> Iterator[RankProgram]:
    """The programs of the ranks that may differ: first, middle and last of each kind of split group, largest first."""
    plan = candidate.plan
    positions = counts_over(job.batch, candidate.ranks, plan.rows)
    largest = [even(count, candidate.micro_batches)[0] for count in positions]
    groups = dict.fromkeys(tuple(largest[first : first + plan.rows]) for first in range(0, len(largest), plan.rows))
    exchanged = job.batch if candidate.ranks > 1 and candidate.micro_batches == 1 else 0
    for counts in groups:
        graph = job.graph_of(sum(counts))
        if plan.rows == 1:
            yield RankProgram(graph, {}, 1, plan.cols, exchanged)
            continue
        partitioned = partition_graph(graph, plan, counts)
        for rank in dict.fromkeys((0, plan.rows // 2, plan.rows - 1)):
            local = partitioned.local(rank, StandInGroup(rank, plan.rows))
            yield RankProgram(local, partitioned.shards_of(rank), plan.rows, plan.cols, exchanged)


def keys_of(plan: ExecutionPlan) -> dict[tuple[Action, int], OperatorKey]:
    """The key of each action of a plan that takes time."""
    return {
        (action, k): operator_key(plan.steps[k], action, plan.memory[k])
        for action, k in (*plan.forward, *plan.backward)
        if action not in _UNTIMED
    }


def record(times: OperatorTimes, plan: ExecutionPlan, parameters: int, step: ProgramTimes) -> None:
    """Keep all times of a step; of operators with the same key their mean. parameters: numbers that were updated."""
    by_key: dict[OperatorKey, list[float]] = {}
    for phase, key in keys_of(plan).items():
        by_key.setdefault(key, []).append(step.actions[phase])
    for key, seconds in by_key.items():
        times.put(key, float(np.mean(seconds)))
    times.put(update_key(parameters), step.update)
    times.put(input_key(plan.tensors[0].bytes), step.input)
    times.put(others_key(len(plan.steps)), step.others)


def ensure_measured(
    job: Job,
    candidates: Iterable[Candidate],
    times: OperatorTimes,
    *,
    budget_seconds: float,
    memory_bytes: int,
    before: Callable[[], None] = lambda: None,
    agree: Callable[[bool], bool] = lambda go_on: go_on,
) -> Coverage:
    """Measure what the candidates compute and `times` does not know yet, those with the most unknown operators first.

    Where several ranks of a node measure at the same time, so that they find caches and memory as busy as in a step, all call
    this with the same arguments, and both functions are collective among them.

    Args:
        memory_bytes: of this rank; programs that take more are left out.
        before: is called before each step: a barrier. agree: makes one decision of all ranks': whether to go on.
    """
    begin, done, left = time.perf_counter(), 0, 0
    for program in _most_unknown_first(job, candidates, times):
        plan = compile_graph(program.graph, job.kernels, training=True)
        if not _unknown(program, plan, times):
            continue
        fits = plan.arena_bytes + _COPIES_OF_PARAMETERS * _parameter_bytes(job) <= memory_bytes
        if not fits or not agree(time.perf_counter() - begin < budget_seconds):
            left += 1
            continue
        _measure(job, program, times, before)
        done += 1
    return Coverage(done, left, time.perf_counter() - begin)


def _most_unknown_first(job: Job, candidates: Iterable[Candidate], times: OperatorTimes) -> list[RankProgram]:
    programs = [program for candidate in candidates for program in rank_programs(job, candidate)]
    unknown = [_unknown(program, compile_graph(program.graph, job.kernels, training=True), times) for program in programs]
    order = sorted(range(len(programs)), key=lambda i: -unknown[i])
    return [programs[i] for i in order if unknown[i]]


def _unknown(program: RankProgram, plan: ExecutionPlan, times: OperatorTimes) -> int:
    keys = {*keys_of(plan).values(), *map(product_key, _products(program, plan))}
    return sum(not times.measured(key) for key in keys)


def _products(program: RankProgram, plan: ExecutionPlan) -> list[FactorProduct]:
    return products_of(plan, program.exchanged_samples) if program.exchanged_samples else []


def _measure(job: Job, program: RankProgram, times: OperatorTimes, before: Callable[[], None]) -> None:
    clock = clock_of(times.setting.threads, on_host=job.kernels.arithmetic.on_host)
    timed = TimedProgram(
        program.graph,
        job.kernels,
        job.specs,
        shards=program.shards,
        mergers=stand_in_mergers(program.split_ranks, program.data_ranks),
        dtype=job.dtype,
        clock=clock,
    )
    record(times, timed.plan, timed.parameters, timed.measure(_STEPS, before))
    for product in _products(program, timed.plan):
        if not times.measured(product_key(product)):
            times.put(product_key(product), time_product(product, parameter_dtype(job.dtype), _STEPS, clock, before))


def _parameter_bytes(job: Job) -> int:
    return sum(int(np.prod(spec.shape)) for spec in job.specs.values()) * np.dtype(np.float32).itemsize


def processor_model(cpuinfo: str = "/proc/cpuinfo") -> str:
    """The processor's name, as machine files give it as the source of what was measured."""
    try:
        with open(cpuinfo, encoding="ascii", errors="replace") as file:
            models = (line.partition(":")[2].strip() for line in file if line.startswith("model name"))
            return next(models, platform.machine())
    except OSError:
        return platform.machine()


def _processor(cpuinfo: str = "/proc/cpuinfo") -> str:
    """The model and the instruction sets that kernels are chosen by."""
    known = processor_flags(cpuinfo)
    return " ".join([processor_model(cpuinfo), *(flag for flag in _INSTRUCTION_SETS if flag in known)])
