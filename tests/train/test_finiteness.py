"""NaN or infinity in a weight, a gradient, an image or a statistic ends training within two steps, and is never kept."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.averaging.strategies.lazy import Lazy
from hpctrain.averaging.strategies.sparse import Sparse
from hpctrain.averaging.strategy import Strategy
from hpctrain.backend.kernels.base import KernelSet
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.kernels.onednn.kernel_set import OnednnKernelSet, available
from hpctrain.data.arrays import ArrayLoader
from hpctrain.data.loader import Batch
from hpctrain.errors import DivergedError
from hpctrain.nn.parameter import Parameter
from hpctrain.optim.optimizers.sgd import Sgd
from hpctrain.optim.schedules.constant import Constant
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.train.metrics import Reporter
from hpctrain.train.replica import Replica
from hpctrain.train.snapshot import Position
from hpctrain.train.trainer import Cadence, Trainer
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine
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

    trainer = Trainer(
        replica=replica,
        loader=_Loader(task, replica, before),
        test_loader=None,
        schedule=Constant(base_lr=task.lr, epochs=2, steps_per_epoch=5),
        cadence=Cadence(epochs=2, checkpoint_epochs=1, checkpoint_steps=checkpoints),
        reporter=Reporter(),
        save=save,
    )
    try:
        trainer.run(Position())
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


@pytest.mark.sample(4)
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(("kernels", "strategy"), KERNELS_AND_STRATEGIES, indirect=["kernels"])
def test_training_stops_within_two_steps_and_names_the_layer(kernels: KernelSet, strategy: str, ranks: int) -> None:
    every = [(poison, checkpoints) for poison in (*WEIGHT, *GRADIENT, *IMAGE) for checkpoints in (0, 1)]
    some = [(WEIGHT[0], 1), (GRADIENT[1], 0), (IMAGE[0], 0)]
    for poison, checkpoints in every if strategy in THOROUGH else some:
        runs = _runs(ranks, _task(kernels), strategy, poison, checkpoints)
        _stops(runs, LAYER[poison.place])


@pytest.mark.sample(2)
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


NUMBERS = st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=9)


@given(NUMBERS, st.sampled_from([np.nan, np.inf, -np.inf]), st.integers(0, 8), st.sampled_from(["float32", "float64"]))
def test_one_number_that_is_not_finite_is_seen(numbers: list[float], bad: float, place: int, dtype: str) -> None:
    """Products of the largest floats overflow; they are finite all the same."""
    from hpctrain.backend.host_arithmetic import all_finite

    values = np.array(numbers, dtype)
    assert all_finite(values)
    values[place % len(numbers)] = bad
    assert not all_finite(values)
