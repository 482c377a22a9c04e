"""Images of a configuration: files, classes, normalisation, sizes by epoch, and batch norms over a single value.

`open_images` opens the files of the section `data`; `training_images` and `evaluation_images` add the pipeline that prepares
them. Nothing here communicates. `check_single_values` finds batch norms with statistics over a single value per channel, from the
plan, before the first step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.assembly.recipe import ImageFacts, Recipe
from hpctrain.config.schema import SYNTHETIC, AugmentConfig, Config, Split
from hpctrain.core.answers import Fault
from hpctrain.core.errors import ConfigError, DataError, HpctrainError, ShapeError
from hpctrain.core.text import counted
from hpctrain.data.image_file import (
    DataFacts,
    ImageFile,
    ImageForm,
    described,
    differences,
    synthetic_file,
    with_class_order,
)
from hpctrain.data.pipeline import ImageSizes, Pipeline, first_fault
from hpctrain.data.sampler import ValidationSplit, hold_out
from hpctrain.models.state_dict import check_file_fits, declared_state
from hpctrain.nn.network import ImageShape, Network
from hpctrain.storage import weights_file
from hpctrain.training.passes import StatisticsSharing


def image_sizes(config: Config) -> ImageSizes | None:
    """Return the sizes by epoch; None if training images have one size.

    Raises:
        ConfigError: the sizes are not in the order of epochs.
    """
    return ImageSizes(_steps(config)) if config.data.sizes else None


def of_largest(config: Config, pipeline: Pipeline) -> Pipeline:
    """Return the pipeline of training images of the largest size, for which memory and plans are computed."""
    sizes = image_sizes(config)
    return pipeline if sizes is None else pipeline.resized(sizes.largest(config.epochs))


def size_faults(recipe: Recipe) -> Iterator[Fault]:
    """Yield the fault of each size that is out of order, or that the model does not support for any data."""
    config = recipe.config
    if (fault := first_fault(_steps(config))) is not None:
        yield Fault(("data", "sizes", fault[0]), fault[1])
        return
    if not config.data.sizes:
        return
    try:
        _, _, channels = recipe.graph.tensors[0].shape[1:]
    except HpctrainError:  # reported as a fault of the model
        return
    for number, step in enumerate(config.data.sizes):
        try:
            recipe.lowering.graph(1, (step.size, step.size, channels))
        except ShapeError as error:
            rule = f"is {step.size}, which the model {config.model.name} does not support ({str(error).removesuffix('.')})"
            yield Fault(("data", "sizes", number, "size"), rule)


def check_image_shapes(network: Network, shapes: Iterable[ImageShape]) -> None:
    """Raise unless a network also supports images of these shapes (H, W, C).

    Raises:
        ShapeError: a shape is not supported; the message names the shape and the layer.
    """
    for shape in shapes:
        try:
            network.check_shape(shape)
        except ShapeError as error:
            raise ShapeError(
                f"The model supports images of shape {network.image_shape} (H, W, C), but not of {shape}, which this training or "
                f"its evaluation also uses: {error}"
            ) from None


def _steps(config: Config) -> tuple[tuple[int, int], ...]:
    return tuple((step.from_epoch, step.size) for step in config.data.sizes)


CHECKPOINT = "the checkpoint"
_TOP = 5  # a label counts for the metric top5 if it is one of the 5 classes of the largest outputs
#: beginning of notes that the user must see even if nothing else is printed
WARNING = "warning: "


#: key of a checkpoint's metadata: form of the images of its evaluation
EVALUATION_IMAGES = "evaluation_images"


@dataclass(frozen=True)
class Images:
    """A data file and the preparation of its images.

    Attributes:
        notes: notes for the user, one sentence each.
        sizes: sizes of images by epoch; None if they do not change.
        split: division of the file into training and validation; None if all of its images are used.
        validation: whether the images held out for validation are used, rather than the training images.
    """

    file: ImageFile
    pipeline: Pipeline
    notes: tuple[str, ...] = ()
    sizes: ImageSizes | None = None
    split: ValidationSplit | None = None
    validation: bool = False

    @property
    def subset(self) -> np.ndarray | None:
        """Numbers of the file's images that are used, ascending; None if all are used."""
        if self.split is None:
            return None
        return self.split.validation if self.validation else self.split.training

    def __len__(self) -> int:
        return len(self.file) if self.subset is None else len(self.subset)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape (H, W, C) of the network's input, if there is a single one."""
        return self.pipeline.output_shape(*self.file.shape)

    def shapes(self, epochs: int) -> tuple[tuple[int, int, int], ...]:
        """Return the shapes (H, W, C) of the network's input that a training of `epochs` epochs reaches, the largest first.

        Raises:
            ShapeError: the stored images are too small for a size.
        """
        return (self.shape,) if self.sizes is None else self.sizes.shapes(self.pipeline, self.file.shape, epochs)

    def facts(self, epochs: int) -> ImageFacts:
        """Return the facts about these training images. Errors are those of `shapes`."""
        return ImageFacts(self.shapes(epochs), len(self.file.class_names), len(self))


