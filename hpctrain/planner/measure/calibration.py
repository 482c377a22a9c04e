"""Calibrate a machine: measure its links, memory and operator rates with the ranks of a job.

Links are measured between pairs of ranks. Within nodes, all pairs communicate at once, as in a step. Between nodes, one pair
measures first, alone on its network cards. Then all pairs measure at once, which shows how many ranks share a card. The rates of
operators are fitted to their times in steps of small networks, in each precision. If every rank has one thread per core and at
least two cores, all ranks measure these rates again with one thread each, and then copy memory with all threads.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hpctrain.backend.operators import KernelSet
from hpctrain.comm.base import Communicator
from hpctrain.comm.groups import node_numbers
from hpctrain.comm.progress import ProgressEngine
from hpctrain.core.text import counted
from hpctrain.models import catalogue
from hpctrain.nn.layers import AdaptiveAveragePool, Conv2d, Flatten, Layer, Linear, ReLU, Sequential
from hpctrain.nn.network import Network
from hpctrain.planner.costs import machine_file
from hpctrain.planner.costs.machine import Link, LinkSegment, Machine, OperatorClass, OperatorRate, slowest_rate
from hpctrain.planner.costs.operator_work import OperatorWork, work_of
from hpctrain.planner.measure import link_measurement
from hpctrain.planner.measure.link_measurement import QUICK, THOROUGH, Effort, LinkProbe, MessagePoint
from hpctrain.planner.measure.program_timing import Repeats, TimedProgram, clock_of, fake_mergers

_STEPS = 4
# Bytes of the array that a thread copies, more than its share of the caches, and number of its copies per lap.
_COPIED_BYTES, _COPIES = 16 << 20, 8
_COPY_TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True)
class RateTask:
    """Network whose operators are timed, on `batch` images of `pixels` x `pixels`."""

    make: Callable[[], Layer]
    batch: int
    pixels: int


def _linear() -> Layer:
    return Sequential([Flatten(), Linear(12 * 12 * 3, 4096), Linear(4096, 1024), Linear(1024, 100)])


def _large_images() -> Layer:
    convolutions = [Conv2d(3, 128, 3, padding=1), ReLU(), Conv2d(128, 128, 3, padding=1), ReLU()]
    return Sequential([*convolutions, AdaptiveAveragePool(1), Flatten(), Linear(128, 10)])


_TASKS = (
    RateTask(lambda: catalogue.build("resnet18", {}), 4, 112),
    RateTask(lambda: catalogue.build("resnet18", {}), 2, 64),  # many weights for few pixels
    RateTask(_large_images, 2, 64),  # tiles of Winograd do not fit into caches
    RateTask(_linear, 32, 12),
    RateTask(_linear, 2, 12),
    RateTask(lambda: catalogue.build("resnet_small", {"depth": 20, "width": 0.25}), 1, 8),  # mostly call overhead
)

#: (work of an operator, seconds)
Timing = tuple[OperatorWork, float]


def measure_rates_of(
    kernels: KernelSet, threads: int, before: Callable[[], None] = lambda: None, dtypes: Sequence[str] = ("float32",)
) -> dict[OperatorClass, OperatorRate]:
    """Measure the rates of one rank with `threads` threads.

    Args:
        before: callback before each step: a barrier if several ranks are to compute at the same time.
        dtypes: dtypes of activations to measure, equal on all ranks.
    """
    clock = clock_of(threads)
    timings = [timing for dtype in dtypes for task in _TASKS for timing in _timings(task, kernels, dtype, clock, before)]
    return rates_from_timings(timings)


def measure_memory_traffic(threads: int, before: Callable[[], None] = lambda: None) -> float:
    """Measure the bytes per second that `threads` threads together read and write in the fastest of several laps of copies.

    Args:
        threads: number of threads; each copies its own array.
        before: callback before each lap: a barrier if several ranks are to copy at the same time.
    """
    barrier = threading.Barrier(threads + 1, timeout=_COPY_TIMEOUT_SECONDS)
    begins, ends = np.zeros((2, _STEPS, threads))

    def copy(thread: int) -> None:
        # The thread that writes an array first places it in the memory next to its core.
        source, target = np.ones(_COPIED_BYTES, np.uint8), np.zeros(_COPIED_BYTES, np.uint8)
        for lap in range(_STEPS):
            barrier.wait()
            begins[lap, thread] = time.perf_counter()
            for _ in range(_COPIES):
                np.copyto(target, source)  # releases the GIL, so that threads copy at the same time
            ends[lap, thread] = time.perf_counter()
            barrier.wait()

    for thread in range(threads):
        threading.Thread(target=copy, args=(thread,), daemon=True).start()
    for _ in range(_STEPS):
        before()
        barrier.wait()  # begins the lap
        barrier.wait()  # ends it
    fastest = float((ends.max(axis=1) - begins.min(axis=1)).min())
    return 2 * _COPIED_BYTES * _COPIES * threads / fastest


def rates_from_timings(timings: Sequence[Timing]) -> dict[OperatorClass, OperatorRate]:
    """Return the rates of the operator classes that have timings, and of all classes of float32.

    Memory-bound operators have the operations per second of convolutions. All classes have the bytes per second of memory-bound
    operators. A class of float32 without timings has the rate of a similar class; memory-bound operators need timings.
    """
    of_class: dict[OperatorClass, list[Timing]] = {}
    for work, seconds in timings:
        of_class.setdefault(work.kind, []).append((work, seconds))
    fitted = {kind: _fitted(some, by_bytes=_is_memory(kind)) for kind, some in of_class.items()}

    def fit(*kinds: OperatorClass) -> list[float]:
        return next(fitted[kind] for kind in (*kinds, OperatorClass.MEMORY) if kind in fitted)

    def rate(kind: OperatorClass) -> OperatorRate:
        dtype = "float32" if kind is kind.of_dtype("float32") else "bfloat16"
        products = [one.of_dtype(of) for of in (dtype, "bfloat16") for one in (OperatorClass.CONVOLUTION, OperatorClass.PRODUCT)]
        call_seconds, operation_seconds, *others = fit(kind) if _is_memory(kind) else fit(kind, *products)
        if _is_memory(kind):
            operation_seconds = fit(*products)[1]
        byte_seconds = fit(OperatorClass.MEMORY.of_dtype(dtype))[1]
        return OperatorRate(1 / operation_seconds, 1 / byte_seconds, call_seconds, *(1 / one if one else None for one in others))

    return {kind: rate(kind) for kind in OperatorClass if kind in fitted or kind is kind.of_dtype("float32")}


def _is_memory(kind: OperatorClass) -> bool:
    return kind.of_dtype("float32") is OperatorClass.MEMORY


# Least seconds of a call, and of an operation or byte, so that all rates are finite.
_LEAST_CALL_SECONDS, _LEAST_SECONDS = 1e-7, 1e-15


def _fitted(timings: Sequence[Timing], *, by_bytes: bool) -> list[float]:
    """Return the seconds of a call, an operation, a byte of weights, a byte of transposing copies, and an operation by Winograd.

    The times of calls are fitted as sums of these parts. The fit minimises the sum of (predicted - measured)^2 / measured, so
    that neither the longest nor the shortest calls dominate. A part without work takes 0 seconds.

    Args:
        by_bytes: whether the second part is the time of a byte instead, as for memory-bound operators.
    """
    parts = np.array([_parts(work, by_bytes=by_bytes) for work, _ in timings], np.float64)
    roots = np.sqrt([max(seconds, _LEAST_CALL_SECONDS) for _, seconds in timings])
    largest = parts.max(axis=0)
    result = np.where(largest > 0, _LEAST_SECONDS, 0.0)
    columns = np.flatnonzero(largest)
    while columns.size:
        weighted = parts[:, columns] / largest[columns] / roots[:, None]
        seconds = np.linalg.lstsq(weighted, roots, rcond=None)[0] / largest[columns]
        if np.all(seconds > 0):
            result[columns] = np.maximum(seconds, _LEAST_SECONDS)
            break
        columns = columns[seconds > 0]  # noise can make a part negative; fit the other parts without it
    return [float(one) for one in result]


def _parts(work: OperatorWork, *, by_bytes: bool) -> tuple[int, int, int, int, int]:
    """Return the amounts of the parts of `_fitted`."""
    amount = work.bytes if by_bytes else 0 if work.winograd_flops else work.flops
    return 1, amount, work.weight_bytes, work.transposed_bytes, work.winograd_flops


def _timings(
    task: RateTask, kernels: KernelSet, dtype: str, clock: Callable[[], float], before: Callable[[], None]
) -> list[Timing]:
    network = Network(task.make(), (task.pixels, task.pixels, 3), kernels, dtype=dtype)
    graph, specs, mergers = network.graph(task.batch), network.parameter_specs, fake_mergers(1, 1)
    timed = TimedProgram(graph, kernels, specs, shards={}, mergers=mergers, dtype=dtype, clock=clock)
    times = timed.measure(Repeats(steps=_STEPS), before)
    assert times is not None  # there is no time limit
    plan = timed.plan
    timings = ((work_of(plan.steps[k], action, plan.memory[k]), seconds) for (action, k), seconds in times.actions.items())
    return [(work, seconds) for work, seconds in timings if not work.is_nothing]


# Used if a link cannot be measured: shared memory of current processors, and 10 Gb/s Ethernet.
_USUAL_WITHIN = Link((LinkSegment(0, 2e-6, 2e-10, None, 0), LinkSegment(16 << 10, 5e-6, 1.5e-10, None, 1)), 1e-5, 1e-10, 3e-10)
_USUAL_BETWEEN = Link((LinkSegment(0, 3e-5, 8e-10, None, 0), LinkSegment(64 << 10, 1e-4, 8e-10, None, 1)), 2e-5, 2e-10, 3e-10)
# Share of the time limit for measuring links, within and between nodes together.
_LINKS_SHARE = 0.6

#: function that measures the rates of this rank, and calls its argument before each step
MeasureRates = Callable[[Callable[[], None]], Mapping[OperatorClass, OperatorRate]]
#: function that measures this rank's rates with one thread, then the bytes per second that all its threads read and write
#: together, and calls its argument before each step and each lap of copies
MeasureThreads = Callable[[Callable[[], None]], tuple[Mapping[OperatorClass, OperatorRate], float]]


@dataclass(frozen=True)
class RankFacts:
    """Facts about a rank and its node.

    Attributes:
        cores: cores on which the rank may run, exclusive or shared with other ranks.
        memory_bytes: memory of the node; processor: name of its processor model.
    """

    cores: frozenset[int]
    memory_bytes: int
    processor: str
    threads: int = 1  # of the rank


@dataclass(frozen=True)
class _Layout:
    """Placement of the job's ranks on nodes.

    Attributes:
        node_of: node of each rank.
        local: local rank of each rank on its node.
        cores: number of cores of the first node's ranks; inf: unknown, as many as ranks at least.
    """

    node_of: tuple[int, ...]
    local: tuple[int, ...]
    cores: float = math.inf

    @property
    def nodes(self) -> int:
        return max(self.node_of) + 1

    @property
    def ranks_per_node(self) -> int:
        return max(self.local) + 1

    @property
    def clock(self) -> Callable[[], float] | None:
        """Clock of the thread if ranks share cores, because wall time includes the turns of other ranks; otherwise None."""
        return time.thread_time if self.cores < self.ranks_per_node else None


def calibrate(
    comm: Communicator,
    progress: ProgressEngine,
    facts: RankFacts,
    measure_rates: MeasureRates,
    *,
    name: str,
    when: str,
    seconds: float = 60.0,
    effort: Effort = THOROUGH,
    measure_threads: MeasureThreads | None = None,
    physical_cores: Callable[[frozenset[int]], int] = len,
) -> Machine:
    """Measure the machine on which the job runs. Collective over `comm`; return the same machine on every rank.

    Args:
        name, when: name of the machine, and date for the sources of its numbers.
        seconds: time for the whole measurement. Links take at most 60 % of it if one pass over all sizes fits; the rest is not
            limited.
        measure_threads: function that measures the effect of this rank's threads, called if every rank has one thread per core
            and at least two cores; None on all ranks: the effect is not measured.
        physical_cores: function from logical cores to the number of physical cores among them.
    """
    node = comm.split_shared_memory("calibration on a node")
    of_all, node_of = comm.allgather_object(facts), node_numbers(comm, node)
    on_first_node = [one for one, number in zip(of_all, node_of, strict=True) if number == node_of[0]]
    cores = physical_cores(frozenset().union(*(one.cores for one in on_first_node)))
    layout = _Layout(node_of, tuple(comm.allgather_object(node.rank)), cores)
    source = f"measured on {when}, {facts.processor}"
    kinds = max(1, (layout.nodes > 1) + (layout.ranks_per_node > 1))
    budget = _LINKS_SHARE * seconds / kinds
    within, within_source = _within(comm, progress, layout, source, effort, budget)
    between, ranks_per_card, sources = _between(comm, progress, layout, source, effort, budget)
    rates = _slowest(comm.allgather_object(measure_rates(_barrier(comm, progress))))
    machine = Machine(
        name=name,
        nodes=layout.nodes,
        ranks_per_node=layout.ranks_per_node,
        cores_per_rank=cores / layout.ranks_per_node,
        memory_bytes=min(fact.memory_bytes for fact in of_all) // layout.ranks_per_node,
        within=within,
        between=between,
        ranks_per_card=ranks_per_card,
        rates=rates,
        description=f"{counted(layout.nodes, 'node')} of {counted(layout.ranks_per_node, 'rank')}, {facts.processor}",
        sources={
            **dict.fromkeys(("nodes", "ranks_per_node"), f"the job that calibrated on {when}"),
            **dict.fromkeys(
                ("cores_per_rank", "memory_bytes"), f"the operating system on {when}, in equal shares for the ranks of a node"
            ),
            **within_source,
            **sources,
            "rates": f"{source}, all ranks of a node computing",
        },
    )
    threads = machine.threads_per_rank
    if measure_threads is not None and threads > 1 and all(fact.threads == threads for fact in of_all):
        machine = _with_thread_rates(comm, progress, layout, machine, measure_threads, source)
    # Parsing the text gives every number its source, as reading the file does.
    answer: Machine = comm.broadcast_object(machine_file.parse(machine_file.text(machine)))
    return answer


def _with_thread_rates(
    comm: Communicator,
    progress: ProgressEngine,
    layout: _Layout,
    machine: Machine,
    measure_threads: MeasureThreads,
    source: str,
) -> Machine:
    """Return the machine with rates of one thread per rank and the memory traffic of a node, measured on all ranks at once."""
    together = comm.allgather_object(measure_threads(_barrier(comm, progress)))
    traffic = [0.0] * layout.nodes
    for node, (_, bytes_per_second) in zip(layout.node_of, together, strict=True):
        traffic[node] += bytes_per_second
    sources = {
        "single_thread_rates": f"{source}, one thread per rank, all ranks of a node computing",
        "node_bytes_per_second": f"{source}, all cores of a node copying",
    }
    return replace(
        machine,
        single_thread_rates=_slowest([rates for rates, _ in together]),
        node_bytes_per_second=min(traffic),
        sources={**machine.sources, **sources},
    )


def _barrier(comm: Communicator, progress: ProgressEngine) -> Callable[[], None]:
    """Return a callback that waits until all ranks have called it."""
    return lambda: progress.wait_handle(comm.ibarrier(), "ranks that measure at the same time")


def _slowest(rates_of_ranks: Sequence[Mapping[OperatorClass, OperatorRate]]) -> dict[OperatorClass, OperatorRate]:
    """Return the lowest rates and the longest call of any rank, by class."""
    return {kind: slowest_rate([rates[kind] for rates in rates_of_ranks]) for kind in rates_of_ranks[0]}


def check_links(comm: Communicator, progress: ProgressEngine) -> float:
    """Return the total seconds of short messages within and long ones between nodes. Collective; the same on every rank."""
    node = comm.split_shared_memory("check of links")
    layout = _Layout(node_numbers(comm, node), tuple(comm.allgather_object(node.rank)))
    tiny, short, *long = QUICK.sizes
    # Within nodes, messages are short and without pauses: ranks that share a core take turns, so that others would vary.
    kinds = [(_pair_within, (tiny, short))] * (layout.ranks_per_node > 1) + [(_pair_between, (tiny, *long))] * (layout.nodes > 1)
    probes = ((LinkProbe(comm, pair(comm, layout), progress), replace(QUICK, sizes=sizes, passes=1)) for pair, sizes in kinds)
    return sum(point.seconds for probe, once in probes for point in probe.measure(once, details=False))


def _pair_within(comm: Communicator, layout: _Layout) -> Communicator | None:
    """Return the communicator of this rank and its partner on the same node; None: it has none."""
    color = _number(layout, comm.rank, lambda node, local: (node, local // 2))
    return comm.split(color, comm.rank, "calibration within nodes")


def _pair_between(comm: Communicator, layout: _Layout) -> Communicator | None:
    """Return the communicator of one rank of each of the first two nodes; None on all other ranks."""
    first = layout.node_of[comm.rank] < 2 and layout.local[comm.rank] == 0
    return comm.split(0 if first else None, comm.rank, "calibration between nodes")


def _within(
    comm: Communicator, progress: ProgressEngine, layout: _Layout, source: str, effort: Effort, budget_seconds: float
) -> tuple[Link, dict[str, str]]:
    if layout.ranks_per_node == 1:
        return _USUAL_WITHIN, {"within": "not measured: one rank per node; shared memory of a current processor"}
    without_bursts, pair = replace(effort, pause_seconds=0.0), _pair_within(comm, layout)
    points = LinkProbe(comm, pair, progress, clock=layout.clock).measure(without_bursts, budget_seconds=budget_seconds)
    return link_measurement.link(points, bursts=False), {"within": f"{source}, all ranks of a node in pairs at once"}


def _between(
    comm: Communicator, progress: ProgressEngine, layout: _Layout, source: str, effort: Effort, budget_seconds: float
) -> tuple[Link, int, dict[str, str]]:
    """Measure the link between nodes. Return it, the number of ranks that share a network card, and the sources of both."""
    if layout.nodes == 1:
        reason = "not measured: one node"
        return _USUAL_BETWEEN, layout.ranks_per_node, {"between": f"{reason}; 10 Gb/s Ethernet", "ranks_per_card": reason}
    probe = LinkProbe(comm, _pair_between(comm, layout), progress, clock=layout.clock)
    points = probe.measure(effort, budget_seconds=budget_seconds)
    fitted = replace(link_measurement.link(points), buffered_bytes=probe.buffered_bytes(points[-1]))
    sources = {"between": f"{source}, one rank of each of two nodes"}
    if layout.ranks_per_node == 1:
        return fitted, 1, {**sources, "ranks_per_card": "one rank per node"}
    color = _number(layout, comm.rank, lambda node, local: (node // 2, local))
    largest = replace(effort, sizes=tuple(point.n_bytes for point in points[-2:]), passes=1)
    pair = comm.split(color, comm.rank, "calibration of cards")
    together = comm.split(None if pair is None else 0, comm.rank, "calibration of cards, all pairs")
    at_once = LinkProbe(comm, pair, progress, together).measure(largest, details=False)
    sharing = _sharing(points, at_once, layout.ranks_per_node)
    return fitted, sharing, {**sources, "ranks_per_card": f"{source}, pairs of all ranks of two nodes at once"}


def _sharing(alone: Sequence[MessagePoint], at_once: Sequence[MessagePoint], ranks_per_node: int) -> int:
    """Return the number of ranks of a node per network card, a divisor of the ranks of a node.

    It is the divisor nearest to the slowdown: the highest rate of a large message while one pair sends, divided by that while all
    pairs send. Disturbances only lengthen messages, so the highest rates are those of undisturbed messages.
    """
    seconds = {point.n_bytes: point.seconds for point in alone}
    large = [point for point in at_once if 2 * point.n_bytes >= at_once[-1].n_bytes]  # smaller ones may pass in a burst
    fastest = max(point.n_bytes / max(1e-9, seconds[point.n_bytes]) for point in large)
    slowed = fastest * min(point.seconds / point.n_bytes for point in large)
    divisors = [count for count in range(1, ranks_per_node + 1) if ranks_per_node % count == 0]
    return min(divisors, key=lambda count: abs(count - slowed))


def _number(layout: _Layout, rank: int, key: Callable[[int, int], tuple[int, int]]) -> int | None:
    """Return the place of the rank's `key(node, local rank)` among all keys, sorted; None unless exactly two ranks share it."""
    keys = [key(node, local) for node, local in zip(layout.node_of, layout.local, strict=True)]
    return sorted(set(keys)).index(keys[rank]) if keys.count(keys[rank]) == 2 else None
