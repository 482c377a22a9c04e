"""Replicas: sums one step late, loops of a program's own, arrays that are not on the host, and one order on any ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from typing import Any

import numpy as np
import pytest

from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.averaging.strategies.bucketed import Bucketed
from hpctrain.averaging.strategies.lazy import Lazy
from hpctrain.averaging.strategies.overlap import Overlap
from hpctrain.averaging.strategies.priority import Priority
from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.backend.cuda.device import Precision, bfloat16_bits, bfloat16_values
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.backend.onednn.kernel_set import OnednnKernelSet
from hpctrain.backend.operators import KernelSet
from hpctrain.comm.groups import ProcessGrid
from hpctrain.core.errors import BackendError, ConfigError, CorruptedStateError, DivergedError
from hpctrain.core.intervals import even
from hpctrain.data.loader import ArrayLoader
from hpctrain.data.sampler import Sampler
from hpctrain.flight.recorder import FlightNotes, FlightRecorder
from hpctrain.nn.layers import BatchNorm, Conv2d, Flatten, Layer, Linear, Sequential
from hpctrain.nn.network import Network
from hpctrain.optim.base import Optimizer
from hpctrain.optim.optimizers import Adamw, Lamb, Lars, Sgd
from hpctrain.parallel.groups import GridGroups
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.parallel.rank_graph import make_network
from hpctrain.storage.checkpoint import CheckpointContent
from hpctrain.training.metrics import RunningSums
from hpctrain.training.replica import BETWEEN, LoopState, Replica, StrategyFactory, slices_of
from hpctrain.training.snapshot import Position
from hpctrain.training.weight_watch import CheckCadence
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.counters import Counters, CountingCommunicator
from hpctrain_testing.virtual.run import lone_rank, run_virtual, virtual_engine
from tests.support import nets, network_state
from tests.support.emulated import CudaKernelsFactory, EmulatedDeviceFactory, kernels_on
from tests.support.training import Task, batches, distance, made_up, replica_of, train

TASK = Task(nets.residual, NumpyKernelSet(), partial(Sgd, momentum=0.9), steps=7)
GRIDS = [ParallelPlan(), ParallelPlan(1, 3), ParallelPlan(2, 1, Parallelism.DOMAIN), ParallelPlan(2, 2, Parallelism.MODEL)]


def _loader(task: Task, replica: Replica) -> ArrayLoader:
    images, labels, _ = made_up(task)
    return ArrayLoader(images, labels, Sampler(len(images), task.batch, shuffle=False), **replica.place)


def _late(comm: ThreadCommunicator, task: Task) -> tuple[list[float], dict[str, np.ndarray], list[tuple[int, float]]]:
    """A training that reads each step's sums one step late: losses, running statistics, and what the replica says of itself."""
    replica = replica_of(task, comm, virtual_engine(comm), Blocking)
    losses, said = [], []
    for number, batch in enumerate(batches(task, replica.groups.position, comm.size, replica.tiles)):
        totals = replica.step(batch, task.lr)
        assert (totals is None) == (number == 0)
        losses += [] if totals is None else [totals.loss]
        said.append((replica.global_step, replica.lr))
    last = replica.settle()
    assert last is not None
    assert replica.settle() is None
    replica.drain()
    return [*losses, last.loss], {name: view.copy() for name, view in replica.network.statistics.views.items()}, said


@pytest.mark.slow
@pytest.mark.parametrize("plan", GRIDS, ids=str)
def test_sums_that_are_read_late_are_those_of_each_step(plan: ParallelPlan) -> None:
    task = replace(TASK, plan=plan)
    ranks = plan.rows * plan.cols
    for comm_late, at_once in zip(
        run_virtual(ranks, partial(_late, task=task), seed=1),
        run_virtual(ranks, lambda comm: train(task, comm, virtual_engine(comm), Blocking), seed=2),
        strict=True,
    ):
        losses, statistics, said = comm_late
        assert losses == [totals.loss for totals in at_once.totals]
        assert distance(statistics, at_once.statistics) == 0.0
        assert said == [(number + 1, task.lr) for number in range(task.steps)]


