"""The configuration of a run as frozen data: every key with its unit, meaning and range.

Objects of a registry (model, optimiser, schedule, averager, augmentation, reporter) are a name and free options. Options are the
keywords of the constructor; the registry checks them, not this module.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from hpctrain.config.values import (
    AUTO,
    AUTO_SIZE,
    OPEN,
    OPEN_SECTIONS,
    ClassWeights,
    Duration,
    Integer,
    Named,
    Number,
    OpenSection,
    PathText,
    Section,
    Size,
    Text,
    Threads,
    Validation,
    or_shorthand,
    switch,
)

Split = Literal["train", "validation", "test"]

MOST_PIXELS = 65_536
MOST_SAMPLES = 100_000_000  # a rank keeps two numbers per sample in memory


class AugmentConfig(Named):
    """One augmentation or preparation step of images."""

    name: Text = Field(
        description="Name of an augmentation, such as random_resized_crop, flip or randaugment; further keys are its options."
    )


#: value in place of a data file's path, for generated images; in place of the section `data`, for both splits
SYNTHETIC = "synthetic"


class SyntheticConfig(Section):
    """The images that are generated if the path of a data file is `synthetic`."""

    height: Integer = Field(default=32, ge=1, le=MOST_PIXELS, description="Height of a synthetic image, in pixels.")
    width: Integer = Field(default=32, ge=1, le=MOST_PIXELS, description="Width of a synthetic image, in pixels.")
    channels: Integer = Field(default=3, ge=1, le=MOST_PIXELS, description="Number of channels of a synthetic image.")
    classes: Integer = Field(default=10, ge=1, le=MOST_SAMPLES, description="Number of classes of synthetic images.")
    samples: Integer = Field(default=10_000, ge=1, le=MOST_SAMPLES, description="Number of synthetic images to train on.")
    test_samples: Integer = Field(default=1_000, ge=1, le=MOST_SAMPLES, description="Number of synthetic images to evaluate on.")


class MixingConfig(Section):
    """Mixup and cutmix, which mix the images of a step with each other, and their labels in the same proportions."""

    mixup: Number = Field(
        default=0.0,
        ge=0,
        le=4,
        description="Alpha of mixup, in [0, 4]: images and labels x become w x + (1 - w) x', with another sample x' of the step "
        "and w drawn from Beta(alpha, alpha) for each step; 0 switches it off.",
    )
    cutmix: Number = Field(
        default=0.0,
        ge=0,
        le=4,
        description="Alpha of cutmix, in [0, 4]: a box with the share 1 - w of the area is replaced by that of another image of "
        "the step; 0 switches it off.",
    )
    probability: Number = Field(default=1.0, ge=0, le=1, description="Probability that the images of a step are mixed.")
    switch: Number = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Share of mixed steps that use cutmix if mixup is on, too; the others use mixup.",
    )

    @property
    def mixes(self) -> bool:
        """Whether any step may be mixed."""
        return (self.mixup > 0 or self.cutmix > 0) and self.probability > 0


class SizeConfig(Section):
    """The size of training images from an epoch on."""

    from_epoch: Integer = Field(
        default=0, ge=0, description="First epoch in which images have this size, counted from 0; 0 for the first size."
    )
    size: Integer = Field(
        ge=1, le=MOST_PIXELS, description="Side of the images, in pixels; the shorter one if they are not square."
    )


class CacheConfig(Section):
    """The cache of samples that have been read once; true enables the defaults, false switches the cache off."""

    alone: ClassVar[str] = "true, false"

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        json_schema_extra=or_shorthand(
            {"type": "boolean", "description": "Shorthand: true for the defaults, false for {memory: 0}."}
        ),
    )

    memory: Size = Field(
        default=AUTO_SIZE,
        description="Memory per node for samples that its ranks share, in bytes or such as 64GB; 0 switches it off, auto uses "
        "at most half of the memory that is free at the start.",
    )
    fill: Literal["auto", "first_epoch", "start"] = Field(
        default="auto",
        description="Time of filling the memory. With first_epoch, each node reads samples when they are first needed. With "
        "start, one rank of the job reads each sample before the first step, and sends it to the other nodes. auto uses start "
        "on several nodes, else first_epoch.",
    )
    local: Text | None = Field(
        default=None,
        description="Directory on each node, such as $TMPDIR, for a local copy of the samples that do not fit the memory; null "
        "makes no copy.",
    )
    local_limit: Size = Field(
        default=AUTO_SIZE,
        description="Maximum size of the local copy of a file, in bytes or such as 500GB; auto uses at most 90 % of the space "
        "that is free in the directory.",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_switch(cls, value: Any) -> Any:
        value = switch(value)
        return ({} if value else {"memory": 0}) if isinstance(value, bool) else value


class DataConfig(Section):
    """The data files, and the preparation of their images."""

    alone: ClassVar[str] = SYNTHETIC

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        json_schema_extra=or_shorthand({"const": SYNTHETIC, "description": "Shorthand for {train: synthetic, test: synthetic}."}),
    )

    train: PathText = Field(
        description="Path of the HDF5 file to train on, relative to the working directory; or synthetic, for generated images."
    )
    validation: Validation = Field(
        default=None,
        description="Samples to evaluate on during training: a fraction of the training file, such as 0.1, or a number of its "
        "samples, which are then not trained on, or the path of another HDF5 file; null evaluates on test.",
    )
    test: PathText | None = Field(
        default=None,
        description="Path of the HDF5 file to test on, or synthetic, for generated images: at the end of training if validation "
        "is set, else in every evaluation; null for no test.",
    )
    synthetic: SyntheticConfig = Field(
        default_factory=SyntheticConfig, description="The generated images, used if train or test is synthetic."
    )
    augment: tuple[AugmentConfig, ...] = Field(default=(), description="Augmentations of training images, in order.")
    evaluate_augment: tuple[AugmentConfig, ...] = Field(
        default=(), description="Augmentations that prepare evaluation images, such as center_crop, in order."
    )
    sizes: tuple[SizeConfig, ...] = Field(
        default=(),
        description="Sizes of training images by epoch, in order: from_epoch is the first epoch with a size, counted from 0 "
        "(0 for the first size), and size is the shorter side in pixels. The last augmentation with a size option makes this "
        "size; without one, images are resized after all augmentations. An empty list leaves images as augment makes them.",
    )
    mixing: MixingConfig = Field(
        default_factory=MixingConfig,
        description="Mixup and cutmix: the training images of a step are mixed with each other.",
    )
    normalise: bool = Field(
        default=True, description="Normalise images by the mean and standard deviation of the training file, per channel."
    )
    prefetch: Integer = Field(
        default=2, ge=0, description="Number of batches that a thread prepares ahead of the step; 0 uses no thread."
    )
    threads: Threads = Field(
        default="auto",
        description="Number of threads per rank that prepare batches; auto uses a quarter of the rank's cores, from 1 to 8.",
    )
    cache: CacheConfig = Field(default_factory=CacheConfig, description="The cache of samples that have been read once.")
    on_unreadable: Literal["stop", "skip"] = Field(
        default="stop",
        description="Action if a sample cannot be read: end the job (stop), or train with another sample in its place (skip).",
    )
    max_unreadable: Number = Field(
        default=0.01,
        ge=0,
        le=1,
        description="Maximum share of a file's samples, rounded up, that a rank skips as unreadable before the job ends.",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_word(cls, value: Any) -> Any:
        return cls.of_synthetic() if value == SYNTHETIC else value

    @property
    def files(self) -> dict[Split, str]:
        """Paths of the configured data files, or `synthetic`, by split."""
        named: dict[Split, object] = {"train": self.train, "validation": self.validation, "test": self.test}
        return {split: path for split, path in named.items() if isinstance(path, str)}

    @property
    def held_out(self) -> int | float | None:
        """Fraction or number of the training file's samples that validation uses; None if validation uses none of them."""
        return None if isinstance(self.validation, str) else self.validation

    @property
    def evaluated_splits(self) -> tuple[Split, ...]:
        """Split that evaluations during training use, and `test` if it is tested only at their end."""
        splits: tuple[Split, ...] = ("validation", "test")
        return tuple(split for split in splits if getattr(self, split) is not None)

    @property
    def evaluated(self) -> Split | None:
        """Split that evaluations during training use; None without evaluations."""
        return next(iter(self.evaluated_splits), None)

    @staticmethod
    def of_synthetic() -> dict[str, Any]:
        """Return the section that the word `synthetic` abbreviates."""
        return {"train": SYNTHETIC, "test": SYNTHETIC}


