"""From a configuration to objects: data, replica, schedule, trainer. The one place that knows all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from hpctrain.backend.choice import Backend, make_backend
from hpctrain.comm.raise_on_all_ranks import raise_on_all_ranks
from hpctrain.data.facts import DataFacts
from hpctrain.data.image_file import ImageFile
from hpctrain.data.loader import Loader
from hpctrain.data.sizes import ImageSizes
from hpctrain.data.synthetic import Split
from hpctrain.core.errors import DataError, DivergedError
from hpctrain.averaging.averagers import make_strategy
from hpctrain.run.data_cache import DataCache, give_levels
from hpctrain.experiment.device_faults import check_device
from hpctrain.config.grid import check_overlap, parallel_plan
from hpctrain.experiment.image_sizes import check_image_shapes
from hpctrain.run.images import CHECKPOINT, check_shapes, configured_splits, evaluation_images, make_loader, open_alike, training_images
from hpctrain.experiment.model import model_options
from hpctrain.job.session import Session
from hpctrain.run.single_values import single_values
from hpctrain.experiment.transport import chosen
from hpctrain.models import catalogue
from hpctrain.nn.layers import Layer
from hpctrain.optim.ema import EmaRule
from hpctrain.optim.optimizers import OPTIMIZERS
from hpctrain.optim.schedules import SCHEDULES
from hpctrain.optim.schedules.base import LearningRateSchedule
from hpctrain.parallel.rank_graph import make_network
from hpctrain.train.data_waits import DataWaits
from hpctrain.train.early_stop import EarlyStop
from hpctrain.train.memory_check import check_memory
from hpctrain.train.metrics_rest import Reporter, RunningSums
from hpctrain.train.operator_sample import OperatorSample
from hpctrain.train.replica import Replica
from hpctrain.train.saving import Saver
from hpctrain.train.snapshot import Position
from hpctrain.train.stopping import TimeLimit
from hpctrain.train.trainer import Cadence, Trainer
from hpctrain.train.weight_watch import CheckCadence


@dataclass(frozen=True)
class Parts:
    """A rank's replica and data, before there is a run directory.

    data: what a checkpoint remembers of the training file. notes: what a user should know of the data, a sentence each.
    sizes: of training images by epoch; None: they have one size.
    cache: the levels that the loaders read through; None: they read the files themselves.
    """

    backend: Backend
    replica: Replica
    loader: Loader
    test_loader: Loader | None
    schedule: LearningRateSchedule
    data: DataFacts
    notes: tuple[str, ...]
    sizes: ImageSizes | None = None
    cache: DataCache | None = None

    @property
    def files(self) -> tuple[ImageFile, ...]:
        """The data files that are read."""
        return tuple(loader.file for loader in (self.loader, self.test_loader) if loader is not None)


def build(session: Session, known: DataFacts | None = None, *, stop_requested: Callable[[], bool] = lambda: False) -> Parts:
    """All objects of this rank; averagers have still to agree. Collective; every error is raised alike on every rank.

    Args:
        known: what the network was trained on before: its classes keep their order, and its images their normalisation.
        stop_requested: this rank was asked to stop; what may take long is cut short then.

    Raises:
        HpctrainError: whatever the configuration, the data files and the grid do not agree on.
    """
    opened = open_alike(session.world, session.config, configured_splits(session.config))
    parts = raise_on_all_ranks(session.world, lambda: _build(session, opened, known))
    loaders = [loader for loader in (parts.loader, parts.test_loader) if loader is not None]
    cache = give_levels(session, session.config.data.cache, loaders, stop_requested=stop_requested)
    arithmetic = parts.backend.kernels.arithmetic
    parts.replica.transport, way = chosen(session.config, session.world, arithmetic, session.device_messages)
    return replace(parts, cache=cache, notes=(*parts.notes, *way, *cache.notes))


def _build(session: Session, opened: Mapping[Split, ImageFile], known: DataFacts | None) -> Parts:
    config = session.config
    backend = make_backend(config.backend, config.dtype, config.precision, session.place)
    check_device(config, backend.kernels)  # which "auto" may have chosen
    train, data = training_images(config, opened["train"], known)
    test = None
    if "test" in opened:
        test = evaluation_images(config, opened["test"], data, config.data.train if known is None else CHECKPOINT)
    shapes = train.shapes(config.epochs)
    if test is not None and train.sizes is None:
        check_shapes(shapes[0], test.shape)
    replica = build_replica(session, backend, len(data.class_names), shapes[0])
    check_image_shapes(replica.network, (*shapes[1:], *((test.shape,) if test is not None else ())))
    check_memory(replica.network, -(-config.batch // session.world.size), replica.passes.following)
    kernels, shards = replica.network.kernels, config.exact.shards
    loader = make_loader(session, train, replica.tiles, batch=config.batch, shuffle=True, kernels=kernels, shards=shards)
    test_loader = None
    if test is not None:
        batch = config.evaluate.batch or config.batch
        test_loader = make_loader(session, test, replica.tiles, batch=batch, shuffle=False, kernels=kernels, shards=shards)
    schedule = SCHEDULES.create(
        config.schedule.name,
        config.schedule.options,
        base_lr=config.optimizer.lr,
        epochs=max(1, config.epochs),
        steps_per_epoch=len(loader),
        warmup_epochs=config.schedule.warmup_epochs,
    )
    plan = parallel_plan(config, session.grid.cols)
    single = single_values(config, shapes, len(data.class_names), len(train.file), plan, config.data.train)
    single.check()
    notes = (*train.notes, *(test.notes if test is not None else ()), *((single.warning,) if single.warning else ()))
    return Parts(backend, replica, loader, test_loader, schedule, data, notes, train.sizes)


def build_replica(
    session: Session, backend: Backend, classes: int, image_shape: tuple[int, int, int], *, trains: bool = True
) -> Replica:
    """This rank's replica of the configured model at the images' shape. Not collective.

    trains: False for a replica that only evaluates, which has no averagers.

    Raises:
        ConfigError: a plan for layers, or frozen layers, that the model does not have; or norms of split layers, which the
            averager cannot add up.
        DataError: the model has another number of classes than the data. ShapeError: images that do not fit the model.
    """
    config = session.config
    model: Layer = catalogue.build(config.model.name, model_options(config, classes, image_shape))
    network = make_network(
        model,
        image_shape,
        backend.kernels,
        groups=session.groups,
        progress=session.progress,
        plan=parallel_plan(config, session.grid.cols),
        dtype=backend.dtype,
        seed=config.seed,
        smoothing=config.loss.label_smoothing,
        frozen=config.init.freeze,
    )
    replica = Replica(
        network,
        groups=session.groups,
        progress=session.progress,
        strategy=partial(make_strategy, config.averager.name, config.averager.options) if trains else None,
        optimizer=partial(OPTIMIZERS.create, config.optimizer.name, config.optimizer.options),
        nominal_batch=config.batch,
        micro_batches=config.micro_batches,
        exact_shards=config.exact.shards if trains else None,
        checks=CheckCadence(config.checks.every_steps),
        skips=config.on_nonfinite.action == "skip",
        ema=None if config.ema.decay is None else EmaRule(config.ema.decay, config.ema.warm_up),
    )
    if replica.distribution is not None:
        check_overlap(config, network.graph(1), replica.distribution.plan)
    if network.classes != classes:
        raise DataError(
            f"{config.data.train} has {classes} classes, the model {config.model.name} has {network.classes}; "
            f"set model.classes to {classes} or use other data."
        )
    return replica


def build_trainer(
    session: Session,
    parts: Parts,
    reporter: Reporter,
    save: Callable[[Position], None],
    *,
    steps: int = 0,
    go_back: Callable[[DivergedError, Position], Position] | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
    limit: TimeLimit | None = None,
    sample: OperatorSample | None = None,
    epoch_ended: Sequence[Callable[[Position], None]] = (),
    saver: Saver | None = None,
    evaluated: Callable[[Position, RunningSums], None] = lambda position, sums: None,
    waits: DataWaits | None = None,
    hashed: Callable[[Position], None] = lambda position: None,
) -> Trainer:
    """The training loop over `parts`; arguments as `Trainer` takes them."""
    config = session.config
    stop = config.early_stop
    return Trainer(
        replica=parts.replica,
        loader=parts.loader,
        test_loader=parts.test_loader,
        schedule=parts.schedule,
        cadence=Cadence(
            epochs=config.epochs,
            evaluate_epochs=config.evaluate.every_epochs,
            checkpoint_epochs=config.checkpoint.every_epochs,
            checkpoint_steps=config.checkpoint.every_steps,
            steps=steps,
            most_skips=config.on_nonfinite.most,
            hash_steps=config.hashes.every_steps,
        ),
        reporter=reporter,
        save=save,
        go_back=go_back,
        stop_requested=stop_requested,
        limit=limit,
        sample=sample,
        epoch_ended=epoch_ended,
        saver=saver,
        evaluated=evaluated,
        sizes=parts.sizes,
        early_stop=None if stop.patience is None else EarlyStop(stop.metric, stop.patience, stop.min_delta),
        waits=waits,
        hashed=hashed,
    )