@pytest.mark.slow
@pytest.mark.parametrize("plan", GRIDS[1:], ids=str)
def test_a_replica_without_averagers_evaluates_alike(plan: ParallelPlan) -> None:
    task = replace(TASK, plan=plan)

    def evaluate(comm: ThreadCommunicator) -> tuple[RunningSums, RunningSums]:
        progress = virtual_engine(comm)
        trained = replica_of(task, comm, progress, Blocking)
        for batch in batches(task, trained.groups.position, comm.size, trained.tiles):
            trained.step(batch, task.lr)
        before = trained.evaluate(_loader(task, trained))  # which settles
        content = trained.state(Position(global_step=trained.global_step), {})
        groups = GridGroups(ProcessGrid(comm, plan.rows, plan.cols))
        network = make_network(
            task.model(), task.image_shape, task.kernels, groups=groups, progress=progress, plan=plan, dtype=task.dtype, seed=99,
            smoothing=task.smoothing,
        )  # fmt: skip
        other = Replica(network, groups=groups, progress=progress)
        other.load_weights(content)
        return before, other.evaluate(_loader(task, other))

    for before, after in run_virtual(plan.rows * plan.cols, evaluate):
        assert before == after
        assert before.count == task.samples


GROUPED = Task(nets.residual, NumpyKernelSet(), partial(Sgd, momentum=0.9), steps=1)


@pytest.mark.parametrize("strategy", [Blocking, Sharded])
@pytest.mark.parametrize("plan", [ParallelPlan(), ParallelPlan(1, 2), ParallelPlan(2, 2, Parallelism.MODEL)], ids=str)
def test_each_group_has_an_averager_whose_slices_hold_all_its_parameters(strategy: StrategyFactory, plan: ParallelPlan) -> None:
    """The network knows the slices, and a rank alone sends none."""

    def program(comm: ThreadCommunicator) -> tuple[set[str], set[str], dict[str, list[int]]]:
        replica = replica_of(replace(GROUPED, plan=plan), comm, virtual_engine(comm), strategy)
        several = [averager for averager in replica.averagers.values() if averager.comm.size > 1]
        names = {name for averager in several for name in averager.group.parameters}
        assert replica.network.slices == slices_of(replica.averagers)
        return set(replica.averagers) ^ set(replica.network.groups), names, dict(replica.network.slices)

    for missing, names, slices in run_virtual(plan.rows * plan.cols, program):
        assert not missing
        assert set(slices) == names
        numbers = {number for held in slices.values() for number in held}
        assert numbers == set(range(len(numbers)))


LOOPED = Task(nets.plain, NumpyKernelSet(), partial(Sgd, momentum=0.9), steps=7)
QUIET = FlightNotes(None)


RANKS = (1, 2, 3)


def _replica(comm: ThreadCommunicator, task: Task, loop: LoopState) -> Replica:
    return replica_of(task, comm, virtual_engine(comm), Sharded, loop=loop)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("asked_at", [0, 3])
def test_a_request_to_one_rank_is_known_on_all_after_the_same_step(ranks: int, asked_at: int) -> None:
    def program(comm: ThreadCommunicator) -> int:
        asked = []
        replica = _replica(comm, LOOPED, LoopState(QUIET, stop_asked=lambda: bool(asked)))
        for number, batch in enumerate(batches(LOOPED, comm.rank, comm.size)):
            if number == asked_at and comm.rank == comm.size - 1:
                asked.append("TERM")
            replica.step(batch, LOOPED.lr)
            if replica.loop.stop_requested:
                return replica.global_step
        raise AssertionError("no rank heard of it")

    assert set(run_virtual(ranks, program, seed=3)) == {asked_at + 2}


@pytest.mark.parametrize("ranks", RANKS)
def test_settling_hears_of_a_request_of_the_last_step(ranks: int) -> None:
    def program(comm: ThreadCommunicator) -> tuple[bool, bool]:
        replica = _replica(comm, LOOPED, LoopState(QUIET, stop_asked=lambda: comm.rank == 0))
        replica.step(next(batches(LOOPED, comm.rank, comm.size)), LOOPED.lr)
        before = replica.loop.stop_requested
        replica.settle()
        return before, replica.loop.stop_requested

    assert run_virtual(ranks, program) == [(False, True)] * ranks


