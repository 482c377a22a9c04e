"""What a run is, as frozen data: every field with its unit, its meaning and its range.

Objects made by a registry (model, optimiser, schedule, averager, augmentation) are a name and free options; the options are
the constructor's keywords and are checked by the registry, which this module does not know.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

# A number with an exponent that YAML 1.1 takes for a string: "1e-3", "1.5E4", ".5e1".
_EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")


def plain(value: Any) -> Any:
    """An option as immutable plain data: lists become tuples, "1e-3" a float.

    Raises:
        ValueError: a value that is no scalar, list or mapping with string keys, or a number that is not finite.
    """
    if isinstance(value, str) and _EXPONENT.fullmatch(value):
        value = float(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a finite number")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return tuple(plain(item) for item in value)
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: plain(item) for key, item in value.items()}
    raise ValueError("a number, string, boolean, list or mapping with string keys")


def _no_bool(value: Any) -> Any:
    # Python counts True as 1, so `batch: yes` would pass for 1.
    if isinstance(value, bool):
        raise PydanticCustomError("number_type", "must be a number")
    return value


def _one_component(value: Any) -> Any:
    if isinstance(value, str) and (value in {".", ".."} or "/" in value or "\0" in value):
        raise PydanticCustomError(
            "name_type", 'must be usable as the name of a directory, so it has no "/" and is not "." or ".."'
        )
    return value


def _count_or_auto(value: Any) -> Any:
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise PydanticCustomError("threads_type", 'must be "auto" or an integer of at least 1')


Integer = Annotated[int, BeforeValidator(_no_bool)]
Number = Annotated[float, BeforeValidator(_no_bool), Field(allow_inf_nan=False)]
Part = Annotated[int, BeforeValidator(_no_bool), Field(ge=1)]
Text = Annotated[str, Field(min_length=1)]
Use = Literal["batch", "model", "domain"]
Threads = Annotated[int | Literal["auto"], BeforeValidator(_count_or_auto)]


class Section(BaseModel):
    """A mapping of known keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def _or_name(schema: dict[str, Any]) -> None:
    """JSON schema of a section that may also be written as its name alone."""
    whole = dict(schema)
    schema.clear()
    schema["anyOf"] = [{"type": "string", "description": "Shorthand for {name: ...}."}, whole]


