"""`hpctrain eval`: a checkpoint on the test set, with the classes and the normalisation that the checkpoint remembers."""

from __future__ import annotations

from pathlib import Path

from hpctrain import rank_log
from hpctrain.backend.backend import make_backend
from hpctrain.comm.raise_on_all_ranks import raise_on_all_ranks
from hpctrain.data.facts import DataFacts
from hpctrain.data.loader import Loader
from hpctrain.errors import CheckpointError, ConfigError
from hpctrain.experiment.build import build_replica
from hpctrain.experiment.checkpoint_search import find_checkpoint
from hpctrain.experiment.images import (
    CHECKPOINT,
    Images,
    check_shapes,
    evaluation_images,
    make_loader,
    open_training_file,
    training_shape,
)
from hpctrain.experiment.resume import check_model, data_of, stored_config
from hpctrain.experiment.session import Session
from hpctrain.storage.checkpoint import CheckpointContent
from hpctrain.storage.run_directory import RunDirectory
from hpctrain.train.progress_text import loss_text
from hpctrain.train.replica import Replica


def run_evaluation(session: Session, source: str) -> None:
    """Evaluate a checkpoint on the test set. Collective.

    The training file is opened for a checkpoint of format version 1 only, which does not know classes and normalisation.

    Raises:
        ConfigError: no test set is configured. CheckpointError: none to evaluate, or another model's.
        DataError: a test set with other classes. ShapeError: or with images of another shape.
    """
    if session.config.data.test is None:
        raise ConfigError("data.test is not set, so there is nothing to evaluate on; give the path of an HDF5 test set.")
    output, name = session.config.output, session.config.name
    there = find_checkpoint(session.world, output, name, source)
    if there is None:
        raise CheckpointError(f"No run of {name!r} in {output} has a checkpoint; train one first.")
    path, content = there
    keep_log(path, session.world.rank)
    images, replica, loader = raise_on_all_ranks(session.world, lambda: _build(session, path, content))
    if session.is_root:
        for note in images.notes:
            print(note)
    sums = replica.evaluate(loader)
    if session.is_root:
        means = sums.means()
        loss = loss_text(means["loss"])
        print(f"{path}: {sums.count} samples, loss {loss}, top1 {means['top1']:.2%}, top5 {means['top5']:.2%}")


def keep_log(checkpoint: Path, rank: int) -> None:
    """The log file of a rank that keeps one goes on in the run that a checkpoint is of; in the checkpoint's directory else."""
    kept = rank_log.own()
    if kept is not None:
        run = RunDirectory(checkpoint.resolve().parent)
        run = RunDirectory(run.path.parent) if run.path.name == run.checkpoints.name else run
        kept.keep_in(run.log_path(rank))


def _build(session: Session, path: Path, content: CheckpointContent) -> tuple[Images, Replica, Loader]:
    """The test set, a replica with the checkpoint's parameters, without an optimiser, and the test set's loader."""
    config = session.config
    data, place = data_of(content), CHECKPOINT
    if data is None:
        data, place = DataFacts.of(open_training_file(session)), config.data.train
    check_model(content, data, config, path)
    images = evaluation_images(config, data, place)
    assert images is not None, "checked"
    check_shapes(training_shape(stored_config(content, config) or config, data), images.shape)
    backend = make_backend(config.backend, config.dtype, config.precision, session.place)
    replica = build_replica(session, backend, len(data.class_names), images.shape, trains=False)
    replica.load_weights(content)
    loader = make_loader(session, images, replica.tiles, batch=config.evaluate.batch or config.batch, shuffle=False)
    return images, replica, loader
