"""What is not finite ends training within two steps, or its steps leave no trace, under any strategy."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from hpctrain.averaging.base import Strategy
from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.averaging.strategies.lazy import Lazy
from hpctrain.averaging.strategies.sparse import Sparse
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.onednn.kernel_set import OnednnKernelSet, available
from hpctrain.backend.operators import KernelSet, LossHandle, LossSums
from hpctrain.core.errors import DivergedError
from hpctrain.data.loader import ArrayLoader, Batch
from hpctrain.nn.parameter import Parameter
from hpctrain.optim.optimizers import Lars, Sgd
from hpctrain.optim.schedules import Constant
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.storage.checkpoint import CheckpointContent
from hpctrain.training.metrics import Reporter
from hpctrain.training.replica import LoopState, Replica
from hpctrain.training.snapshot import Position
from hpctrain.training.trainer import Cadence, Trainer, TrainingObjects
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.run import run_virtual, virtual_engine
from tests.support import nets
from tests.support.averaging import STRATEGIES
from tests.support.training import Task, made_up, replica_of

POISONED_STEP = 3
STEPS = 7

ALL: dict[str, tuple[type[Strategy], dict[str, Any]]] = {
    "blocking": (Blocking, {}),
    **STRATEGIES,
    "sparse": (Sparse, {**STRATEGIES["sparse, all of it"][1], "density": 0.02}),  # what is not finite is sent first
    "lazy": (Lazy, {"layers": 3, "max_interval": 8, "check_every": 1, "bucket_bytes": 100}),
}

SETS = {"numpy": NumpyKernelSet, "onednn": OnednnKernelSet}


@dataclass(frozen=True)
class Poison:
    """Where something that is not finite comes in, in step `POISONED_STEP`. parameter: None for images."""

    place: str
    parameter: str | None
    value: float
    everywhere: bool = False

    def in_batch(self, batch: Batch) -> Batch:
        x = batch.x.copy()
        if len(x):
            x[0, 0, 0, 0] = self.value
        return replace(batch, x=x)


WEIGHT = [Poison("weight", "conv2.weight", value, everywhere=True) for value in (np.nan, np.inf)]
GRADIENT = [Poison("gradient", "conv2.weight", value) for value in (np.nan, -np.inf)]
IMAGE = [Poison("image", None, value) for value in (np.nan, np.inf)]
LAYER = {"weight": "conv2", "gradient": "conv2", "image": "conv1"}


@dataclass
class Run:
    """What one rank saw of a training that should stop."""

    error: str = ""
    ranks: tuple[int, ...] = ()
    steps: int = 0
    kept: int = 0
    kept_poison: list[str] = field(default_factory=list)


class _Loader(ArrayLoader):
    """A task's batches; what is to be poisoned before a step is handed to `before`."""

    def __init__(self, task: Task, replica: Replica, before: Callable[[int, Batch], Batch]) -> None:
        super().__init__(*made_up(task), **replica.place)
        self._steps, self._before = task.steps, before

    def epoch(self, epoch: int, first: int = 0) -> Generator[Batch, None, None]:
        for batch in super().epoch(epoch, first):
            number = epoch * len(self) + batch.step
            if number < self._steps:
                yield self._before(number, batch)


def trainer_of(
    task: Task,
    replica: Replica,
    before: Callable[[int, Batch], Batch],
    save: Callable[[Position], None],
    cadence: Cadence,
    reporter: Reporter | None = None,
) -> Trainer:
    """A trainer of epochs of 5 steps; each batch is what `before` makes of it."""
    schedule = Constant(base_lr=task.lr, epochs=cadence.epochs, steps_per_epoch=5)
    objects = TrainingObjects(replica=replica, loader=_Loader(task, replica, before), evaluated={}, schedule=schedule)
    return Trainer(objects, cadence, reporter or Reporter(), save)


