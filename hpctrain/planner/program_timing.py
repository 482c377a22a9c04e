"""One rank's step of a model, run by itself with a clock between its actions: the times that predictions are made of."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from hpctrain.backend.dtypes import parameter_dtype
from hpctrain.backend.operators import KernelSet, StatisticsMerger, StepContext
from hpctrain.backend.graph import Graph, Node
from hpctrain.backend.specs import SoftmaxCrossEntropySpec
from hpctrain.nn.compile.compiler import compile_graph
from hpctrain.nn.compile.plan import Action
from hpctrain.nn.distribution import Shard
from hpctrain.nn.initialise import first_value
from hpctrain.nn.network import local_spec
from hpctrain.nn.parameter import FlatGroup, ParameterSpec, StatisticSpec
from hpctrain.nn.program import Program
from hpctrain.nn.statistics import FlatStatistics
from hpctrain.optim.optimizers.sgd import Sgd

_LEARNING_RATE = 0.0  # no step learns anything, so weights stay what they are and finite
_WARM_UP = 2
# What stand-ins leave in message buffers are no numbers of a training: they may overflow.
_without_warnings = np.errstate(over="ignore", invalid="ignore", divide="ignore")
_FILL = {"running_mean": 0.0, "running_var": 1.0}


@dataclass(frozen=True)
class ProgramTimes:
    """An undisturbed step, from those that were timed, in seconds.

    actions: of (action, position) of the plan; what begins early counts in the phase that it ends in. input: the copy of the
    images. update: of all parameters, with the look at finite numbers. others: loss, sums and statistics. step: whole steps
    without a clock between actions; 0 where none were run.
    """

    actions: Mapping[tuple[Action, int], float]
    input: float
    update: float
    others: float
    step: float

    @property
    def sum(self) -> float:
        """All of a step, added up."""
        return sum(self.actions.values()) + self.input + self.update + self.others


class TimedProgram:
    """A rank's graph with made-up parameters and images, and steps of it without communication.

    Args:
        graph: of one rank, made with stand-ins for the others (see `stand_ins`). kernels: who computes.
        specs: of the model's parameters, whole; those that the graph does not use are left out.
        shards: the parts of parameters that the rank has; others are whole. mergers: by group, of batch statistics.
        dtype: of activations. clock: gives seconds.

    Attributes:
        plan: what runs. parameters: numbers that are updated.
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
        self._statistics = FlatStatistics(_statistic_specs(graph), held, arithmetic=kernels.arithmetic)
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
        # Operators that draw numbers by sample read the ids of the split group's samples, of which theirs may be any.
        first = max((getattr(node.spec, "first_sample", 0) for node in graph.nodes), default=0)
        ids = np.arange(first + max(tensor.shape[0] for tensor in self.plan.tensors))
        self._context = StepContext(sample_ids=ids, global_count=max(1, samples))
        self._marks: list[float] = []

    @property
    def parameters(self) -> int:
        """Numbers that are updated."""
        return self._group.size

    @_without_warnings
    def measure(self, steps: int, before: Callable[[], None] = lambda: None, *, wholes: bool = False) -> ProgramTimes:
        """The least disturbed of so many steps with a clock between actions; two steps come before, which are not counted.

        before: is called before each step: a barrier, where several ranks measure at the same time.
        wholes: run as many steps without that clock, in turn with the others.
        """
        laps, whole_seconds = [], []
        for number in range(-_WARM_UP, steps):
            before()
            lap = self._run(stepwise=True)
            if wholes:
                before()
                begin = self._clock()
                self._run(stepwise=False)
                whole_seconds.append(self._clock() - begin)
            if number >= 0:
                laps.append(lap)
        whole = float(np.median(whole_seconds[_WARM_UP:])) if wholes else 0.0
        return self._times(typical(np.array(laps)).tolist(), whole)

    def _times(self, laps: list[float], step: float) -> ProgramTimes:
        """Laps in the order of `_run`, by what they are."""
        forward, backward = self.plan.forward, self.plan.backward
        loss_at = 1 + len(forward)
        phases = [(Action.FORWARD if action is Action.BEGIN else action, k) for action, k in forward]
        phases += [(Action.INPUT if action is Action.BEGIN else action, k) for action, k in backward]
        actions: dict[tuple[Action, int], float] = {}
        for phase, seconds in zip(phases, laps[1:loss_at] + laps[loss_at + 2 : -2], strict=True):
            actions[phase] = actions.get(phase, 0.0) + seconds
        loss, look = laps[loss_at : loss_at + 2]
        sums, update = laps[-2:]
        return ProgramTimes(actions, laps[0], look + update, loss + sums, step)

    def _run(self, *, stepwise: bool) -> list[float]:
        """Run one step as a training does, and return the seconds of its laps.

        Laps: input, forward's actions, loss, look, backward's, sums, update.
        """
        program, arithmetic, data = self._program, self._kernels.arithmetic, self._group.data
        self._marks = [self._clock()]
        program.set_input(self._images)
        self._mark()
        program.begin(self._context)
        for span in _spans(len(self.plan.forward), stepwise):
            program.run_forward(span, self._context)
            self._mark()
        loss, statistics = program.loss(self._labels, self._context.global_count), self._statistics.fetch_batch()
        self._mark()
        look = arithmetic.fetch_finite([data])
        self._mark()
        for span in _spans(len(self.plan.backward), stepwise):
            program.run_backward(span)
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
    """Seconds of each lap (L,) of an undisturbed step, from those of several steps (steps, L); their sum is the least sum.

    Others that use the machine only ever lengthen steps, by half and more for seconds at a time, so the least is what repeats.
    Least laps alone would add up to too little: something disturbs most steps somewhere.
    """
    medians: np.ndarray = np.median(laps, axis=0)
    total = float(medians.sum())
    return medians * (float(np.min(laps.sum(axis=1))) / total) if total else medians


def _spans(actions: int, stepwise: bool) -> list[range]:
    return [range(i, i + 1) for i in range(actions)] if stepwise else [range(actions)]


def _statistic_specs(graph: Graph) -> dict[str, StatisticSpec]:
    return {
        name: StatisticSpec((_channels(node),), _FILL.get(role, 0.0), 0.1)
        for node in graph.nodes
        for role, name in node.statistics.items()
    }


def _channels(node: Node) -> int:
    return int(getattr(node.spec, "channels", 0))


def clock_of(threads: int, *, on_host: bool = True) -> Callable[[], float]:
    """CPU seconds where one thread of the host computes, which others on its core do not lengthen; else wall-clock seconds."""
    return time.process_time if threads == 1 and on_host else time.perf_counter
