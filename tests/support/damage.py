"""Random damage to the memory of one rank in a training on virtual ranks, and the outcome that the checks must reach."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import numpy as np

from hpctrain.averaging.base import GradientAverager, Strategy
from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.averaging.strategies.bucketed import Bucketed
from hpctrain.averaging.strategies.lazy import Lazy
from hpctrain.averaging.strategies.overlap import Overlap
from hpctrain.averaging.strategies.priority import Priority
from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.averaging.strategies.sparse import Sparse
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.core.errors import CorruptedStateError
from hpctrain.optim.ema import EMA, EmaRule
from hpctrain.optim.optimizers import Sgd
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.training.replica import Replica
from hpctrain.training.snapshot import Position
from hpctrain.training.weight_watch import CheckCadence
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.run import run_virtual, virtual_engine
from tests.support import nets
from tests.support.training import Task, batches, replica_of

STEPS = 8
#: of lazy averaging, whose owners compare what they wrote when they write again
INTERVAL = 3
_CADENCE = CheckCadence(2)
_RESUMED_STEP = 2

_STATISTICS = ("running statistic", "averaged statistic")
KINDS = ("owned parameter", "copied parameter", "frozen parameter", *_STATISTICS, "average", "momentum")
MOMENTS = ("before forward", "between forward and backward", "in backward", "before update", "after the step")
HARMS = ("flip", "nan", "zeros")


@dataclass(frozen=True)
class Training:
    """A kind of training. ranks: possible numbers of ranks. node: ranks per node; None: one node. changes: to the task."""

    strategy: type[Strategy]
    options: Mapping[str, Any] = field(default_factory=dict)
    ranks: tuple[int, ...] = (2, 3, 4)
    node: int | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)


_SMALL: dict[str, Any] = {"bucket_bytes": 400, "fc_exchange": "never"}
_SPARSE: dict[str, Any] = {"compress": "always", "least_elements": 4, "bucket_bytes": 400, "density": 0.2}
_SPLIT = {"plan": ParallelPlan(2, 2, Parallelism.MODEL), "model": nets.plain, "frozen": ("conv1",)}
_EXACT = {"exact_shards": 4, "micro_batches": 2, "batch": 8, "samples": 40, "model": partial(nets.residual, synchronised=False)}
TRAININGS: dict[str, Training] = {
    "blocking": Training(Blocking),
    "overlap": Training(Overlap),
    "bucketed": Training(Bucketed, {"bucket_bytes": 400}),
    "sharded": Training(Sharded, _SMALL),
    "sharded, exchange": Training(Sharded, {**_SMALL, "fc_exchange": "always"}),
    "sharded, rounded": Training(Sharded, {**_SMALL, "wire_parameters": "bfloat16"}),
    "sharded, split": Training(Sharded, _SMALL, ranks=(4,), changes=_SPLIT),
    "sharded, exact": Training(Sharded, _SMALL, ranks=(2, 4), changes=_EXACT),
    "sharded, micro-batches": Training(Sharded, _SMALL, changes={"micro_batches": 3}),
    "sharded, skips": Training(Sharded, _SMALL, changes={"skips": True}),
    "priority": Training(Priority, {"slice_parameters": 100, "fc_exchange": "never"}),
    "lazy": Training(Lazy, {"layers": 3, "max_interval": INTERVAL, "check_every": 1, "bucket_bytes": 400}),
    "sparse": Training(Sparse, {**_SPARSE, "two_level": False}),
    "sparse, by node": Training(Sparse, _SPARSE, ranks=(4,), node=2),
}


@dataclass(frozen=True)
class Damage:
    """Damage to the memory of one rank. place: position among the elements, in [0, 1). bit: the bit that is flipped."""

    training: str
    ranks: int
    rank: int
    kind: str
    moment: str
    harm: str
    step: int
    place: float
    bit: int
    resumes: bool
    seed: int


@dataclass(frozen=True)
class Outcome:
    """The outcome of a training with damage. happened: the damage changed a bit. error: the same on all ranks; "": none.

    ranks: those that the error names. steps: steps begun. state: by rank, all bits that later steps depend on, of finished ranks.
    """

    happened: bool
    error: str
    ranks: tuple[int, ...]
    steps: int
    state: tuple[bytes, ...]


def drawn(seed: int) -> Damage:
    """Return random damage that depends on the seed alone."""
    random = np.random.default_rng(seed)
    names = list(TRAININGS)
    training = names[int(random.integers(len(names)))]
    ranks = int(random.choice(TRAININGS[training].ranks))
    return Damage(
        training=training,
        ranks=ranks,
        rank=int(random.integers(ranks)),
        kind=str(random.choice(KINDS)),
        moment=str(random.choice(MOMENTS)),
        harm=str(random.choice(HARMS, p=(0.6, 0.2, 0.2))),
        step=int(random.integers(STEPS - 1)),
        place=float(random.random()),
        bit=int(random.integers(32)),
        resumes=bool(random.random() < 0.3),
        seed=seed,
    )


def outcome(damage: Damage) -> Outcome:
    """Return the outcome of a training with this damage."""
    return _run(damage, damages=True)


@cache
def undamaged(damage: Damage) -> tuple[bytes, ...]:
    """Return the state of each rank at the end of the same training without this damage."""
    return _run(damage, damages=False).state


def latest(damage: Damage) -> int:
    """Return the largest number of steps that may have begun when the damage, if later steps depend on it, is reported."""
    training = TRAININGS[damage.training]
    late = damage.moment in ("before update", "after the step")  # nothing reads it in that step
    steps = damage.step + 2 + late
    if damage.kind in (*_STATISTICS, "owned parameter"):
        steps += 1  # statistics are written a step later; of what an owner sends it knows at its next update
    if damage.kind in ("momentum", "average"):
        steps += 1  # compared before it is written again, which may be in the next step
    if damage.kind == "frozen parameter":
        steps += _CADENCE.every_steps
    if training.strategy is Lazy and damage.kind in ("momentum", "average", "owned parameter"):
        steps += INTERVAL
    if training.changes.get("skips"):
        steps += 1  # a step that the damage makes non-finite is skipped together with its checks
    return min(steps, STEPS)


def _task(training: Training) -> Task:
    task = Task(
        nets.residual,
        NumpyKernelSet(),
        partial(Sgd, momentum=0.9),
        steps=STEPS,
        dtype="float32",
        checks=_CADENCE,
        frozen=("layer1.*",),
        ema=EmaRule(0.9),
    )
    return replace(task, **training.changes)


def _run(damage: Damage, *, damages: bool) -> Outcome:
    training = TRAININGS[damage.training]
    task = _task(training)
    options = {"ranks_per_node": training.node, "deadline_seconds": 300.0}
    program = partial(_program, task=task, training=training, damage=damage, damages=damages)
    outcomes = run_virtual(damage.ranks, program, seed=damage.seed, **options)  # type: ignore[arg-type]
    first = outcomes[0]
    assert all((one.error, one.ranks, one.steps) == (first.error, first.ranks, first.steps) for one in outcomes), outcomes
    return replace(first, happened=any(one.happened for one in outcomes), state=tuple(one.state[0] for one in outcomes))


def _program(comm: ThreadCommunicator, task: Task, training: Training, damage: Damage, damages: bool) -> Outcome:
    replica = replica_of(task, comm, virtual_engine(comm), training.strategy, **training.options)
    replica.require_alike(schedules=True)
    happened, now = list[bool](), list[int]()

    def harm(moment: str) -> None:
        if damages and comm.rank == damage.rank and (moment, now[-1]) == (damage.moment, damage.step) and not happened:
            happened.append(_harm(replica, damage))

    _call_before(replica, harm)
    error, blamed_ranks = "", ()
    try:
        for number, batch in enumerate(batches(task, replica.groups.position, comm.size, replica.tiles)):
            now.append(number)
            if damage.resumes and number == _RESUMED_STEP:
                _resume(replica, comm)
            harm("before forward")
            replica.step(batch, task.lr)
            harm("after the step")
        replica.settle()
        replica.require_alike()
    except CorruptedStateError as found:
        error, blamed_ranks = str(found), tuple(found.ranks)
    return Outcome(any(happened), error, blamed_ranks, len(now), (_bits(replica),))


def _call_before(replica: Replica, harm: Callable[[str], None]) -> None:
    """Call `harm` at each moment inside a step."""
    step = replica._step
    begin, ready = step.finiteness.begin, step._hooks.grad_ready
    calls = list[int]()

    def between() -> Any:
        calls.clear()
        harm("between forward and backward")
        return begin()

    def in_backward(parameter: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            harm("in backward")
        ready(parameter)

    step.finiteness.begin = between  # type: ignore[method-assign]
    step._hooks.grad_ready = in_backward  # type: ignore[method-assign]
    first = next(iter(replica.averagers.values()))
    end = first.end_backward

    def before_update() -> None:
        harm("before update")
        end()

    first.end_backward = before_update  # type: ignore[method-assign]


def _resume(replica: Replica, comm: ThreadCommunicator) -> None:
    replica.settle()
    replica.require_alike()
    content = comm.broadcast_object(replica.state(Position(global_step=replica.global_step), {}))
    replica.load(content)
    replica.require_alike(schedules=True)


def _harm(replica: Replica, damage: Damage) -> bool:
    """Damage the memory, and return whether this changed a bit."""
    arrays = [array for array in _arrays(replica, damage.kind) if array.size]
    if not arrays:
        return False
    sizes = np.cumsum([array.size for array in arrays])
    place = int(damage.place * sizes[-1])
    number = int(np.searchsorted(sizes, place, side="right"))
    values = arrays[number].reshape(-1)
    element = place - int(sizes[number] - values.size)
    before = values.tobytes()
    if damage.harm == "flip":
        values[element : element + 1].view(np.uint32)[0] ^= np.uint32(1 << damage.bit)
    else:
        values[element : element + 8] = np.nan if damage.harm == "nan" else 0.0
    return values.tobytes() != before


def _arrays(replica: Replica, kind: str) -> list[np.ndarray]:
    """Return all arrays of a kind that this rank holds."""
    network, averagers = replica.network, replica.averagers.values()
    if kind == "running statistic":
        return list(network.statistics.views.values())
    if kind == "averaged statistic":
        return [] if replica.average is None else list(replica.average.views.values())
    if kind == "frozen parameter":
        return [group.data for group in network.frozen_groups.values()]
    owned = [(averager, segment) for averager in averagers for segment in averager.owned() if segment.size]
    if kind in ("momentum", "average"):
        name = EMA if kind == "average" else kind
        return [averager.optimizer.state(segment)[name] for averager, segment in owned]
    if kind == "owned parameter":
        return [averager.group.data[segment.start : segment.stop] for averager, segment in owned]
    return [array for averager in averagers for array in _copies(averager)]


def _copies(averager: GradientAverager) -> list[np.ndarray]:
    """Return the elements that other ranks own."""
    mine = np.zeros(averager.group.size, bool)
    for segment in averager.owned():
        mine[segment.start : segment.stop] = True
    bounds = np.flatnonzero(np.diff(np.concatenate([[1], mine, [1]])))
    return [averager.group.data[begin:end] for begin, end in zip(bounds[::2].tolist(), bounds[1::2].tolist(), strict=True)]


def _bits(replica: Replica) -> bytes:
    """Return all bits of this rank that later steps and evaluations depend on."""
    return b"".join(array.tobytes() for kind in KINDS for array in _arrays(replica, kind))
