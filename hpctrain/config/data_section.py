"""The section `data` of a configuration: files or made-up images, and what is done with them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field, model_validator

from hpctrain.config.values import Integer, Named, Number, PathText, Section, Text, Threads, switch
from hpctrain.config.size import AUTO, Size

MOST_PIXELS = 65_536
MOST_SAMPLES = 100_000_000  # two numbers of each are in memory


class AugmentConfig(Named):
    """One step of image preparation."""

    name: Text = Field(
        description="Name of an augmentation, such as random_resized_crop, flip or randaugment; further keys are its options."
    )


#: in place of a data file's path: images are made up; in place of the section `data`: those of both splits are
SYNTHETIC = "synthetic"


class SyntheticConfig(Section):
    """The images that are made up where a path is `synthetic`."""

    height: Integer = Field(default=32, ge=1, le=MOST_PIXELS, description="Height of a made-up image, in pixels.")
    width: Integer = Field(default=32, ge=1, le=MOST_PIXELS, description="Width of a made-up image, in pixels.")
    channels: Integer = Field(default=3, ge=1, le=MOST_PIXELS, description="Number of channels of a made-up image.")
    classes: Integer = Field(default=10, ge=1, le=MOST_SAMPLES, description="Number of classes of made-up images.")
    samples: Integer = Field(default=10_000, ge=1, le=MOST_SAMPLES, description="Number of made-up images to train on.")
    test_samples: Integer = Field(default=1_000, ge=1, le=MOST_SAMPLES, description="Number of made-up images to evaluate on.")


class MixingConfig(Section):
    """The images of a step mixed with each other, and their labels with them."""

    mixup: Number = Field(
        default=0.0,
        ge=0,
        le=4,
        description="Alpha of mixup, in [0, 4]: images and labels are w of their own and 1 - w of another's, w drawn from "
        "Beta(alpha, alpha) for each step; 0 switches it off.",
    )
    cutmix: Number = Field(
        default=0.0,
        ge=0,
        le=4,
        description="Alpha of cutmix, in [0, 4]: a box of 1 - w of the area is taken from another image of the step; 0 switches "
        "it off.",
    )
    probability: Number = Field(default=1.0, ge=0, le=1, description="Share of steps that are mixed.")
    switch: Number = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Share of mixed steps that take cutmix, where mixup is on, too; the others take mixup.",
    )

    @property
    def mixes(self) -> bool:
        """True where any step may be mixed."""
        return (self.mixup > 0 or self.cutmix > 0) and self.probability > 0


class SizeConfig(Section):
    """The size of training images from an epoch on."""

    from_epoch: Integer = Field(
        default=0, ge=0, description="Number of epochs that are done when images get this size; 0 for the first size."
    )
    size: Integer = Field(
        ge=1, le=MOST_PIXELS, description="Side of the images, in pixels; of images that are not square, the shorter one."
    )


def _or_switch(schema: dict[str, Any]) -> None:
    """JSON schema of the section that may also be true or false."""
    whole = dict(schema)
    schema.clear()
    schema["anyOf"] = [{"type": "boolean", "description": "Shorthand: true for the defaults, false for {memory: 0}."}, whole]


class CacheConfig(Section):
    """The levels in which samples are kept that have been read once; true stands for the defaults, false for none."""

    model_config = ConfigDict(frozen=True, extra="forbid", json_schema_extra=_or_switch)

    memory: Size = Field(
        default=AUTO,
        description="Memory of a node in which its ranks share samples, as a number of bytes or such as 64GB; 0 switches it off, "
        "auto takes at most half of what is free at the start.",
    )
    fill: Literal["auto", "first_epoch", "start"] = Field(
        default="auto",
        description="Time at which memory is filled: in the first_epoch each node reads samples as they come up; at the start "
        "all are read before the first step, each by one rank of the job, and sent to the other nodes; auto takes start where "
        "there are several nodes.",
    )
    local: Text | None = Field(
        default=None,
        description="Directory of each node, such as $TMPDIR, for a local copy of samples that memory does not hold; null makes "
        "none.",
    )
    local_limit: Size = Field(
        default=AUTO,
        description="Largest size of the local copy of a file, as a number of bytes or such as 500GB; auto takes at most 90 % of "
        "what is free in the directory.",
    )
    keep: bool = Field(
        default=False,
        description="Leave the local copy on the node, of all samples, for a later run on the same data file; false removes it.",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_switch(cls, value: Any) -> Any:
        value = switch(value)
        return ({} if value else {"memory": 0}) if isinstance(value, bool) else value


def _or_synthetic(schema: dict[str, Any]) -> None:
    """JSON schema of the section that may also be the one word."""
    whole = dict(schema)
    schema.clear()
    schema["anyOf"] = [{"const": SYNTHETIC, "description": "Shorthand for {train: synthetic, test: synthetic}."}, whole]


class DataConfig(Section):
    """The images."""

    model_config = ConfigDict(frozen=True, extra="forbid", json_schema_extra=_or_synthetic)

    train: PathText = Field(
        description="Path of the HDF5 file to train on, relative to the working directory; or synthetic, for made-up images."
    )
    test: PathText | None = Field(
        default=None,
        description="Path of the HDF5 file to evaluate on, or synthetic, for made-up images; null switches evaluation off.",
    )
    synthetic: SyntheticConfig = Field(
        default_factory=SyntheticConfig, description="The images that are made up where train or test is synthetic."
    )
    augment: tuple[AugmentConfig, ...] = Field(default=(), description="Augmentations of training images, in order.")
    evaluate_augment: tuple[AugmentConfig, ...] = Field(
        default=(), description="Preparation of evaluation images, by the same names, in order."
    )
    sizes: tuple[SizeConfig, ...] = Field(
        default=(),
        description="Sizes of training images by epoch, in order: from_epoch is the number of epochs done when a size begins (0 "
        "for the first), size the shorter side in pixels. The last augmentation that has a size takes it; where none has, images "
        "are resized behind all. An empty list leaves images as augment makes them.",
    )
    mixing: MixingConfig = Field(
        default_factory=MixingConfig,
        description="Mixup and cutmix of training images: those of a step are mixed with each other.",
    )
    normalise: bool = Field(
        default=True, description="Subtract the training file's mean from images and divide them by its deviation, per channel."
    )
    prefetch: Integer = Field(
        default=2, ge=0, description="Number of batches that a thread prepares ahead of the step; 0 uses no thread."
    )
    threads: Threads = Field(
        default="auto",
        description="Number of threads per rank that make a batch; auto takes a quarter of the rank's cores, from 1 to 8.",
    )
    cache: CacheConfig = Field(
        default_factory=CacheConfig, description="The levels in which samples are kept after they have been read once."
    )
    on_unreadable: Literal["stop", "skip"] = Field(
        default="stop",
        description="Consequence of a sample that cannot be read: stop ends the job, skip trains on with another in its place.",
    )
    max_unreadable: Number = Field(
        default=0.01,
        ge=0,
        le=1,
        description="Share of a file's samples, rounded up, that a rank may find unreadable under skip before the job ends.",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_word(cls, value: Any) -> Any:
        return cls.of_synthetic() if value == SYNTHETIC else value

    @staticmethod
    def of_synthetic() -> dict[str, Any]:
        """The section that the one word stands for."""
        return {"train": SYNTHETIC, "test": SYNTHETIC}
