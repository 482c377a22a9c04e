"""From a configuration to objects: data, model, optimiser, averager, trainer. The one place that knows all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from hpctrain.averaging.base import GradientAverager
from hpctrain.averaging.norms import JointNorms
from hpctrain.backend.backend import Backend, make_backend
from hpctrain.comm.agreement import raise_alike
from hpctrain.comm.watchdog import guard
from hpctrain.config.schema import AugmentConfig, Config
from hpctrain.data.facts import DataFacts
from hpctrain.data.format import ImageFile
from hpctrain.data.loader import Boxes, Loader
from hpctrain.data.pipeline import Pipeline
from hpctrain.data.sampler import Sampler
from hpctrain.errors import DataError, ShapeError
from hpctrain.experiment.averager import make_averager
from hpctrain.experiment.check import OPTIMIZERS
from hpctrain.experiment.grid import grid_plan
from hpctrain.experiment.model import model_options
from hpctrain.experiment.session import Session
from hpctrain.models import catalogue
from hpctrain.nn.layer import Layer
from hpctrain.nn.network import MODEL, Network
from hpctrain.optim import schedules
from hpctrain.optim.schedules import Schedule
from hpctrain.parallel.distribution import GridDistribution
from hpctrain.train.evaluator import Evaluator
from hpctrain.train.message import SmallMessage
from hpctrain.train.metrics import Reporter
from hpctrain.train.shards import Shards
from hpctrain.train.snapshot import Position
from hpctrain.train.step import TrainingStep
from hpctrain.train.tracing import traced_optimizer
from hpctrain.train.trainer import Cadence, Trainer


@dataclass(frozen=True)
class Parts:
    """What one rank trains with, before there is a run directory.

    shards: split parameters as whole ones and back. data: what a checkpoint remembers of the training file.
    """

    backend: Backend
    network: Network
    shards: Shards
    averagers: Mapping[str, GradientAverager]
    loader: Loader
    test_loader: Loader | None
    schedule: Schedule
    data: DataFacts


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
    train = _Images(train_file, _pipeline(config, config.data.augment, train_file))
    test = _test_images(config, train)
    network, boxes = build_network(session, backend, train_file, train.shape)
    loader = _loader(session, train, boxes, batch=config.batch, shuffle=True)
    test_loader = None
    if test is not None:
        test_loader = _loader(session, test, boxes, batch=config.evaluate.batch or config.batch, shuffle=False)
    schedule = schedules.make(
        config.schedule.name,
        config.schedule.options,
        config.optimizer.lr,
        max(1, config.epochs),
        len(loader),
        config.schedule.warmup_epochs,
    )
    shards = Shards(network, session.groups.parts, session.progress)
    averagers = build_averagers(session, network)
    return Parts(backend, network, shards, averagers, loader, test_loader, schedule, DataFacts.of(train_file))


@dataclass(frozen=True)
class _Images:
    """A data file and what is made of its images."""

    file: ImageFile
    pipeline: Pipeline

    @property
    def shape(self) -> tuple[int, int, int]:
        """(H, W, C) as the network sees them."""
        return self.pipeline.output_shape(*self.file.shape)


def _test_images(config: Config, train: _Images) -> _Images | None:
    """The test set, normalised as the training set is; None where none is configured."""
    if config.data.test is None:
        return None
    file = ImageFile.open(config.data.test)
    _check_classes(config.data.test, file, len(train.file.class_names), "the training set")
    test = _Images(file, _pipeline(config, config.data.evaluate_augment, train.file))
    if test.shape != train.shape:
        raise ShapeError(
            f"Test images come out as {test.shape}, training images as {train.shape} (H, W, C); "
            f"give data.evaluate_augment a crop to {train.shape[:2]}."
        )
    return test


def _pipeline(config: Config, augment: tuple[AugmentConfig, ...], statistics: ImageFile) -> Pipeline:
    """Augmentation, and normalisation by the statistics of a file."""
    mean, std = statistics.mean, statistics.std
    if not config.data.normalise:
        mean, std = np.zeros_like(mean), np.ones_like(std)
    specs = [(each.name, each.options) for each in augment]
    return Pipeline(specs, seed=config.seed, mean=mean, std=std, dtype=config.dtype)


def build_network(
    session: Session, backend: Backend, file: ImageFile, image_shape: tuple[int, int, int]
) -> tuple[Network, Boxes | None]:
    """This rank's part of the configured model at the images' shape, and what the ranks of its column read of the images.

    Raises:
        ConfigError: a plan for layers that the model does not have.
        DataError: the model has another number of classes than the data. ShapeError: images that do not fit the model.
    """
    config, grid = session.config, session.grid
    model: Layer = catalogue.build(config.model.name, model_options(config, len(file.class_names), image_shape))
    axis = session.groups.row_axis(session.progress)
    distribution = None if axis is None else GridDistribution(grid_plan(config, grid.cols), axis)
    network = Network(
        model,
        image_shape,
        backend.kernels,
        dtype=config.dtype,
        seed=config.seed,
        smoothing=config.loss.label_smoothing,
        mergers=session.groups.mergers(session.progress),
        distribution=distribution,
    )
    _check_classes(config.data.train, file, network.classes, f"the model {config.model.name}")
    return network, None if distribution is None else distribution.boxes_by_counts(network.graph)


def build_averagers(session: Session, network: Network) -> dict[str, GradientAverager]:
    """One averager, with an optimiser of its own, per parameter group.

    Raises:
        ConfigError: an option of the averager, or norms of split layers, which it cannot add up.
    """
    config, groups = session.config, session.groups
    norms = JointNorms(groups.norms, session.progress) if MODEL in network.groups else None
    averagers = {}
    for name, group in network.groups.items():
        optimizer = traced_optimizer(OPTIMIZERS.create(config.optimizer.name, config.optimizer.options), session.progress.trace)
        averagers[name] = make_averager(
            config, group, optimizer, groups.gradients[name], session.progress, norms=norms, nodes=groups.nodes[name]
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
    groups, progress = session.groups, session.progress
    message = SmallMessage(groups.messages, progress, parts.network.statistics.size)
    return Trainer(
        network=parts.network,
        averagers=parts.averagers,
        step=TrainingStep(parts.network, parts.averagers, progress, message, config.micro_batches, groups.counts_of),
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
    return Evaluator(parts.network, parts.test_loader, session.groups.samples, session.progress)


def _loader(session: Session, images: _Images, boxes: Boxes | None, *, batch: int, shuffle: bool) -> Loader:
    """This rank's share of a data file."""
    config, groups = session.config, session.groups
    return Loader(
        images.file,
        Sampler(len(images.file), batch, seed=config.seed, shuffle=shuffle),
        images.pipeline,
        part=groups.position,
        parts=groups.samples.size,
        rows=groups.rows,
        boxes=boxes,
        prefetch=config.data.prefetch,
        cache=config.data.cache,
    )


def _check_classes(path: str, file: ImageFile, classes: int, what: str) -> None:
    if len(file.class_names) != classes:
        raise DataError(
            f"{path} has {len(file.class_names)} classes, {what} has {classes}; "
            f"set model.classes to {len(file.class_names)} or use other data."
        )