def test_the_flight_record_knows_the_step_and_what_lies_between() -> None:
    flight, doing = FlightRecorder(), list[str]()

    def program(comm: ThreadCommunicator) -> None:
        progress = virtual_engine(comm)
        progress.notes = FlightNotes(flight)
        replica = replica_of(LOOPED, comm, progress, Sharded)
        update = replica.update
        replica.update = lambda *given: (doing.append(flight.doing), update(*given))[1]  # type: ignore[method-assign]
        replica.global_step = 41
        replica.step(next(batches(LOOPED, comm.rank, comm.size)), LOOPED.lr)

    run_virtual(1, program)
    assert doing == ["a training step, step 42"]
    assert flight.doing == f"{BETWEEN}, step 42"


# -- a program that writes -----------------------------------------------------------------------------------------------------
def _written(comm: ThreadCommunicator, tell: Callable[[Replica], None]) -> str:
    """A training whose program halves the parameters after two steps; the error, if there is one."""
    replica = replica_of(replace(LOOPED, checks=CheckCadence(1, hint="A hint.")), comm, virtual_engine(comm), Sharded)
    try:
        for batch in batches(LOOPED, comm.rank, comm.size):
            if replica.global_step == 2:
                replica.drain()
                for parameter in replica.network.parameters.values():
                    parameter.data *= 0.5
                tell(replica)
            replica.step(batch, LOOPED.lr)
        replica.settle()
        replica.require_alike()
    except CorruptedStateError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("ranks", RANKS)
def test_what_the_program_writes_is_an_alarm_unless_it_says_so(ranks: int) -> None:
    assert set(run_virtual(ranks, partial(_written, tell=Replica.parameters_written))) == {""}
    (sentence,) = set(run_virtual(ranks, partial(_written, tell=lambda replica: None)))
    assert "changed between two updates" in sentence
    assert sentence.endswith(". A hint.")


STRATEGIES: Mapping[str, tuple[type, dict[str, Any]]] = {
    "blocking": (Blocking, {}),
    "bucketed": (Bucketed, {"bucket_bytes": 2000}),
    "overlap": (Overlap, {}),
    "lazy": (Lazy, {"max_interval": 3, "check_every": 1}),
    "priority": (Priority, {}),
    "sharded": (Sharded, {"bucket_bytes": 2000}),
    "exchanging": (Sharded, {"fc_exchange": "always"}),
}

OPTIMIZERS: Mapping[str, Callable[[], Optimizer]] = {
    "sgd": partial(Sgd, momentum=0.9, nesterov=True, weight_decay=0.01),
    "clipped": partial(Sgd, momentum=0.0, clip_norm=0.5),
    "lars": partial(Lars, momentum=0.9, weight_decay=0.01, trust_coefficient=0.1),
}


def _task(kernels: KernelSet, optimizer: str = "sgd", **changes: Any) -> Task:
    options = {"model": partial(nets.plain, dropout=0.3), "steps": 5, "samples": 21, **changes}
    return Task(kernels=kernels, optimizer=OPTIMIZERS[optimizer], **options)


def _replica_alone(task: Task, strategy: str) -> Replica:
    kind, options = STRATEGIES[strategy]
    return replica_of(task, *lone_rank(), kind, nominal_batch=task.batch, **options)


def _trained(task: Task, strategy: str) -> tuple[Replica, list[float]]:
    replica, losses = _replica_alone(task, strategy), []
    for batch in batches(task, 0, 1):
        totals = replica.step(batch, task.lr)
        # Whatever the step has not copied by now is lost.
        batch.x.fill(np.nan)
        losses += [] if totals is None else [totals.loss, float(totals.statistics.sum())]
    return replica, losses


def _everything(replica: Replica, losses: list[float], task: Task) -> dict[str, np.ndarray]:
    """All that a training leaves: sums of its steps, an evaluation, a checkpoint, weights for other frameworks."""
    images, labels, _ = made_up(task)
    sums = replica.evaluate(ArrayLoader(images, labels, Sampler(len(images), task.batch, shuffle=False), **replica.place))
    content = replica.state(Position(), {})
    return {
        "losses": np.array(losses),
        "evaluation": np.array([sums.loss, sums.top1, sums.top5, sums.count]),
        **content.tensors,
        **{f"export/{name}": array for name, array in network_state.export(replica.network).items()},
    }


