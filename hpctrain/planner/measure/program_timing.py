"""Time the operators of a rank's program in the order of a step, because the state of the caches affects each operator's time.

`TimedProgram` runs one rank's step with a clock between its actions. A `FakeSplitGroup` replaces the other ranks of the split
group: it sends nothing, and its messages complete at once with arbitrary values. Packing, copying and unpacking take their usual
time. `ensure_measured` times the operators of candidates that were not measured before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hpctrain.backend.graph import Graph
from hpctrain.backend.operators import KernelSet, StatisticsMerger, StepContext
from hpctrain.backend.specs import SoftmaxCrossEntropySpec, parameter_dtype
from hpctrain.comm.base import SingleCommunicator
from hpctrain.comm.progress import ProgressEngine, Ticket
from hpctrain.core.intervals import even
from hpctrain.nn.compile.compiler import compile_graph
from hpctrain.nn.compile.plan import Action, ExecutionPlan
from hpctrain.nn.initialise import first_value
from hpctrain.nn.network import Shard, local_spec
from hpctrain.nn.parameter import FlatGroup, FlatStatistics, ParameterSpec, StatisticSpec
from hpctrain.nn.program import Program
from hpctrain.optim.optimizers import Sgd
from hpctrain.parallel.groups import merge_moments
from hpctrain.parallel.moves import SplitGroup
from hpctrain.parallel.partition_graph import partition_graph
from hpctrain.planner.costs.compute_costs import input_key, others_key, product_key, update_key
from hpctrain.planner.costs.operator_times import OperatorKey, OperatorTimes, operator_key
from hpctrain.planner.costs.operator_work import FactorProduct, products_of, time_product
from hpctrain.planner.job import Candidate, Job


class FakeSplitGroup(SplitGroup):
    """Split group of `size` ranks in which only this rank exists."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(SingleCommunicator("split"), ProgressEngine(rank=0, deadline_seconds=1.0, abort=lambda code: None))
        self.rank, self.size = rank, size
        self._done = Ticket(SingleCommunicator("split").ibarrier, "nothing", (), "stand-in", 0)
        self._done.done = True

    def alltoall(
        self, send: np.ndarray, recv: np.ndarray, send_counts: Sequence[int], recv_counts: Sequence[int], purpose: str
    ) -> Ticket:
        return self._done

    def wait(self, ticket: Ticket) -> None:
        """Return at once."""


