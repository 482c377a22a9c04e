"""Steps that are not finite leave no trace under any strategy: the run is that in which they were left out, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.averaging.strategies.lazy import Lazy
from hpctrain.averaging.strategies.sparse import Sparse
from hpctrain.averaging.strategy import Strategy
from hpctrain.backend.kernels.base import LossHandle, LossSums
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.data.arrays import ArrayLoader
from hpctrain.data.loader import Batch
from hpctrain.errors import DivergedError
from hpctrain.nn.parameter import Parameter
from hpctrain.optim.optimizers.lars import Lars
from hpctrain.optim.optimizers.sgd import Sgd
from hpctrain.optim.schedules.constant import Constant
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.storage.checkpoint import CheckpointContent
from hpctrain.train.metrics import Reporter
from hpctrain.train.replica import Replica
from hpctrain.train.snapshot import Position
from hpctrain.train.trainer import Cadence, Trainer
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine
from tests.support import nets
from tests.support.averaging import STRATEGIES
from tests.support.training import Task, made_up, replica_of

STEPS = 9
ALL: dict[str, tuple[type[Strategy], dict[str, Any]]] = {
    "blocking": (Blocking, {}),
    **STRATEGIES,
    "sparse": (Sparse, {**STRATEGIES["sparse, all of it"][1], "density": 0.1}),
    "sparse, momentum": (Sparse, {**STRATEGIES["sparse, all of it"][1], "density": 0.1, "momentum_correction": 0.9}),
    "lazy": (Lazy, {"layers": 3, "max_interval": 4, "check_every": 1, "bucket_bytes": 100}),
    "sharded, 16 bits": (
        STRATEGIES["sharded"][0],
        {**STRATEGIES["sharded"][1], "wire": "float16", "wire_parameters": "bfloat16"},
    ),
}
TASK = Task(nets.plain, NumpyKernelSet(), partial(Sgd, momentum=0.9), samples=37, batch=8, steps=STEPS)
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
    #: stop after so many steps; go on from a checkpoint
    steps: int = 0
    content: CheckpointContent | None = None


@dataclass
class Kept(Reporter):
    """The lines that one rank has been told, and where it ended."""

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


class _Loader(ArrayLoader):
    """A task's batches, each of which `before` may change."""

    def __init__(self, task: Task, replica: Replica, before: Callable[[int, Batch], Batch]) -> None:
        super().__init__(*made_up(task), **replica.place)
        self._before = before

    def epoch(self, epoch: int, first: int = 0) -> Generator[Batch, None, None]:
        for batch in super().epoch(epoch, first):
            yield self._before(epoch * len(self) + batch.step, batch)


def _train(comm: ThreadCommunicator, case: Case) -> Kept:
    kind, options = ALL[case.strategy]
    task = replace(case.task, skips=not case.left_out)
    if "momentum_correction" in options:
        task = replace(task, optimizer=partial(Sgd, momentum=0.0))
    replica = replica_of(task, comm, virtual_engine(comm), kind, **options)
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

    trainer = Trainer(
        replica=replica,
        loader=_Loader(task, replica, before),
        test_loader=None,
        schedule=Constant(base_lr=task.lr, epochs=2, steps_per_epoch=5),
        cadence=Cadence(epochs=2, checkpoint_epochs=1, steps=case.steps, most_skips=case.most),
        reporter=kept,
        save=save,
    )
    position = Position() if case.content is None else replica.load(case.content)
    try:
        trainer.run(position)
    except DivergedError as error:
        kept.error = str(error)
    return kept


def _left_out(replica: Replica, update: Callable[[Batch, float], None], steps: tuple[int, ...], batch: Batch, lr: float) -> None:
    """A step without its first part, which is all that changes anything; its message says nothing."""
    if replica.global_step in steps:
        replica._reduction.clear()
    else:
        update(batch, lr)


def _runs(ranks: int, case: Case) -> list[Kept]:
    return run_virtual(ranks, lambda comm: _train(comm, case), deadline_seconds=300)


def _assert_same(a: CheckpointContent | None, b: CheckpointContent | None) -> None:
    assert a is not None
    assert b is not None
    assert a.tensors.keys() == b.tensors.keys()
    for name, tensor in b.tensors.items():
        assert np.isfinite(tensor).all(), name
        assert a.tensors[name].tobytes() == tensor.tobytes(), name


def _skips(ranks: int, case: Case) -> None:
    found, expected = _runs(ranks, case), _runs(ranks, replace(case, left_out=True))
    for one, other in zip(found, expected, strict=True):
        assert not one.error, one.error
        _assert_same(one.content, other.content)
        steps = [record["step"] for record in one.of_kind("skip")]
        assert steps == [number + 1 for number in case.bad]
        assert one.of_kind("epoch")[-1]["loss"] == other.of_kind("epoch")[-1]["loss"]
    assert found[0].content is not None
    assert found[0].content.meta["position"]["skipped"] == len(case.bad)  # type: ignore[index]


