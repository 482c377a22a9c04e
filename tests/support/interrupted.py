"""Trainings by the program's own loop on virtual ranks: with checkpoints, ended early, killed, gone on with, taken back.

What is real: the loop, the writing and finding of checkpoints, the way back, the limit of time, the loader of files. What is not:
processes. A kill ends all ranks between two steps, and leaves what a thread has begun to write.
"""

from __future__ import annotations

import errno
import random
import shutil
import tempfile
import threading
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import numpy as np

from hpctrain.assembly.images import Images
from hpctrain.assembly.recipe import Recipe
from hpctrain.backend.choice import Backend
from hpctrain.comm.base import raise_on_all_ranks
from hpctrain.comm.groups import ProcessGrid
from hpctrain.comm.progress import ProgressEngine
from hpctrain.config.load import dump
from hpctrain.config.schema import Config
from hpctrain.data.image_file import DataFacts, ImageFile
from hpctrain.data.loader import Batch, BatchSource, Loader
from hpctrain.data.pipeline import Pipeline
from hpctrain.data.readers import MappedReader
from hpctrain.data.writer import write_data_file
from hpctrain.job.automatic_choice import Resolved
from hpctrain.job.session import Session
from hpctrain.launch.launcher import Launcher
from hpctrain.launch.threads import ThreadPlan
from hpctrain.optim.schedules import SCHEDULES
from hpctrain.parallel.groups import GridGroups
from hpctrain.run import reproducibility
from hpctrain.run.accounts import RunHashes
from hpctrain.run.build import TrainingSetup
from hpctrain.run.checkpoints import RunCheckpoints, rollback
from hpctrain.run.data_cache import add_caches
from hpctrain.run.images import make_loader
from hpctrain.run.resume import AUTO, Start, find_start
from hpctrain.runs.directory import RunDirectory
from hpctrain.runs.records import HashRecord, read_hashes
from hpctrain.storage import checkpoint
from hpctrain.training.metrics import Reporter, RunningSums, StepTotals
from hpctrain.training.replica import Replica, StrategyFactory
from hpctrain.training.snapshot import Position
from hpctrain.training.stopping import TimeLimit
from hpctrain.training.trainer import Cadence, Trainer
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from tests.support.training import ArraysByEpoch, Result, Task, replica_on, result_of, stored


class Killed(Exception):
    """The run was killed here."""


@dataclass(frozen=True)
class Course:
    """The events of a run, and when they come.

    Attributes:
        end: "own": nothing; "request", "max_time", "steps" or "kill": it ends early, and goes on. step: of that, steps done.
        rank: that is asked to end, or is killed (of more than there are: by its remainder).
        every_steps: from one checkpoint to the next.
    """

    end: str
    step: int
    rank: int
    every_steps: int

    @classmethod
    def drawn(cls, end: str, steps: int, seed: int) -> Course:
        """A course of a run with this number of steps."""
        source = random.Random(seed)
        return cls(end, source.randint(1, steps - 1), source.randrange(12), source.randint(1, 3))


@dataclass(frozen=True)
class PartOutcome:
    """The outcome of a part of a run on a rank; the part has begun after `first_step` steps.

    hashes: that the run directory has at its end, on rank 0.
    """

    first_step: int
    position: Position
    stopped: bool
    result: Result
    hashes: Mapping[int, HashRecord] = field(default_factory=dict)


@dataclass
class RunOutcome:
    """The end of a whole run.

    Attributes:
        results: by rank; the totals are sums over the epoch so far. position: where it has ended.
        stops: where it has ended early, with a checkpoint. goes_on_from: steps done where
        a second part has begun; None: there is one alone. hashes: by step, those of the run directory.
    """

    results: list[Result]
    position: Position
    stops: list[Position]
    goes_on_from: int | None
    hashes: Mapping[int, HashRecord]