def _train(comm: ThreadCommunicator, task: Task, strategy: str, poison: Poison, checkpoints: int) -> Run:
    kind, options = ALL[strategy]
    replica = replica_of(task, comm, virtual_engine(comm), kind, **options)
    network, averagers = replica.network, replica.averagers
    run, here = Run(), poison.everywhere or comm.rank == comm.size - 1

    def before(number: int, batch: Batch) -> Batch:
        run.steps = number + 1
        if number == POISONED_STEP and here:
            if poison.place == "image":
                return poison.in_batch(batch)
            parameter = network.parameters[poison.parameter or ""]
            if poison.place == "weight" and parameter.size:
                parameter.data.reshape(-1)[0] = poison.value
        return batch

    def with_poison(ready: Callable[[Parameter], None], parameter: Parameter) -> None:
        at_once = poison.place == "gradient" and run.steps == POISONED_STEP + 1
        if at_once and here and parameter.name == poison.parameter and parameter.size:
            parameter.grad.reshape(-1)[-1] = poison.value
        ready(parameter)

    for averager in averagers.values():
        averager.grad_ready = partial(with_poison, averager.grad_ready)  # type: ignore[method-assign]

    def save(position: Position) -> None:
        run.kept += 1
        tensors = replica.state(position, {}).tensors
        run.kept_poison += [name for name, value in tensors.items() if not np.isfinite(value).all()]

    cadence = Cadence(epochs=2, checkpoint_epochs=1, checkpoint_steps=checkpoints)
    try:
        trainer_of(task, replica, before, save, cadence).run(Position())
    except DivergedError as error:
        run.error, run.ranks = str(error), error.ranks
    return run


def _runs(ranks: int, task: Task, strategy: str, poison: Poison, checkpoints: int = 1) -> list[Run]:
    return run_virtual(ranks, lambda comm: _train(comm, task, strategy, poison, checkpoints), deadline_seconds=300)


def _task(kernels: KernelSet, **more: Any) -> Task:
    dtype = "float64" if isinstance(kernels, NumpyKernelSet) else "float32"
    return replace(Task(nets.plain, kernels, partial(Sgd, momentum=0.9), dtype=dtype, steps=STEPS, samples=37, batch=8), **more)


def _stops(runs: list[Run], layer: str | None) -> None:
    errors = {run.error for run in runs}
    assert len(errors) == 1
    (error,) = errors
    assert error, "training went on"
    assert layer is None or f"ayer {layer} is the first, in forward order, whose" in error
    assert error.endswith("or set optimizer.clip_norm.")
    for run in runs:
        assert run.steps <= POISONED_STEP + 1 + 2
        assert run.kept_poison == []


@pytest.fixture(scope="module", params=SETS)
def kernels(request: pytest.FixtureRequest) -> KernelSet:
    if request.param == "onednn" and (reason := available()) is not None:
        pytest.skip(reason)
    kernel_set: KernelSet = SETS[request.param]()
    return kernel_set


# Strategies see gradients, whatever kernels made them: oneDNN's meet two of them, with every poison.
THOROUGH = ("bucketed", "sharded, auto")
KERNELS_AND_STRATEGIES = [*(("numpy", strategy) for strategy in ALL), *(("onednn", strategy) for strategy in THOROUGH)]


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(("kernels", "strategy"), KERNELS_AND_STRATEGIES, indirect=["kernels"])
def test_training_stops_within_two_steps_and_names_the_layer(kernels: KernelSet, strategy: str, ranks: int) -> None:
    every = [(poison, checkpoints) for poison in (*WEIGHT, *GRADIENT, *IMAGE) for checkpoints in (0, 1)]
    some = [(WEIGHT[0], 1), (GRADIENT[1], 0), (IMAGE[0], 0)]
    for poison, checkpoints in every if strategy in THOROUGH else some:
        runs = _runs(ranks, _task(kernels), strategy, poison, checkpoints)
        _stops(runs, LAYER[poison.place])


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernels", "strategy"),
    [*(("numpy", strategy) for strategy in ("blocking", "overlap", "sharded", "priority")), ("onednn", "sharded")],
    indirect=["kernels"],
)
@pytest.mark.parametrize("use", [Parallelism.MODEL, Parallelism.DOMAIN])
def test_split_layers_stop_too(kernels: KernelSet, strategy: str, use: Parallelism) -> None:
    task = _task(kernels, plan=ParallelPlan(2, 2, use={"conv*": use, "fc1": Parallelism.MODEL}))
    for poison in (WEIGHT[0], GRADIENT[1], IMAGE[0]):
        _stops(_runs(4, task, strategy, poison), LAYER[poison.place])


