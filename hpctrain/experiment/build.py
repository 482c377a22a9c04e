"""From a configuration to objects: data, model, optimiser, averager, trainer. The one place that knows all of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from hpctrain.averaging.base import GradientAverager
from hpctrain.backend.backend import Backend, make_backend
from hpctrain.comm.agreement import raise_alike
from hpctrain.comm.watchdog import guard
from hpctrain.config.schema import AugmentConfig, Config
from hpctrain.data.format import ImageFile
from hpctrain.data.loader import Loader
from hpctrain.data.pipeline import Pipeline
from hpctrain.data.sampler import Sampler
from hpctrain.errors import DataError, ShapeError
from hpctrain.experiment.check import AVERAGERS, OPTIMIZERS
from hpctrain.experiment.model import model_options
from hpctrain.experiment.session import Session
from hpctrain.models import catalogue
from hpctrain.nn.layer import Layer
from hpctrain.nn.network import Network
from hpctrain.optim import schedules
from hpctrain.optim.schedules import Schedule
from hpctrain.parallel.batch_norm import RankStatistics
from hpctrain.train.evaluator import Evaluator
from hpctrain.train.message import SmallMessage
from hpctrain.train.metrics import Reporter
from hpctrain.train.snapshot import Position
from hpctrain.train.step import TrainingStep
from hpctrain.train.tracing import traced_optimizer
from hpctrain.train.trainer import Cadence, Trainer


@dataclass(frozen=True)
class Parts:
    """What one rank trains with, before there is a run directory."""

    backend: Backend
    network: Network
    averagers: Mapping[str, GradientAverager]
    loader: Loader
    test_loader: Loader | None
    schedule: Schedule


def build(session: Session) -> Parts:
    """All objects of this rank; averagers have still to agree. Collective; every error is raised alike on every rank.

    Raises:
        HpctrainError: whatever the configuration, the data files and the grid do not agree on.
    """
    return raise_alike(session.world, lambda: _build(session))


def _build(session: Session) -> Parts:
    config = session.config
    backend = make_backend(config.backend, config.dtype)
    with guard(f"Opening {config.data.train}", config.deadline_seconds, rank=session.world.rank):
        train_file = ImageFile.open(config.data.train)
    loader = _loader(session, train_file, config.data.augment, batch=config.batch, shuffle=True)
    test_loader = None
    if config.data.test is not None:
        test_file = ImageFile.open(config.data.test)
        _check_classes(config.data.test, test_file, len(train_file.class_names), "the training set")
        batch = config.evaluate.batch or config.batch
        augment = config.data.evaluate_augment
        test_loader = _loader(session, test_file, augment, batch=batch, shuffle=False, statistics=train_file)
        if test_loader.image_shape != loader.image_shape:
            raise ShapeError(
                f"Test images come out as {test_loader.image_shape}, training images as {loader.image_shape} (H, W, C); "
                f"give data.evaluate_augment a crop to {loader.image_shape[:2]}."
            )
    network = build_network(
        config, backend, train_file, loader.image_shape, merger=RankStatistics(session.statistics, session.progress)
    )
    averagers = build_averagers(session, network)
    schedule = schedules.make(
        config.schedule.name,
        config.schedule.options,
        config.optimizer.lr,
        max(1, config.epochs),
        len(loader),
        config.schedule.warmup_epochs,
    )
    return Parts(backend, network, averagers, loader, test_loader, schedule)


def build_network(
    config: Config, backend: Backend, file: ImageFile, image_shape: tuple[int, int, int], *, merger: RankStatistics | None = None
) -> Network:
    """The configured model at the images' shape.

    Raises:
        DataError: the model has another number of classes than the data. ShapeError: images that do not fit the model.
    """
    synchronised = config.batch_norm.statistics == "synchronised"
    model: Layer = catalogue.build(config.model.name, model_options(config, len(file.class_names), image_shape))
    network = Network(
        model,
        image_shape,
        backend.kernels,
        dtype=config.dtype,
        seed=config.seed,
        smoothing=config.loss.label_smoothing,
        mergers={"world": merger} if synchronised and merger is not None else None,
    )
    _check_classes(config.data.train, file, network.classes, f"the model {config.model.name}")
    return network


def build_averagers(session: Session, network: Network) -> dict[str, GradientAverager]:
    """One averager, with an optimiser of its own, per parameter group."""
    config = session.config
    known = {"nominal_batch": config.batch, "micro_batches": config.micro_batches}
    accepted = inspect.signature(AVERAGERS.find(config.averager.name)).parameters
    averagers = {}
    for name, group in network.groups.items():
        optimizer = traced_optimizer(OPTIMIZERS.create(config.optimizer.name, config.optimizer.options), session.progress.trace)
        averagers[name] = AVERAGERS.create(
            config.averager.name,
            config.averager.options,
            group=group,
            optimizer=optimizer,
            comm=session.gradients,
            progress=session.progress,
            **{key: value for key, value in known.items() if key in accepted},
        )
    return averagers


def build_trainer(
    session: Session,
    parts: Parts,
    reporter: Reporter,
    save: Callable[[Position], None],
    *,
    steps: int = 0,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Trainer:
    """The training loop over `parts`."""
    config = session.config
    message = SmallMessage(session.messages, session.progress, parts.network.statistics.size)
    return Trainer(
        network=parts.network,
        averagers=parts.averagers,
        step=TrainingStep(parts.network, parts.averagers, session.progress, message, config.micro_batches),
        message=message,
        loader=parts.loader,
        evaluator=build_evaluator(session, parts),
        schedule=parts.schedule,
        cadence=Cadence(
            epochs=config.epochs,
            evaluate_epochs=config.evaluate.every_epochs,
            checkpoint_epochs=config.checkpoint.every_epochs,
            checkpoint_steps=config.checkpoint.every_steps,
            steps=steps,
        ),
        reporter=reporter,
        save=save,
        stop_requested=stop_requested,
        trace=session.progress.trace,
    )


def build_evaluator(session: Session, parts: Parts) -> Evaluator | None:
    """The evaluation of the test set; None where none is configured."""
    if parts.test_loader is None:
        return None
    return Evaluator(parts.network, parts.test_loader, session.samples, session.progress)


def _loader(
    session: Session,
    file: ImageFile,
    augment: tuple[AugmentConfig, ...],
    *,
    batch: int,
    shuffle: bool,
    statistics: ImageFile | None = None,
) -> Loader:
    """This rank's share of `file`; images are normalised by the statistics of `statistics` (the training set)."""
    config = session.config
    source = statistics if statistics is not None else file
    mean, std = source.mean, source.std
    if not config.data.normalise:
        mean, std = np.zeros_like(mean), np.ones_like(std)
    specs = [(each.name, each.options) for each in augment]
    pipeline = Pipeline(specs, seed=config.seed, mean=mean, std=std, dtype=config.dtype)
    sampler = Sampler(len(file), batch, seed=config.seed, shuffle=shuffle)
    return Loader(
        file,
        sampler,
        pipeline,
        part=session.samples.rank,
        parts=session.samples.size,
        prefetch=config.data.prefetch,
        cache=config.data.cache,
    )


def _check_classes(path: str, file: ImageFile, classes: int, what: str) -> None:
    if len(file.class_names) != classes:
        raise DataError(
            f"{path} has {len(file.class_names)} classes, {what} has {classes}; "
            f"set model.classes to {len(file.class_names)} or use other data."
        )
