"""A started rank, as a program with a loop of its own has it: what makes replicas, their data and checkpoints, and keeps them.

Checkpoints are written where the program says, at once or while its steps continue.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from pydantic import ValidationError

from hpctrain.averaging.averagers import make_strategy
from hpctrain.averaging.base import PlannedGroup, Strategy
from hpctrain.backend.choice import Backend, make_backend
from hpctrain.comm.base import Communicator, raise_on_all_ranks
from hpctrain.config.images import check_image_shapes
from hpctrain.config.schema import CacheConfig, NonFiniteConfig
from hpctrain.core.errors import CheckpointError, ConfigError, DataError, DivergedError, ShapeError
from hpctrain.core.files import path_of
from hpctrain.core.log import get_logger
from hpctrain.core.registry import check_options
from hpctrain.data.image_file import ImageFile, with_class_order
from hpctrain.data.loader import ArrayLoader, Loader, as_samples
from hpctrain.data.pipeline import ImageSizes, Pipeline
from hpctrain.data.sampler import Mixing, Sampler
from hpctrain.flight.recorder import FlightNotes
from hpctrain.job.same_start import Subject, called_with, check_same_code, compare, opened_file
from hpctrain.job.session import StartedRank
from hpctrain.launch.signals import SignalWatch
from hpctrain.nn.layers import Layer
from hpctrain.nn.network import Network
from hpctrain.optim.base import Optimizer
from hpctrain.optim.ema import EmaRule
from hpctrain.parallel.parallel_plan import ParallelPlan
from hpctrain.parallel.rank_graph import make_network
from hpctrain.planner.job import Candidate
from hpctrain.run.automatic_search import BestCandidate, Choice, named, optimizer_of
from hpctrain.run.build import put_weights
from hpctrain.run.checkpoints import one_file, shards
from hpctrain.run.data_cache import cache_of, give_levels
from hpctrain.run.messages import set_progress
from hpctrain.run.resume import read_together
from hpctrain.storage import checkpoint
from hpctrain.storage.hdf5_store import ShardedTensors
from hpctrain.train.metrics import Reporter
from hpctrain.train.replica import BETWEEN, LoopState, Replica
from hpctrain.train.saving import Saver
from hpctrain.train.weight_watch import CheckCadence


def check_shape(shape: tuple[int, ...], replica: Replica) -> None:
    """Make sure that a replica takes images of a shape (H, W, C).

    Raises:
        ShapeError: it takes others.
    """
    expected = replica.network.image_shape
    if tuple(shape) != tuple(expected):
        raise ShapeError(f"Images come out as {tuple(shape)}, but the replica takes {expected} (H, W, C); make it for those.")


def mixing_of(options: Mapping[str, float] | None, seed: int, replica: Replica) -> Mixing | None:
    """Return the mixing of a loader's images.

    Raises:
        ConfigError: an option that there is not, a value outside its range, or a loss that takes one label of each sample.
    """
    if options is None:
        return None
    mixing = Mixing(**check_options(Mixing, "the mixing of images", options, reserved=("seed",)), seed=seed)
    if mixing.mixes and not replica.network.kernels.arithmetic.on_host:
        raise ConfigError(
            'The loss of backend "cuda" takes one label of each sample so far, so it takes no mixed images; leave mixing out.'
        )
    return mixing


_log = get_logger(__name__)


class _Log(Reporter):
    """Tells of checkpoints in the log of rank 0."""

    def say(self, text: str) -> None:
        _log.info(text)


class LoopCheckpoints:
    """Writes and reads the checkpoints of a program. Every method is collective.

    Args:
        world: of all ranks. notes: for the flight record.
        deadline_seconds: that the end of the program waits for a checkpoint in the background.

    Attributes:
        saver: of checkpoints in the background, whose news travel with steps.
    """

    def __init__(self, world: Communicator, notes: FlightNotes, deadline_seconds: float) -> None:
        self._world, self._notes = world, notes
        self.saver = Saver(world, notes, _Log(), asynchronous=True, deadline_seconds=deadline_seconds)
        self._at_once = Saver(world, notes, _Log(), asynchronous=False, deadline_seconds=deadline_seconds)

    def save(self, replica: Replica, path: Path, notes: Mapping[str, Any], *, background: bool) -> None:
        """Write a checkpoint, or begin to; a path that ends with .shards is a directory with a shard of each rank.

        Raises:
            CheckpointError: it cannot be written; in the background that is reported, and raised by `finish`.
            DivergedError, CorruptedStateError: it would hold what is not finite, or what ranks do not hold alike.
        """
        replica.settle()
        replica.require_finite()
        replica.require_alike()
        self._notes.phase("a checkpoint")
        position, meta = replica.loop.position(replica.global_step), {"notes": notes}
        saver = self.saver if background else self._at_once
        if not background:
            self.saver.finish()  # one writes in a directory at a time
        if saver.ready(replica.global_step):
            if checkpoint.is_sharded(path):
                saver.begin(shards(self._world, replica, position, meta, path))
            else:
                saver.begin(one_file(self._world, replica, position, meta, path, copied=background))
            replica.kept_step = replica.global_step
        self._notes.phase(BETWEEN)

    def load(self, replica: Replica, path: Path) -> Mapping[str, Any]:
        """Restore what `save` wrote; give its notes.

        Raises:
            CheckpointError: it is missing or damaged, or another model's or optimiser's.
        """
        with contextlib.suppress(DivergedError):  # what it tells of is what the checkpoint takes the place of
            replica.settle()
        replica.drain()
        self._notes.phase("a checkpoint")
        self.saver.settle()
        content = read_together(self._world, path)
        raise_on_all_ranks(self._world, partial(replica.load, content))
        if isinstance(content.tensors, ShardedTensors):
            content.tensors.close()
        replica.kept_step = replica.global_step
        replica.require_alike(schedules=True)
        self._notes.phase(BETWEEN)
        notes: Mapping[str, Any] = content.meta.get("notes", {})  # type: ignore[assignment]
        return notes

    def finish(self) -> None:
        """Wait for the checkpoint in the background, if any.

        Raises:
            CheckpointError: it is not there, on every rank.
        """
        self._notes.phase("a checkpoint")
        self.saver.finish()
        self._notes.phase(BETWEEN)

    def finish_after_error(self) -> None:
        """Do the same after an error that all ranks have raised; ignore what cannot be written."""
        with contextlib.suppress(CheckpointError):
            self.finish()


_AUTO = "auto"
#: the address in the default repr of an object
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
#: names of a loader's files in messages
_FILE, _LIKE = "data file", "file of `like`"
_WRITTEN = "Where the program itself has written there, alike on all ranks, let it say so by replica.parameters_written()."


class Stopped(BaseException):
    """The program leaves the block of `start`, as `Job.stop` has it do. No `except Exception` of the program's takes it."""