class EvaluateConfig(Section):
    """Evaluation during training, on the validation samples or, without them, on the test file."""

    every_epochs: Integer = Field(default=1, ge=0, description="Number of epochs between evaluations; 0 switches evaluation off.")
    batch: Integer | None = Field(
        default=None, ge=1, description="Global batch size of the evaluation, in samples; null uses that of the training."
    )


class EmaConfig(Section):
    """The exponential moving average of the weights."""

    decay: Number | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Decay of the average per update, in (0, 1), such as 0.999; null keeps no average.",
    )
    warm_up: bool = Field(
        default=True,
        description="Use a smaller decay at first: (1 + t) / (10 + t) in the t-th update, while this is below decay.",
    )


class EarlyStopConfig(Section):
    """The early end of a training whose evaluations no longer improve."""

    patience: Integer | None = Field(
        default=None,
        ge=1,
        description="Number of consecutive evaluations without improvement after which training ends; null trains all epochs.",
    )
    metric: Literal["top1", "top5", "loss", "ema_top1", "ema_top5", "ema_loss"] = Field(
        default="top1",
        description="Metric of the evaluations that must improve: a higher top1 or top5, or a lower loss; the prefix ema_ "
        "selects the metric of the averaged weights.",
    )
    min_delta: Number = Field(default=0.0, ge=0, description="Change that an improvement must exceed.")


