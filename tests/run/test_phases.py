"""Phases of a run: every rank enters the same ones in the same order, and one that does not is named instead of waited for."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from hpctrain.assembly.options import filled
from hpctrain.assembly.recipe import Recipe, columns
from hpctrain.comm.groups import ProcessGrid
from hpctrain.config.load import load
from hpctrain.core.errors import CollectiveMismatchError, CommunicationTimeoutError, DivergedError
from hpctrain.data.loader import Batch
from hpctrain.flight.autopsy import autopsy, records_in
from hpctrain.flight.recorder import FlightRecorder, RunPhase
from hpctrain.flight.ring import FlightRecord
from hpctrain.job.automatic_choice import Resolved
from hpctrain.job.session import Session
from hpctrain.launch.launcher import detect
from hpctrain.launch.signals import SignalWatch
from hpctrain.launch.threads import ThreadPlan
from hpctrain.parallel.groups import GridGroups
from hpctrain.run import training
from hpctrain.training.snapshot import Position
from hpctrain.training.trainer import Trainer
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.run import run_virtual, virtual_engine
from tests.support.tiny_runs import tiny

RANKS, ODD = 3, 1
OVERRIDES = ("data.synthetic={height: 8, width: 8, classes: 3, samples: 24, test_samples: 9}", "model.hidden=4")
CONFIG = tiny(
    "dtype: float64, model: {name: small, channels: [2, 2]}, data: synthetic, batch: 6, hashes: {every_steps: 4}, "
    "on_nonfinite: rollback, checkpoint: {every_epochs: 1, asynchronous: true}, flight: none"
)
#: phases that `enter` compares at once, in the order of a run that resumes, and of one that begins
RESUMED = [
    *(RunPhase.START, RunPhase.FIND, RunPhase.BUILD, RunPhase.AGREE, RunPhase.LOAD, RunPhase.OPEN, RunPhase.INTRODUCE),
    *(RunPhase.MEASURE, RunPhase.TAKE_UP, RunPhase.DRAIN, RunPhase.REPORT, RunPhase.END),
]
NEW = [RunPhase.BUILD, RunPhase.WEIGHTS, RunPhase.AGREE]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(f"{CONFIG}output: {tmp_path}/runs\n")
    return path


def train(file: Path, recorders: Sequence[FlightRecorder], resume: str | None = None, *overrides: str) -> None:
    """Train on virtual ranks, each with its flight record."""

    def program(comm: ThreadCommunicator) -> None:
        config = filled(load(file, (*OVERRIDES, *overrides))[0])
        grid = ProcessGrid(comm, config.grid.rows, columns(config, comm.size))
        recorders[comm.rank].join(comm.rank, comm.size, 1, 60.0)
        engine = virtual_engine(comm, flight=recorders[comm.rank])
        threads, resolved = ThreadPlan(1, 1, "a test"), Resolved(Recipe.of(config))
        session = Session(detect({}), threads, comm, grid, GridGroups(grid), engine, resolved, {})
        training.run_training(session, SignalWatch(), training.TrainingRequest(resume, style="none"))

    run_virtual(len(recorders), program, deadline_seconds=60)


def records(recorders: Sequence[FlightRecorder], directory: Path) -> tuple[FlightRecord, ...]:
    for recorder in recorders:
        recorder.keep_in(directory)
    return records_in(directory)


class Noted(FlightRecorder):
    """Remembers all phases that its rank has entered."""

    def __init__(self) -> None:
        super().__init__()
        self.entered: list[RunPhase] = []

    def phase(self, name: str | RunPhase) -> None:
        super().phase(name)
        if isinstance(name, RunPhase):
            self.entered.append(name)


def test_all_ranks_enter_the_same_phases_and_runs_enter_all_that_there_are(file: Path) -> None:
    entered = set()
    for resume in (None, "auto"):
        recorders = [Noted() for _ in range(RANKS)]
        train(file, recorders, resume)
        assert [recorder.entered for recorder in recorders] == [recorders[0].entered] * RANKS
        entered |= {*recorders[0].entered}
    # Values that are not finite lead to the one, a checkpoint that is still being written when steps go on to the other.
    assert entered >= {*RunPhase} - {RunPhase.GO_BACK, RunPhase.STATUS}


@pytest.mark.parametrize(
    ("resume", "first", "second"), [("auto", *pair) for pair in pairwise(RESUMED)] + [(None, *pair) for pair in pairwise(NEW)]
)
def test_a_phase_of_the_start_or_the_end_that_one_rank_enters_out_of_order_is_named(
    resume: str | None, first: RunPhase, second: RunPhase, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two neighbours are swapped on one rank."""
    if resume is not None:
        train(file, [Noted() for _ in range(RANKS)])
    enter = training.enter

    def swapped(session: Session, entered: RunPhase) -> None:
        if session.world.rank == ODD:
            entered = {first: second, second: first}.get(entered, entered)
        enter(session, entered)

    monkeypatch.setattr(training, "enter", swapped)
    with pytest.raises(CollectiveMismatchError) as caught:
        train(file, [Noted() for _ in range(RANKS)], resume)
    assert f"ranks 0, 2 {first}; rank {ODD} {second}" in str(caught.value)


