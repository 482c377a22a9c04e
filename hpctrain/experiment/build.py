"""From a configuration to objects: data, model, optimiser, averager, trainer. The one place that knows all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hpctrain.averaging.base import GradientAverager
from hpctrain.averaging.norms import JointNorms
from hpctrain.backend.backend import Backend, make_backend
from hpctrain.comm.raise_on_all_ranks import raise_on_all_ranks
from hpctrain.data.facts import DataFacts
from hpctrain.data.loader import Loader, TileOfRank
from hpctrain.errors import DataError
from hpctrain.experiment.averager import make_averager
from hpctrain.experiment.grid import check_overlap, parallel_plan
from hpctrain.experiment.images import CHECKPOINT, check_shapes, evaluation_images, make_loader, training_images
from hpctrain.experiment.model import model_options
from hpctrain.experiment.session import Session
from hpctrain.models import catalogue
from hpctrain.nn.layer import Layer
from hpctrain.nn.network import MODEL, Network
from hpctrain.optim.optimizers import OPTIMIZERS
from hpctrain.optim.schedules import SCHEDULES
from hpctrain.optim.schedules.base import LearningRateSchedule
from hpctrain.parallel.rank_graph import GridDistribution
from hpctrain.train.evaluator import Evaluator
from hpctrain.train.metrics import Reporter
from hpctrain.train.shards import Shards
from hpctrain.train.snapshot import Position
from hpctrain.train.step import TrainingStep
from hpctrain.train.step_reduction import StepReduction
from hpctrain.train.tracing import traced_optimizer
from hpctrain.train.trainer import Cadence, Trainer


@dataclass(frozen=True)
class Parts:
    """What one rank trains with, before there is a run directory.

    shards: split parameters as whole ones and back. data: what a checkpoint remembers of the training file. notes: what a user
    should know of the data, a sentence each.
    """

    backend: Backend
    network: Network
    shards: Shards
    averagers: Mapping[str, GradientAverager]
    loader: Loader
    test_loader: Loader | None
    schedule: LearningRateSchedule
    data: DataFacts
    notes: tuple[str, ...]


def build(session: Session, known: DataFacts | None = None) -> Parts:
    """All objects of this rank; averagers have still to agree. Collective; every error is raised alike on every rank.

    Args:
        known: what the network was trained on before: its classes keep their order, and its images their normalisation.

    Raises:
        HpctrainError: whatever the configuration, the data files and the grid do not agree on.
    """
    return raise_on_all_ranks(session.world, lambda: _build(session, known))


def _build(session: Session, known: DataFacts | None) -> Parts:
    config = session.config
    backend = make_backend(config.backend, config.dtype)
    train, data = training_images(session, known)
    test = evaluation_images(config, data, config.data.train if known is None else CHECKPOINT)
    if test is not None:
        check_shapes(train.shape, test.shape)
    network, boxes = build_network(session, backend, len(data.class_names), train.shape)
    loader = make_loader(session, train, boxes, batch=config.batch, shuffle=True)
    test_loader = None
    if test is not None:
        test_loader = make_loader(session, test, boxes, batch=config.evaluate.batch or config.batch, shuffle=False)
    schedule = SCHEDULES.create(
        config.schedule.name,
        config.schedule.options,
        base_lr=config.optimizer.lr,
        epochs=max(1, config.epochs),
        steps_per_epoch=len(loader),
        warmup_epochs=config.schedule.warmup_epochs,
    )
    shards = Shards(network, session.groups.shard_holders, session.progress)
    averagers = build_averagers(session, network)
    notes = (*train.notes, *(test.notes if test is not None else ()))
    return Parts(backend, network, shards, averagers, loader, test_loader, schedule, data, notes)


def build_network(
    session: Session, backend: Backend, classes: int, image_shape: tuple[int, int, int]
) -> tuple[Network, TileOfRank | None]:
    """This rank's part of the configured model at the images' shape, and what the ranks of its column read of the images.

    Raises:
        ConfigError: a plan for layers that the model does not have.
        DataError: the model has another number of classes than the data. ShapeError: images that do not fit the model.
    """
    config, grid = session.config, session.grid
    model: Layer = catalogue.build(config.model.name, model_options(config, classes, image_shape))
    axis = session.groups.split_group(session.progress)
    distribution = None if axis is None else GridDistribution(parallel_plan(config, grid.cols), axis)
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
    if distribution is not None:
        check_overlap(config, network.graph(1), distribution.plan)
    if network.classes != classes:
        raise DataError(
            f"{config.data.train} has {classes} classes, the model {config.model.name} has {network.classes}; "
            f"set model.classes to {classes} or use other data."
        )
    return network, None if distribution is None else distribution.tiles_by_counts(network.graph)


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
    message = StepReduction(groups.messages, progress, parts.network.statistics.size)
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
    return Evaluator(parts.network, parts.test_loader, session.groups.all_ranks, session.progress)