@dataclass(frozen=True)
class Job(StartedRank):
    """A started rank of a job, from which replicas and their data are made. All methods are collective but `print`.

    Attributes:
        batch: samples of a step over all ranks. progress_mode: as `start` was given.
        checkpoints: writes and reads them. watch: of signals; None if `start` was not asked to take them.
        best: what `start` chose, with its prediction; None if it was not asked to.
        loops: of the replicas that were made.
    """

    batch: int
    progress_mode: str
    checkpoints: LoopCheckpoints
    watch: SignalWatch | None = None
    best: BestCandidate | None = None
    loops: list[LoopState] = field(default_factory=list)

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
        """True once a signal has asked any rank to stop, on all ranks after the same step; known two steps later at most.

        Not collective: the request travels with the sums of a step.

        Raises:
            ConfigError: `start` was not asked to take signals.
        """
        if self.watch is None:
            raise ConfigError("Signals end this program as usual, so it cannot be asked to stop; give `start` signals=True.")
        return any(loop.stop_requested for loop in self.loops)

    def stop(self) -> NoReturn:
        """Leave the block of `start` and end the program with exit code 85: stopped, and to be started again.

        No more of the program is run but what `finally` and `with` have to end. A checkpoint in the background is waited for.
        """
        raise Stopped

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
        exact_shards: int | None = None,
        backend: str = "auto",
        dtype: str = "float32",
        precision: str = "float32",
        seed: int = 0,
        label_smoothing: float = 0.0,
        ema_decay: float | None = None,
        checks_every_steps: int = 10,
        on_nonfinite: str | Mapping[str, Any] = "stop",
        frozen: Sequence[str] = (),
    ) -> Replica:
        """Return this rank's copy of a model, ready to train; the same first parameters on every rank.

        Args:
            model: the root layer; its output has shape (N, classes). image_shape: (H, W, C) of one sample.
            optimizer: without a learning rate, which each step is given. averager: how gradients are averaged.
            plan: pattern of layer names -> "batch", "model" or "domain", on a grid of several rows; "default": of all others.
            plan, averager: "auto" takes what `start` chose. tiles: (vertical, horizontal) parts of an image under "domain"; by
            default (rows, 1). micro_batches: passes that one step's samples are split into. exact_shards: parts of each batch
            whose sums have one order on any number of ranks (docs/exact.md). backend: "auto", "numpy", "onednn" or "cuda".
            dtype: "float32" or "float64". precision: "float32"; of backend cuda also "tf32", "bfloat16". seed: of first values.
            label_smoothing: in [0, 1). ema_decay: in (0, 1), of an average of the weights; None: there is none. frozen: patterns
            of layers that are not trained. checks_every_steps: from one comparison of ranks to the next; 0: none is made.
            on_nonfinite: "stop" raises `DivergedError`; "skip", or {"action": "skip", "most": 3}, undoes the step on all ranks.

        Raises:
            ConfigError: an unknown name, option, or pattern of the plan; arguments, or code of your own, that differ among ranks.
            ShapeError: layers that do not fit each other.
        """
        arguments = dict(locals())

        def make() -> Replica:
            answer = _answer(on_nonfinite, checks_every_steps)
            chosen = make_backend(backend, dtype, precision, self.place)
            return Replica(
                self._network(model, image_shape, chosen, self._plan(plan, tiles), seed, label_smoothing, frozen),
                groups=self.groups,
                progress=self.progress,
                strategy=self._strategy(averager),
                optimizer=optimizer_of(optimizer),
                nominal_batch=self.batch,
                micro_batches=micro_batches,
                exact_shards=exact_shards,
                checks=CheckCadence(checks_every_steps, hint=_WRITTEN),
                skips=answer.action == "skip",
                ema=None if ema_decay is None else EmaRule(ema_decay),
                loop=self._loop(answer.most),
            )

        return self._agreed(raise_on_all_ranks(self.world, make), arguments, -(-self.batch // self.size // micro_batches))

    def _agreed(self, replica: Replica, arguments: Mapping[str, Any], samples: int) -> Replica:
        """Return a replica on which the ranks have agreed. samples: of a rank's pass, at most. Collective."""
        check_same_code(self.world)
        if self.size > 1:
            mend = "make the same on all ranks"
            network = Subject("another network in job.replica", mend, _operations(replica))
            optimizer = Subject("another optimizer in job.replica", mend, _options(arguments["optimizer"]))
            compare(self.world, called_with("job.replica", arguments), network, optimizer)
        replica.agree()
        set_progress(self, replica.network, self.progress_mode, samples)
        replica.require_alike(schedules=True)
        self.loops.append(replica.loop)
        return replica

    def _network(
        self,
        model: Layer,
        image_shape: tuple[int, int, int],
        backend: Backend,
        plan: ParallelPlan,
        seed: int,
        label_smoothing: float,
        frozen: Sequence[str],
    ) -> Network:
        return make_network(
            model,
            image_shape,
            backend.kernels,
            groups=self.groups,
            progress=self.progress,
            plan=plan,
            dtype=backend.dtype,
            seed=seed,
            smoothing=label_smoothing,
            frozen=frozen,
        )

    def _loop(self, most_skips: int) -> LoopState:
        notes, asked = self.progress.notes, _asked_of(self.watch)
        return LoopState(notes, stop_asked=asked, most_skips=most_skips, saver=self.checkpoints.saver)

    def _plan(self, plan: Mapping[str, str] | str | None, tiles: tuple[int, int] | None) -> ParallelPlan:
        if isinstance(plan, str):
            return self._chosen("plan", plan).plan
        patterns = dict(plan or {})
        default = patterns.pop("default", "batch")
        return ParallelPlan(self.grid.rows, self.grid.cols, default, patterns, tiles)  # type: ignore[arg-type]

    def _strategy(self, averager: Choice) -> Callable[[PlannedGroup], Strategy]:
        if averager == _AUTO:
            chosen = self._chosen("averager", _AUTO).averager
            return partial(make_strategy, chosen.name, chosen.options)
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
        mixing: Mapping[str, float] | None = None,
        sizes: Sequence[tuple[int, int]] | None = None,
        like: str | Path | None = None,
        prefetch: int = 2,
        threads: int = 1,
        cache: bool | Mapping[str, Any] = True,
    ) -> Loader:
        """Return this rank's share of an HDF5 file (docs/data.md), in batches; images have mean 0 and deviation 1 per channel.

        Args:
            replica: that reads the batches. batch: samples of a step over all ranks; by default the job's.
            shuffle: another order in each epoch, by `seed`; False: in order, for evaluation. augment: augmentations, in order.
            mixing: "mixup", "cutmix", "probability" and "switch", as `data.mixing` of a configuration has them; None: no mixing.
            sizes: (epoch, side) from which on images have which side, as `data.sizes` of a configuration says it; the replica is
                best made for the largest. None: all epochs have images as `augment` makes them.
            like: path of the training file, whose mean, deviation and order of classes count; by default the file's own.
            prefetch: batches that a thread makes ahead. threads: that share out the samples of a batch.
            cache: as `data.cache` has it; auto takes a quarter of free memory.

        Raises:
            DataError: a file cannot be read or has other classes, or a rank has another file than most ranks.
            ShapeError: images that the replica does not take.
            ConfigError: an option of `augment`, `mixing` or `cache`, sizes that are out of order, or mixed labels, that are not
                taken; arguments that differ between ranks.
        """
        files = self._open(path, like, dict(locals()))

        def make() -> tuple[Loader, CacheConfig]:
            mixed, levels = mixing_of(mixing, seed, replica), cache_of(cache)
            file = reference = files[_FILE]
            if like is not None:
                reference = files[_LIKE]
                file = with_class_order(file, reference.class_names, str(like))
            mean, std = np.array(reference.mean), np.array(reference.std)
            pipeline = Pipeline(
                [named(step) for step in augment], seed=seed, mean=mean, std=std, dtype=replica.network.parameter_dtype
            )
            pipeline.share_out(threads)
            file.decode_by(threads)
            by_epoch = None if sizes is None else ImageSizes(tuple(sizes))
            if by_epoch is None:
                check_shape(pipeline.output_shape(*file.shape), replica)
            else:
                check_image_shapes(replica.network, by_epoch.shapes(pipeline, file.shape))
            sampler = Sampler(len(file), batch or self.batch, seed, shuffle)
            return Loader(file, sampler, pipeline, **replica.place, prefetch=prefetch, mixing=mixed, sizes=by_epoch), levels

        loader, levels = raise_on_all_ranks(self.world, make)
        give_levels(self, levels, [loader], auto_share=0.25, stop_requested=_asked_of(self.watch))
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
        """Return this rank's share of arrays that every rank has whole, in batches, as they are.

        Args:
            images: array-like (N, H, W, C), floating and finite; converted to the replica's dtype.
            labels: (N,) integers from 0 to the replica's classes - 1.
            replica, batch, shuffle, seed, mixing: as for `loader`.

        Raises:
            DataError: arrays of another kind, values outside their range, or a rank has other arrays than most ranks.
            ShapeError: arrays of other shapes, or images that the replica does not take. ConfigError: as for `loader`.
        """
        arguments = dict(locals())

        def make() -> tuple[ArrayLoader, Subject]:
            samples = as_samples(images, labels, replica.network.classes, replica.network.parameter_dtype)
            check_shape(samples.images.shape[1:], replica)
            sampler = Sampler(len(samples.images), batch or self.batch, seed, shuffle)
            mixed = mixing_of(mixing, seed, replica)
            loader = ArrayLoader(samples.images, samples.labels, sampler, **replica.place, mixing=mixed)
            facts = samples.facts() if self.size > 1 else {}
            return loader, Subject("other arrays in job.array_loader", "give all ranks the same", facts, error=DataError)

        loader, arrays = raise_on_all_ranks(self.world, make)
        compare(self.world, called_with("job.array_loader", arguments), arrays)
        return loader

    def _open(self, path: str | Path, like: str | Path | None, arguments: Mapping[str, Any]) -> dict[str, ImageFile]:
        """Open the files of a loader, and compare them and its arguments. Return the files by name in messages. Collective."""
        paths = {_FILE: path} if like is None else {_FILE: path, _LIKE: like}
        files = raise_on_all_ranks(
            self.world, lambda: {name: ImageFile.open(str(path_of(place))) for name, place in paths.items()}
        )
        if self.size > 1:
            compare(self.world, called_with("job.loader", arguments), *(opened_file(*item) for item in files.items()))
        return files

    def save(self, replica: Replica, path: str | Path, *, background: bool = False, **notes: Any) -> None:
        """Write parameters, statistics and optimiser state, whole or not at all; any grid can read them.

        The last step's sums are settled; where they are wanted, take them from `replica.settle()` before.

        Args:
            path: of a file, which rank 0 writes; or one that ends with .shards, a directory to which each rank writes its share.
            background: continue with a copy being written. The next `save` or `load`, and the end of the block, wait for it.
            notes: kept next to the tensors, as far as JSON can hold them.

        Raises:
            CheckpointError: it cannot be written; in the background that is reported, tried again, and raised at the block's end.
            DivergedError: a parameter is not finite. CorruptedStateError: ranks hold something differently. Nothing is written.
        """
        self.checkpoints.save(replica, self._path(path), notes, background=background)

    def load_weights(self, replica: Replica, path: str | Path, *, ignore: Sequence[str] = ()) -> None:
        """Start from a file of weights in torchvision's names (docs/weights.md): parameters and running statistics, nothing else.

        Args:
            path: of a .safetensors, .pt or .pth file, the same on all nodes. ignore: patterns of names that keep their values.

        Raises:
            CheckpointError: the file cannot be read or does not fit the model.
        """
        put_weights(
            self.world, replica, self._path(path), ignore, "of this program", hint='leave such layers out, as in ignore=["fc.*"]'
        )

    def load(self, replica: Replica, path: str | Path) -> Mapping[str, Any]:
        """Restore what `save` wrote, also after a `DivergedError`, and return its notes. Sets `replica.global_step` to that step.

        Raises:
            CheckpointError: the checkpoint is missing or damaged, or another model's or optimiser's.
        """
        return self.checkpoints.load(replica, self._path(path))

    def _path(self, path: str | Path) -> Path:
        """Return a path with `~` and variables expanded. Collective."""
        return raise_on_all_ranks(self.world, lambda: path_of(path))


def _asked_of(watch: SignalWatch | None) -> Callable[[], bool]:
    """Return a function that tells whether a signal has asked this rank to stop; always False if signals are not handled."""
    return watch.asked if watch is not None else lambda: False


def _answer(on_nonfinite: str | Mapping[str, Any], checks_every_steps: int) -> NonFiniteConfig:
    """Return the answer to values that are not finite.

    Raises:
        ConfigError: an argument is wrong.
    """
    if checks_every_steps < 0:
        raise ConfigError(f"checks_every_steps is {checks_every_steps}, but must be 0 or more; 10 is usual, 0 compares nothing.")
    try:
        answer = NonFiniteConfig.model_validate(on_nonfinite)
    except ValidationError as error:
        raise ConfigError(
            f'on_nonfinite is {on_nonfinite!r}, but must be "stop", "skip", or {{"action": "skip", "most": 10}}, where most is 1 '
            f"or more."
        ) from error
    if answer.action == "rollback":
        raise ConfigError(
            'on_nonfinite is "rollback", but only the loop knows its way back: catch DivergedError and `load` a checkpoint, '
            'with "stop".'
        )
    return answer


def _options(optimizer: Choice | Callable[[], Optimizer]) -> dict[str, str]:
    """Return the plain attribute values of a new optimiser: if a program constructs it, its options are not known otherwise."""
    values = vars(optimizer_of(optimizer)())
    return {name: str(value) for name, value in values.items() if isinstance(value, bool | int | float | str | None)}


def _operations(replica: Replica) -> dict[str, str]:
    """Return the specifications of a network's operations as text, by layer name.

    The options of a program's layers are not known otherwise.
    """
    nodes = enumerate(replica.network.graph(1).nodes)
    return {f"{node.name or 'operation'} ({number})": _ADDRESS.sub("", repr(node.spec)) for number, node in nodes}
