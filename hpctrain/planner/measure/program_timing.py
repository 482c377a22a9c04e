"""Time the operators of a rank's program in the order of a step, because the state of the caches affects each operator's time.

`TimedProgram` runs one rank's step with a clock between its actions. A `FakeSplitGroup` replaces the other ranks of the split
group: it sends nothing, and its messages complete at once with arbitrary values. Packing, copying and unpacking take their usual
time. `ensure_measured` times the operators of candidates that were not measured before.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

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
from hpctrain.parallel.parallel_plan import Parallelism
from hpctrain.parallel.partition_graph import partition_graph
from hpctrain.planner.costs.compute_costs import UPDATE_ACCESSES, input_key, others_key, product_key, update_key
from hpctrain.planner.costs.machine import OperatorClass
from hpctrain.planner.costs.operator_times import OperatorKey, OperatorTimes, operator_key
from hpctrain.planner.costs.operator_work import FactorProduct, OperatorWork, is_move, products_of, time_product, work_of
from hpctrain.planner.job import Candidate, Job
from hpctrain.trace.time_budget import TimeBudget


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
# Nothing is received, so message buffers contain arbitrary numbers and may overflow.
_without_warnings = np.errstate(over="ignore", invalid="ignore", divide="ignore")
_FILL = {"running_mean": 0.0, "running_var": 1.0}
_QUIET = 1.1  # largest duration of an undisturbed step, relative to the fastest


# Number of different random weights of a parameter, repeated: steps with weights that are all different take no longer.
_DIFFERENT, _PIECE = 4099, 1 << 18
# Maximum number of elements to update: an update takes time in proportion, and the state of all would fill memory.
_MOST_UPDATED = 1 << 24


@dataclass(frozen=True)
class Repeats:
    """Number of steps of a measurement."""

    warm_up: int = 2  # steps that do not count, unless the first one takes `enough_seconds`
    steps: int = 7  # maximum number of timed steps
    enough_seconds: float = math.inf  # of timed steps, after which no further one begins
    share: float = 1.0  # of the rest of the budget, which the first step may take


#: repeats for the user's cache, and for a choice at the start of a job
MANY_STEPS, FEW_STEPS = Repeats(), Repeats(1, 2, 0.5)


class _CutShort(Exception):
    """A step takes longer than its time limit."""


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
        plan: plan of the graph; None: compile the graph.
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
        plan: ExecutionPlan | None = None,
    ) -> None:
        held = parameter_dtype(dtype)
        of_rank = local_specs(graph, specs, shards)
        self._group = FlatGroup(of_rank, held, arithmetic=kernels.arithmetic, shadow_dtype=kernels.shadow_dtype)
        for segment in self._group.segments:
            spec = specs[segment.parameter]
            few = replace(spec, shape=(*(1 for _ in spec.shape[1:]), min(_DIFFERENT, segment.size)))
            values = np.resize(first_value(few, segment.parameter, 0, held), min(_PIECE, segment.size))
            for low in range(segment.start, segment.stop, _PIECE):
                piece = self._group.data[low : min(low + _PIECE, segment.stop)]
                kernels.arithmetic.from_host(piece, values[: piece.size])
        self._group.refresh_shadow()
        statistics = {
            name: StatisticSpec((int(getattr(node.spec, "channels", 0)),), _FILL.get(role, 0.0), 0.1)
            for node in graph.nodes
            for role, name in node.statistics.items()
        }
        self._statistics = FlatStatistics(statistics, held, arithmetic=kernels.arithmetic)
        self.plan = plan or compile_graph(graph, kernels, training=True)
        memory = kernels.allocate(self.plan.arena_bytes)
        for untouched in (memory.view(held), self._group.grad):  # so that the first step does not wait for memory
            kernels.arithmetic.fill(untouched, 0.0)
        self._program = Program(
            self.plan,
            kernels=kernels,
            parameters=self._group.parameters,
            statistics=self._statistics,
            memory=memory,
            loss=kernels.make_loss(SoftmaxCrossEntropySpec()),
            mergers=mergers,
        )
        self._kernels, self._clock = kernels, clock
        self._optimizer = Sgd(momentum=0.9, weight_decay=1e-4)
        self._updated = [one.part(0, _MOST_UPDATED) for one in self._group.segments if one.start < _MOST_UPDATED]
        self._optimizer.bind(self._group, self._updated)
        self._optimizer.update(self._updated, _LEARNING_RATE, None)  # touches the state
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
        self._end = math.inf  # of the step

    @_without_warnings
    def measure(
        self, repeats: Repeats, before: Callable[[], None] = lambda: None, budget: TimeBudget | None = None
    ) -> ProgramTimes | None:
        """Return the times of an undisturbed step, from steps with a clock between actions.

        The result is None if the budget ends before a step that counts, or the first step exceeds its share of the rest.

        Args:
            before: callback before each step: a barrier if several ranks measure at the same time.
            budget: time limit; None: there is none.
        """
        budget, laps, seconds = budget or TimeBudget(), list[list[float]](), list[float]()
        self._end = time.perf_counter() + budget.left() * repeats.share
        for _ in range(repeats.warm_up + repeats.steps):
            enough = max(sum(seconds[repeats.warm_up :]), *seconds[:1], 0.0) >= repeats.enough_seconds
            if seconds and not budget.allows(math.inf if enough else seconds[-1]):
                break
            before()
            begin = time.perf_counter()
            try:
                laps.append(self._run())
            except _CutShort:
                begin = -math.inf  # the step would not have ended in time
            seconds.append(time.perf_counter() - begin)
            self._end = math.inf
        timed = laps[repeats.warm_up :] or laps * (seconds[0] >= repeats.enough_seconds)
        return self._times(typical(np.array(timed)).tolist()) if timed else None

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
        return ProgramTimes(actions, laps[0], (look + update) * max(1.0, self._group.size / _MOST_UPDATED), loss + sums)

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
        look = arithmetic.fetch_finite([data[:_MOST_UPDATED]])
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
        self._optimizer.update(self._updated, _LEARNING_RATE, None)
        self._mark()
        return np.diff(self._marks).tolist()

    def _mark(self) -> None:
        self._kernels.wait()
        self._marks.append(self._clock())
        if time.perf_counter() > self._end:
            raise _CutShort


def local_specs(graph: Graph, specs: Mapping[str, ParameterSpec], shards: Mapping[str, Shard]) -> dict[str, ParameterSpec]:
    """Return the parameters of a rank's graph, with the shapes of this rank's parts."""
    used = dict.fromkeys(name for node in graph.nodes for name in node.parameters.values())
    return {name: local_spec(specs[name], shards.get(name)) for name in used}


def typical(laps: np.ndarray) -> np.ndarray:
    """Return the seconds of each lap (L,) in a usual undisturbed step, estimated from several steps (steps, L).

    The laps add up to the mean duration of undisturbed steps. Other work on the machine lengthens steps by half and more for
    seconds at a time. The fastest step alone is shorter than most steps of a training.
    """
    medians: np.ndarray = np.median(laps, axis=0)
    steps, total = laps.sum(axis=1), float(medians.sum())
    return medians * (float(np.mean(steps[steps <= _QUIET * np.min(steps)])) / total) if total else medians


def clock_of(threads: int, *, on_host: bool = True) -> Callable[[], float]:
    """Return the clock for timing: CPU time if a single host thread computes, otherwise wall time.

    Other processes do not affect CPU time.
    """
    return time.process_time if threads == 1 and on_host else time.perf_counter


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

    job: Job
    graph: Graph
    shards: Mapping[str, Shard]
    split_ranks: int  # ranks of a split group
    data_ranks: int  # ranks of a data group
    exchanged_samples: int

    @cached_property
    def plan(self) -> ExecutionPlan:
        return compile_graph(self.graph, self.job.kernels, training=True)

    @cached_property
    def products(self) -> list[FactorProduct]:
        return products_of(self.plan, self.exchanged_samples) if self.exchanged_samples else []

    @cached_property
    def elements(self) -> int:
        return sum(math.prod(spec.shape) for spec in local_specs(self.graph, self.job.specs, self.shards).values())

    @property
    def memory_bytes(self) -> int:
        item_bytes = np.dtype(parameter_dtype(self.job.dtype)).itemsize
        return self.plan.arena_bytes + _COPIES_OF_PARAMETERS * item_bytes * self.elements

    def is_known(self, times: OperatorTimes, *, edges: bool) -> bool:
        """Return whether all operators have times; after a neighbour's program, `edges` of images need no times of their own."""
        keys = [key for (_, k), key in keys_of(self.plan).items() if not (edges and is_move(self.plan.steps[k].operator))]
        keys += map(product_key, self.products)
        return all(times.seconds(key) is not None if edges else times.measured(key) for key in keys)

    def measure(self, times: OperatorTimes, repeats: Repeats, before: Callable[[], None], budget: TimeBudget) -> bool:
        """Time the program, and return whether the budget sufficed on rank 0."""
        job, clock = self.job, clock_of(times.setting.threads, on_host=self.job.kernels.arithmetic.on_host)
        timed = TimedProgram(
            self.graph,
            job.kernels,
            job.specs,
            shards=self.shards,
            mergers=fake_mergers(self.split_ranks, self.data_ranks),
            dtype=job.dtype,
            clock=clock,
            plan=self.plan,
        )
        step = timed.measure(repeats, before, budget)
        if step is not None:
            record(times, self.plan, self.elements, step)
        for product in self.products if (complete := budget.agree(step is not None)) else ():
            if not budget.agree(times.measured(product_key(product))):
                seconds = time_product(product, parameter_dtype(job.dtype), repeats.steps, clock, before, job.kernels.arithmetic)
                times.put(product_key(product), seconds)
        return complete

    def timings(self, times: OperatorTimes) -> Iterator[tuple[OperatorWork, float]]:
        """Yield the work of each operator that has a time, with its seconds."""
        plan, item_bytes = self.plan, np.dtype(parameter_dtype(self.job.dtype)).itemsize
        works = [(work_of(plan.steps[k], action, plan.memory[k]), key) for (action, k), key in keys_of(plan).items()]
        update = OperatorWork(OperatorClass.MEMORY, 0, UPDATE_ACCESSES * item_bytes * self.elements)
        works.append((update, update_key(self.elements)))
        for work, key in works:
            seconds = times.seconds(key)
            if seconds is not None and not work.is_nothing:
                yield work, seconds