def _assert_equal(first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray]) -> None:
    assert first.keys() == second.keys()
    different = [name for name in first if np.asarray(first[name]).tobytes() != np.asarray(second[name]).tobytes()]
    assert not different


def _shadows_are_fresh(network: Network) -> None:
    for group in network.groups.values():
        data, shadow = (network.kernels.arithmetic.to_host(array) for array in (group.data, group.shadow))
        assert np.array_equal(shadow, bfloat16_values(bfloat16_bits(data)))


@pytest.mark.sample(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_training_goes_on_from_its_checkpoint_on_either_side(cuda_kernels: CudaKernelsFactory, strategy: str) -> None:
    task, on_host = _task(cuda_kernels()), _task(NumpyKernelSet())
    content = _trained(task, strategy)[0].state(Position(), {})
    results = []
    for other in (task, on_host):
        replica = _replica_alone(other, strategy)
        replica.load(content)
        for batch in batches(other, 0, 1):
            replica.step(batch, other.lr)
        results.append(_everything(replica, [], other))
    assert distance(*results) < 1e-10


def test_weights_of_other_frameworks_come_and_go(cuda_kernels: CudaKernelsFactory) -> None:
    kernels = cuda_kernels("bfloat16")
    source, target = (Network(nets.residual(), (9, 7, 3), kernels, dtype="bfloat16", seed=seed) for seed in (1, 2))
    network_state.restore(target, network_state.export(source))
    _assert_equal(network_state.export(source), network_state.export(target))
    _shadows_are_fresh(target)


@pytest.mark.parametrize("device", [True, False])
@pytest.mark.parametrize("strategy", ["blocking", "lazy", "sharded"])
def test_the_first_layer_that_is_not_finite_is_named(cuda_kernels: CudaKernelsFactory, device: bool, strategy: str) -> None:
    """Its NaN has reached all other layers by the time that anybody asks."""
    task = _task(cuda_kernels() if device else NumpyKernelSet())
    replica = _replica_alone(task, strategy)
    arithmetic, parameter = task.kernels.arithmetic, replica.network.parameters["fc1.weight"]

    def run() -> None:
        for number, batch in enumerate(batches(task, 0, 1)):
            if number == 2:
                replica.drain()
                values = np.array(arithmetic.to_host(parameter.data))
                values[3, 4] = np.nan
                arithmetic.from_host(parameter.data, values)
            replica.step(batch, task.lr)

    with pytest.raises(DivergedError, match=r"^Layer fc1 is the first.*whose parameters are not finite after step 2"):
        run()


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-5), ("tf32", 1e-5), ("bfloat16", 1e-2)])
def test_a_device_trains_in_other_precisions(
    emulated_device: EmulatedDeviceFactory, precision: Precision, tolerance: float
) -> None:
    """Losses follow those of float64; parameters stay float32, and rounded copies of them fresh."""
    kernels = kernels_on(emulated_device(0), precision, graphs=False)
    losses = []
    for task in (
        _task(kernels, model=nets.residual, steps=3, dtype=kernels.runtime.dtype),
        _task(NumpyKernelSet(), model=nets.residual, steps=3),
    ):
        replica, sums = _trained(task, "sharded")
        losses.append(np.array(sums[::2]))
        assert replica.network.parameter_dtype == ("float32" if task.kernels is kernels else "float64")
        if precision == "bfloat16" and task.kernels is kernels:
            _shadows_are_fresh(replica.network)
    np.testing.assert_allclose(*losses, rtol=tolerance)


def test_layers_of_numpy_are_refused(cuda_kernels: CudaKernelsFactory) -> None:
    from tests.testing.test_user_checks import Scale

    model = Sequential({"scale": Scale(3), "flatten": Flatten(), "fc": Linear(9 * 7 * 3, 2)})
    network = Network(model, (9, 7, 3), cuda_kernels())
    with pytest.raises(BackendError, match=r"Layer scale: The layer's code computes with NumPy.*use backend numpy or onednn\.$"):
        network.program(2, training=True)


