"""Training from Python: models and loops of your own, on one rank or on many.

    with hpctrain.start(batch=64) as job:
        replica = job.replica(model, (28, 28, 1), optimizer={"name": "sgd", "momentum": 0.9})
        loader = job.loader(replica, "train.h5")
        for batch in loader.epoch(0):
            replica.step(batch, lr=0.05)

The words are those of a configuration (docs/config.md), the objects those of a run; docs/python-api.md has whole programs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.averaging.strategy import PlannedGroup, Strategy
from hpctrain.backend.backend import make_backend
from hpctrain.cli.failure import job_ends_on_error
from hpctrain.comm.base import Communicator
from hpctrain.comm.progress_mode import ProgressMode
from hpctrain.comm.raise_on_all_ranks import raise_on_all_ranks
from hpctrain.data.arrays import ArrayLoader
from hpctrain.data.classes import in_order_of
from hpctrain.data.format import ImageFile
from hpctrain.data.loader import Loader
from hpctrain.data.pipeline import Pipeline
from hpctrain.data.sampler import Sampler
from hpctrain.errors import ConfigError, ShapeError
from hpctrain.experiment.averager import make_strategy
from hpctrain.experiment.checkpoint_search import read_together
from hpctrain.experiment.network_choice import Automatic, Choice, named, optimizer_of
from hpctrain.experiment.progress import set_progress
from hpctrain.experiment.session import StartedRank, on_grid, start_world
from hpctrain.experiment.start_search import BestCandidate, StartedJob
from hpctrain.launch.launcher import detect
from hpctrain.launch.threads import set_threads
from hpctrain.models import catalogue
from hpctrain.nearest import choices
from hpctrain.nn.layer import Layer
from hpctrain.optim.base import Optimizer
from hpctrain.optim.schedules import SCHEDULES
from hpctrain.optim.schedules.base import LearningRateSchedule
from hpctrain.parallel.groups import GridGroups
from hpctrain.parallel.parallel_plan import ParallelPlan
from hpctrain.parallel.rank_graph import make_network
from hpctrain.planner.job import Candidate
from hpctrain.storage import checkpoint
from hpctrain.train.replica import Replica
from hpctrain.train.snapshot import Position

_DEADLINE_SECONDS = 300.0
_AUTO = "auto"
_PROGRESS = ("auto", *(str(mode) for mode in ProgressMode))


@contextmanager
def start(
    *,
    batch: int,
    rows: int = 1,
    cols: int | None = None,
    threads: int | None = None,
    progress: str = "auto",
    deadline_seconds: float = _DEADLINE_SECONDS,
    automatic: Automatic | None = None,
) -> Iterator[Job]:
    """Start this rank, with MPI where a launcher has started several; an error that leaves the block ends all of them.

    An `HpctrainError` ends the job with its sentence and exit code 2, any other exception with its traceback and exit code 1.

    Args:
        batch: samples of a step over all ranks. rows, cols: of the process grid; cols: by default all ranks divided by rows.
        threads: that this rank computes with; by default OMP_NUM_THREADS, else its share of the cores.
        progress: how messages move while kernels run: "auto" (measured), "none", "test", "thread" or "posting".
        deadline_seconds: that a rank waits for the others before it ends the job.
        automatic: a network for which the grid is chosen now; rows and cols do not count then.
    """
    launcher = detect(os.environ)
    world: Communicator | None = None

    def rank() -> int:
        return launcher.rank or 0 if world is None else world.rank

    def abort(code: int) -> None:
        if world is not None and launcher.starts_mpi:  # a process that is alone ends as Python does, and may be a notebook's
            world.abort(code)

    with job_ends_on_error(rank, abort):
        # What is wrong is said once all can hear it: a rank alone with its error would leave the others waiting.
        world = start_world(launcher, deadline_seconds if deadline_seconds > 0 else _DEADLINE_SECONDS)
        if progress not in _PROGRESS:
            raise ConfigError(f'There is no progress mode "{progress}"; {choices(progress, _PROGRESS)}.')
        if deadline_seconds <= 0:
            raise ConfigError(f"deadline_seconds is {deadline_seconds:g}, but must be above 0; {_DEADLINE_SECONDS:g} is usual.")
        plan = raise_on_all_ranks(world, lambda: set_threads(launcher, threads))
        best = None
        if automatic is not None:
            best = automatic.best(StartedJob(world, plan.threads, deadline_seconds), batch)
            rows, cols = best.candidate.plan.rows, best.candidate.plan.cols
        cols = max(1, world.size // max(1, rows)) if cols is None else cols
        grid, engine = on_grid(world, rows, cols, batch=batch, deadline_seconds=deadline_seconds)
        try:
            yield Job(launcher, plan, world, grid, GridGroups(grid), engine, batch, progress, best)
        finally:
            engine.stop_thread()


@dataclass(frozen=True)
class Job(StartedRank):
    """A started rank of a job, from which replicas and their data are made. All methods are collective but `print`.

    Attributes:
        batch: samples of a step over all ranks. progress_mode: as `start` was told.
        best: what `start` chose, with its prediction; None where it was not asked to.
    """

    batch: int
    progress_mode: str
    best: BestCandidate | None = None

    @property
    def rank(self) -> int:
        """This rank's number, from 0."""
        return self.world.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.world.size

    def print(self, *values: object) -> None:
        """Print on rank 0 alone."""
        if self.is_root:
            print(*values, flush=True)

    def replica(
        self,
        model: Layer,
        image_shape: tuple[int, int, int],
        *,
        optimizer: Choice | Callable[[], Optimizer] = "sgd",
        averager: Choice = "sharded",
        plan: Mapping[str, str] | str | None = None,
        tiles: tuple[int, int] | None = None,
        micro_batches: int = 1,
        backend: str = "auto",
        dtype: str = "float32",
        precision: str = "float32",
        seed: int = 0,
        label_smoothing: float = 0.0,
    ) -> Replica:
        """This rank's copy of a model, ready to train; the same first parameters on every rank.

        Args:
            model: the root layer; its output has shape (N, classes). image_shape: (H, W, C) of one sample.
            optimizer: without a learning rate, which each step is given. averager: how gradients are averaged.
            plan: pattern of layer names -> "batch", "model" or "domain", on a grid of several rows; "default": of all others.
            plan, averager: "auto" takes what `start` chose.
            tiles: (vertical, horizontal) parts of an image under "domain"; by default (rows, 1).
            micro_batches: passes that one step's samples are split into. backend: "auto", "numpy", "onednn" or "cuda".
            dtype: "float32" or "float64". precision: "float32"; of backend cuda also "tf32", "bfloat16". seed: of first values.
            label_smoothing: in [0, 1).

        Raises:
            ConfigError: an unknown name, option, or pattern of the plan. ShapeError: layers that do not fit each other.
        """

        def make() -> Replica:
            chosen = make_backend(backend, dtype, precision, self.place)
            network = make_network(
                model,
                image_shape,
                chosen.kernels,
                groups=self.groups,
                progress=self.progress,
                plan=self._plan(plan, tiles),
                dtype=chosen.dtype,
                seed=seed,
                smoothing=label_smoothing,
            )
            return Replica(
                network,
                groups=self.groups,
                progress=self.progress,
                strategy=self._strategy(averager),
                optimizer=optimizer_of(optimizer),
                nominal_batch=self.batch,
                micro_batches=micro_batches,
            )

        replica = raise_on_all_ranks(self.world, make)
        replica.agree()
        set_progress(self, replica.network, self.progress_mode, -(-self.batch // self.size // micro_batches))
        return replica

    def _plan(self, plan: Mapping[str, str] | str | None, tiles: tuple[int, int] | None) -> ParallelPlan:
        if isinstance(plan, str):
            return self._chosen("plan", plan).plan
        patterns = dict(plan or {})
        default = patterns.pop("default", "batch")
        return ParallelPlan(self.grid.rows, self.grid.cols, default, patterns, tiles)  # type: ignore[arg-type]

    def _strategy(self, averager: Choice) -> Callable[[PlannedGroup], Strategy]:
        if averager == _AUTO:
            chosen = self._chosen("averager", _AUTO)
            return partial(make_strategy, chosen.averager, chosen.options)
        return partial(make_strategy, *named(averager))

    def _chosen(self, argument: str, value: str) -> Candidate:
        if value != _AUTO:
            raise ConfigError(f'{argument} is {value!r}, but must be a mapping of patterns, or "auto".')
        if self.best is None:
            raise ConfigError(
                f'{argument} is "auto", but nothing was chosen; give `start` automatic=Automatic(model, image_shape).'
            )
        return self.best.candidate

    def loader(
        self,
        replica: Replica,
        path: str | Path,
        *,
        batch: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        augment: Sequence[Choice] = (),
        like: str | Path | None = None,
        prefetch: int = 2,
    ) -> Loader:
        """This rank's share of an HDF5 file (docs/data.md), in batches; images have mean 0 and deviation 1 per channel.

        Args:
            replica: that reads the batches. batch: samples of a step over all ranks; by default the job's.
            shuffle: another order in each epoch, by `seed`; False: in order, for evaluation. augment: augmentations, in order.
            like: path of the training file, whose mean, deviation and order of classes count; by default the file's own.
            prefetch: batches that a thread makes ahead.

        Raises:
            DataError: a file that cannot be read, or with other classes. ShapeError: images that the replica does not take.
        """

        def make() -> Loader:
            file = reference = ImageFile.open(str(path))
            if like is not None:
                reference = ImageFile.open(str(like))
                file = in_order_of(file, reference.class_names, str(like))
            mean, std = np.array(reference.mean), np.array(reference.std)
            pipeline = Pipeline(
                [named(step) for step in augment], seed=seed, mean=mean, std=std, dtype=replica.network.parameter_dtype
            )
            _check_shape(pipeline.output_shape(*file.shape), replica)
            sampler = Sampler(len(file), batch or self.batch, seed, shuffle)
            return Loader(file, sampler, pipeline, **replica.place, prefetch=prefetch, cache=True)

        return raise_on_all_ranks(self.world, make)

    def array_loader(
        self,
        replica: Replica,
        images: np.ndarray,
        labels: np.ndarray,
        *,
        batch: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
    ) -> ArrayLoader:
        """This rank's share of arrays that every rank has whole, in batches, as they are.

        Args:
            images: (N, H, W, C) floating, converted to the replica's dtype. labels: (N,) integers from 0.
            replica, batch, shuffle, seed: as for `loader`.

        Raises:
            ShapeError: arrays of other shapes, or images that the replica does not take.
        """

        def make() -> ArrayLoader:
            _check_shape(images.shape[1:], replica)
            sampler = Sampler(len(images), batch or self.batch, seed, shuffle)
            return ArrayLoader(images.astype(replica.network.parameter_dtype, copy=False), labels, sampler, **replica.place)

        return raise_on_all_ranks(self.world, make)

    def save(self, replica: Replica, path: str | Path, **notes: Any) -> None:
        """Write parameters, statistics and optimiser state to one file, whole or not at all; any grid can read it.

        The last step's sums are settled; where they are wanted, take them from `replica.settle()` before.

        Args:
            notes: kept beside the tensors, as far as JSON can hold them.

        Raises:
            CheckpointError: the file cannot be written. DivergedError: a parameter is not finite; nothing is written.
        """
        replica.settle()
        replica.require_finite()
        replica.require_alike()
        content = replica.state(Position(global_step=replica.global_step), {"notes": notes}, keep=self.is_root)
        raise_on_all_ranks(self.world, lambda: checkpoint.write(Path(path), content) if self.is_root else None)

    def load(self, replica: Replica, path: str | Path) -> Mapping[str, Any]:
        """Restore what `save` wrote; gives its notes. `replica.global_step` is that of the file.

        Raises:
            CheckpointError: the file is missing or damaged, or another model's or optimiser's.
        """
        content = read_together(self.world, Path(path))
        raise_on_all_ranks(self.world, partial(replica.load, content))
        notes: Mapping[str, Any] = content.meta.get("notes", {})  # type: ignore[assignment]
        return notes


def model(name: str, **options: Any) -> Layer:
    """A model of the catalogue, such as "resnet18" (`hpctrain list models`).

    Raises:
        ConfigError: no such name, or an option that is wrong.
    """
    return catalogue.build(name, options)


def schedule(
    name: str, *, base_lr: float, epochs: int, steps_per_epoch: int, warmup_epochs: float = 0.0, **options: Any
) -> LearningRateSchedule:
    """A learning-rate schedule, such as "cosine": `lr(step)` gives the rate of a step.

    Raises:
        ConfigError: no such name, or an option that is wrong.
    """
    return SCHEDULES.create(
        name, options, base_lr=base_lr, epochs=epochs, steps_per_epoch=steps_per_epoch, warmup_epochs=warmup_epochs
    )


def _check_shape(shape: tuple[int, ...], replica: Replica) -> None:
    expected = replica.network.image_shape
    if tuple(shape) != tuple(expected):
        raise ShapeError(f"Images come out as {tuple(shape)}, but the replica takes {expected} (H, W, C); make it for those.")