@pytest.mark.parametrize("ranks", [1, 3])
def test_batch_statistics_count(kernels: KernelSet, ranks: int) -> None:
    """Infinity in an image leaves no other trace on kernels whose ReLU makes a number of NaN."""
    task = _task(kernels, model=partial(nets.residual, synchronised=False))
    runs = _runs(ranks, task, "sharded", IMAGE[1], 0)
    _stops(runs, "bn1")
    assert "batch statistics are not finite in step 4" in runs[0].error
    assert (f"(on rank {ranks - 1} of {ranks})" in runs[0].error) == (ranks > 1)
    assert {run.ranks for run in runs} == {(2,) if ranks > 1 else ()}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["blocking", "sharded"])
@pytest.mark.parametrize("poison", [replace(WEIGHT[0], everywhere=False), GRADIENT[0], IMAGE[0]], ids=lambda poison: poison.place)
def test_a_rank_is_blamed_where_it_certainly_began(kernels: KernelSet, strategy: str, poison: Poison) -> None:
    """A gradient travels before anybody looks at it. A loss tells, where kernels do not make a number of NaN."""
    runs = _runs(3, _task(kernels), strategy, poison, 0)
    certain = isinstance(kernels, NumpyKernelSet) or (poison.place, strategy) == ("weight", "blocking")
    (ranks,) = {run.ranks for run in runs}
    assert ranks == ((2,) if certain and poison.place != "gradient" else ())


def test_the_last_step_counts(kernels: KernelSet) -> None:
    """Its update is seen by no later step."""
    for poison in GRADIENT:
        task = _task(kernels, steps=POISONED_STEP + 1, samples=8 * (POISONED_STEP + 1))
        (run,) = _runs(1, task, "sharded", poison, 0)
        assert "Layer conv2 is the first" in run.error
        assert run.kept == 0


SKIPPING: dict[str, tuple[type[Strategy], dict[str, Any]]] = {
    **ALL,
    "sparse": (Sparse, {**STRATEGIES["sparse, all of it"][1], "density": 0.1}),
    "sparse, momentum": (Sparse, {**STRATEGIES["sparse, all of it"][1], "density": 0.1, "momentum_correction": 0.9}),
    "lazy": (Lazy, {"layers": 3, "max_interval": 4, "check_every": 1, "bucket_bytes": 100}),
    "sharded, 16 bits": (ALL["sharded"][0], {**ALL["sharded"][1], "wire": "bfloat16", "wire_parameters": "bfloat16"}),
}

TASK = Task(nets.plain, NumpyKernelSet(), partial(Sgd, momentum=0.9), samples=37, batch=8, steps=10)
PLACES = ("image", "gradient", "infinite gradient", "loss")


@dataclass(frozen=True)
class Case:
    """A training in which the last rank meets what is not finite in some steps, at a place; or in which these are left out."""

    task: Task
    strategy: str
    bad: tuple[int, ...] = ()
    place: str = "image"
    left_out: bool = False
    most: int = 99
    #: number of steps after which to stop; go on from a checkpoint
    steps: int = 0
    content: CheckpointContent | None = None


@dataclass
class Kept(Reporter):
    """The lines that one rank has received, and where it ended."""

    records: list[dict[str, Any]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    content: CheckpointContent | None = None
    error: str = ""

    def record(self, kind: str, values: Mapping[str, Any]) -> None:
        self.records.append({"kind": kind, **values})

    def say(self, text: str) -> None:
        self.said.append(text)

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record["kind"] == kind]


class _Nan(LossHandle):
    """A loss that is not finite, though all that is made of it is."""

    def __init__(self, inner: LossHandle) -> None:
        self._inner = inner

    def result(self) -> LossSums:
        return replace(self._inner.result(), loss=np.nan)