@dataclass(frozen=True)
class PartOfRun:
    """One part of a run: from a checkpoint, if there is one, to an end.

    Args:
        task: on the grid of this part. config: of it. strategy: of its averagers. course: None: to the end of the run.

    Attributes:
        sums: by steps done, those of the epoch so far, as rank 0 knows them; also of a part that was killed.
    """

    task: Task
    config: Config
    strategy: StrategyFactory
    course: Course | None
    sums: dict[int, RunningSums] = field(default_factory=dict)

    def run(self, comm: ThreadCommunicator, progress: ProgressEngine) -> PartOutcome:
        """Train. Collective.

        Raises:
            Killed: on the rank that is killed.
        """
        rows = self.task.plan.rows
        grid = ProcessGrid(comm, rows, comm.size // rows)
        threads = ThreadPlan(1, 1, "virtual ranks")
        session = Session(Launcher("none"), threads, comm, grid, GridGroups(grid), progress, Resolved(Recipe.of(self.config)), {})
        start = find_start(session, AUTO)
        parts = self._parts(session)
        parts.replica.agree(reproducibility.stored_schedules(session, parts, start), parts.transport)
        reporter = _Sums(self.sums) if session.is_root else Reporter()
        outcome = self._train(session, parts, start, reporter)
        return replace(outcome, result=result_of(parts.replica))

    def _train(self, session: Session, parts: TrainingSetup, start: Start | None, reporter: Reporter) -> PartOutcome:
        """As a run does, from its start to its last checkpoint."""
        position, directory = Position(), None
        if start is not None:
            raise_on_all_ranks(session.world, lambda: parts.replica.load(start.content))
            assert start.directory is not None
            position, directory = start.position, start.directory
            if session.is_root:
                checkpoint.set_aside(directory.checkpoints, position.global_step)
                directory.cut_metrics(position.epoch, position.global_step)
                directory.follow_config(dump(session.config), position.global_step, str(start.content.meta["config"]))
            session.world.allgather_object(None)
        directory = directory or _new_directory(session)
        checkpoints = RunCheckpoints(session, parts, directory, reporter)
        parts.replica.loop.writes_with(checkpoints.saver)
        hashes = RunHashes(session, parts.replica, directory)
        go_back = rollback(session, parts, directory, reporter, checkpoints, start)
        first_step = position.global_step
        asks = self._asks(session.world.rank, session.world.size, parts.replica)
        ends = self.course is not None
        trainer = Trainer(
            parts,
            Cadence.of(session.config, self._steps(first_step)),
            reporter,
            checkpoints.save,
            go_back=go_back,
            stop_requested=asks if ends and self._ends_by("request") else lambda: False,
            limit=TimeLimit(1e3, clock=lambda: 1e6 * asks()) if ends and self._ends_by("max_time") else None,
            observers=(hashes,),
        )
        outcome = trainer.run(position)
        parts.replica.drain()
        checkpoints.saver.finish()
        stopped = outcome.position.global_step < self.task.steps
        kept = read_hashes(directory.hashes_path) if session.is_root else {}
        return PartOutcome(first_step, outcome.position, stopped, Result({}, {}), kept)

    def _steps(self, first_step: int) -> int:
        """The steps to end after; 0: to end with the last epoch."""
        if self.course is not None and self.course.end == "steps":
            return self.course.step
        return 0 if self.config.on_nonfinite.action == "rollback" else self.task.steps - first_step

    def _ends_by(self, end: str) -> bool:
        return self.course is not None and self.course.end == end

    def _asks(self, rank: int, ranks: int, replica: Replica) -> Callable[[], bool]:
        """Whether this rank asks for the end after the current step."""
        course = self.course
        if course is None or rank != course.rank % ranks:
            return lambda: False
        return lambda: replica.global_step + 1 >= course.step

    def _parts(self, session: Session) -> TrainingSetup:
        task, config = self.task, self.config
        replica = replica_on(task, session.groups, session.progress, self.strategy, nominal_batch=config.batch)
        path = Path(config.data.train)
        loader: BatchSource
        if task.unreadable is None:
            file = ImageFile.open(path)
            loader = ArraysByEpoch(task, **replica.place)
        else:
            file = open_broken(path, task.unreadable)
            pipeline = Pipeline([], config.seed, np.zeros(3), np.ones(3), config.dtype)
            images = Images(file, pipeline, sizes=task.image_sizes)
            loader = make_loader(session, images, replica.tiles, batch=config.batch, shuffle=True, shards=replica.passes.shards)
            add_caches(session, config.data.cache, [loader])
            assert isinstance(file.pixels, MappedReader)
            file.pixels.policy = replace(file.pixels.policy, pauses_seconds=())
        killed = self.course is not None and self._ends_by("kill") and session.world.rank == self.course.rank % session.world.size
        disturbed = _Disturbed(
            loader,
            is_first=session.groups.position == 0,
            poisoned_step=task.poisoned_step,
            once=config.on_nonfinite.action == "rollback",
            killed_step=self.course.step if self.course is not None and killed else None,
        )
        schedule = SCHEDULES.create(
            "constant", {}, base_lr=task.lr, epochs=config.epochs, steps_per_epoch=len(loader), warmup_epochs=0.0
        )
        return TrainingSetup(
            backend=Backend("numpy", task.dtype, task.kernels, "virtual"),
            replica=replica,
            loader=cast(Loader, disturbed),
            evaluated={},
            schedule=schedule,
            data=DataFacts.of(file),
            notes=(),
            sizes=task.image_sizes,
            transport=task.transport,
        )


class _Disturbed:
    """Batches of a loader, of which one is poisoned, or the last one that a killed rank reads.

    Args:
        is_first: of the ranks, the one that reads images of NaN in `poisoned_step`. once: not in another order of samples.
        killed_step: in the place of which there is a kill; None: there is none.
    """

    def __init__(
        self, loader: BatchSource, *, is_first: bool, poisoned_step: int | None, once: bool, killed_step: int | None
    ) -> None:
        self._loader, self._killed_step, self._once = loader, killed_step, once
        self.sampler = loader.sampler
        self._poisoned_step = poisoned_step if is_first else None

    def epoch(self, epoch: int, first: int = 0) -> Generator[Batch, None, None]:
        batches = self._loader.epoch(epoch, first)
        try:
            for batch in batches:
                number = batch.epoch * self.sampler.steps_per_epoch + batch.step
                if number == self._killed_step:
                    raise Killed(f"before step {number + 1}")
                reordered = self._once and bool(self.sampler._reorderings)
                poisoned = number == self._poisoned_step and not reordered
                yield replace(batch, x=np.full_like(batch.x, np.nan)) if poisoned else batch
        finally:
            batches.close()


class _Sums(Reporter):
    """Keeps the sums of each step; of steps that are done again, the latest."""

    def __init__(self, sums: dict[int, RunningSums]) -> None:
        self.sums = sums

    def step(self, epoch: int, step: int, sums: RunningSums, lr: float, images_per_second: float) -> None:
        self.sums[step] = replace(sums)


def _new_directory(session: Session) -> RunDirectory:
    """A new run directory, made by rank 0. Collective."""
    config = session.config
    path = None
    if session.is_root:
        path = RunDirectory.create(Path(config.output), config.name, config=dump(config), versions={}, git={}).path
    return RunDirectory.open(Path(session.world.broadcast_object(str(path))))


def run_whole(
    make: Callable[[Path, Course | None], PartOfRun], course: Course, on_ranks: Callable[[PartOfRun], list[PartOutcome]]
) -> RunOutcome:
    """A run on its course from its first to its last step, in a folder of its own.

    Args:
        make: a part of the run, from its folder; with the course: the first one; with None: the one that ends it.
        on_ranks: runs a part on its ranks.
    """
    folder = Path(tempfile.mkdtemp(prefix="hpctrain-run-"))
    try:
        first = make(folder, course if course.end != "own" else None)
        write_images(folder / "train.h5", first.task)
        outcomes = _ended(first, on_ranks)
        stops = [end.position for end in (outcomes or [])[:1] if end.stopped]
        sums, goes_on = first.sums, False
        if not outcomes or outcomes[0].stopped:
            goes_on, last = True, make(folder, None)
            outcomes = on_ranks(last)
            sums = {**sums, **last.sums}
        whole = _whole(outcomes, sums, stops)
        return whole if goes_on else replace(whole, goes_on_from=None)
    finally:
        shutil.rmtree(folder)


def _ended(part: PartOfRun, on_ranks: Callable[[PartOfRun], list[PartOutcome]]) -> list[PartOutcome] | None:
    """The outcome of a part, by rank; None where it was killed, and what it was writing has come to its end."""
    try:
        return on_ranks(part)
    except Killed:
        for thread in threading.enumerate():
            if thread.name == "hpctrain-checkpoint":
                thread.join()
        return None


def _whole(outcomes: list[PartOutcome], sums: Mapping[int, RunningSums], stops: list[Position]) -> RunOutcome:
    position = outcomes[0].position
    totals = [_totals(sums[step]) for step in range(1, position.global_step + 1)]
    results = [replace(outcome.result, totals=totals) for outcome in outcomes]
    return RunOutcome(results, position, stops, outcomes[0].first_step, outcomes[0].hashes)


def _totals(sums: RunningSums) -> StepTotals:
    return StepTotals(sums.loss, sums.top1, sums.top5, sums.count, 0, 0, np.zeros(0))


def by_epoch(result: Result, steps_per_epoch: int) -> Result:
    """A result whose totals are sums over the epoch so far."""
    totals: list[StepTotals] = []
    sums = RunningSums()
    for step, of_step in enumerate(result.totals):
        sums = RunningSums() if step % steps_per_epoch == 0 else sums
        sums.add(of_step)
        totals.append(_totals(sums))
    return replace(result, totals=totals)


def other_order_from(course: Course, poisoned_step: int, steps_per_epoch: int, stops: Sequence[Position], *, saves: bool) -> int:
    """The step to which a run goes back from what is not finite: that of its newest checkpoint before.

    Args:
        saves: the run has checkpoints other than those of its start and of its early end, `stops`.
    """
    regular = [
        step for step in range(1, poisoned_step + 1) if saves and (step % course.every_steps == 0 or step % steps_per_epoch == 0)
    ]
    return max([0, *regular, *(stop.global_step for stop in stops if stop.global_step <= poisoned_step and not stop.reorderings)])


def write_images(path: Path, task: Task) -> None:
    """The images of a task as a data file."""
    pixels, labels = stored(task)
    names = [f"class {number}" for number in range(task.classes)]
    write_data_file(path, task.samples, task.image_shape, names, [(pixels, labels)])


def open_broken(path: Path, unreadable: Collection[int]) -> ImageFile:
    """The file, on a disk that refuses some samples."""
    file = ImageFile.open(path)
    intact = file.pixels
    assert isinstance(intact, MappedReader)
    assert isinstance(intact._map, np.memmap)
    file.pixels = BrokenReader(path, intact._map, intact._offset, unreadable)
    return file


class BrokenReader(MappedReader):
    """Reads as its base does, from a disk that refuses the `unreadable` samples."""

    def __init__(self, path: Path, images: np.memmap, offset: int, unreadable: Collection[int]) -> None:
        super().__init__(path, images, offset)
        self._refused, self._image_bytes = list(unreadable), int(np.prod(images.shape[1:]))

    def _gather(self, wanted: np.ndarray, out: np.ndarray) -> int:
        refused = np.flatnonzero(np.isin(wanted[0] // self._image_bytes, self._refused))
        end = refused[0] if len(refused) else wanted.shape[1]
        return super()._gather(wanted[:, :end], out)

    def _read_piece(self, at: int, out: memoryview) -> None:
        if (at - self._offset) // self._image_bytes in self._refused:
            raise OSError(errno.EIO, "Input/output error")
        super()._read_piece(at, out)
