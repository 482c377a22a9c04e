"""Construction of a run's objects from its configuration: open sections, weights, data, replica, schedule.

Only this module depends on all of them. Sections that a configuration leaves open are decided on rank 0 before the grid is made,
sent to all ranks, and stored. A run that resumes from a checkpoint on the same number of ranks keeps the stored choice, because
another grid would add numbers in another order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.assembly.faults import check_device
from hpctrain.assembly.images import (
    CHECKPOINT,
    check_image_shapes,
    check_shapes,
    check_single_values,
    described_training,
    evaluation_images,
    training_images,
)
from hpctrain.assembly.recipe import Recipe
from hpctrain.backend.choice import Backend
from hpctrain.comm.base import Communicator, Subject, compare, raise_on_all_ranks
from hpctrain.comm.transports import Transport
from hpctrain.config.schema import Config, Split
from hpctrain.core.errors import CheckpointError, DataError
from hpctrain.core.text import counted
from hpctrain.data.image_file import DataFacts, ImageFile, differences
from hpctrain.data.loader import Loader
from hpctrain.job.automatic_choice import Resolved
from hpctrain.job.session import Session, StartedRank
from hpctrain.models.state_dict import INIT_HINT, StateEntry, check_file_fits, check_finite, declared_state
from hpctrain.nn.layers import join
from hpctrain.nn.network import Network
from hpctrain.nn.whitening import whitened_convolution, whitening_filters
from hpctrain.optim.ema import EmaRule
from hpctrain.parallel.rank_graph import make_network
from hpctrain.run.data_cache import DataCache, add_caches
from hpctrain.run.images import make_loader, open_alike
from hpctrain.run.messages import choose_transport
from hpctrain.runs.directory import RunDirectory
from hpctrain.storage import weights_file
from hpctrain.storage.atomic_write import write_json
from hpctrain.training.passes import check_memory
from hpctrain.training.replica import LoopState, Replica
from hpctrain.training.trainer import TrainingObjects
from hpctrain.training.weight_watch import CheckCadence


def keep_choice(resolved: Resolved, directory: RunDirectory) -> None:
    """Write the choice and the machine measured for it into the run directory. Call on one rank.

    Without a choice, an earlier one is deleted.
    """
    if resolved.choice is None:
        directory.choice_path.unlink(missing_ok=True)
        return
    write_json(directory.choice_path, resolved.choice.to_meta())
    if resolved.machine is not None:
        from hpctrain.planner.costs import machine_file  # loaded earlier, to measure the machine

        machine_file.write(directory.machine_path, resolved.machine)


def start_from_weights(session: Session, setup: TrainingSetup) -> tuple[str, ...]:
    """Write whitening filters and the configured weights, if any, into the replica before ranks agree on averaging. Collective.

    Return notes on the weights.

    Raises:
        ConfigError: `init.whiten` is not a convolution of the images that can be whitened.
        DataError: a training image cannot be read, or the weights have other classes; on every rank.
        CheckpointError: the file cannot be read, does not fit the model, or differs between ranks; on every rank.
    """
    init = session.config.init
    if init.whiten is not None:
        whiten(session, setup, init.whiten)
    if init.weights is None:
        return ()
    facts = put_weights(session.world, setup.replica, Path(init.weights), init.ignore, session.config.model.name)
    own = described_training(session.config, setup.data, setup.replica.network.image_shape)
    place = f"{init.weights} (see init.ignore)"
    return raise_on_all_ranks(session.world, lambda: differences(session.config.data.train, own, place, facts))


#: maximum number of training images from which whitening filters are computed; a larger number has less effect than the seed
_WHITENED_IMAGES = 4096
_READ_TOGETHER = 64


def whiten(session: Session, setup: TrainingSetup, name: str) -> None:
    """Set the filters of the convolution `name` so that they whiten patches of evenly spaced training images. Collective.

    The first rank computes the filters for all ranks, because eigenvectors differ in their last bits between processors.
    """
    network, file = setup.replica.network, setup.loader.file
    spec = whitened_convolution(network.graph(1), name)

    def filters() -> np.ndarray | None:
        if session.world.rank != 0:
            return None
        spread = np.array(setup.data.std) if session.config.data.normalise else np.ones(file.shape[2])
        return whitening_filters(_spaced_images(setup.loader, 255.0 * np.where(spread > 0, spread, 1.0)), spec)

    weight = session.world.broadcast_object(raise_on_all_ranks(session.world, filters))
    entry, entries = join(name, "weight"), declared_state(network.model)
    setup.replica.drain()
    _put(setup.replica, entries, {entry: network.parameter_specs[entry].interchange.export(weight)})
    setup.replica.parameters_written()


def _spaced_images(loader: Loader, scale: np.ndarray) -> Iterator[np.ndarray]:
    """Yield evenly spaced images of a loader, divided by the scale of each channel, and read a few at a time to save memory."""
    file, sampler = loader.file, loader.sampler
    count = min(sampler.samples, _WHITENED_IMAGES)
    chosen = np.arange(count, dtype=np.int64) * sampler.samples // count
    chosen = chosen if sampler.subset is None else sampler.subset[chosen]
    for some in np.array_split(chosen, -(-count // _READ_TOGETHER)):
        yield from file.pixels.take(some, np.empty((len(some), *file.shape), np.uint8)) / scale


def put_weights(
    world: Communicator, replica: Replica, path: Path, ignore: Sequence[str], model: str, *, hint: str = INIT_HINT
) -> dict[str, Any]:
    """Write the weights of a file into a replica, and return the description of their data (see `described`). Collective.

    Every rank reads the file from the file system, so that weights are not sent by MPI, and takes its part of split layers.

    Args:
        ignore: patterns of parameter names that keep their values.
        model: name of the model, for messages.
        hint: advice on how to ignore names, for messages; the list of patterns replaces {patterns}.

    Raises:
        CheckpointError: as for `start_from_weights`; the replica is then unchanged on every rank.
    """
    network = replica.network
    compare(world, raise_on_all_ranks(world, lambda: read_weights(world, path)))
    entries = declared_state(network.model)

    def fitting() -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        content = weights_file.read(path)
        ignored, facts = check_file_fits(entries, content, path, ignore, model, hint)
        fitting_tensors = {name: content.tensors[name] for name in entries if name not in ignored}
        check_finite(fitting_tensors, str(path), network.parameter_dtype)
        return fitting_tensors, facts

    state, facts = raise_on_all_ranks(world, fitting)
    replica.drain()
    _put(replica, entries, state)
    replica.parameters_written()
    return facts


def read_weights(world: Communicator, path: Path) -> Subject:
    """Return the facts about a file of weights that must be the same on all ranks. A single rank does not read the file.

    Raises:
        CheckpointError: the file does not exist, or the suffix of its name is unknown.
    """
    weights_file.check_suffix(path, weights_file.SUFFIXES)
    if not path.is_file():
        raise CheckpointError(f"There is no weight file {path}.")
    facts = {} if world.size == 1 else {"sha256": weights_file.checksum(path)[:16]}
    return Subject("another file of weights", f"give all nodes the same {path}", facts, error=CheckpointError)


def _put(replica: Replica, entries: Mapping[str, StateEntry], state: Mapping[str, np.ndarray]) -> None:
    network = replica.network
    for name, array in state.items():
        values = entries[name].restore(array)
        if name in network.parameters:
            share = replica.shards.part(name, values.astype(network.parameter_dtype, copy=False))
            network.kernels.arithmetic.from_host(network.parameters[name].data, share)
        else:
            network.statistics.views[name][...] = values
    network.parameters_changed()


def describe_frozen(network: Network) -> str | None:
    """Return a sentence about frozen layers; None if all layers are trained."""
    if not network.frozen:
        return None
    trained = sum(math.prod(network.parameter_specs[name].shape) for name in network.trained)
    return f"{counted(len(network.frozen), 'layer')} frozen: {trained:,} parameters are trained"


@dataclass(frozen=True, kw_only=True)
class TrainingSetup(TrainingObjects):
    """Replica and data of a rank, before there is a run directory.

    Attributes:
        data: facts about the training file that checkpoints store.
        notes: remarks on the data for the user, one sentence each.
        cache: cache levels between loaders and files.
        transport: transport of arrays in device memory.
    """

    loader: Loader
    evaluated: Mapping[str, Loader]
    backend: Backend
    data: DataFacts
    notes: tuple[str, ...]
    cache: DataCache | None = None
    transport: Transport = "staged"

    @property
    def loaders(self) -> tuple[Loader, ...]:
        """All loaders, that of the training samples first."""
        return (self.loader, *self.evaluated.values())

    @property
    def files(self) -> tuple[ImageFile, ...]:
        """Data files that the loaders read, each once."""
        return tuple({id(loader.file.pixels): loader.file for loader in reversed(self.loaders)}.values())[::-1]


def build(
    session: Session, known: DataFacts | None = None, *, stop_requested: Callable[[], bool] = lambda: False
) -> TrainingSetup:
    """Return all objects of this rank. Its averagers have not agreed yet. Collective; every error is raised on every rank.

    Args:
        known: data that the network was trained on before, whose order of classes and normalisation are used; None: a new
            network.
        stop_requested: function that returns whether this rank was asked to stop; filling the cache then ends early.

    Raises:
        HpctrainError: configuration, data files and grid do not fit each other.
    """
    opened = open_alike(session.world, session.config, tuple(session.config.data.files))
    setup = raise_on_all_ranks(session.world, lambda: _build(session, opened, known))
    cache = add_caches(session, session.config.data.cache, setup.loaders, stop_requested=stop_requested)
    arithmetic = setup.backend.kernels.arithmetic
    transport, way = choose_transport(session.config, session.world, arithmetic, session.device_messages)
    return replace(setup, cache=cache, transport=transport, notes=(*setup.notes, *way, *cache.notes))


def _build(session: Session, opened: Mapping[Split, ImageFile], known: DataFacts | None) -> TrainingSetup:
    config = session.config
    backend = session.backend()
    check_device(config, backend.kernels)  # which "auto" may have chosen
    train, data = training_images(config, opened["train"], known)
    place = config.data.train if known is None else CHECKPOINT
    evaluated = {split: evaluation_images(config, opened, split, data, place) for split in config.data.evaluated_splits}
    facts = train.facts(config.epochs)
    if train.sizes is None:
        for images in evaluated.values():
            check_shapes(facts.shapes[0], images.shape)
    labels = train.file.labels if train.subset is None else train.file.labels[train.subset]
    weights = class_weights(config, labels, data.class_names)
    recipe = replace(session.recipe, facts=replace(facts, class_weights=weights), backend=backend)
    loop = LoopState(session.progress.notes, most_skips=config.on_nonfinite.most)
    replica = make_replica(recipe, session, loop=loop)
    check_image_shapes(replica.network, (*facts.shapes[1:], *(images.shape for images in evaluated.values())))
    check_memory(replica.network, -(-config.batch // session.world.size), replica.passes.following)
    kernels, shards = replica.network.kernels, config.exact.shards
    loader = make_loader(
        *(session, train, replica.tiles),
        batch=config.batch,
        shuffle=True,
        kernels=kernels,
        shards=shards,
        class_weights=weights,
    )
    batch = config.evaluate.batch or config.batch
    loaders: dict[str, Loader] = {
        split: make_loader(session, images, replica.tiles, batch=batch, shuffle=False, kernels=kernels, shards=shards)
        for split, images in evaluated.items()
    }
    schedule = recipe.schedule(len(train))
    single = check_single_values(recipe)
    remarks = [note for images in evaluated.values() for note in images.notes]
    notes = (*train.notes, *remarks, *((single,) if single else ()))
    return TrainingSetup(
        replica=replica,
        loader=loader,
        evaluated=loaders,
        schedule=schedule,
        sizes=train.sizes,
        backend=backend,
        data=data,
        notes=notes,
    )


def class_weights(config: Config, labels: np.ndarray, names: Sequence[str]) -> tuple[float, ...]:
    """Return the weight of each class in the loss of training steps; empty without weights.

    Raises:
        DataError: the number of weights is not that of the classes, or a class without images would have a balanced weight.
    """
    chosen, classes = config.loss.class_weights, len(names)
    if chosen is None:
        return ()
    if not isinstance(chosen, str):
        if len(chosen) != classes:
            raise DataError(
                f"loss.class_weights has {counted(len(chosen), 'weight')}, but {config.data.train} has "
                f"{counted(classes, 'class')}; set one weight per class, in the order of the classes."
            )
        return tuple(chosen)
    counts = np.bincount(labels, minlength=classes)
    if not counts.all():
        raise DataError(
            f"loss.class_weights is balanced, but {config.data.train} has no image of the class {names[int(counts.argmin())]!r}; "
            "set it to a list with one weight per class, or to null."
        )
    return tuple((len(labels) / (classes * counts)).tolist())


def make_replica(
    recipe: Recipe, rank: StartedRank, *, trains: bool = True, loop: LoopState | None = None, hint: str = ""
) -> Replica:
    """Return this rank's replica for the largest images of a recipe, which has image facts, grid and backend. Not collective.

    Args:
        loop: state of the loop that calls `step`; None: one without stop requests and checkpoints.
        hint: sentence appended to errors of the checks of values.
        trains: False for a replica that only evaluates, which has no averagers.

    Raises:
        ConfigError: the plan or `init.freeze` names layers that the model lacks, or the averager cannot add up norms of split
            layers.
        DataError: the number of classes differs between model and data.
        ShapeError: the images do not fit the model.
    """
    config, facts, backend = recipe.config, recipe.facts, recipe.backend
    assert facts is not None, "a replica needs facts about its images"
    assert backend is not None, "a replica needs a backend"
    network = make_network(
        recipe.model,
        recipe.image_shape,
        backend.kernels,
        groups=rank.groups,
        progress=rank.progress,
        plan=recipe.plan,
        dtype=backend.dtype,
        seed=config.seed,
        smoothing=config.loss.label_smoothing,
        class_weights=facts.class_weights,
        frozen=config.init.freeze,
    )
    replica = Replica(
        network,
        groups=rank.groups,
        progress=rank.progress,
        strategy=recipe.averager.strategy if trains else None,
        optimizer=recipe.make_optimizer,
        nominal_batch=config.batch,
        micro_batches=config.micro_batches,
        exact_shards=config.exact.shards if trains else None,
        checks=CheckCadence(config.checks.every_steps, hint),
        skips=config.on_nonfinite.action == "skip",
        ema=None if config.ema.decay is None else EmaRule(config.ema.decay, config.ema.warm_up),
        loop=loop,
    )
    if facts.classes not in (None, network.classes):
        raise DataError(
            f"{config.data.train} has {counted(facts.classes, 'class')}, but the model {config.model.name} has "
            f"{network.classes}; set model.classes to {facts.classes}, or use other data."
        )
    return replica