def _train_case(comm: ThreadCommunicator, case: Case) -> Kept:
    kind, options = SKIPPING[case.strategy]
    task = replace(case.task, skips=not case.left_out)
    if "momentum_correction" in options:
        task = replace(task, optimizer=partial(Sgd, momentum=0.0))
    progress = virtual_engine(comm)
    replica = replica_of(task, comm, progress, kind, loop=LoopState(progress.notes, most_skips=case.most), **options)
    kept, here, now = Kept(), comm.rank == comm.size - 1, [-1]

    def before(number: int, batch: Batch) -> Batch:
        now[0] = number
        if number in case.bad and here and not case.left_out and len(batch.x):
            if case.place == "image":
                return replace(batch, x=np.full_like(batch.x, np.nan))
            if case.place == "large image":
                return replace(batch, x=batch.x * 1e200)
        return batch

    def with_poison(ready: Callable[[Parameter], None], parameter: Parameter) -> None:
        if now[0] in case.bad and here and "gradient" in case.place and parameter.name == "conv2.weight" and parameter.size:
            parameter.grad.reshape(-1)[-1] = -np.inf if "infinite" in case.place else np.nan
        ready(parameter)

    def with_bad_loss(add: Callable[..., None], step: int, loss: LossHandle, *others: Any) -> None:
        add(step, _Nan(loss) if step in case.bad and here and case.place == "loss" else loss, *others)

    replica._step._add_to_message = partial(with_bad_loss, replica._step._add_to_message)  # type: ignore[method-assign]
    for averager in replica.averagers.values():
        averager.grad_ready = partial(with_poison, averager.grad_ready)  # type: ignore[method-assign]
    if case.left_out:
        replica.update = partial(_left_out, replica, replica.update, case.bad)  # type: ignore[method-assign]

    def save(position: Position) -> None:
        kept.content = replica.state(position, {})

    cadence = Cadence(epochs=2, checkpoint_epochs=1, steps=case.steps)
    trainer = trainer_of(task, replica, before, save, cadence, kept)
    position = Position() if case.content is None else replica.load(case.content)
    try:
        trainer.run(position)
    except DivergedError as error:
        kept.error = str(error) if error.reported_by == 0 else f"not known to be raised alike: {error}"
    return kept


def _left_out(replica: Replica, update: Callable[[Batch, float], None], steps: tuple[int, ...], batch: Batch, lr: float) -> None:
    """A step without its first part, which is all that changes anything; its message says nothing."""
    if replica.global_step in steps:
        replica._reduction.clear()
    else:
        update(batch, lr)


def _run_case(ranks: int, case: Case) -> list[Kept]:
    return run_virtual(ranks, lambda comm: _train_case(comm, case), deadline_seconds=300)


def _assert_same(a: CheckpointContent | None, b: CheckpointContent | None) -> None:
    assert a is not None
    assert b is not None
    assert a.tensors.keys() == b.tensors.keys()
    for name, tensor in b.tensors.items():
        assert np.isfinite(tensor).all(), name
        assert a.tensors[name].tobytes() == tensor.tobytes(), name


def _skips(ranks: int, case: Case) -> None:
    found, expected = _run_case(ranks, case), _run_case(ranks, replace(case, left_out=True))
    for one, other in zip(found, expected, strict=True):
        assert not one.error, one.error
        _assert_same(one.content, other.content)
        steps = [record["step"] for record in one.of_kind("skip")]
        assert steps == [number + 1 for number in case.bad]
        assert one.of_kind("epoch")[-1]["loss"] == other.of_kind("epoch")[-1]["loss"]
    assert found[0].content is not None
    assert found[0].content.meta["position"]["skipped"] == len(case.bad)  # type: ignore[index]


EVERY_SIZE = ("overlap", "sharded, auto", "sparse", "lazy")


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [(strategy, ranks) for strategy in SKIPPING for ranks in ((1, 2, 3, 4) if strategy in EVERY_SIZE else (1, 3))],
)
def test_a_step_that_is_not_finite_is_left_out(strategy: str, ranks: int) -> None:
    """The first of all, two in a row over an epoch's end, and one of the end."""
    place = PLACES[(list(SKIPPING).index(strategy) + ranks) % len(PLACES)]
    _skips(ranks, Case(TASK, strategy, (0, 4, 5, 8), place))


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["overlap", "sharded", "priority", "lazy"])
@pytest.mark.parametrize("use", [Parallelism.MODEL, Parallelism.DOMAIN])
def test_where_ranks_share_samples(strategy: str, use: Parallelism) -> None:
    task = replace(TASK, plan=ParallelPlan(2, 2, use={"conv*": use, "fc1": Parallelism.MODEL}))
    _skips(4, Case(task, strategy, (2, 3), "image"))


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer", [partial(Sgd, momentum=0.9, nesterov=True, clip_norm=0.3), partial(Lars, weight_decay=1e-2, clip_norm=0.5)]
)
def test_with_norms_of_all_gradients(optimizer: Callable[[], Any]) -> None:
    for strategy in ("bucketed", "sharded"):
        _skips(2, Case(replace(TASK, optimizer=optimizer), strategy, (3,), "gradient"))