DEFAULT_SHARDS = 8
MOST_SHARDS = 1_000_000  # far beyond any machine: a larger value is a typing error


class ExactConfig(Section):
    """The order of sums over samples; true uses 8 shards, false lets the order depend on the ranks."""

    alone: ClassVar[str] = "true, false"

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        json_schema_extra=or_shorthand(
            {"type": "boolean", "description": f"Shorthand: true for {DEFAULT_SHARDS} shards, false for none."}
        ),
    )

    shards: Integer | None = Field(
        default=None,
        ge=1,
        le=MOST_SHARDS,
        description="Number of parts of each batch, such as 8. Their sums are added in one fixed order, so that a run is bitwise "
        "the same on every number of ranks that divides the number of parts; null lets the order depend on the ranks.",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_switch(cls, value: Any) -> Any:
        value = switch(value)
        return {"shards": DEFAULT_SHARDS if value else None} if isinstance(value, bool) else value


_MOST_NAME_BYTES = 200  # with the time and number of a run, at most the 255 bytes that file systems allow


def _one_component(value: Any) -> Any:
    if isinstance(value, str) and (value in {".", ".."} or "/" in value or "\0" in value):
        raise PydanticCustomError(
            "name_type", 'must be usable as the name of a directory: it must not contain "/" or be "." or ".."'
        )
    if isinstance(value, str) and len(value.encode(errors="replace")) > _MOST_NAME_BYTES:
        sentence = "must be usable as the name of a directory: it must have at most {most} bytes"
        raise PydanticCustomError("name_type", sentence, {"most": _MOST_NAME_BYTES})
    return value


MOST_RANKS = 1_000_000  # far beyond any machine: a larger value is a typing error
MOST_SECONDS = 1e9  # 31 years: timers of the system have a limit not far above

Part = Annotated[Integer, Field(ge=1)]
Use = Literal["batch", "model", "domain"]


class ModelConfig(Named):
    """The network."""

    name: Text = Field(description='Name of a model in the catalogue, such as "resnet50"; further keys are its options.')


class OptimizerConfig(Named):
    """The optimiser: how a gradient becomes an update."""

    name: Text = Field(
        description="Name of an optimiser: sgd, lars, adam, adamw or lamb; further keys are its options, such as momentum."
    )
    lr: Number = Field(gt=0, description="Base learning rate for the global batch, above 0; the schedule multiplies it.")


class ScheduleConfig(Named):
    """The learning rate over time."""

    name: Text = Field(
        description="Name of a schedule: constant, step, cosine, polynomial, one_cycle or plateau; further keys are its options."
    )
    warmup_epochs: Number = Field(
        default=0.0,
        ge=0,
        description="Number of epochs in which the learning rate rises linearly to its base; fractions are allowed.",
    )


class AveragerConfig(Named):
    """The averaging of gradients over the ranks."""

    name: Text = Field(
        default="sharded",
        description="Name of an averaging strategy, or auto for the shortest predicted step time; further keys are its options.",
    )

    @property
    def automatic(self) -> bool:
        """Whether a strategy must still be chosen."""
        return self.name == AUTO


class LossConfig(Section):
    """The loss: softmax cross entropy."""

    label_smoothing: Number = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of the target probability that is distributed evenly over all classes, in [0, 1).",
    )
    class_weights: ClassWeights = Field(
        default=None,
        description="Weight of each class in the loss of training steps, above 0, in the order of the classes; balanced uses "
        "weights in inverse proportion to the numbers of training images, with mean 1 over the images; null uses no weights.",
    )