EVERY_SIZE = ("overlap", "sharded, auto", "sparse", "lazy")


@pytest.mark.sample(4)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [(strategy, ranks) for strategy in ALL for ranks in ((1, 2, 3, 4) if strategy in EVERY_SIZE else (1, 3))],
)
def test_a_step_that_is_not_finite_is_left_out(strategy: str, ranks: int) -> None:
    """The first of all, two in a row over an epoch's end, and one of the end."""
    place = PLACES[(list(ALL).index(strategy) + ranks) % len(PLACES)]
    _skips(ranks, Case(TASK, strategy, (0, 4, 5, 8), place))


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("strategy", ["overlap", "sharded, auto", "sparse", "lazy"])
def test_wherever_it_comes_from(strategy: str, place: str) -> None:
    _skips(3, Case(TASK, strategy, (2, 6), place))


@pytest.mark.sample(2)
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


@pytest.mark.parametrize("synchronised", [True, False])
def test_running_statistics_stay(synchronised: bool) -> None:
    """Infinity in a batch statistic alone counts too: of images that are so large that a square overflows."""
    task = replace(TASK, model=partial(nets.residual, synchronised=synchronised), micro_batches=2)
    _skips(2, Case(task, "sharded", (1, 5), "large image"))


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["overlap", "sharded", "sparse", "sparse, momentum", "lazy"])
def test_a_resume_behind_a_skipped_step_is_bitwise(strategy: str) -> None:
    """Right behind one, in the middle of several."""
    case = Case(TASK, strategy, (2, 3, 7), "gradient")
    whole = _runs(2, case)
    first = _runs(2, replace(case, steps=3))
    assert first[0].content is not None
    assert first[0].content.meta["position"]["skipped_in_a_row"] == 1  # type: ignore[index]
    again = run_virtual(2, lambda comm: _train(comm, replace(case, content=first[comm.rank].content)), deadline_seconds=300)
    for one, other in zip(again, whole, strict=True):
        _assert_same(one.content, other.content)
        assert one.content is not None
        assert other.content is not None
        assert one.content.meta == other.content.meta


def test_a_skip_is_reported_with_the_first_layer_and_the_ranks() -> None:
    for kept in _runs(3, Case(TASK, "blocking", (2,), "image")):
        (record,) = kept.of_kind("skip")
        where = {"layer": "conv1", "held": "gradients", "ranks": [0, 1, 2], "sources": [2]}
        assert record == {"kind": "skip", "epoch": 1, "step": 3, **where}
        assert kept.said[0] == (
            "step 3 skipped: layer conv1 is the first, in forward order, whose gradients are not finite in step 3; losses or "
            "batch statistics were so before they were summed (on rank 2 of 3)"
        )


def test_an_update_that_overflows_is_a_matter_of_parameters() -> None:
    """Gradients are large, and finite."""
    task = replace(TASK, lr=1e150, optimizer=partial(Sgd, momentum=0.0))
    for kept in _runs(2, Case(task, "blocking", (0,), "large image", most=1)):
        assert kept.of_kind("skip")[0]["held"] == "parameters"
        assert " whose parameters are not finite after step 1" in kept.said[0]


def test_a_loss_alone_has_no_layer() -> None:
    for kept in _runs(3, Case(TASK, "blocking", (2,), "loss")):
        (record,) = kept.of_kind("skip")
        assert (record["layer"], record["held"], record["ranks"]) == (None, "loss", [2])
        assert kept.said[0] == "step 3 skipped: the loss of step 3 is not finite (on rank 2 of 3)"


def test_training_ends_with_one_step_more_in_a_row_than_may() -> None:
    enough = _runs(2, Case(TASK, "sharded", (1, 2, 4, 5), "gradient", most=2))
    assert not enough[0].error
    runs = _runs(2, Case(TASK, "sharded", (1, 3, 4, 5, 6), "gradient", most=2))
    (error,) = {run.error for run in runs}
    assert error.startswith(
        "3 steps, one after another, are not finite and were skipped, the last one step 6, as layer conv2 is the first"
    )
    assert error.endswith("or raise on_nonfinite.most.")
    assert [record["step"] for record in runs[0].of_kind("skip")] == [2, 4, 5, 6]


def test_without_a_guard_nothing_is_kept() -> None:
    """It costs nothing where it is not asked for."""

    def guarded(comm: ThreadCommunicator, skips: bool) -> bool:
        return replica_of(replace(TASK, skips=skips), comm, virtual_engine(comm), Blocking)._guard is not None

    assert run_virtual(2, lambda comm: guarded(comm, False)) == [False, False]
    assert run_virtual(2, lambda comm: guarded(comm, True)) == [True, True]