@dataclass(frozen=True)
class Coverage:
    """Result of a measurement.

    Attributes:
        programs: number of timed programs.
        covered: candidates whose operators all have times; there was no time or memory for the others.
        timings: (work, seconds) of all operators of covered candidates.
    """

    programs: int
    covered: tuple[Candidate, ...]
    timings: tuple[tuple[OperatorWork, float], ...]


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
            yield RankProgram(job, graph, {}, 1, plan.cols, exchanged)
            continue
        partitioned = partition_graph(graph, plan, counts)
        for rank in dict.fromkeys((0, plan.rows // 2, plan.rows - 1)):
            local = partitioned.local(rank, FakeSplitGroup(rank, plan.rows))
            yield RankProgram(job, local, partitioned.shards_of(rank), plan.rows, plan.cols, exchanged)


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
    budget: TimeBudget,
    memory_bytes: int,
    repeats: Repeats = MANY_STEPS,
    basis: int = 0,
    before: Callable[[], None] = lambda: None,
) -> Coverage:
    """Measure the candidates' operators that `times` lacks, one candidate after the other, within the budget.

    Several ranks of a node may measure at the same time, so that caches and memory are as busy as in a step. All of them then
    call this function with equal arguments. `before` and the budget are collective over them; the times of rank 0 decide.

    Args:
        times: measured times, extended in place.
        memory_bytes: memory of this rank; candidates that need more are omitted.
        basis: number of first candidates without which no other is measured. If it is positive, the first one is measured again
            at the end, and its shorter times count, because a disturbance rarely lasts that long.
        before: callback before each step: a barrier.
    """
    timed, covered, programs, first_seconds, whole_budget = 0, list[Candidate](), list[RankProgram](), 0.0, budget.seconds
    for number, candidate in enumerate(candidates):
        found: list[RankProgram] = []
        if basis and candidate.plan.default is Parallelism.DOMAIN:
            budget.seconds = 0.8 * whole_budget  # the rest is for the second timing of the first candidate, which is worth more
        complete = budget.allows() and len(covered) >= min(number, basis)
        for one in rank_programs(job, candidate) if complete else ():
            if not budget.agree(one.is_known(times, edges=bool(found))):
                fits = budget.agree(one.memory_bytes <= memory_bytes) and budget.allows()
                complete = fits and one.measure(times, replace(repeats, share=1 / max(1, basis - len(covered))), before, budget)
                timed += complete
            if not complete:
                break
            found.append(one)
        if complete:
            covered.append(candidate)
            programs += found
        first_seconds = first_seconds or time.perf_counter() - budget.begin
    again, budget.seconds = OperatorTimes(times.setting), whole_budget
    if timed and programs and basis and budget.allows(first_seconds) and programs[0].measure(again, repeats, before, budget):
        times.take_shorter(again)
    return Coverage(timed, tuple(covered), tuple(timing for one in programs for timing in one.timings(times)))