class GridConfig(Section, OpenSection):
    """The process grid: the ranks of a split group share samples, those of a data group share weights."""

    model_config = ConfigDict(frozen=True, extra="forbid", json_schema_extra=or_shorthand(OPEN))

    rows: Integer = Field(
        default=1, ge=1, le=MOST_RANKS, description="Number of ranks that split the weights or images of a layer (Pr)."
    )
    cols: Integer | None = Field(
        default=None,
        ge=1,
        le=MOST_RANKS,
        description="Number of ranks that split the batch (Pc); null uses the number of ranks divided by rows.",
    )
    tiles: tuple[Part, Part] | None = Field(
        default=None,
        description="Numbers of vertical and horizontal parts of an image under domain, whose product is rows; null uses "
        "[rows, 1].",
    )


class PlanConfig(OpenSection):
    """The parallelism of each layer, by patterns of layer names, in order; the last matching pattern decides."""

    model_config = ConfigDict(frozen=True, extra="allow", json_schema_extra=or_shorthand(OPEN))
    __pydantic_extra__: dict[str, Use] = Field(init=False)

    default: Use = Field(
        default="batch",
        description="Parallelism of layers that no pattern matches: batch, model (output channels split) or domain (images "
        'split); further keys are patterns, such as "features.*": domain.',
    )

    @property
    def patterns(self) -> dict[str, Use]:
        """Mapping from pattern to use, in order, as a new dict."""
        return dict(self.__pydantic_extra__)


class BatchNormConfig(Section):
    """Batch normalisation."""

    statistics: Literal["local", "synchronised"] = Field(
        default="local",
        description="Samples over which batch statistics are computed: those of all ranks (synchronised), or those of the rank "
        "(local); in a layer under model or domain, local uses those of the split group.",
    )
    momentum: Number = Field(
        default=0.1, gt=0, le=1, description="Weight of a new batch's statistics in the running statistics, in (0, 1]."
    )
    epsilon: Number = Field(default=1e-5, gt=0, description="Number added to the variance before the square root.")


class CheckpointConfig(Section):
    """The checkpoints of a run."""

    every_epochs: Integer = Field(
        default=1, ge=0, description="Number of epochs between checkpoints; 0 writes none at the end of epochs."
    )
    every_steps: Integer = Field(
        default=0, ge=0, description="Number of steps between checkpoints within an epoch; 0 writes none within epochs."
    )
    keep: Integer = Field(default=2, ge=1, description="Number of newest checkpoints to keep; older ones are deleted.")
    best: Literal["top1", "top5", "loss", "ema_top1", "ema_top5", "ema_loss", "none"] = Field(
        default="top1",
        description="Metric that selects the best checkpoint, which is kept next to the newest ones: the highest top1 or top5, "
        "or the lowest loss; the earlier checkpoint if two are equal. The prefix ema_ selects the metric of the averaged "
        "weights; none keeps the newest ones only.",
    )
    layout: Literal["auto", "single", "sharded"] = Field(
        default="auto",
        description="One file written by rank 0 (single), or a directory with one file per rank (sharded); auto uses sharded "
        "for 128 MiB of parameters or more on several nodes.",
    )
    asynchronous: bool = Field(
        default=True,
        description="Write a checkpoint from a copy while training continues; the copy takes memory until it is written. false "
        "makes all ranks wait until the checkpoint is on the disk.",
    )


def _action(*actions: str) -> dict[str, Any]:
    return {"enum": list(actions), "type": "string", "description": "Shorthand for {action: ...}."}


class InitConfig(Section):
    """The start of a training: weights from a file, and layers that are not trained."""

    weights: PathText | None = Field(
        default=None,
        description="File of initial weights with torchvision's names: .safetensors, .pt or .pth; null draws all weights from "
        "the seed.",
    )
    ignore: tuple[Text, ...] = Field(
        default=(),
        description='Patterns of names that are not read from the file, such as "fc.*"; these weights are drawn from the seed.',
    )
    freeze: tuple[Text, ...] = Field(
        default=(),
        description="Patterns of names of layers that are not trained: they have no gradients and no optimiser state, and batch "
        "normalisation uses its running statistics.",
    )
    whiten: Text | None = Field(
        default=None,
        description="Name of a convolution of the images, such as whiten of the model vgg_small. Before init.weights are read, "
        "its filters are computed from patches of training images: directions with variance 1 that are not correlated, and their "
        "negatives; null draws the filters from the seed.",
    )


