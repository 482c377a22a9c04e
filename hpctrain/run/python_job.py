"""Rank of a job written in Python, which creates replicas, loaders and checkpoints.

Checkpoints are written when the program requests it, either at once or in the background.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from hpctrain.assembly.images import WARNING, aligned, check_image_shapes, constant_metrics
from hpctrain.assembly.keywords import LOADER_KEYS, REPLICA_KEYS, keyword_config
from hpctrain.assembly.recipe import Given, ImageFacts, Recipe
from hpctrain.backend.choice import Backend, make_backend
from hpctrain.comm.base import Communicator, Subject, compare, raise_on_all_ranks
from hpctrain.config.schema import Config
from hpctrain.config.values import AUTO
from hpctrain.core.errors import ConfigError, DataError, DivergedError, ShapeError
from hpctrain.core.files import path_of
from hpctrain.core.registry import Count, check_types
from hpctrain.data.image_file import ImageFile, described, differences
from hpctrain.data.loader import ArrayLoader, Loader, as_samples
from hpctrain.data.pipeline import ImageSizes, Pipeline
from hpctrain.data.sampler import Mixing, Sampler, hold_out
from hpctrain.flight.recorder import FlightNotes
from hpctrain.job.same_start import called_with, check_same_code, opened_file
from hpctrain.job.session import StartedRank
from hpctrain.launch.signals import SignalWatch
from hpctrain.nn.layers import Layer
from hpctrain.optim.base import Optimizer
from hpctrain.planner.search.configured_search import with_candidate
from hpctrain.run.automatic_search import BestCandidate, Choice, optimizer_factory
from hpctrain.run.build import make_replica, put_weights
from hpctrain.run.data_cache import add_caches
from hpctrain.run.images import configured_mixing
from hpctrain.run.messages import set_progress
from hpctrain.run.resume import read_together
from hpctrain.storage import checkpoint
from hpctrain.storage.hdf5_store import ShardedTensors
from hpctrain.training.metrics import Reporter
from hpctrain.training.replica import BETWEEN, LoopState, Replica
from hpctrain.training.saving import Saver, one_file, shards


def check_shape(shape: tuple[int, ...], replica: Replica) -> None:
    """Raise ShapeError unless a replica accepts images of this shape (H, W, C)."""
    expected = replica.network.image_shape
    if tuple(shape) != tuple(expected):
        raise ShapeError(f"Images have shape {tuple(shape)} (H, W, C), but must have the replica's image_shape {expected}.")


def loader_mixing(config: Config, replica: Replica) -> Mixing | None:
    """Return the mixing of the images of a loader; None if images are not mixed.

    Raises:
        ConfigError: the backend of the replica does not support mixed labels.
    """
    mixing = configured_mixing(config)
    if mixing is not None and not replica.network.kernels.arithmetic.on_host:
        raise ConfigError(
            'Backend "cuda" does not support mixed labels yet; leave mixing out, or use backend "onednn" or "numpy".'
        )
    return mixing


_log = logging.getLogger(__name__)


class _Log(Reporter):
    """Reporter that writes lines on checkpoints to the log of rank 0."""

    def say(self, text: str) -> None:
        _log.info(text)


class LoopCheckpoints:
    """Writer and reader of checkpoints for a training loop in Python. Every method is collective.

    Args:
        world: communicator of all ranks.
        notes: notes of the flight record.
        deadline_seconds: maximum time that the end of the program waits for a checkpoint in the background.

    Attributes:
        saver: writer of checkpoints in the background; its status is exchanged with the messages of steps.
    """

    def __init__(self, world: Communicator, notes: FlightNotes, deadline_seconds: float) -> None:
        self._world, self._notes = world, notes
        self.saver = Saver(world, notes, _Log(), asynchronous=True, deadline_seconds=deadline_seconds)
        self._at_once = Saver(world, notes, _Log(), asynchronous=False, deadline_seconds=deadline_seconds)

    def save(self, replica: Replica, path: Path, notes: Mapping[str, Any], *, background: bool) -> None:
        """Write a checkpoint, or begin to write it. A path that ends with .shards is a directory with a shard per rank.

        Raises:
            CheckpointError: the checkpoint cannot be written. Errors in the background are reported, and raised by `finish`.
            DivergedError: a value is not finite.
            CorruptedStateError: state that must be the same on all ranks differs.
        """
        replica.settle()
        replica.require_finite()
        replica.require_alike()
        self._notes.phase("a checkpoint")
        position, meta = replica.loop.position(replica.global_step), {"notes": notes}
        saver = self.saver if background else self._at_once
        if not background:
            self.saver.finish()  # only one checkpoint may be written at a time
        if saver.ready(replica.global_step):
            if checkpoint.is_sharded(path):
                saver.begin(shards(self._world, *replica.own_parts(position, meta), position.global_step, path))
            else:
                content = replica.state(position, meta, keep=self._world.rank == 0, copied=background)
                saver.begin(one_file(self._world, content, position.global_step, path))
            replica.loop.keeps(replica.global_step)
        self._notes.phase(BETWEEN)

    def load(self, replica: Replica, path: Path) -> Mapping[str, Any]:
        """Restore a checkpoint written by `save`, and return its notes.

        Raises:
            CheckpointError: the checkpoint is missing or damaged, or belongs to another model or optimiser.
        """
        with contextlib.suppress(DivergedError):  # the checkpoint replaces the values that it reports
            replica.settle()
        replica.drain()
        self._notes.phase("a checkpoint")
        self.saver.settle()
        content = read_together(self._world, path)
        raise_on_all_ranks(self._world, partial(replica.load, content))
        if isinstance(content.tensors, ShardedTensors):
            content.tensors.close()
        replica.loop.keeps(replica.global_step)
        replica.require_alike(schedules=True)
        self._notes.phase(BETWEEN)
        notes: Mapping[str, Any] = content.meta.get("notes", {})  # type: ignore[assignment]
        return notes

    def finish(self) -> None:
        """Wait for the checkpoint in the background, if any.

        Raises:
            CheckpointError: the checkpoint was not written; on every rank.
        """
        self._notes.phase("a checkpoint")
        self.saver.finish()
        self._notes.phase(BETWEEN)


#: the address in the default repr of an object
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
#: names of a loader's files in messages
_FILE, _LIKE = "data file", "file of `like`"
_WRITTEN = "If the program itself wrote these values, the same on all ranks, call replica.parameters_written() afterwards."


class Stopped(BaseException):
    """Exception with which `Job.stop` leaves the block of `start`. `except Exception` does not catch it."""


@dataclass(frozen=True)
class Job(StartedRank):
    """A started rank of a job, which creates replicas, loaders and checkpoints. All methods are collective except `print`.

    Attributes:
        batch: number of samples per step over all ranks.
        progress_mode: progress mode given to `start`.
        checkpoints: writer and reader of checkpoints.
        watch: watcher of signals; None if `start` was called without signals=True.
        best: grid, plan and averager chosen by `start`, with their prediction; None without `automatic`.
        backends: backend of the search of `start`, by name, dtype and precision. `replica` reuses it, as the first one chooses
            the GPU.
        loops: loop states of all replicas.
        described: name and facts of the first data file or weights of each replica, by `id` of its loop state, for comparison.
    """

    batch: int
    progress_mode: str
    checkpoints: LoopCheckpoints
    watch: SignalWatch | None = None
    best: BestCandidate | None = None
    backends: Mapping[tuple[str, str, str], Backend] = field(default_factory=dict)
    loops: list[LoopState] = field(default_factory=list)
    described: dict[int, tuple[object, Mapping[str, Any]]] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """This rank's number, from 0."""
        return self.world.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.world.size

    @property
    def stop_requested(self) -> bool:
        """Whether a signal has asked any rank to stop.

        The value changes after the same step on all ranks, at most two steps after the signal. Not collective; the request is
        exchanged with the sums of a step.

        Raises:
            ConfigError: `start` was called without signals=True.
        """
        if self.watch is None:
            raise ConfigError(
                "stop_requested needs signals, but `start` was called without them; call `start` with signals=True."
            )
        return any(loop.stop_requested for loop in self.loops)

    def stop(self) -> NoReturn:
        """Leave the block of `start` and end the program with exit code 85, which requests a restart.

        Only `finally` clauses and exits of context managers still run. A checkpoint in the background is completed.
        """
        raise Stopped

    def print(self, *values: object) -> None:
        """Print on rank 0 only. Not collective."""
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
        exact_shards: int | None = None,
        backend: str = "auto",
        dtype: str = "float32",
        precision: str = "float32",
        seed: int = 0,
        label_smoothing: float = 0.0,
        class_weights: Sequence[float] = (),
        ema_decay: float | None = None,
        checks_every_steps: int = 10,
        on_nonfinite: str | Mapping[str, Any] = "stop",
        frozen: Sequence[str] = (),
    ) -> Replica:
        """Return this rank's copy of a model, ready to train. Initial parameters are the same on every rank.

        Args:
            model: root layer; its output has shape (N, classes).
            image_shape: (height, width, channels) of one sample.
            optimizer: name, name with options, or factory; without a learning rate, which each step receives.
            averager: how gradients are averaged; "auto": as `start` chose.
            plan: parallelism by pattern of layer names, "batch", "model" or "domain", on a grid with several rows; "default"
                applies to all other layers. "auto": as `start` chose.
            tiles: number of (vertical, horizontal) parts of an image under "domain"; default: (rows, 1).
            micro_batches: number of passes into which a step's samples are split.
            exact_shards: number of parts of each batch whose sums are added in a fixed order for any number of ranks
                (docs/exact.md).
            backend: "auto", "numpy", "onednn" or "cuda".
            dtype: "float32" or "float64".
            precision: "float32" or "bfloat16"; with backend cuda also "tf32".
            seed: seed of the initial parameters.
            label_smoothing: label smoothing of the loss, in [0, 1).
            class_weights: weight of each class in the loss of steps with batches of loaders, above 0; empty: all are 1.
            ema_decay: decay of an exponential moving average of the weights, in (0, 1); None: no average.
            checks_every_steps: number of steps between checks of values that no step writes; all other values are checked in each
                step. 0: no checks.
            on_nonfinite: "stop" raises `DivergedError`; "skip" or {"action": "skip", "most": 3} undoes the step on all ranks.
            frozen: patterns of layers that are not trained.

        Raises:
            ConfigError: a name, an option or a pattern is unknown, or arguments or user code differ between ranks.
            BackendError: the backend is not available, or does not support the requested computation.
            ShapeError: the layers do not fit each other.
        """
        arguments = dict(locals())

        def make() -> Replica:
            config = keyword_config(Job.replica, REPLICA_KEYS, arguments, batch=self.batch)
            if config.on_nonfinite.action == "rollback":
                raise ConfigError(
                    'on_nonfinite is "rollback", which a loop in Python must do itself; set "stop", catch DivergedError and '
                    "`load` a checkpoint."
                )
            loop = LoopState(
                self.progress.notes,
                stop_asked=_stop_requests(self.watch),
                most_skips=config.on_nonfinite.most,
                saver=self.checkpoints.saver,
            )
            height, width, channels = image_shape
            words = (config.backend, config.dtype, config.precision)
            config = self._with_choice(config, [key for key in ("plan", "averager") if arguments[key] == AUTO])
            facts = ImageFacts(((height, width, channels),), class_weights=tuple(class_weights))
            recipe = Recipe.of(config, facts, (self.grid.rows, self.grid.cols))
            backend = self.backends.get(words) or make_backend(*words, self.place)
            recipe = replace(recipe, backend=backend, given=Given(model, optimizer_factory(optimizer)))
            return make_replica(recipe, self, loop=loop, hint=_WRITTEN)

        return self._agreed(raise_on_all_ranks(self.world, make), arguments)

    def _agreed(self, replica: Replica, arguments: Mapping[str, Any]) -> Replica:
        """Compare the replica and its arguments between ranks, agree on averaging, and apply the progress mode. Collective."""
        check_same_code(self.world)
        if self.size > 1:
            advice = "make the same on all ranks"
            network = Subject("another network in job.replica", advice, _operations(replica))
            optimizer = Subject("another optimizer in job.replica", advice, replica.settings)
            compare(self.world, called_with("job.replica", arguments), network, optimizer)
        replica.agree()
        set_progress(self, replica.network, self.progress_mode)
        replica.require_alike(schedules=True)
        self.loops.append(replica.loop)
        return replica

    def _with_choice(self, config: Config, sections: Sequence[str]) -> Config:
        """Return the configuration with the choice of `start` for some of its sections.

        Raises:
            ConfigError: `start` chose nothing.
        """
        if not sections:
            return config
        if self.best is None:
            raise ConfigError(
                f'{sections[0]} is "auto", but `start` chose no plan; call it with automatic=Automatic(model, image_shape).'
            )
        chosen = with_candidate(config, self.best.candidate)
        keys = [*sections, *(["grid"] if "plan" in sections else [])]  # the plan of a grid has its tiles
        return config.model_copy(update={key: getattr(chosen, key) for key in keys})

    def loader(
        self,
        replica: Replica,
        path: str | Path,
        *,
        batch: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        augment: Sequence[Choice] = (),
        mixing: Mapping[str, float] | None = None,
        sizes: Sequence[tuple[int, int]] | None = None,
        like: str | Path | None = None,
        validation: int | float | None = None,
        validation_of: Loader | None = None,
        prefetch: int = 2,
        threads: Count = 1,
        cache: bool | Mapping[str, Any] = True,
    ) -> Loader:
        """Return the loader of this rank's share of an HDF5 file (docs/data.md).

        Images are normalised to mean 0 and standard deviation 1 per channel.

        Args:
            replica: replica that reads the batches.
            batch: number of samples per step over all ranks; default: that of the job.
            shuffle: whether each epoch has another order, drawn from `seed`; False for evaluation.
            seed: seed of the order, the augmentations and the mixing.
            augment: augmentations, in order.
            mixing: "mixup", "cutmix", "probability" and "switch", as in `data.mixing` of a configuration; None: no mixing.
            sizes: pairs (epoch, side) as in `data.sizes` of a configuration: side of the images from this epoch on. The
                replica must be made for the largest side. None: images have the size that `augment` produces.
            like: path of the training file, whose mean, standard deviation and class order are used; default: the file's own.
            validation: fraction of the file's samples, or their number, that are held out for validation, stratified by class and
                drawn from `seed`; the loader never reads them. None: no sample is held out.
            validation_of: loader of the same file, made with `validation`, whose held-out samples this loader reads.
            prefetch: number of batches that a thread prepares in advance.
            threads: number of threads that share the samples of a batch.
            cache: value of `data.cache` in a configuration; "auto" uses at most a quarter of the free memory.

        Raises:
            DataError: a file cannot be read, has other classes, differs between ranks, or is not the file of `validation_of`; or
                too few samples would be left for training.
            ShapeError: the replica accepts images of another shape.
            ConfigError: `validation` is not a fraction or a number, an option of `augment`, `mixing` or `cache` is invalid,
                `sizes` are out of order, the backend does not support mixed labels, or arguments differ between ranks.
        """
        config, files = self._open(path, like, dict(locals()))

        def make() -> Loader:
            mixed = loader_mixing(config, replica)
            file, reference, notes = files[_FILE], files[_FILE], tuple[str, ...]()
            if like is not None:
                reference = files[_LIKE]
                file, notes = aligned(file, reference, str(like))
            _warn(self, *notes, *_data_differences(self, replica, like or path, described(reference)))
            _warn(self, *constant_metrics(file.labels, replica.network.classes, path) if shuffle else ())
            mean, std = np.array(reference.mean), np.array(reference.std)
            steps = [(step.name, step.options) for step in config.data.augment]
            pipeline = Pipeline(steps, seed=config.seed, mean=mean, std=std, dtype=replica.network.parameter_dtype)
            pipeline.share_out(threads)
            file.decode_by(threads)
            by_epoch = None if sizes is None else ImageSizes(tuple(sizes))
            if by_epoch is None:
                check_shape(pipeline.output_shape(*file.shape), replica)
            else:
                check_image_shapes(replica.network, by_epoch.shapes(pipeline, file.shape))
            subset = _subset(files[_FILE], validation, validation_of, config.seed)
            samples = len(file) if subset is None else len(subset)
            sampler = Sampler(samples, config.batch, config.seed, shuffle, subset)
            return Loader(
                *(file, sampler, pipeline),
                **replica.place,
                prefetch=config.data.prefetch,
                mixing=mixed,
                sizes=by_epoch,
                class_weights=replica.network.loss_spec.class_weights,
                holds_out=validation is not None,
            )

        loader, levels = raise_on_all_ranks(self.world, make), config.data.cache
        if validation_of is not None:  # the other loader's cache fills its memory with the same file
            levels = levels.model_copy(update={"fill": "first_epoch"})
        add_caches(self, levels, [loader], auto_share=0.25, stop_requested=_stop_requests(self.watch))
        return loader

    def array_loader(
        self,
        replica: Replica,
        images: np.ndarray,
        labels: np.ndarray,
        *,
        batch: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        mixing: Mapping[str, float] | None = None,
    ) -> ArrayLoader:
        """Return the loader of this rank's share of arrays, which every rank holds completely. Images are not normalised.

        Args:
            images: array-like (N, H, W, C) of finite floating-point numbers; converted to the replica's dtype.
            labels: (N,) integers from 0 to the replica's classes - 1.
            replica, batch, shuffle, seed, mixing: as for `loader`.

        Raises:
            DataError: an array has another kind or values out of range, or differs from that of most ranks.
            ShapeError: an array has another shape, or the replica accepts images of another shape.
            ConfigError: as for `loader`.
        """
        arguments = dict(locals())

        def make() -> tuple[ArrayLoader, Subject]:
            config = keyword_config(Job.array_loader, LOADER_KEYS, arguments, batch=self.batch)
            samples = as_samples(images, labels, replica.network.classes, replica.network.parameter_dtype)
            _warn(self, *constant_metrics(samples.labels, replica.network.classes, "job.array_loader") if shuffle else ())
            check_shape(samples.images.shape[1:], replica)
            sampler = Sampler(len(samples.images), config.batch, config.seed, shuffle)
            mixed = loader_mixing(config, replica)
            weights = replica.network.loss_spec.class_weights
            loader = ArrayLoader(samples.images, samples.labels, sampler, **replica.place, mixing=mixed, class_weights=weights)
            facts = samples.facts() if self.size > 1 else {}
            return loader, Subject("other arrays in job.array_loader", "give all ranks the same", facts, error=DataError)

        loader, arrays = raise_on_all_ranks(self.world, make)
        compare(self.world, called_with("job.array_loader", arguments), arrays)
        return loader

    def _open(
        self, path: str | Path, like: str | Path | None, arguments: Mapping[str, Any]
    ) -> tuple[Config, dict[str, ImageFile]]:
        """Return the configuration of a loader, and its open files by their name in messages.

        Files and arguments are compared between ranks. Collective.
        """
        paths = {_FILE: path} if like is None else {_FILE: path, _LIKE: like}

        def opened() -> tuple[Config, dict[str, ImageFile]]:
            config = keyword_config(Job.loader, LOADER_KEYS, arguments, batch=self.batch)
            return config, {name: ImageFile.open(str(path_of(place))) for name, place in paths.items()}

        config, files = raise_on_all_ranks(self.world, opened)
        if self.size > 1:
            given = {**arguments, "validation_of": arguments["validation_of"] is not None}
            compare(self.world, called_with("job.loader", given), *(opened_file(*item) for item in files.items()))
        return config, files

    def save(self, replica: Replica, path: str | Path, *, background: bool = False, **notes: Any) -> None:
        """Write parameters, statistics and optimiser state. The checkpoint is complete or absent, and can be read on any grid.

        The call discards the sums of the last step. To use them, call `replica.settle()` first.

        Args:
            path: path of a file, which rank 0 writes, or of a directory that ends with .shards, to which each rank writes its
                share.
            background: whether to continue while a copy is written. The next `save` or `load`, and the end of the block, wait for
                it.
            notes: values stored next to the tensors; they must be convertible to JSON.

        Raises:
            CheckpointError: the checkpoint cannot be written. In the background, the error is reported, the write repeated, and
                the error raised at the end of the block.
            DivergedError: a parameter is not finite; no checkpoint is written.
            CorruptedStateError: state that must be the same on all ranks differs; no checkpoint is written.
        """
        arguments = {"replica": replica, "path": path, "background": background}
        self.checkpoints.save(replica, self._path(path, Job.save, arguments), notes, background=background)

    def load_weights(self, replica: Replica, path: str | Path, *, ignore: Sequence[str] = ()) -> None:
        """Load parameters and running statistics from a file of weights in torchvision's names (docs/weights.md).

        Args:
            path: path of a .safetensors, .pt or .pth file, the same on all nodes.
            ignore: patterns of names that keep their values.

        Raises:
            CheckpointError: the file cannot be read, differs between ranks, or does not fit the model; the replica is unchanged.
        """
        hint = "leave such layers out by ignore={patterns}"
        file = self._path(path, Job.load_weights, {"replica": replica, "path": path, "ignore": ignore})
        facts = put_weights(self.world, replica, file, ignore, "of this program", hint=hint)
        facts.pop("image_shape", None)  # of the network, not of the data
        raise_on_all_ranks(self.world, lambda: _warn(self, *_data_differences(self, replica, f"{path} (see ignore)", facts)))

    def load(self, replica: Replica, path: str | Path) -> Mapping[str, Any]:
        """Restore a checkpoint written by `save`, with `replica.global_step`, also after a `DivergedError`; return its notes.

        Raises:
            CheckpointError: the checkpoint is missing or damaged, or belongs to another model or optimiser.
        """
        return self.checkpoints.load(replica, self._path(path, Job.load, {"replica": replica, "path": path}))

    def _path(self, path: str | Path, method: Callable[..., Any], arguments: Mapping[str, Any]) -> Path:
        """Check the arguments of a method, and return its path with `~` and variables expanded. Collective."""

        def expanded() -> Path:
            check_types(method, arguments)
            return path_of(path)

        return raise_on_all_ranks(self.world, expanded)