def _save(trainer: Trainer, position: Position) -> None:
    trainer._notes.phase(RunPhase.SAVE)
    trainer._save(position)


def _exchange(trainer: Trainer, position: Position) -> None:
    assert trainer._state.saver is not None
    trainer._state._status = trainer._state.saver.size
    trainer._state.end(None, 0.1, trainer._replica.drain)


def _read(trainer: Trainer, position: Position) -> None:
    trainer._notes.phase(RunPhase.READ_STATE)
    for observer in trainer._observers:
        observer.read_state(position)


def _diverge(trainer: Trainer, position: Position) -> None:
    raise DivergedError("planted")


#: phase of the loop -> what enters it
LOOP: dict[RunPhase, Callable[[Trainer, Position], object]] = {
    RunPhase.CHECK: lambda trainer, _: trainer._check(),
    RunPhase.READ_STATE: _read,
    RunPhase.SAVE: _save,
    RunPhase.STATUS: _exchange,
    RunPhase.EVALUATE: Trainer.evaluate,
    RunPhase.ACCOUNT: Trainer._end_epoch,
    RunPhase.GO_BACK: _diverge,
}


@pytest.mark.parametrize("phase", LOOP)
def test_a_phase_of_the_loop_that_one_rank_enters_out_of_order_is_named(
    phase: RunPhase, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_step = Trainer._run_step

    def early(trainer: Trainer, batch: Batch, position: Position) -> bool:
        if trainer._replica.groups.all_ranks.rank == ODD and position.global_step == 2:
            LOOP[phase](trainer, position)
        return run_step(trainer, batch, position)

    monkeypatch.setattr(Trainer, "_run_step", early)
    # A checkpoint whose states are exchanged is one that is being written.
    assert_named(phase, file, tmp_path, *(["checkpoint.every_steps=2"] if phase is RunPhase.STATUS else []))


def test_a_step_that_one_rank_does_in_place_of_an_evaluation_is_named(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_step, end_epoch = Trainer._run_step, Trainer._end_epoch
    batches: dict[int, Batch] = {}

    def kept(trainer: Trainer, batch: Batch, position: Position) -> bool:
        batches[trainer._replica.groups.all_ranks.rank] = batch
        return run_step(trainer, batch, position)

    def late(trainer: Trainer, position: Position) -> object:
        if trainer._replica.groups.all_ranks.rank == ODD:
            trainer._state.begin(position.epoch, position.global_step)
            run_step(trainer, batches[ODD], position)
        return end_epoch(trainer, position)

    monkeypatch.setattr(Trainer, "_run_step", kept)
    monkeypatch.setattr(Trainer, "_end_epoch", late)
    assert_named(RunPhase.STEP, file, tmp_path)


def assert_named(phase: RunPhase, file: Path, tmp_path: Path, *overrides: str) -> None:
    """Train, and see the run end with an error before a deadline, and the records name the phase of the odd rank."""
    recorders = [FlightRecorder() for _ in range(RANKS)]
    with pytest.raises(CommunicationTimeoutError):
        train(file, recorders, None, *overrides)
    text = " ".join(autopsy(records(recorders, tmp_path / "flight")).sentences)
    assert re.search(rf"[rR]ank {ODD} (entered |was in )?{phase}", text), text