def open_images(config: Config, split: Split) -> ImageFile:
    """Return the configured images of a split: a file, or generated images. The split must be configured.

    Raises:
        DataError: as for `ImageFile.open`.
    """
    path = config.data.files[split]
    if path != SYNTHETIC:
        return ImageFile.open(path)
    made_up = config.data.synthetic
    samples = made_up.samples if split == "train" else made_up.test_samples
    return synthetic_file(split, samples, (made_up.height, made_up.width, made_up.channels), made_up.classes)


def validation_split(config: Config, opened: ImageFile) -> ValidationSplit | None:
    """Return the division of the training file that holds out validation samples; None if no sample is held out.

    Raises:
        DataError: too few samples would be left for training.
    """
    amount = config.data.held_out
    return None if amount is None else hold_out(opened.labels, amount, config.seed, opened.path)


def training_images(config: Config, opened: ImageFile, known: DataFacts | None) -> tuple[Images, DataFacts]:
    """Return the training set, and the facts about it that a checkpoint stores.

    Args:
        opened: configured file.
        known: facts about the data of an earlier training, whose order of classes and normalisation are kept; None if there is
            none.

    Raises:
        DataError: the file has other classes than `known`, another number of channels, or too few samples (`validation_split`).
    """
    file, split, notes = opened, validation_split(config, opened), list[str]()
    held_out = None if split is None else split.validation
    data = DataFacts.of(file, held_out)
    if known is not None:
        file, notes[:] = aligned(opened, known, CHECKPOINT)
        data = replace(DataFacts.of(file, held_out), mean=known.mean, std=known.std)
        if config.data.normalise and (tuple(opened.mean), tuple(opened.std)) != (known.mean, known.std):
            notes.append(f"images are normalised with the mean and deviation of {CHECKPOINT}, not with those of {opened.path}")
    images = Images(file, make_pipeline(config, config.data.augment, data), (), image_sizes(config), split)
    labels = file.labels if images.subset is None else file.labels[images.subset]
    notes += constant_metrics(labels, len(file.class_names), opened.path, config)
    return replace(images, notes=tuple(notes)), data


def evaluation_images(config: Config, files: Mapping[Split, ImageFile], split: Split, data: DataFacts, place: str) -> Images:
    """Return the validation or the test set with the classes and the normalisation of `data`.

    Args:
        files: open files, at least that of `split` or, if its samples are held out of the training file, the training file.
        place: origin of `data`, for messages.

    Raises:
        DataError: the file has other classes, or another number of channels.
    """
    held_out = split == "validation" and config.data.held_out is not None
    opened = files["train" if held_out else split]
    file, notes = aligned(opened, data, place)
    pipeline = make_pipeline(config, config.data.evaluate_augment, data)
    if held_out:
        return Images(file, pipeline, split=validation_split(config, opened), validation=True)
    if opened.manifest.get("images") == data.images:
        notes = (*notes, f"{WARNING}{opened.path} holds the training images, so its results are not those of new images")
    return Images(file, pipeline, notes)