@pytest.mark.slow
@pytest.mark.parametrize("synchronised", [True, False])
def test_running_statistics_stay(synchronised: bool) -> None:
    """Infinity in a batch statistic alone counts too: of images that are so large that a square overflows."""
    task = replace(TASK, model=partial(nets.residual, synchronised=synchronised), micro_batches=2)
    _skips(2, Case(task, "sharded", (1, 5), "large image"))


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["overlap", "sharded", "sparse", "sparse, momentum", "lazy"])
def test_a_resume_after_a_skipped_step_is_bitwise(strategy: str) -> None:
    """The resume is right after one, in the middle of several."""
    case = Case(TASK, strategy, (2, 3, 7), "gradient")
    whole = _run_case(2, case)
    first = _run_case(2, replace(case, steps=3))
    assert first[0].content is not None
    assert first[0].content.meta["position"]["skipped_in_a_row"] == 1  # type: ignore[index]
    again = run_virtual(2, lambda comm: _train_case(comm, replace(case, content=first[comm.rank].content)), deadline_seconds=300)
    for one, other in zip(again, whole, strict=True):
        _assert_same(one.content, other.content)
        assert one.content is not None
        assert other.content is not None
        assert one.content.meta == other.content.meta


def test_a_skip_is_reported_with_the_first_layer_and_the_ranks() -> None:
    for kept in _run_case(3, Case(TASK, "blocking", (2,), "image")):
        (record,) = kept.of_kind("skip")
        where = {"layer": "conv1", "held": "gradients", "ranks": [0, 1, 2], "sources": [2]}
        assert record == {"kind": "skip", "epoch": 1, "step": 3, **where}
        assert kept.said[0] == (
            "step 3 skipped: layer conv1 is the first, in forward order, whose gradients are not finite in step 3; losses or "
            "batch statistics were not finite before they were summed (on rank 2 of 3)"
        )


def test_an_update_that_overflows_is_a_matter_of_parameters() -> None:
    """Gradients are large, and finite."""
    task = replace(TASK, lr=1e150, optimizer=partial(Sgd, momentum=0.0))
    for kept in _run_case(2, Case(task, "blocking", (0,), "large image", most=1)):
        assert kept.of_kind("skip")[0]["held"] == "parameters"
        assert " whose parameters are not finite after step 1" in kept.said[0]


def test_a_loss_alone_has_no_layer() -> None:
    for kept in _run_case(3, Case(TASK, "blocking", (2,), "loss")):
        (record,) = kept.of_kind("skip")
        assert (record["layer"], record["held"], record["ranks"]) == (None, "loss", [2])
        assert kept.said[0] == "step 3 skipped: the loss of step 3 is not finite (on rank 2 of 3)"


@pytest.mark.slow
def test_training_ends_with_one_step_more_in_a_row_than_may() -> None:
    enough = _run_case(2, Case(TASK, "sharded", (1, 2, 4, 5), "gradient", most=2))
    assert not enough[0].error
    runs = _run_case(2, Case(TASK, "sharded", (1, 3, 4, 5, 6), "gradient", most=2))
    (error,) = {run.error for run in runs}
    assert error.startswith(
        "3 consecutive steps were not finite and were skipped. In the last one, step 6, layer conv2 is the first"
    )
    assert error.endswith("or raise on_nonfinite.most.")
    assert [record["step"] for record in runs[0].of_kind("skip")] == [2, 4, 5, 6]


def test_without_a_guard_nothing_is_kept() -> None:
    """It costs nothing where it is not asked for."""

    def guarded(comm: ThreadCommunicator, skips: bool) -> bool:
        return replica_of(replace(TASK, skips=skips), comm, virtual_engine(comm), Blocking)._guard is not None

    assert run_virtual(2, lambda comm: guarded(comm, False)) == [False, False]
    assert run_virtual(2, lambda comm: guarded(comm, True)) == [True, True]