@pytest.mark.parametrize("seed", range(8))
def test_steps_with_a_batch_norm_over_one_value_are_refused(seed: int) -> None:
    """Every rank refuses the first step in which some rank has one image of one pixel."""
    random = np.random.default_rng(seed)
    ranks, batch = int(random.integers(1, 4)), int(random.integers(1, 6))
    side, synchronised = (1, 1, 1, 2)[random.integers(4)], bool(random.integers(3) == 0)

    def model() -> Layer:
        parts = {"norm": BatchNorm(3, synchronised=synchronised), "flatten": Flatten()}
        return Sequential({"conv": Conv2d(3, 3, 1), **parts, "fc": Linear(3 * side * side, 5)})

    def said(comm: ThreadCommunicator) -> str:
        task = replace(TASK, model=model, image_shape=(side, side, 3), batch=batch, samples=2 * batch, steps=2)
        replica = replica_of(task, comm, virtual_engine(comm), Sharded, nominal_batch=batch)
        try:
            for one in batches(task, comm.rank, comm.size):
                replica.step(one, 0.01)
        except ConfigError as error:
            return str(error)
        replica.settle()
        return ""

    shares = [batch] if synchronised else [count for count in even(batch, ranks) if count]
    sentences = set(run_virtual(ranks, said))
    assert len(sentences) == 1
    single = side == 1 and min(shares) == 1
    assert sentences.pop().startswith("Batch norm norm has a single value per channel") == single


#: a batch that no number of ranks divides, and a last one of an epoch with fewer samples than shards
PLAIN = Task(partial(nets.plain, dropout=0.3), NumpyKernelSet(), partial(Sgd, momentum=0.9), dtype="float32", batch=11, steps=6)
RESIDUAL = replace(PLAIN, model=partial(nets.residual, synchronised=False))
#: a layer of many terms of a norm, and others of a few; in float32 rounding would hide the last bits of norms
WIDE = replace(PLAIN, model=partial(nets.plain, hidden=300), steps=4, dtype="float64")
TASKS = {
    "plain": PLAIN,
    "residual": RESIDUAL,
    "residual adamw": replace(RESIDUAL, optimizer=partial(Adamw, beta2=0.9)),
    "wide lars": replace(WIDE, optimizer=partial(Lars, momentum=0.9, weight_decay=1e-2, trust_coefficient=0.1)),
    "wide lars clipping": replace(WIDE, optimizer=partial(Lars, momentum=0.9, trust_coefficient=0.1, clip_norm=0.5)),
    "wide lamb": replace(WIDE, optimizer=partial(Lamb, weight_decay=1e-2)),
    "wide clipping": replace(WIDE, optimizer=partial(Sgd, momentum=0.9, clip_norm=0.3)),
    "plain onednn": replace(PLAIN, kernels=OnednnKernelSet()),
    "residual onednn": replace(RESIDUAL, kernels=OnednnKernelSet()),
}
EXACT_STRATEGIES: Mapping[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "sharded": (Sharded, {}),
    "sharded 64": (Sharded, {"bucket_bytes": 64}),
    "sharded 3000": (Sharded, {"bucket_bytes": 3000}),
    "sharded one by one": (Sharded, {"bucket_bytes": 64, "window": 1, "replan": False}),
    "bucketed": (Bucketed, {}),
    "bucketed 64": (Bucketed, {"bucket_bytes": 64}),
    "bucketed 3000": (Bucketed, {"bucket_bytes": 3000}),
    "overlap": (Overlap, {}),
    "priority": (Priority, {"slice_parameters": 100}),
    "blocking": (Blocking, {}),
}


def _sha256(tensors: Mapping[str, np.ndarray]) -> str:
    """Of all tensors of a checkpoint, by name."""
    sha = hashlib.sha256()
    for name in sorted(tensors):
        sha.update(name.encode())
        sha.update(np.ascontiguousarray(tensors[name]).tobytes())
    return sha.hexdigest()


def _steps(
    task: Task, comm: ThreadCommunicator, strategy: str, steps: range, content: CheckpointContent | None = None
) -> tuple[CheckpointContent, list[float]]:
    """Return the state after some steps of a training, and the loss of each."""
    kind, options = EXACT_STRATEGIES[strategy]
    replica = replica_of(task, comm, virtual_engine(comm), kind, nominal_batch=task.batch, **options)
    if content is not None:
        assert replica.load(content).global_step == steps.start
    losses = []
    for batch in islice(batches(task, replica.groups.position, comm.size), steps.start, steps.stop):
        replica.step(batch, task.lr)
        sums = replica.settle()
        assert sums is not None
        losses.append(sums.loss)
    replica.drain()
    return replica.state(Position(global_step=replica.global_step), {}), losses


