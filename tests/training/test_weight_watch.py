"""Checks that ranks hold the same state and train the same bits; one flipped bit is found, with its rank and name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

from hpctrain.averaging.base import GradientAverager, Strategy
from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.averaging.strategies.lazy import Lazy
from hpctrain.averaging.strategies.overlap import Overlap
from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.averaging.strategies.sparse import Sparse
from hpctrain.backend.cuda.device import Precision
from hpctrain.backend.numpy.kernel_set import NumpyKernelSet
from hpctrain.core.errors import CorruptedStateError, DivergedError
from hpctrain.flight.recorder import FlightNotes
from hpctrain.nn.network import MODEL
from hpctrain.optim.optimizers import Lars, Sgd
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.training.metrics import Reporter
from hpctrain.training.replica import Replica
from hpctrain.training.saving import Saver, Writing
from hpctrain.training.snapshot import Position
from hpctrain.training.trainer import Cadence
from hpctrain.training.weight_watch import CheckCadence
from hpctrain_testing.emulator.device import EmulatedDevice
from hpctrain_testing.faults import FAULTS, Fault, findings, is_named, prepare, run_fault
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.run import run_virtual, virtual_engine
from tests.support import nets
from tests.support.averaging import STRATEGIES
from tests.support.damage import _copies, drawn, latest, outcome, undamaged
from tests.support.emulated import EmulatedDeviceFactory, kernels_on
from tests.support.training import Task, batches, replica_of, train
from tests.training.test_not_finite import trainer_of

ALL_STRATEGIES: dict[str, tuple[type[Strategy], dict[str, Any]]] = {
    "blocking": (Blocking, {}),
    **STRATEGIES,
    "sharded, rounded": (Sharded, {"bucket_bytes": 100, "wire_parameters": "bfloat16"}),
    "sparse": (Sparse, {**STRATEGIES["sparse, all of it"][1], "density": 0.1}),
    "lazy": (Lazy, {"layers": 3, "max_interval": 4, "check_every": 1, "bucket_bytes": 100}),
}

#: random damages
DAMAGES = 200
EVERY_STEP, IN_TURN, SLOWLY = CheckCadence(1), CheckCadence(2), CheckCadence(3)
TASK = Task(nets.plain, NumpyKernelSet(), partial(Sgd, momentum=0.9), steps=8, checks=EVERY_STEP)
GRIDS = [ParallelPlan(), ParallelPlan(1, 2), ParallelPlan(1, 4), ParallelPlan(2, 1, Parallelism.DOMAIN)]
SPLIT = ParallelPlan(2, 2, Parallelism.MODEL)
FLIPPED_STEP = 3
Flip = Callable[[Replica], None]
Ranks = tuple[int, ...]


@dataclass
class Run:
    """How a training went on one rank. error: "" where it went through. steps: begun."""

    error: str = ""
    steps: int = 0


def _flip(values: np.ndarray) -> None:
    """One bit of the first element, of few consequences."""
    values.reshape(-1).view(np.uint64)[:1] ^= np.uint64(1 << 30)


def _flip_in(replica: Replica, name: str, array: Any) -> None:
    """One bit of the first element, of few consequences, wherever the array lies."""
    arithmetic, place = _averager_of(replica, name).group.arithmetic, array.reshape(-1)[:1]
    bits = np.array(arithmetic.to_host(place))
    bits.view(np.uint8)[2] ^= np.uint8(8)
    arithmetic.from_host(place, bits)


def _averager_of(replica: Replica, name: str) -> GradientAverager:
    return next(averager for averager in replica.averagers.values() if name in averager.group.parameters)


def _parameter(replica: Replica, name: str = "conv2.weight") -> None:
    _flip_in(replica, name, replica.network.parameters[name].data)


def _state(replica: Replica, name: str = "conv2.weight") -> None:
    """The momentum of a parameter, as far as this rank holds it."""
    averager = _averager_of(replica, name)
    owned = [segment for segment in averager.owned() if segment.parameter == name and segment.size]
    for segment in owned[:1]:
        _flip_in(replica, name, averager.optimizer.state(segment)["momentum"])


def _statistic(replica: Replica) -> None:
    _flip(replica.network.statistics.views["bn1.running_mean"])


def _run(comm: ThreadCommunicator, task: Task, strategy: tuple[type[Strategy], dict[str, Any]], flip: Flip, ranks: Ranks) -> Run:
    """Train; flip a bit on some ranks before step `FLIPPED_STEP`, when all earlier steps have ended."""
    kind, options = strategy
    replica, run = replica_of(task, comm, virtual_engine(comm), kind, **options), Run()
    replica.require_alike(schedules=True)
    try:
        for number, batch in enumerate(batches(task, replica.groups.position, comm.size, replica.tiles)):
            run.steps = number + 1
            replica.drain()
            if number == FLIPPED_STEP and comm.rank in ranks:
                flip(replica)
            replica.step(batch, task.lr)
        replica.settle()
        replica.require_alike()
    except CorruptedStateError as error:
        run.error = str(error)
    task.kernels.wait()  # what a step has enqueued on a device still reads the replica's arrays
    return run


def _runs(ranks: int, task: Task, strategy: str, flip: Flip, rank: int = 1) -> Run:
    """The outcome of all ranks, which is the same."""
    runs = run_virtual(ranks, lambda comm: _run(comm, task, ALL_STRATEGIES[strategy], flip, (rank,)), deadline_seconds=300)
    assert all(run == runs[0] for run in runs)
    return runs[0]


# -- no false alarms -----------------------------------------------------------------------------------------------------------
@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize(("number", "strategy"), list(enumerate(ALL_STRATEGIES)))
def test_checks_change_no_bit_and_find_nothing(number: int, strategy: str) -> None:
    """Each strategy runs on one of the grids. The combinations of options (`tests/testing`) cover all grids."""
    kind, options = ALL_STRATEGIES[strategy]
    plan = GRIDS[number % len(GRIDS)]
    micro_batches = 1 if "exchange" in strategy else 1 + number % 2
    task = replace(TASK, plan=plan, micro_batches=micro_batches, steps=5)
    found = []
    for checks in (CheckCadence(), IN_TURN):
        program = partial(_train, task=replace(task, checks=checks), kind=kind, options=options)
        found.append(run_virtual(plan.rows * plan.cols, program, seed=4, deadline_seconds=300))
    assert found[0] == found[1]


def _train(comm: ThreadCommunicator, task: Task, kind: type[Strategy], options: dict[str, Any]) -> dict[str, bytes]:
    result = train(task, comm, virtual_engine(comm), kind, **options)
    return {name: values.tobytes() for name, values in (*result.parameters.items(), *result.statistics.items())}


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [partial(Sgd, momentum=0.9, clip_norm=0.1), partial(Lars, trust_coefficient=0.1)])
@pytest.mark.parametrize("strategy", [Blocking, Sharded])
def test_norms_and_split_parameters_are_no_alarm(strategy: type[Strategy], optimizer: Callable[[], Any]) -> None:
    task = replace(TASK, model=nets.residual, plan=SPLIT, optimizer=optimizer)
    run_virtual(4, lambda comm: train(task, comm, virtual_engine(comm), strategy), seed=1, deadline_seconds=300)


def test_what_is_loaded_is_no_alarm() -> None:
    def program(comm: ThreadCommunicator) -> None:
        replica = replica_of(TASK, comm, virtual_engine(comm), Sharded)
        steps = list(batches(TASK, replica.groups.position, comm.size, replica.tiles))
        content = None
        for batch in (*steps, *steps):
            replica.step(batch, TASK.lr)
            replica.settle()
            replica.require_alike()
            if content is None:
                content = comm.broadcast_object(replica.state(Position(global_step=1), {}))
            elif replica.global_step == 5:
                replica.load(content)

    run_virtual(3, program, deadline_seconds=300)


def test_a_replica_without_checks_compares_nothing() -> None:
    assert _runs(3, replace(TASK, checks=CheckCadence()), "blocking", _parameter) == Run("", TASK.steps)


# -- flipped bits --------------------------------------------------------------------------------------------------------------
@pytest.mark.sample(6)
@pytest.mark.once_failed("71", "586", "2209", "3645")  # NaN that reached all ranks, or whose step was skipped
@pytest.mark.slow
@pytest.mark.parametrize("seed", [*range(DAMAGES), 586, 2209, 3645])
def test_damage_to_one_rank_is_reported_in_time_and_of_that_rank(seed: int) -> None:
    """Damage to any array at any moment of a step is reported, or it changes no bit of any rank at the end."""
    damage = drawn(seed)
    with_damage = outcome(damage)
    if with_damage.error:
        assert with_damage.happened
        assert with_damage.ranks == (damage.rank,), with_damage.error
        assert with_damage.steps <= latest(damage), with_damage.error
    else:
        assert with_damage.state == undamaged(damage)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["sharded", "priority", "lazy, every step", "sparse"])
@pytest.mark.parametrize("damaged", [0, 1])
def test_of_two_ranks_the_one_that_does_not_own_a_parameter_is_wrong(strategy: str, damaged: int) -> None:
    def flip(replica: Replica) -> None:
        (averager,) = replica.averagers.values()
        owned = {place for segment in averager.owned() for place in range(segment.start, segment.stop)}
        copied = [place for place in range(averager.group.size) if place not in owned]
        _flip(averager.group.data[copied[0] :])

    run = _runs(2, TASK, strategy, flip, damaged)
    assert f"After step {FLIPPED_STEP} rank {damaged} holds other bits of parameter" in run.error
    assert f"than rank {1 - damaged}, which owns it; " in run.error
    assert run.steps == FLIPPED_STEP + 2  # reported one step later


@pytest.mark.parametrize("strategy", ["blocking", "sharded"])
def test_values_that_are_not_finite_on_all_ranks_are_no_damage(strategy: str) -> None:
    def program(comm: ThreadCommunicator) -> str:
        kind, options = ALL_STRATEGIES[strategy]
        task = replace(TASK, lr=1e200, steps=20)
        with pytest.raises(DivergedError) as error:
            train(task, comm, virtual_engine(comm), kind, **options)
        return str(error.value)

    assert len(set(run_virtual(3, program, deadline_seconds=300))) == 1


@pytest.mark.parametrize("flip", [_parameter, _state])
@pytest.mark.parametrize("strategy", ["blocking", "overlap"])
def test_of_two_ranks_that_update_all_the_damaged_one_is_named(strategy: str, flip: Flip) -> None:
    run = _runs(2, TASK, strategy, flip)
    assert "On rank 1 " in run.error
    assert " of conv2.weight changed" in run.error or " parameter conv2.weight changed" in run.error
    assert run.steps <= FLIPPED_STEP + 3


def test_one_rank_finds_changes_of_its_own_state() -> None:
    run = _runs(1, TASK, "blocking", _state, rank=0)
    assert run.error.startswith("On rank 0 the momentum of conv2.weight changed between two updates")
    assert run.steps == FLIPPED_STEP + 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_running_statistics_are_guarded(ranks: int) -> None:
    run = _runs(ranks, replace(TASK, model=nets.residual), "sharded", _statistic, rank=ranks - 1)
    assert f"On rank {ranks - 1} running statistic bn1.running_mean changed between two updates" in run.error
    assert run.steps == FLIPPED_STEP + 2


@pytest.mark.parametrize("rank", [0, 3])
def test_split_parameters_are_compared_with_the_same_part(rank: int) -> None:
    """On a grid of 2 x 2 each part of a split layer is on two ranks; the others learn of it, too."""
    task = replace(TASK, plan=SPLIT)

    def split(comm: ThreadCommunicator) -> list[str]:
        averager = replica_of(task, comm, virtual_engine(comm), Blocking).averagers[MODEL]
        return [name for name, parameter in averager.group.parameters.items() if parameter.size]

    name = run_virtual(4, split)[0][0]
    run = _runs(4, task, "blocking", partial(_parameter, name=name), rank)
    assert f"On rank {rank} parameter {name} changed between two updates" in run.error


@pytest.mark.parametrize("what", ["parameter fc1.bias", "the schedule of parameters all"])
def test_first_values_and_schedules_are_compared_before_the_first_step(what: str) -> None:
    def program(comm: ThreadCommunicator) -> tuple[str, tuple[int, ...]]:
        replica = replica_of(TASK, comm, virtual_engine(comm), Sharded)
        if comm.rank == 2 and "parameter " in what:
            _parameter(replica, "fc1.bias")
            replica.parameters_written()
        elif comm.rank == 2:
            (averager,) = replica.averagers.values()
            assert averager.schedule is not None
            averager.schedule = replace(averager.schedule, operations=averager.schedule.operations[::-1])
        with pytest.raises(CorruptedStateError) as error:
            replica.require_alike(schedules=True)
        return str(error.value), error.value.ranks

    ((text, ranks),) = set(run_virtual(3, program))
    assert text.startswith(f"After step 0 rank 2 holds other bits of {what} than ranks 0-1;")
    assert ranks == (2,)


@pytest.mark.parametrize("flip", [_parameter, _state])
@pytest.mark.parametrize("strategy", ["blocking", "sharded"])
def test_nothing_is_kept_that_was_damaged(strategy: str, flip: Flip) -> None:
    """Even where the checks of steps have not come to it: all is compared before a checkpoint, which is what to resume from."""
    kind, options = ALL_STRATEGIES[strategy]
    task = replace(TASK, checks=CheckCadence(1000), samples=40, lr=0.01)

    def program(comm: ThreadCommunicator) -> tuple[str, list[int]]:
        replica, kept = replica_of(task, comm, virtual_engine(comm), kind, **options), list[int]()

        def before(number: int, batch: Any) -> Any:
            if number == FLIPPED_STEP and comm.rank == 0:
                replica.drain()
                flip(replica)
            return batch

        cadence = Cadence(epochs=1, checkpoint_steps=1)
        trainer = trainer_of(task, replica, before, lambda position: kept.append(position.global_step), cadence)
        with pytest.raises(CorruptedStateError) as error:
            trainer.run(Position())
        return str(error.value), kept

    ((text, kept), *others) = run_virtual(3, program, deadline_seconds=300)
    assert all(other == (text, kept) for other in others)
    assert kept[-1] in (FLIPPED_STEP, FLIPPED_STEP + 1)
    assert text.endswith(f"resume from the checkpoint of step {kept[-1]}.")
    assert "conv2.weight" in text


def test_a_skipped_checkpoint_is_not_the_one_to_resume_from() -> None:
    """The one of step 1 is still being written, so all later ones are skipped."""
    kind, options = ALL_STRATEGIES["blocking"]
    written = Event()

    def program(comm: ThreadCommunicator) -> int | None:
        replica = replica_of(TASK, comm, virtual_engine(comm), kind, **options)
        saver = Saver(comm, FlightNotes(None), Reporter(), asynchronous=True, deadline_seconds=0.0)
        replica.loop.writes_with(saver)

        def save(position: Position) -> None:
            if saver.ready(position.global_step):
                saver.begin(Writing(position.global_step, Path("c"), lambda: written.wait(60)))

        trainer_of(TASK, replica, lambda number, batch: batch, save, Cadence(epochs=1, checkpoint_steps=1)).run(Position())
        written.set()
        return replica.loop.kept_step

    assert run_virtual(1, program) == [1]


# -- jobs ----------------------------------------------------------------------------------------------------------------------
#: the others are the same from another place of the memory on
BITS = [fault for fault in FAULTS if fault.name.startswith("a flipped bit of a parameter")]


@pytest.mark.sample(1)
@pytest.mark.job
@pytest.mark.parametrize("fault", BITS, ids=lambda fault: fault.name)
def test_a_job_ends_with_the_rank_and_the_name(fault: Fault, tmp_path: Path) -> None:
    prepare(tmp_path)
    outcome = run_fault(fault, tmp_path)
    report = findings(tmp_path)
    assert outcome.code == 2, outcome.output
    assert is_named(fault, outcome, report), (report, outcome.output)
    (run,) = (tmp_path / "runs").iterdir()
    assert [path.name for path in sorted((run / "checkpoints").iterdir())] == ["checkpoint-00000001.h5"]


DEVICE_STRATEGIES: dict[str, tuple[type[Strategy], dict[str, Any]]] = {
    "blocking": (Blocking, {}),
    "overlap": (Overlap, {}),
    "sharded": (Sharded, {"bucket_bytes": 1000}),
    "lazy": (Lazy, {"layers": 3, "max_interval": 4, "check_every": 1, "bucket_bytes": 100}),
}


def _task(device: EmulatedDevice, checks: CheckCadence, precision: Precision = "float64", **changes: Any) -> Task:
    kernels = kernels_on(device, precision)
    task = Task(nets.plain, kernels, partial(Sgd, momentum=0.9), steps=5, checks=checks, dtype=precision)
    return replace(task, **changes)


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("flip", [_parameter, _state])
@pytest.mark.parametrize("strategy", DEVICE_STRATEGIES)
def test_a_flipped_bit_is_found_and_named(strategy: str, flip: Flip, emulated_device: EmulatedDeviceFactory) -> None:
    """Of three ranks, the others or the rank itself find it at the next comparison."""
    precision: Precision = "bfloat16" if strategy in ("overlap", "lazy") else "float64"
    ranks = (1,) if flip is _parameter or strategy in ("blocking", "overlap") else (0, 1, 2)

    def program(comm: ThreadCommunicator) -> Run:
        task = _task(emulated_device(comm.rank), EVERY_STEP, precision, steps=9)
        return _run(comm, task, DEVICE_STRATEGIES[strategy], flip, ranks)

    runs = run_virtual(3, program, deadline_seconds=300)
    assert all(run == runs[0] for run in runs)
    what = "parameter conv2.weight" if flip is _parameter else "the momentum of conv2.weight"
    by_others = f"rank 1 holds other bits of {what} than ranks 0, 2;" in runs[0].error
    by_itself = f"{what} changed between two updates" in runs[0].error
    assert by_others or by_itself, runs[0]
    assert runs[0].steps <= FLIPPED_STEP + (6 if strategy == "lazy" else 4)


@pytest.mark.slow
def test_nan_in_the_copy_of_one_rank_is_reported_of_that_rank(emulated_device: EmulatedDeviceFactory) -> None:
    """Although batch statistics of all ranks are not finite before the sums of what the step has read are sent."""

    def damage(replica: Replica) -> None:
        (averager,) = replica.averagers.values()
        averager.group.arithmetic.from_host(_copies(averager)[0][:1], np.array([np.nan], np.float32))

    def program(comm: ThreadCommunicator) -> Run:
        task = _task(emulated_device(comm.rank), CheckCadence(50), "float32", model=nets.residual)
        return _run(comm, task, DEVICE_STRATEGIES["sharded"], damage, (1,))

    for run in run_virtual(3, program, deadline_seconds=300):
        assert "rank 1 holds other bits of parameter conv1.weight than ranks 0, 2;" in run.error


@pytest.mark.slow
def test_checks_allocate_nothing_once_all_has_had_its_turn(emulated_device: EmulatedDeviceFactory) -> None:
    """Not even in the first step that looks at a part: its memory is there from the start."""
    devices = [emulated_device(rank) for rank in range(2)]

    def program(comm: ThreadCommunicator) -> None:
        task = _task(devices[comm.rank], IN_TURN, steps=8, samples=40)  # batches of one size
        replica = replica_of(task, comm, virtual_engine(comm), Sharded)
        replica.require_alike(schedules=True)
        for number, batch in enumerate(batches(task, replica.groups.position, comm.size, replica.tiles)):
            replica.step(batch, task.lr)
            if number == 1:
                devices[comm.rank].seal()
        replica.settle()
        replica.require_alike()

    run_virtual(2, program, deadline_seconds=300)
    for device in devices:
        assert device.counters.late_allocations == []