def _data_differences(job: Job, replica: Replica, origin: object, facts: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a warning on the differences from the first data file or weights of the replica; () if there are none."""
    return differences(origin, facts, *job.described.setdefault(id(replica.loop), (origin, facts)))


def _warn(job: Job, *notes: str) -> None:
    for note in notes if job.is_root else ():
        _log.warning("%s", note.removeprefix(WARNING))


def _subset(file: ImageFile, validation: int | float | None, validation_of: Loader | None, seed: int) -> np.ndarray | None:
    """Return the numbers of the samples that a loader reads, ascending; None if it reads all.

    Raises:
        ConfigError, DataError: as for `Job.loader`.
    """
    if validation_of is not None:
        trained_on = validation_of.sampler.subset
        if validation is not None or trained_on is None or not validation_of.holds_out:
            raise ConfigError(
                "validation_of must be the loader of the training samples, made with validation, such as validation=0.1; leave "
                "validation out of this call."
            )
        if validation_of.file.manifest["images"] != file.manifest["images"]:
            raise DataError(f"validation_of reads {validation_of.file.path}, but must read the images of {file.path}.")
        return np.setdiff1d(np.arange(len(file)), trained_on)
    if validation is None:
        return None
    is_number = isinstance(validation, int | float) and not isinstance(validation, bool)
    if not is_number or not (0 < validation < 1 or (isinstance(validation, int) and validation >= 1)):
        raise ConfigError(f"validation is {validation!r}, but must be a fraction in (0, 1), such as 0.1, or a number of samples.")
    return hold_out(file.labels, validation, seed, file.path).training


def _stop_requests(watch: SignalWatch | None) -> Callable[[], bool]:
    """Return a function that returns whether a signal has asked this rank to stop; always False if signals are not handled."""
    return watch.asked if watch is not None else lambda: False


def _operations(replica: Replica) -> dict[str, str]:
    """Return the specifications of a network's operations as text, by layer, to compare them between ranks."""
    nodes = enumerate(replica.network.graph(1).nodes)
    return {f"{node.name or 'operation'} ({number})": _ADDRESS.sub("", repr(node.spec)) for number, node in nodes}