def aligned(opened: ImageFile, known: DataFacts | ImageFile, place: str) -> tuple[ImageFile, tuple[str, ...]]:
    """Return a file with its classes in the order of `known`, and notes on the differences of the two.

    Args:
        known: facts about the data to compare with.
        place: name of the origin of `known`, for messages.

    Raises:
        DataError: the file has other classes, or another number of channels.
    """
    file = with_class_order(opened, known.class_names, place)
    channels, expected = opened.shape[2], known.shape[2]
    if channels != expected:
        raise DataError(
            f"{opened.path} has images of {counted(channels, 'channel')}, those of {place} have {expected}; "
            f"convert {opened.path} again by `hpctrain data convert` with --channels {expected}."
        )
    notes = differences(opened.path, described(file), place, described(known), measured=True)
    if (file.labels != opened.labels).any():
        notes = (f"{opened.path} has another order of classes than {place}; its labels are mapped by class name", *notes)
    return file, notes


def constant_metrics(labels: np.ndarray, classes: int, place: object, config: Config | None = None) -> Iterator[str]:
    """Yield a warning for each metric that has the same value after any training.

    Args:
        labels: labels of the training images, from `place`.
        config: configuration that chooses metrics; None: all accuracies are considered.
    """
    if labels.min() == labels.max():
        yield f"{WARNING}the training images of {place} have only 1 class, so every accuracy will be 100 %"
    for path, metric in () if config is None or classes > _TOP else chosen_metrics(config).items():
        if metric in ("top5", "ema_top5"):
            yield f"{WARNING}{'.'.join(path)} is {metric}, which is always 100 %, as {place} has {counted(classes, 'class')}"


def chosen_metrics(config: Config) -> dict[tuple[str, str], str]:
    """Return the metrics that a configuration chooses, by key."""
    chosen: dict[tuple[str, str], str] = {("checkpoint", "best"): config.checkpoint.best}
    chosen["early_stop", "metric"] = config.early_stop.metric
    if config.schedule.name == "plateau":
        chosen["schedule", "metric"] = config.schedule.options.get("metric", "loss")
    return chosen


def mirrored(images: Images) -> Images:
    """Return the images of the same samples, mirrored left to right."""
    return replace(images, pipeline=images.pipeline.mirrored())


def pictures(
    config: Config, data: DataFacts, form: ImageForm, files: Sequence[Path], threads: int, max_pixels: int | None = None
) -> Images:
    """Return pictures as evaluation images with labels 0 and the classes and normalisation of `data`.

    Args:
        form: form of a data file's images to which pictures are converted first.
        threads: number of threads that decode pictures.
        max_pixels: maximum number of pixels of a picture; see `decoding.decode`.

    Raises:
        ShapeError: pictures cannot be converted to this form.
    """
    from hpctrain.data.pictures import DecodedPictures  # loads Pillow, which trainings may not need

    decoded = DecodedPictures(files, form, threads, max_pixels)
    moments = np.array(data.mean), np.array(data.std)
    file = ImageFile(files[0], decoded, np.zeros(len(files), np.int64), data.class_names, moments, {})
    return Images(file, make_pipeline(config, config.data.evaluate_augment, data))


def training_shape(config: Config, data: DataFacts) -> tuple[int, int, int]:
    """Return the shape (H, W, C) of the network's input in the training that `config` describes, the largest if sizes change."""
    height, width, channels = data.shape
    return of_largest(config, make_pipeline(config, config.data.augment, data)).output_shape(height, width, channels)


def check_shapes(train: tuple[int, int, int], test: tuple[int, int, int]) -> None:
    """Raise unless training and test images have one shape (H, W, C) after their pipelines, as one network reads both.

    Raises:
        ShapeError: the shapes differ.
    """
    if test != train:
        raise ShapeError(
            f"Evaluation images have shape {test} after augmentation, but training images {train} (H, W, C); "
            f"crop or resize them to {train[:2]} in data.evaluate_augment."
        )


def described_training(config: Config, data: DataFacts, shape: ImageShape | None) -> dict[str, Any]:
    """Return the description of a training's data, with the shape of the network's input and the moments that it uses."""
    facts, channels = described(data) | {"image_shape": shape}, len(data.mean)
    return facts if config.data.normalise else facts | {"mean": (0.0,) * channels, "std": (1.0,) * channels}


def make_pipeline(config: Config, augment: tuple[AugmentConfig, ...], data: DataFacts) -> Pipeline:
    """Return the pipeline that applies `augment` and normalises by the mean and deviation of `data`.

    If `config.data.normalise` is false, it does not normalise.
    """
    mean, std = np.array(data.mean), np.array(data.std)
    if not config.data.normalise:
        mean, std = np.zeros_like(mean), np.ones_like(std)
    specs = [(step.name, step.options) for step in augment]
    return Pipeline(specs, seed=config.seed, mean=mean, std=std, dtype=config.dtype)