def _on_ranks(name: str, shards: int, ranks: int, strategy: str) -> tuple[str, list[float]]:
    """SHA-256 of parameters, optimiser state and running statistics, and all losses; of all ranks, which agree."""
    task = replace(TASKS[name], exact_shards=shards)
    results = run_virtual(ranks, lambda comm: _steps(task, comm, strategy, range(task.steps)), seed=ranks)
    digests = [(_sha256(dict(content.tensors)), losses) for content, losses in results]
    assert all(digest == digests[0] for digest in digests)
    return digests[0]


@cache
def _on_one(name: str, shards: int) -> tuple[str, list[float]]:
    return _on_ranks(name, shards, 1, "blocking")


#: any strategy and size of messages, any number of ranks, states of optimisers, norms, and kernels
CASES = [
    *(("plain", *of_ranks, strategy) for of_ranks in ((8, 4), (6, 2)) for strategy in EXACT_STRATEGIES),
    *(
        (name, *case)
        for name in ("residual", "residual adamw")
        for case in (
            (8, 2, "sharded 64"), (8, 8, "bucketed"), (6, 3, "sharded"), (6, 6, "bucketed 3000"), (12, 3, "bucketed 64"),
            (12, 4, "sharded 3000"), (24, 6, "sharded"), (24, 8, "bucketed"), (24, 12, "bucketed 3000"), (24, 24, "sharded"),
        )
    ),
    *(
        (name, *case)
        for name in ("wide lars", "wide lars clipping", "wide lamb", "wide clipping")
        for case in (
            (6, 2, "sharded"), (6, 3, "sharded 3000"), (8, 4, "priority"), (8, 2, "bucketed 3000"), (8, 8, "sharded 64"),
            (8, 4, "overlap"),
        )
    ),
    *(
        (f"{name} onednn", *case)
        for name in ("plain", "residual")
        for case in ((8, 2, "sharded"), (8, 4, "bucketed 64"), (6, 3, "sharded 3000"), (12, 4, "bucketed"))
    ),
]  # fmt: skip


@pytest.mark.sample(6)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "shards", "ranks", "strategy"), CASES)
def test_any_training_has_the_bits_of_one_rank(name: str, shards: int, ranks: int, strategy: str) -> None:
    assert _on_ranks(name, shards, ranks, strategy) == _on_one(name, shards)


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [(4, 2), (1, 8), (8, 1), (2, 4)])
def test_a_training_goes_on_with_the_same_bits_on_other_ranks(first: int, then: int) -> None:
    task = replace(RESIDUAL, exact_shards=8)
    stop = int(np.random.default_rng((first, then)).integers(1, task.steps))
    content = run_virtual(first, lambda comm: _steps(task, comm, "sharded", range(stop)))[0][0]
    rest = range(stop, task.steps)
    for ended, losses in run_virtual(then, lambda comm: _steps(task, comm, "bucketed 64", rest, content)):
        assert (_sha256(dict(ended.tensors)), losses) == (_on_one("residual", 8)[0], _on_one("residual", 8)[1][stop:])


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["residual", "residual onednn"])
@pytest.mark.parametrize("passes", [2, 3, 8])
def test_shards_may_be_computed_in_several_passes(name: str, passes: int) -> None:
    """Memory is needed for the shards of one pass; the bits do not tell."""
    task = replace(TASKS[name], exact_shards=8, micro_batches=passes)
    for ranks in (1, 2):
        for content, losses in run_virtual(ranks, lambda comm: _steps(task, comm, "sharded", range(task.steps))):
            assert (_sha256(dict(content.tensors)), losses) == _on_one(name, 8)