class NonFiniteConfig(Section):
    """The action if a loss, gradient, parameter or batch statistic is not finite; a plain string is the action."""

    alone: ClassVar[str] = "an action"

    model_config = ConfigDict(frozen=True, extra="forbid", json_schema_extra=or_shorthand(_action("stop", "skip", "rollback")))

    action: Literal["stop", "skip", "rollback"] = Field(
        default="stop",
        description="Action if a value is not finite: end the run (stop), skip the step on all ranks (skip), or return to the "
        "newest checkpoint of the run and continue with another order of samples (rollback).",
    )
    most: Integer = Field(
        default=10,
        ge=1,
        description="Maximum number of consecutive skipped steps, or of rollbacks without a new checkpoint; the run ends if it "
        "is exceeded.",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_action(cls, value: Any) -> Any:
        return {"action": value} if isinstance(value, str) else value


class ChecksConfig(Section):
    """Checks of the state in the memory of the ranks: parameters, running statistics and the optimiser state."""

    every_steps: Integer = Field(
        default=10,
        ge=0,
        description="Number of steps between checks of frozen parameters; all other values are checked in each step. 0 "
        "switches all checks off.",
    )


class HashesConfig(Section):
    """Hashes of the state that a run resumes from. They allow comparing two runs step by step."""

    every_steps: Integer = Field(
        default=0,
        ge=0,
        description="Number of steps between records of hashes, one of each parameter, its optimiser state and each running "
        "statistic, for hpctrain compare; 0 records none.",
    )


class ReporterConfig(Named):
    """One receiver of the metrics and events of a run."""

    name: Text = Field(description="Name of a reporter; further keys are its options.")


class MetricsConfig(Section):
    """The metrics, and where they are reported."""

    tensorboard: bool = Field(default=False, description="Also write TensorBoard event files; requires the extra `export`.")
    interval_seconds: Number = Field(
        default=10.0, gt=0, description="Time between records of progress, and between printed lines without a bar, in seconds."
    )
    reporters: tuple[ReporterConfig, ...] = Field(
        default=(),
        description="Further receivers of the metrics on rank 0: names, or mappings of name and options.",
    )

    @property
    def all_reporters(self) -> tuple[ReporterConfig, ...]:
        """All reporters, including that of `tensorboard` if it is switched on."""
        named = {reporter.name for reporter in self.reporters}
        board = (ReporterConfig(name="tensorboard"),) if self.tensorboard and "tensorboard" not in named else ()
        return (*board, *self.reporters)


class Config(Section):
    """The configuration of one run."""

    name: Annotated[Text, BeforeValidator(_one_component)] = Field(
        default="run", description="Name of the run; the name of its directory begins with it."
    )
    seed: Integer = Field(default=0, ge=0, lt=2**63, description="Seed of weights, sample order, augmentation and dropout.")
    dtype: Literal["float32", "float64"] = Field(default="float32", description="Type of activations, parameters and gradients.")
    backend: Literal["auto", "numpy", "onednn", "cuda"] = Field(
        default="auto",
        description="Kernel set; auto uses cuda if a GPU can be used, else the fastest one on this machine that supports the "
        "dtype.",
    )
    precision: Literal["float32", "tf32", "bfloat16"] = Field(
        default="float32",
        description="Precision of matrix products and convolutions, with dtype float32: tf32 rounds their factors, on GPUs only; "
        "bfloat16 rounds all activations, on GPUs and on CPUs that multiply bfloat16; parameters stay float32.",
    )
    threads: Threads = Field(
        default="auto",
        description="Number of threads per rank; auto uses OMP_NUM_THREADS if it is set, else the rank's cores. Without MPI, "
        "auto leaves out cores that other programs use when the run starts.",
    )
    model: ModelConfig = Field(description="The network: a name, or a mapping of name and options.")
    init: InitConfig = Field(
        default_factory=InitConfig, description="The start of a training: weights from a file, and frozen layers."
    )
    data: DataConfig = Field(description="The data files, and the preparation of their images.")
    batch: Integer = Field(ge=1, description="Global batch size: number of samples per step over all ranks.")
    micro_batches: Integer = Field(
        default=1, ge=1, description="Number of micro-batches: a rank computes its share of the batch in this number of passes."
    )
    exact: ExactConfig = Field(
        default_factory=ExactConfig,
        description="Sums in one fixed order, for bitwise equal runs on different numbers of ranks: true, false, or a mapping "
        "with shards.",
    )
    epochs: Integer = Field(ge=0, description="Number of passes over the training file; 0 only evaluates.")
    optimizer: OptimizerConfig = Field(description="The optimiser: a name, or a mapping of name, learning rate and options.")
    schedule: ScheduleConfig = Field(description="The learning-rate schedule: a name, or a mapping of name and options.")
    ema: EmaConfig = Field(
        default_factory=EmaConfig, description="The exponential moving average of the weights, which is also evaluated."
    )
    loss: LossConfig = Field(default_factory=LossConfig, description="The loss, which is softmax cross entropy.")
    averager: AveragerConfig = Field(
        default_factory=AveragerConfig,
        description="The averaging of gradients over ranks: a name, a mapping of name and options, or auto.",
    )
    grid: GridConfig = Field(default_factory=GridConfig, description="The process grid, rows x columns of ranks, or auto.")
    plan: PlanConfig = Field(
        default_factory=PlanConfig, description="The parallelism of each layer among the ranks that share samples, or auto."
    )
    machine: PathText | None = Field(
        default=None,
        description="Machine model for auto and for the advice of `hpctrain plan show`: a file, or the name of an installed one; "
        "null measures the machine at the start if auto needs it.",
    )
    batch_norm: BatchNormConfig = Field(default_factory=BatchNormConfig, description="The statistics of batch normalisation.")
    on_nonfinite: NonFiniteConfig = Field(
        default_factory=NonFiniteConfig,
        description="The action if a value is not finite: stop, skip, rollback, or a mapping of action and most.",
    )
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="The checkpoints of a run.")
    early_stop: EarlyStopConfig = Field(
        default_factory=EarlyStopConfig, description="The end of a training whose evaluations no longer improve."
    )
    evaluate: EvaluateConfig = Field(default_factory=EvaluateConfig, description="The evaluation during training.")
    progress: Literal["none", "test", "thread"] = Field(
        default="test",
        description="Progress of messages while kernels run: not at all (none), by MPI tests after operators (test), or also by "
        "a thread (thread).",
    )
    transport: Literal["auto", "staged", "mpi", "nccl"] = Field(
        default="auto",
        description="Transport of gradients and parameters between GPUs: through host memory (staged), by an MPI that reads GPU "
        "memory (mpi), or by NCCL (nccl); auto uses mpi if a trial shows that MPI reads GPU memory, else staged. For backend "
        "cuda only.",
    )
    trace: bool = Field(default=False, description="Record every step, write trace.json and print where the time went.")
    metrics: MetricsConfig = Field(default_factory=MetricsConfig, description="The metrics that are reported.")
    deadline_seconds: Number = Field(
        default=300.0,
        gt=0,
        le=MOST_SECONDS,
        description="Maximum time that a rank waits for other ranks, or makes no progress, before it ends the job, in seconds.",
    )
    max_time: Duration = Field(
        default=None,
        description='Wall time by which the run must have ended with a checkpoint, such as "3h50m", "00:50:00" or a number of '
        "seconds; slurm uses the end of the Slurm job; null sets no limit.",
    )
    checks: ChecksConfig = Field(default_factory=ChecksConfig, description="The checks of the state in the memory of the ranks.")
    hashes: HashesConfig = Field(default_factory=HashesConfig, description="The hashes for the comparison of runs step by step.")
    flight: Text = Field(
        default="run",
        description="Directory of the flight records, in which each rank records its operations and waits for hpctrain autopsy: "
        "run is the run's directory, none records nothing, any other value is a path, such as one on the nodes' local disks.",
    )
    output: PathText = Field(
        default="runs",
        description="Directory in which run directories are created. As in all paths, ~ and $VARIABLE are expanded.",
    )

    @property
    def automatic(self) -> tuple[str, ...]:
        """The sections among grid, plan and averager that a run chooses at its start."""
        return tuple(key for key in OPEN_SECTIONS if getattr(self, key).automatic)