class FakeStatisticsMerger:
    """`StatisticsMerger` for `ranks` ranks that all have this rank's values."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    @property
    def alone(self) -> bool:
        return self._ranks == 1

    def merge(self, count: int, mean: np.ndarray, m2: np.ndarray) -> int:
        counts = np.full(self._ranks, float(count))
        means, m2s = (np.broadcast_to(values, (self._ranks, values.size)) for values in (mean.copy(), m2.copy()))
        total, mean[...], m2[...] = merge_moments(counts, means, m2s)
        return total

    def sum(self, values: np.ndarray) -> None:
        np.multiply(values, self._ranks, out=values)


def fake_mergers(split: int, data: int) -> dict[str, FakeStatisticsMerger]:
    """Return a merger for each value of `BatchNormSpec.merge`, on a grid of `split` x `data` ranks."""
    return {"all": FakeStatisticsMerger(split * data), "split": FakeStatisticsMerger(split), "data": FakeStatisticsMerger(data)}


_LEARNING_RATE = 0.0  # so that weights do not change and stay finite
_WARM_UP = 2
# Nothing is received, so message buffers contain arbitrary numbers and may overflow.
_without_warnings = np.errstate(over="ignore", invalid="ignore", divide="ignore")
_FILL = {"running_mean": 0.0, "running_var": 1.0}


@dataclass(frozen=True)
class ProgramTimes:
    """Times of an undisturbed step in seconds, estimated from several timed steps.

    Attributes:
        actions: time by (action, position in the plan); an exchange that begins early counts in the phase in which it ends.
        update: time to update all parameters, including the check for non-finite values.
        others: time of loss, sums and statistics.
    """

    actions: Mapping[tuple[Action, int], float]
    input: float  # copy of the images
    update: float
    others: float


class TimedProgram:
    """Program of one rank with synthetic parameters and images, which runs steps without communication.

    Args:
        graph: graph of one rank, made with a `FakeSplitGroup`.
        specs: whole parameters of the model; parameters that the graph does not use are ignored.
        shards: this rank's parts of split parameters; all other parameters are whole.
    """

    def __init__(
        self,
        graph: Graph,
        kernels: KernelSet,
        specs: Mapping[str, ParameterSpec],
        *,
        shards: Mapping[str, Shard],
        mergers: Mapping[str, StatisticsMerger],
        dtype: str = "float32",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        held = parameter_dtype(dtype)
        used = dict.fromkeys(name for node in graph.nodes for name in node.parameters.values())
        self._group = FlatGroup(
            {name: local_spec(specs[name], shards.get(name)) for name in used},
            held,
            arithmetic=kernels.arithmetic,
            shadow_dtype=kernels.shadow_dtype,
        )
        for name, parameter in self._group.parameters.items():
            shard, value = shards.get(name), first_value(specs[name], name, 0, held)
            kernels.arithmetic.from_host(parameter.data, value if shard is None else value[shard.index])
        self._group.refresh_shadow()
        statistics = {
            name: StatisticSpec((int(getattr(node.spec, "channels", 0)),), _FILL.get(role, 0.0), 0.1)
            for node in graph.nodes
            for role, name in node.statistics.items()
        }
        self._statistics = FlatStatistics(statistics, held, arithmetic=kernels.arithmetic)
        self.plan = compile_graph(graph, kernels, training=True)
        self._program = Program(
            self.plan,
            kernels=kernels,
            parameters=self._group.parameters,
            statistics=self._statistics,
            memory=kernels.allocate(self.plan.arena_bytes),
            loss=kernels.make_loss(SoftmaxCrossEntropySpec()),
            mergers=mergers,
        )
        self._kernels, self._clock = kernels, clock
        self._optimizer = Sgd(momentum=0.9, weight_decay=1e-4)
        self._optimizer.bind(self._group, self._group.segments)
        random = np.random.default_rng(0)
        shape = self.plan.tensors[0].shape
        self._images = random.standard_normal(shape, np.float32).astype(held)
        samples, classes = self.plan.tensors[self.plan.output].shape
        self._labels = random.integers(0, classes, samples)
        # Operators with random numbers per sample read the ids of the whole split group.
        first = max((getattr(node.spec, "first_sample", 0) for node in graph.nodes), default=0)
        ids = np.arange(first + max(tensor.shape[0] for tensor in self.plan.tensors))
        self._context = StepContext(sample_ids=ids)
        self._marks: list[float] = []

    @property
    def parameters(self) -> int:
        """Number of updated elements."""
        return self._group.size

    @_without_warnings
    def measure(self, steps: int, before: Callable[[], None] = lambda: None) -> ProgramTimes:
        """Return the times of an undisturbed step, from `steps` steps with a clock between actions after two warm-up steps.

        Args:
            before: callback before each step: a barrier if several ranks measure at the same time.
        """
        laps = []
        for _ in range(_WARM_UP + steps):
            before()
            laps.append(self._run())
        return self._times(typical(np.array(laps[_WARM_UP:])).tolist())

    def _times(self, laps: list[float]) -> ProgramTimes:
        """Assign the laps, in the order of `_run`, to the fields of `ProgramTimes`."""
        forward, backward = self.plan.forward, self.plan.backward
        loss_at = 1 + len(forward)
        phases = [*forward, *((Action.INPUT if action is Action.BEGIN else action, k) for action, k in backward)]
        actions: dict[tuple[Action, int], float] = {}
        for phase, seconds in zip(phases, laps[1:loss_at] + laps[loss_at + 2 : -2], strict=True):
            actions[phase] = actions.get(phase, 0.0) + seconds
        loss, look = laps[loss_at : loss_at + 2]
        sums, update = laps[-2:]
        return ProgramTimes(actions, laps[0], look + update, loss + sums)

    def _run(self) -> list[float]:
        """Run one step as in training, and return the seconds of its laps.

        The laps are: input, each action of forward, loss, check for finite values, each action of backward, sums, update.
        """
        program, arithmetic, data = self._program, self._kernels.arithmetic, self._group.data
        self._marks = [self._clock()]
        program.set_input(self._images)
        self._mark()
        program.begin(self._context)
        for k in range(len(self.plan.forward)):
            program.run_forward(range(k, k + 1), self._context)
            self._mark()
        loss, statistics = program.loss(self._labels, max(1, self._labels.size)), self._statistics.fetch_batch()
        self._mark()
        look = arithmetic.fetch_finite([data])
        self._mark()
        for k in range(len(self.plan.backward)):
            program.run_backward(range(k, k + 1))
            self._mark()
        count = loss.result().count
        terms = self._statistics.weighted(count, count, statistics.result())
        self._statistics.not_finite(terms)
        self._statistics.blend(terms, count)
        look.result()
        self._mark()
        self._optimizer.update(self._group.segments, _LEARNING_RATE, None)
        self._mark()
        return np.diff(self._marks).tolist()

    def _mark(self) -> None:
        self._kernels.wait()
        self._marks.append(self._clock())


def typical(laps: np.ndarray) -> np.ndarray:
    """Return the seconds of each lap (L,) in an undisturbed step, estimated from several steps (steps, L).

    The laps add up to the duration of the fastest step. Other work on the machine only lengthens steps, by half and more for
    seconds at a time, so the minimum is reproducible. The sum of the minima of all laps would be too small, because most steps
    are disturbed in some lap.
    """
    medians: np.ndarray = np.median(laps, axis=0)
    total = float(medians.sum())
    return medians * (float(np.min(laps.sum(axis=1))) / total) if total else medians


def clock_of(threads: int, *, on_host: bool = True) -> Callable[[], float]:
    """Return the clock for timing: CPU time if a single host thread computes, otherwise wall time.

    Other processes do not affect CPU time.
    """
    return time.process_time if threads == 1 and on_host else time.perf_counter


_STEPS = 7
_UNTIMED = (Action.BEGIN, Action.FREE)
# Number of arrays of the parameters' size: parameters, gradients, momentum, and temporaries.
_COPIES_OF_PARAMETERS = 4


@dataclass(frozen=True)
class RankProgram:
    """Program of a rank.

    Attributes:
        graph: graph of the rank, not yet fused.
        shards: the rank's parts of split parameters.
        exchanged_samples: number of samples in the products that compute weight gradients from exchanged inputs and errors; 0:
            there are no such products.
    """

    graph: Graph
    shards: Mapping[str, Shard]
    split_ranks: int  # ranks of a split group
    data_ranks: int  # ranks of a data group
    exchanged_samples: int


@dataclass(frozen=True)
class Coverage:
    """Result of a measurement.

    Attributes:
        programs: number of timed programs.
        left: number of programs omitted for lack of time or memory.
    """

    programs: int
    left: int
    seconds: float  # duration of the measurement


def rank_programs(job: Job, candidate: Candidate) -> Iterator[RankProgram]:
    """Yield the distinct programs of ranks: of the first, middle and last rank of each kind of split group, largest first."""
    plan = candidate.plan
    parts = job.passes(candidate).micro_batches
    positions = job.counts(candidate.ranks, plan.rows)
    largest = [even(count, parts)[0] for count in positions]
    groups = dict.fromkeys(tuple(largest[first : first + plan.rows]) for first in range(0, len(largest), plan.rows))
    exchanged = job.batch if candidate.ranks > 1 and parts == 1 and job.shards is None else 0
    for counts in groups:
        graph = job.graph_of(sum(counts))
        if plan.rows == 1:
            yield RankProgram(graph, {}, 1, plan.cols, exchanged)
            continue
        partitioned = partition_graph(graph, plan, counts)
        for rank in dict.fromkeys((0, plan.rows // 2, plan.rows - 1)):
            local = partitioned.local(rank, FakeSplitGroup(rank, plan.rows))
            yield RankProgram(local, partitioned.shards_of(rank), plan.rows, plan.cols, exchanged)


def keys_of(plan: ExecutionPlan) -> dict[tuple[Action, int], OperatorKey]:
    """Return the keys of all actions of a plan that take time."""
    return {
        (action, k): operator_key(plan.steps[k], action, plan.memory[k])
        for action, k in (*plan.forward, *plan.backward)
        if action not in _UNTIMED
    }


def record(times: OperatorTimes, plan: ExecutionPlan, parameters: int, step: ProgramTimes) -> None:
    """Store all times of a step of `plan` with `parameters` updated elements; the mean for operators with the same key."""
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
    """Measure the candidates' operators that `times` lacks, programs with most of them first; begin none after `budget_seconds`.

    Several ranks of a node may measure at the same time, so that caches and memory are as busy as in a step. All of them then
    call this function with the same arguments, and `before` and `agree` are collective over them.

    Args:
        times: measured times, extended in place.
        memory_bytes: memory of this rank; programs that need more are omitted.
        before: callback before each step: a barrier.
        agree: function from this rank's decision to continue to the common decision of all ranks.
    """
    begin, done, left = time.perf_counter(), 0, 0
    programs = [program for candidate in candidates for program in rank_programs(job, candidate)]
    unknown = [_unknown(program, compile_graph(program.graph, job.kernels, training=True), times) for program in programs]
    for program in (programs[i] for i in sorted(range(len(programs)), key=lambda i: -unknown[i]) if unknown[i]):
        plan = compile_graph(program.graph, job.kernels, training=True)
        if not _unknown(program, plan, times):
            continue
        parameter_bytes = sum(int(np.prod(spec.shape)) for spec in job.specs.values()) * np.dtype(np.float32).itemsize
        fits = plan.arena_bytes + _COPIES_OF_PARAMETERS * parameter_bytes <= memory_bytes
        if not fits or not agree(time.perf_counter() - begin < budget_seconds):
            left += 1
            continue
        _measure(job, program, times, before)
        done += 1
    return Coverage(done, left, time.perf_counter() - begin)


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
        mergers=fake_mergers(program.split_ranks, program.data_ranks),
        dtype=job.dtype,
        clock=clock,
    )
    record(times, timed.plan, timed.parameters, timed.measure(_STEPS, before))
    for product in _products(program, timed.plan):
        if not times.measured(product_key(product)):
            times.put(product_key(product), time_product(product, parameter_dtype(job.dtype), _STEPS, clock, before))