@pytest.mark.parametrize("name", ["plain", "residual"])
def test_it_trains_what_the_ordinary_order_trains(name: str) -> None:
    """In float64 with shards as micro-batches, rounding alone differs."""
    task = replace(TASKS[name], dtype="float64", batch=16, samples=32)
    ordinary = run_virtual(1, lambda comm: train(replace(task, micro_batches=4), comm, virtual_engine(comm), Blocking))[0]
    exact = run_virtual(2, lambda comm: train(replace(task, exact_shards=4), comm, virtual_engine(comm), Sharded))[0]
    assert distance(exact.parameters, ordinary.parameters) < 1e-10
    assert not exact.statistics or distance(exact.statistics, ordinary.statistics) < 1e-10
    assert np.allclose([step.loss for step in exact.totals], [step.loss for step in ordinary.totals], rtol=1e-10, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [Sharded, Bucketed])
@pytest.mark.parametrize(("ranks", "shards"), [(2, 2), (2, 8), (3, 12)])
def test_ranks_with_one_sum_each_send_what_they_send_without_an_order(ranks: int, shards: int, strategy: type[Any]) -> None:
    def sent(comm: ThreadCommunicator, task: Task) -> int:
        counters = Counters()
        options = {"fc_exchange": "never"} if strategy is Sharded else {}
        replica = replica_of(task, CountingCommunicator(comm, counters), virtual_engine(comm), strategy, **options)
        before = counters.snapshot()
        for batch in batches(task, replica.groups.position, comm.size):
            replica.step(batch, task.lr)
        replica.drain()
        replica.settle()
        return counters.since(before).total().exchanged_bytes

    task = replace(RESIDUAL, steps=3, batch=24, samples=72)
    ordinary = run_virtual(ranks, lambda comm: sent(comm, task))
    exact = run_virtual(ranks, lambda comm: sent(comm, replace(task, exact_shards=shards)))
    for with_order, without in zip(exact, ordinary, strict=True):
        assert abs(with_order - without) * 100 <= without


@pytest.mark.parametrize("flip", [False, True])
def test_an_evaluation_has_the_bits_of_one_rank(flip: bool) -> None:
    task = replace(RESIDUAL, exact_shards=12)
    images, labels, _ = made_up(task)

    def evaluate(comm: ThreadCommunicator) -> tuple[float, int, int, int]:
        replica = replica_of(task, comm, virtual_engine(comm), Blocking)
        loaders = [
            ArrayLoader(array, labels, Sampler(len(images), 10, shuffle=False), **replica.place)
            for array in (images, images[:, :, ::-1])
        ]
        sums = replica.evaluate(loaders[0], mirrored=loaders[1] if flip else None)
        return sums.loss, sums.top1, sums.top5, sums.count

    expected = run_virtual(1, evaluate)[0]
    assert expected[3] == len(images)
    for ranks in (2, 3, 4):
        assert set(run_virtual(ranks, evaluate)) == {expected}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"exact_shards": 8}, "exact.shards is 8, which 3 ranks cannot share evenly; .*, or set .* 9"),
        ({"exact_shards": 2}, "exact.shards is 2, which 3 ranks cannot share evenly; .*, or set .* 3"),
        ({"exact_shards": 0}, "must be at least 1"),
        ({"model": nets.residual}, "bn1 computes batch statistics over all ranks"),
        ({"plan": ParallelPlan(3, 1, Parallelism.DOMAIN)}, "grid.rows is 3, but exact does not support ranks that share samples"),
    ],
)
def test_what_cannot_be_the_same_on_any_ranks_is_refused(changed: dict[str, Any], words: str) -> None:
    task = replace(PLAIN, **{"exact_shards": 6, **changed})
    with pytest.raises(ConfigError, match=words):
        run_virtual(3, lambda comm: replica_of(task, comm, virtual_engine(comm), Blocking))


def test_a_loader_without_shards_is_refused() -> None:
    task = replace(PLAIN, exact_shards=8, batch=10)

    def program(comm: ThreadCommunicator) -> None:
        replica = replica_of(task, comm, virtual_engine(comm), Blocking)
        for batch in batches(replace(task, exact_shards=None), replica.groups.position, comm.size):
            replica.step(batch, task.lr)

    with pytest.raises(
        ConfigError, match=r"The ranks have 5, 5 samples of a step, but 8 shards of 10 samples require 6, 4; create the"
    ):
        run_virtual(2, program)