class Named(BaseModel):
    """A registry name and the options of what it names; a plain string is shorthand for {name: ...}."""

    model_config = ConfigDict(frozen=True, extra="allow", json_schema_extra=_or_name)

    name: Text = Field(description="Name in the registry: the module or the class that is made.")

    @model_validator(mode="before")
    @classmethod
    def _from_string(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _plain_options(self) -> Named:
        extra = self.__pydantic_extra__ or {}
        for key, item in extra.items():
            try:
                extra[key] = plain(item)
            except ValueError as error:
                raise PydanticCustomError("option", "must be {rule}", {"option": key, "rule": str(error)}) from None
        return self

    @property
    def options(self) -> dict[str, Any]:
        """The keywords beside the declared fields; a fresh dict, lists as tuples."""
        return dict(self.__pydantic_extra__ or {})


class ModelConfig(Named):
    """The network."""

    name: Text = Field(description='Model in the catalogue, such as "resnet50"; further keys are the model\'s options.')


class OptimizerConfig(Named):
    """How a gradient becomes an update."""

    name: Text = Field(description='Optimiser: "sgd" or "lars"; further keys are its options (momentum, weight_decay, ...).')
    lr: Number = Field(gt=0, description="Base learning rate for the global batch; the schedule multiplies it. Must be > 0.")


class ScheduleConfig(Named):
    """The learning rate over time."""

    name: Text = Field(description="constant, step, cosine or polynomial; further keys are the schedule's options.")
    warmup_epochs: Number = Field(default=0.0, ge=0, description="Epochs of linear warm-up to the base learning rate.")


class AveragerConfig(Named):
    """How gradients are averaged over the ranks."""

    name: Text = Field(default="sharded", description="Averaging strategy; further keys are the strategy's options.")


class AugmentConfig(Named):
    """One step of image preparation."""

    name: Text = Field(
        description="pad_crop {padding px}, random_resized_crop {size px, scale area fractions, ratio}, center_crop {size px}, "
        "flip {probability}."
    )


class DataConfig(Section):
    """The images."""

    train: Text = Field(description="Path of the HDF5 file to train on, as written: relative to the working directory.")
    test: Text | None = Field(default=None, description="Path of the HDF5 file to evaluate on; null: no evaluation.")
    augment: tuple[AugmentConfig, ...] = Field(default=(), description="Steps applied to training images, in order.")
    evaluate_augment: tuple[AugmentConfig, ...] = Field(default=(), description="Steps applied to evaluation images, in order.")
    normalise: bool = Field(default=True, description="Subtract the file's mean and divide by its deviation, per channel.")
    prefetch: Integer = Field(default=2, ge=0, description="Batches made ready ahead of the step by a thread (0: no thread).")
    cache: bool = Field(default=True, description="Keep the file's uint8 images in memory after the first read.")


class LossConfig(Section):
    """Softmax cross entropy."""

    label_smoothing: Number = Field(
        default=0.0, ge=0, lt=1, description="Probability mass spread evenly over the classes, in [0, 1)."
    )


class GridConfig(Section):
    """The process grid: the ranks of a column share samples, the ranks of a row share weights."""

    rows: Integer = Field(default=1, ge=1, description="Ranks that split one layer's weights or images (Pr).")
    cols: Integer | None = Field(default=None, ge=1, description="Ranks that split the batch (Pc); null: world size / rows.")
    tiles: tuple[Part, Part] | None = Field(
        default=None, description="Parts [vertical, horizontal] of an image under domain, rows in all; null: [rows, 1]."
    )
    overlap: tuple[Text, ...] = Field(
        default=(), description="Patterns of convolutions under domain whose interior is computed while their halos travel."
    )


class PlanConfig(BaseModel):
    """What the rows of the grid do, layer by layer: patterns of layer names, in order; the last one that matches counts."""

    model_config = ConfigDict(frozen=True, extra="allow")
    __pydantic_extra__: dict[str, Use] = Field(init=False)

    default: Use = Field(
        default="batch",
        description='Use of layers that no pattern matches: batch, model (output channels split) or domain (images split); '
        'further keys are patterns, such as "features.*": domain.',
    )

    @property
    def patterns(self) -> dict[str, Use]:
        """Pattern -> use, in order; a fresh dict."""
        return dict(self.__pydantic_extra__)


class BatchNormConfig(Section):
    """Batch normalisation."""

    statistics: Literal["local", "synchronised"] = Field(
        default="local", description="Batch statistics of the ranks that share samples, or of all ranks of the step."
    )
    momentum: Number = Field(default=0.1, gt=0, le=1, description="Weight of the new batch in the running statistics, in (0, 1].")
    epsilon: Number = Field(default=1e-5, gt=0, description="Added to the variance before the square root.")


class CheckpointConfig(Section):
    """What is kept for a restart."""

    every_epochs: Integer = Field(default=1, ge=0, description="Epochs between checkpoints (0: off).")
    every_steps: Integer = Field(default=0, ge=0, description="Steps between checkpoints inside an epoch (0: off).")
    keep: Integer = Field(default=2, ge=1, description="Newest checkpoints kept; older ones are deleted.")


class EvaluateConfig(Section):
    """Evaluation on the test file."""

    every_epochs: Integer = Field(default=1, ge=0, description="Epochs between evaluations (0: off).")
    batch: Integer | None = Field(default=None, ge=1, description="Global batch, samples; null: the training batch.")


class MetricsConfig(Section):
    """What is reported."""

    tensorboard: bool = Field(default=False, description="Write TensorBoard event files too (needs the extra `export`).")
    interval_seconds: Number = Field(default=10.0, gt=0, description="Seconds between progress lines where there is no terminal.")


class Config(Section):
    """One run."""

    name: Annotated[Text, BeforeValidator(_one_component)] = Field(
        default="run", description="Name of the run; its directory is made from it."
    )
    seed: Integer = Field(default=0, ge=0, lt=2**63, description="Seed of weights, sample order, augmentation and dropout.")
    dtype: Literal["float32", "float64"] = Field(default="float32", description="Type of activations, parameters, gradients.")
    backend: Literal["auto", "numpy", "onednn"] = Field(
        default="auto", description="Kernel set; auto: the fastest that is here and computes this dtype."
    )
    threads: Threads = Field(default="auto", description="Threads per rank; auto: the node's cores over its local ranks.")
    model: ModelConfig = Field(description="The network: a name, or a mapping of name and options.")
    data: DataConfig = Field(description="The images.")
    batch: Integer = Field(ge=1, description="Global batch: samples of one step over all ranks.")
    micro_batches: Integer = Field(default=1, ge=1, description="Parts into which a rank splits its share of the batch.")
    epochs: Integer = Field(ge=0, description="Passes over the training file (0: evaluation only).")
    optimizer: OptimizerConfig = Field(description="The optimiser.")
    schedule: ScheduleConfig = Field(description="The learning-rate schedule.")
    loss: LossConfig = Field(default_factory=LossConfig, description="The loss.")
    averager: AveragerConfig = Field(default_factory=AveragerConfig, description="Averaging of gradients over ranks.")
    grid: GridConfig = Field(default_factory=GridConfig, description="The process grid.")
    plan: PlanConfig = Field(default_factory=PlanConfig, description="What the grid's rows do, layer by layer.")
    batch_norm: BatchNormConfig = Field(default_factory=BatchNormConfig, description="Batch normalisation.")
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="Checkpoints.")
    evaluate: EvaluateConfig = Field(default_factory=EvaluateConfig, description="Evaluation.")
    progress: Literal["auto", "none", "test", "thread"] = Field(
        default="auto",
        description="Who moves messages while kernels run: nobody, a test after each operator, or a thread as well; auto takes "
        "test unless a measurement at the start leaves no doubt that another one is faster.",
    )
    trace: bool = Field(default=False, description="Record every step; write trace.json and print where the time went.")
    metrics: MetricsConfig = Field(default_factory=MetricsConfig, description="Metrics.")
    deadline_seconds: Number = Field(default=300.0, gt=0, description="Seconds a rank waits for others before the job is ended.")
    output: Text = Field(default="runs", description="Directory in which run directories are made.")
