"""Trial of a configuration before it is queued: a few steps on synthetic images with all components that it names.

Model, augmentations, mixing, optimiser, schedule with its warm-up, averager, average of weights, evaluation and checkpoints are
those of the configuration. Only sizes that cost time are reduced: number of images, batch and epochs.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.assembly.images import check_files, open_images
from hpctrain.assembly.recipe import ImageFacts
from hpctrain.config.schema import SYNTHETIC, Config, DataConfig, ScheduleConfig, SizeConfig
from hpctrain.config.values import SLURM
from hpctrain.core.errors import ConfigError
from hpctrain.core.text import counted
from hpctrain.job.session import StartedJob, on_root
from hpctrain.models import catalogue

#: suffix of the run's name, so that `--resume auto` and other runs of the configuration do not find the trial
SUFFIX = "-smoke"
EPOCHS = 2
STEPS = 2  # per epoch
SAMPLES = 4  # per rank and micro-batch
_UNKNOWN = (64, 64, 3)  # for a model that does not declare its image shape


@dataclass(frozen=True)
class SmokeTrial:
    """Shortened configuration that takes about a minute, and its differences from the original, one sentence each."""

    config: Config
    notes: tuple[str, ...]


def smoke_trial(config: Config, started: StartedJob) -> SmokeTrial:
    """Return the trial of a configuration, the same on every rank. Collective.

    Raises:
        HpctrainError: the configuration and the existing files do not fit each other.
    """
    return on_root(started.world, lambda: shortened(config, started.world.size))


def shortened(config: Config, ranks: int) -> SmokeTrial:
    """Return the trial of a configuration, with its options filled in. The call reads headers of existing files.

    Raises:
        HpctrainError: as for `smoke_trial`.
    """
    images, of_files = recipe_images(config)
    config, of_grid = _with_legal_grid(config, ranks)
    config, of_weights = _with_weights_that_exist(config)
    short, of_time = _short(config, ranks)
    trial, of_sizes = _on_images(short, images)
    of_size = f"synthetic images of {images.shapes[0][0]} x {images.shapes[0][1]}, {images.classes} classes"
    notes = (*of_time, of_size, *of_sizes, *of_files, *of_weights, *of_grid)
    return SmokeTrial(trial, tuple(f"smoke: {note}" for note in notes))


def recipe_images(config: Config) -> tuple[ImageFacts, tuple[str, ...]]:
    """Return facts about the stored images of the training file or, without a file, about the model's usual images.

    The second result has sentences on missing files, and on what is assumed instead.

    Raises:
        HpctrainError: an existing file cannot be read, or files and model do not fit each other.
    """
    missing = tuple(f"there is no {path} yet" for path in config.data.files.values() if not _exists(path))
    if not _exists(config.data.train):
        return _of_the_model(config, missing)
    files = {split: open_images(config, split) for split, path in config.data.files.items() if _exists(path)}
    file = files["train"]
    check_files(config)
    return ImageFacts((file.shape,), len(file.class_names)), missing


def remove_run(directory: Path) -> str:
    """Delete the directory of a successful trial; return a sentence on it, with the reason if it cannot be deleted."""
    try:
        shutil.rmtree(directory)
    except OSError as error:
        return f"the trial passed; its directory {directory} could not be deleted ({error.strerror})"
    return f"the trial passed; its directory {directory} was deleted"


def _exists(path: str) -> bool:
    return path == SYNTHETIC or Path(path).exists()


def _of_the_model(config: Config, missing: tuple[str, ...]) -> tuple[ImageFacts, tuple[str, ...]]:
    options = catalogue.check(config.model.name, config.model.options)
    height, width, channels = _UNKNOWN
    with suppress(ConfigError):  # user code need not declare it
        height, width, channels = catalogue.image_shape(config.model.name)
    steps = (*config.data.augment, *config.data.evaluate_augment)
    crops = [step.options["size"] for step in steps if isinstance(step.options.get("size"), int)]
    crops += [step.size for step in config.data.sizes]
    height, width = max(height, *crops, 0), max(width, *crops, 0)
    shape = (height, width, int(options.get("channels_in", channels)))
    assumed = "so images and classes are the model's defaults"
    return ImageFacts((shape,), int(options.get("classes", 10))), (f"{missing[0]}, {assumed}", *missing[1:])


def _on_images(config: Config, images: ImageFacts) -> tuple[Config, tuple[str, ...]]:
    """Return the configuration on synthetic images, and a sentence on the image sizes by epoch, if any."""
    height, width, channels = images.shapes[0]
    made_up = {
        "height": height,
        "width": width,
        "channels": channels,
        "classes": images.classes,
        "samples": STEPS * config.batch,
        "test_samples": config.batch + 1,  # the last batch of an evaluation is usually incomplete
    }
    sizes = [step.size for step in config.data.sizes]
    several = len(set(sizes)) > 1  # keep the first and the largest; if the first is the largest, the last one
    sizes = [sizes[0], max(sizes) if max(sizes) != sizes[0] else sizes[-1]] if several else sizes[:1]
    data: DataConfig = config.data.model_copy(
        update={
            "train": SYNTHETIC,
            **dict.fromkeys(config.data.evaluated_splits, SYNTHETIC),
            "synthetic": config.data.synthetic.model_copy(update=made_up),
            "sizes": tuple(SizeConfig(from_epoch=epoch, size=size) for epoch, size in enumerate(sizes)),
        }
    )
    all_sizes, stand_ins = (", ".join(map(str, some)) for some in ([step.size for step in config.data.sizes], sizes))
    note = (f"training images of {stand_ins} px, an epoch each, in place of {all_sizes}",) if sizes else ()
    return config.model_copy(update={"data": data}), note


def _short(config: Config, ranks: int) -> tuple[Config, tuple[str, ...]]:
    """Return the configuration with a small batch and few epochs, and sentences on the differences.

    Learning rate and schedule are scaled accordingly.
    """
    batch = min(config.batch, SAMPLES * max(config.micro_batches * ranks, config.exact.shards or 1))
    epochs = min(config.epochs, EPOCHS)
    lr = config.optimizer.lr * batch / config.batch
    evaluate = {"every_epochs": 1}
    if config.evaluate.batch is not None:
        evaluate["batch"] = min(config.evaluate.batch, batch)
    changes: dict[str, Any] = {
        "name": config.name + SUFFIX,
        "batch": batch,
        "epochs": epochs,
        "optimizer": config.optimizer.model_copy(update={"lr": lr}),
        "schedule": short_schedule(config.schedule, config.epochs, epochs),
        "evaluate": config.evaluate.model_copy(update=evaluate),
        "checkpoint": config.checkpoint.model_copy(update={"every_epochs": 1}),
    }
    if config.max_time == SLURM:  # a trial usually runs outside of a Slurm job
        changes["max_time"] = None
    sentence = (
        f"{counted(epochs, 'epoch')} of {STEPS} steps with {counted(batch, 'image')} each in place of "
        f"{counted(config.epochs, 'epoch')} with {config.batch}, learning rate {lr:.3g} in place of {config.optimizer.lr:.3g}"
    )
    return config.model_copy(update=changes), (sentence,)


def short_schedule(schedule: ScheduleConfig, epochs: int, fewer: int) -> ScheduleConfig:
    """Return the schedule scaled to fewer epochs. The warm-up takes at least one step; later epochs are scaled in proportion."""
    if not fewer or fewer == epochs:
        return schedule
    warm = schedule.warmup_epochs
    shorter = max(warm * fewer / epochs, 1 / STEPS) if warm else 0.0
    slope = (fewer - shorter) / (epochs - warm) if epochs > warm else 1.0

    def moved(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(moved(one) for one in value)
        return shorter + (value - warm) * slope if isinstance(value, int | float) else value

    options: Mapping[str, Any] = {
        name: moved(value) if name.endswith("_epochs") else value for name, value in schedule.options.items()
    }
    return ScheduleConfig(name=schedule.name, warmup_epochs=shorter, **options)


def _with_weights_that_exist(config: Config) -> tuple[Config, tuple[str, ...]]:
    weights = config.init.weights
    if weights is None or Path(weights).exists():
        return config, ()
    drawn = config.init.model_copy(update={"weights": None, "ignore": ()})
    return config.model_copy(update={"init": drawn}), (f"there is no {weights} yet, so all weights are drawn from the seed",)


def _with_legal_grid(config: Config, ranks: int) -> tuple[Config, tuple[str, ...]]:
    """Return the configuration with a grid that fits the ranks, and a sentence if its grid was changed.

    A changed grid has as many rows as fit, at most the configured number.
    """
    rows, cols = config.grid.rows, config.grid.cols
    if config.grid.automatic or (ranks % rows == 0 and cols in (None, ranks // rows)):
        return config, ()
    fewer = max(size for size in range(1, rows + 1) if ranks % size == 0)
    changes: dict[str, Any] = {"rows": fewer, "cols": None}
    if fewer != rows:
        changes["tiles"] = None
    wanted = f"{rows} x {cols}" if cols is not None else f"{rows} x n"
    of_ranks = f"{counted(ranks, 'rank')} cannot form"
    note = f"a grid of {fewer} x {ranks // fewer} in place of {wanted}, which {of_ranks}"
    return config.model_copy(update={"grid": config.grid.model_copy(update=changes)}), (note,)