def check_single_values(recipe: Recipe) -> str:
    """Raise if a batch norm has a single value per channel in every step of the training of a recipe, which has a grid.

    Return a warning if only the last step of an epoch has one; else "", also if a section is "auto" or the images are unknown.

    Raises:
        ConfigError: the message names the layer, and how to change the configuration.
    """
    config, facts = recipe.config, recipe.facts
    if config.epochs == 0 or config.automatic or facts is None:
        return ""
    samples, shapes = facts.samples, sorted(facts.shapes)
    whole, rest = min(config.batch, samples), samples % config.batch if samples > config.batch else 0
    sharing = StatisticsSharing(recipe.plan, config.micro_batches, config.exact.shards)
    if (one := sharing.single((recipe.lowering.graph(1, shape) for shape in shapes), whole)) is not None:
        few = f", as {config.data.train} has {counted(samples, 'image')}" if samples < config.batch else ""
        step = f"every step, of {counted(whole, 'image')}{few}"
        raise ConfigError(f"{one.sentence(step)}; {one.fix}.")
    if (one := sharing.single((recipe.lowering.graph(1, shape) for shape in shapes), rest)) is not None:
        step = f"the last step of each epoch, of {counted(rest, 'image')}"
        fix = f"choose a batch that divides the {samples:,} images of an epoch or leaves a larger remainder"
        return f"{one.sentence(step)}; {fix}"
    return ""


def data_line(config: Config, images: int, held_out: int) -> str:
    """Return the line on the training data and the steps per epoch.

    Args:
        images: number of images per epoch.
        held_out: number of images held out for validation.
    """
    validation = f", {held_out:,} others for validation" if held_out else ""
    few = " (more than all images)" if config.batch > images else ""
    steps = counted(-(-images // config.batch), "step")
    return f"data {config.data.train}: {counted(images, 'image')}{validation}, batch {config.batch}{few}, {steps} per epoch"


def check_files(config: Config) -> tuple[Recipe, Images] | None:
    """Raise unless existing data files, the network and the file of initial weights fit each other. Only headers are read.

    The result is the recipe for the training images, with one column if grid.cols is null, and these images, with notes on all
    sets and on the weights. It is None if the training file is missing or cannot be opened. Other such data files, a missing file
    of weights, and the tensors of a PyTorch file, which has no header, are not checked.

    Raises:
        HpctrainError: validation or evaluation images, a layer or a tensor does not fit; the message is that of a training.
    """
    train = None
    if config.data.train == SYNTHETIC or Path(config.data.train).exists():
        with suppress(HpctrainError, OSError):  # reported elsewhere
            train = open_images(config, "train")
    if train is None:
        return None
    images, _ = training_images(config, train, None)
    recipe = Recipe.of(config, images.facts(config.epochs), (config.grid.rows, config.grid.cols or 1))
    data = DataFacts.of(images.file)
    largest, shapes = recipe.image_shape, images.shapes(config.epochs)
    notes = [*images.notes]
    for split in config.data.evaluated_splits:
        opened: dict[Split, ImageFile] = {"train": images.file}
        if split in config.data.files:
            with suppress(HpctrainError, OSError):  # reported elsewhere
                opened[split] = open_images(config, split)
            if split not in opened:
                continue
        evaluated = evaluation_images(config, opened, split, data, config.data.train)
        if images.sizes is None:
            check_shapes(largest, evaluated.shape)
        notes += evaluated.notes
    for shape in sorted(set(shapes)):
        recipe.lowering.graph(1, shape)
    weights = None if config.init.weights is None else Path(config.init.weights)
    if weights is not None and weights.suffix.lower() == weights_file.SAFETENSORS and weights.is_file():
        content = weights_file.read(weights, header=True)
        _, facts = check_file_fits(declared_state(recipe.model), content, weights, config.init.ignore, config.model.name)
        own = described_training(config, data, largest)
        notes += differences(config.data.train, own, f"{weights} (see init.ignore)", facts)
    return recipe, replace(images, notes=tuple(notes))
