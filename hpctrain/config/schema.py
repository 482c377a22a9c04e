"""A run as frozen data: every key with its unit, its meaning and its range.

Objects made by a registry (model, optimiser, schedule, averager, augmentation) are a name and free options; the options are
the
constructor's keywords and are checked by the registry, which this module does not know.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from hpctrain.config.values import (
    AUTO,
    AUTO_SIZE,
    OPEN,
    OPEN_SECTIONS,
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
    or_shorthand,
    switch,
)

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
    """The images that are generated if a path is `synthetic`."""

    height: Integer = Field(default=32, ge=1, le=MOST_PIXELS, description="Height of a synthetic image, in pixels.")
    width: Integer = Field(default=32, ge=1, le=MOST_PIXELS, description="Width of a synthetic image, in pixels.")
    channels: Integer = Field(default=3, ge=1, le=MOST_PIXELS, description="Number of channels of a synthetic image.")
    classes: Integer = Field(default=10, ge=1, le=MOST_SAMPLES, description="Number of classes of synthetic images.")
    samples: Integer = Field(default=10_000, ge=1, le=MOST_SAMPLES, description="Number of synthetic images to train on.")
    test_samples: Integer = Field(default=1_000, ge=1, le=MOST_SAMPLES, description="Number of synthetic images to evaluate on.")


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
        """True if any step may be mixed."""
        return (self.mixup > 0 or self.cutmix > 0) and self.probability > 0


class SizeConfig(Section):
    """The size of training images from an epoch on."""

    from_epoch: Integer = Field(
        default=0, ge=0, description="Number of epochs that are done when images get this size; 0 for the first size."
    )
    size: Integer = Field(
        ge=1, le=MOST_PIXELS, description="Side of the images, in pixels; of images that are not square, the shorter one."
    )


class CacheConfig(Section):
    """The cache of samples that have been read once; true stands for the defaults, false for none."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        json_schema_extra=or_shorthand(
            {"type": "boolean", "description": "Shorthand: true for the defaults, false for {memory: 0}."}
        ),
    )

    memory: Size = Field(
        default=AUTO_SIZE,
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
        default=AUTO_SIZE,
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


class DataConfig(Section):
    """The images."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        json_schema_extra=or_shorthand({"const": SYNTHETIC, "description": "Shorthand for {train: synthetic, test: synthetic}."}),
    )

    train: PathText = Field(
        description="Path of the HDF5 file to train on, relative to the working directory; or synthetic, for generated images."
    )
    test: PathText | None = Field(
        default=None,
        description="Path of the HDF5 file to evaluate on, or synthetic, for generated images; null switches evaluation off.",
    )
    synthetic: SyntheticConfig = Field(
        default_factory=SyntheticConfig, description="The generated images, used if train or test is synthetic."
    )
    augment: tuple[AugmentConfig, ...] = Field(default=(), description="Augmentations of training images, in order.")
    evaluate_augment: tuple[AugmentConfig, ...] = Field(
        default=(), description="Preparation of evaluation images, by the same names, in order."
    )
    sizes: tuple[SizeConfig, ...] = Field(
        default=(),
        description="Sizes of training images by epoch, in order: from_epoch is the number of epochs done when a size begins (0 "
        "for the first), size the shorter side in pixels. The last augmentation that has a size takes it; where none has, images "
        "are resized after all others. An empty list leaves images as augment makes them.",
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
    cache: CacheConfig = Field(default_factory=CacheConfig, description="The cache of samples that have been read once.")
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
        """Return the section that the one word stands for."""
        return {"train": SYNTHETIC, "test": SYNTHETIC}


class EvaluateConfig(Section):
    """Evaluation on the test file."""

    every_epochs: Integer = Field(
        default=1, ge=0, description="Number of epochs from one evaluation to the next; 0 switches them off."
    )
    batch: Integer | None = Field(
        default=None, ge=1, description="Global batch of the evaluation, in samples; null takes the training batch."
    )


class EmaConfig(Section):
    """The exponential moving average of the weights."""

    decay: Number | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Share of the average of weights that is kept in an update, in (0, 1), such as 0.999; null keeps no average.",
    )
    warm_up: bool = Field(
        default=True,
        description="Keep less of the average at first: (1 + t) / (10 + t) in the t-th update, as long as that is below decay.",
    )


class EarlyStopConfig(Section):
    """The end of a training whose evaluations no longer improve."""

    patience: Integer | None = Field(
        default=None,
        ge=1,
        description="Number of consecutive evaluations without improvement after which training ends; null trains all epochs.",
    )
    metric: Literal["top1", "top5", "loss", "ema_top1", "ema_top5", "ema_loss"] = Field(
        default="top1",
        description="Measure of evaluations by which training ends early: a higher top1 or top5 is better, and a lower loss; "
        "ema_top1 and so on are those of the average of weights.",
    )
    min_delta: Number = Field(default=0.0, ge=0, description="Minimum change that counts as an improvement.")


DEFAULT_SHARDS = 8
MOST_SHARDS = 1_000_000  # far beyond any machine: what is larger is a slip of the pen


class ExactConfig(Section):
    """The order of sums over samples; true takes 8 shards, false leaves the order to the ranks."""

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
        description="Number of parts of each batch whose sums are added in one fixed order, so that a run has the same bits on "
        "any number of ranks that divides it, such as 8; null leaves the order to the ranks.",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_switch(cls, value: Any) -> Any:
        value = switch(value)
        if isinstance(value, bool):
            return {"shards": DEFAULT_SHARDS if value else None}
        return value


_MOST_NAME_BYTES = 200  # with the time and number of a run, at most the 255 bytes that file systems allow


def _one_component(value: Any) -> Any:
    if isinstance(value, str) and (value in {".", ".."} or "/" in value or "\0" in value):
        raise PydanticCustomError(
            "name_type", 'must be usable as the name of a directory, so it has no "/" and is not "." or ".."'
        )
    if isinstance(value, str) and len(value.encode(errors="replace")) > _MOST_NAME_BYTES:
        sentence = "must be usable as the name of a directory, so it has at most {most} bytes"
        raise PydanticCustomError("name_type", sentence, {"most": _MOST_NAME_BYTES})
    return value


MOST_RANKS = 1_000_000  # far beyond any machine: what is larger is a slip of the pen
MOST_SECONDS = 1e9  # 31 years; timers of the system end somewhere beyond it

Part = Annotated[Integer, Field(ge=1)]
Use = Literal["batch", "model", "domain"]


class ModelConfig(Named):
    """The network."""

    name: Text = Field(description='Name of a model in the catalogue, such as "resnet50"; further keys are its options.')


class OptimizerConfig(Named):
    """The optimiser: how a gradient becomes an update."""

    name: Text = Field(
        description="Name of an optimiser: sgd, lars, adamw or lamb; further keys are its options, such as momentum."
    )
    lr: Number = Field(gt=0, description="Base learning rate for the global batch, above 0; the schedule multiplies it.")


class ScheduleConfig(Named):
    """The learning rate over time."""

    name: Text = Field(description="Name of a schedule: constant, step, cosine or polynomial; further keys are its options.")
    warmup_epochs: Number = Field(
        default=0.0,
        ge=0,
        description="Number of epochs in which the learning rate rises linearly to its base; fractions are allowed.",
    )


class AveragerConfig(Named):
    """The averaging of gradients over the ranks."""

    name: Text = Field(
        default="sharded",
        description="Name of an averaging strategy, or auto (the fastest by prediction); further keys are its options.",
    )

    @property
    def automatic(self) -> bool:
        """True if the strategy is still to be chosen."""
        return self.name == AUTO


class LossConfig(Section):
    """Softmax cross entropy."""

    label_smoothing: Number = Field(
        default=0.0, ge=0, lt=1, description="Share of the target probability that is spread evenly over all classes, in [0, 1)."
    )


class GridConfig(Section, OpenSection):
    """The process grid: the ranks of a split group share samples, those of a data group share weights."""

    model_config = ConfigDict(frozen=True, extra="forbid", json_schema_extra=or_shorthand(OPEN))

    rows: Integer = Field(
        default=1, ge=1, le=MOST_RANKS, description="Number of ranks that split one layer's weights or images (Pr)."
    )
    cols: Integer | None = Field(
        default=None,
        ge=1,
        le=MOST_RANKS,
        description="Number of ranks that split the batch (Pc); null takes the number of ranks divided by rows.",
    )
    tiles: tuple[Part, Part] | None = Field(
        default=None,
        description="Numbers of parts [vertical, horizontal] of an image under domain; their product is rows; null takes "
        "[rows, 1].",
    )
    overlap: tuple[Text, ...] = Field(
        default=(),
        description="Patterns of the names of convolutions under domain whose interior is computed while their halos travel.",
    )


class PlanConfig(OpenSection):
    """The parallelism of each layer: patterns of layer names, in order; the last one that matches counts."""

    model_config = ConfigDict(frozen=True, extra="allow", json_schema_extra=or_shorthand(OPEN))
    __pydantic_extra__: dict[str, Use] = Field(init=False)

    default: Use = Field(
        default="batch",
        description="Parallelism of layers that no pattern matches: batch, model (output channels split) or domain (images "
        'split); further keys are patterns, such as "features.*": domain.',
    )

    @property
    def patterns(self) -> dict[str, Use]:
        """Pattern -> use, in order; a fresh dict."""
        return dict(self.__pydantic_extra__)


class BatchNormConfig(Section):
    """Batch normalisation."""

    statistics: Literal["local", "synchronised"] = Field(
        default="local",
        description="Samples that batch statistics are taken over: those of the ranks that share samples (local), or of all "
        "ranks (synchronised).",
    )
    momentum: Number = Field(
        default=0.1, gt=0, le=1, description="Weight of a new batch's statistics in the running ones, in (0, 1]."
    )
    epsilon: Number = Field(default=1e-5, gt=0, description="Number added to the variance before its square root is taken.")


class CheckpointConfig(Section):
    """The checkpoints of a run."""

    every_epochs: Integer = Field(
        default=1, ge=0, description="Number of epochs from one checkpoint to the next; 0 switches them off."
    )
    every_steps: Integer = Field(
        default=0, ge=0, description="Number of steps from one checkpoint to the next inside an epoch; 0 switches them off."
    )
    keep: Integer = Field(
        default=2, ge=1, description="Number of checkpoints that are kept, the newest ones; older ones are deleted."
    )
    best: Literal["top1", "top5", "loss", "ema_top1", "ema_top5", "ema_loss", "none"] = Field(
        default="top1",
        description="Measure by which the checkpoint with the best evaluation is kept next to the newest ones: the highest top1 "
        "or top5, or the lowest loss, the earlier one where two are equal (ema_top1 and so on are those of the average of "
        "weights); none keeps the newest ones only.",
    )
    layout: Literal["auto", "single", "sharded"] = Field(
        default="auto",
        description="One file that rank 0 writes (single), or a directory with a file of each rank (sharded); auto takes sharded "
        "for 128 MiB of parameters or more on several nodes.",
    )
    asynchronous: bool = Field(
        default=True,
        description="Write a checkpoint from a copy while training continues, which takes the memory of the copy meanwhile; "
        "false makes all ranks wait until it is on the disk.",
    )


def _action(*actions: str) -> dict[str, Any]:
    return {"enum": list(actions), "type": "string", "description": "Shorthand for {action: ...}."}


class InitConfig(Section):
    """The start of a training: weights from a file, and layers that are not trained."""

    weights: PathText | None = Field(
        default=None,
        description="File of weights in torchvision's names that training starts from: .safetensors, .pt or .pth; null draws all "
        "weights by the seed.",
    )
    ignore: tuple[Text, ...] = Field(
        default=(),
        description='Patterns of names that are not taken from the file, such as "fc.*"; these weights are drawn by the seed.',
    )
    freeze: tuple[Text, ...] = Field(
        default=(),
        description="Patterns of names of layers that are not trained: they have no gradients and no optimiser state, and their "
        "batch norms compute as in evaluation.",
    )


class NonFiniteConfig(Section):
    """The answer to a loss, gradient, parameter or batch statistic that is not finite; a plain string is its action."""

    model_config = ConfigDict(frozen=True, extra="forbid", json_schema_extra=or_shorthand(_action("stop", "skip", "rollback")))

    action: Literal["stop", "skip", "rollback"] = Field(
        default="stop",
        description="Answer to values that are not finite: end the run (stop), leave the step out on all ranks (skip), or go "
        "back to the newest checkpoint of the run, and on in another order of samples (rollback).",
    )
    most: Integer = Field(
        default=10,
        ge=1,
        description="Largest number of steps skipped in a row, or of times that the run goes back without coming to another "
        "checkpoint; where it is not enough, the run ends.",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_action(cls, value: Any) -> Any:
        return {"action": value} if isinstance(value, str) else value


class LostRankConfig(Section):
    """The answer to a rank that dies; a plain string is its action."""

    model_config = ConfigDict(frozen=True, extra="forbid", json_schema_extra=or_shorthand(_action("stop", "shrink")))

    action: Literal["stop", "shrink"] = Field(
        default="stop",
        description="Answer to a rank or node that dies: end the run (stop), or continue without it from the newest checkpoint, "
        "in the same job (shrink, experimental), which needs Open MPI 5 under mpiexec --with-ft ulfm.",
    )
    least: Integer = Field(
        default=1, ge=1, le=MOST_RANKS, description="Smallest number of ranks to continue with; if fewer are left, the run ends."
    )

    @model_validator(mode="before")
    @classmethod
    def _from_action(cls, value: Any) -> Any:
        return {"action": value} if isinstance(value, str) else value

    @property
    def shrinks(self) -> bool:
        """Return whether the run continues without ranks that die."""
        return self.action == "shrink"


class ChecksConfig(Section):
    """Checks of what ranks hold in memory: parameters, running statistics and the optimiser's state."""

    every_steps: Integer = Field(
        default=10,
        ge=0,
        description="Number of steps from one check to the next, each of a part of what ranks must hold alike; 0 switches them "
        "off, and with them the sums of what every step has read, and those that owners keep of the optimiser's state.",
    )


class HashesConfig(Section):
    """Hashes of the state that a run resumes from, by which two runs are compared step by step."""

    every_steps: Integer = Field(
        default=0,
        ge=0,
        description="Number of steps from one record of hashes to the next, of each parameter, its optimiser state and each "
        "running statistic, for hpctrain compare; 0 keeps none.",
    )


class ReporterConfig(Named):
    """One receiver of what happens in a run."""

    name: Text = Field(description="Name of a reporter; further keys are its options.")


class MetricsConfig(Section):
    """The metrics that are reported."""

    tensorboard: bool = Field(default=False, description="Write TensorBoard event files, too, which needs the extra `export`.")
    interval_seconds: Number = Field(
        default=10.0, gt=0, description="Time between records of progress, and between lines where there is no bar, in seconds."
    )
    reporters: tuple[ReporterConfig, ...] = Field(
        default=(),
        description="Further reporters, which receive what rank 0 reports: names, or mappings of name and options.",
    )

    @property
    def all_reporters(self) -> tuple[ReporterConfig, ...]:
        """The reporters, and that of `tensorboard` if it is switched on."""
        named = {reporter.name for reporter in self.reporters}
        board = (ReporterConfig(name="tensorboard"),) if self.tensorboard and "tensorboard" not in named else ()
        return (*board, *self.reporters)


class Config(Section):
    """One run."""

    name: Annotated[Text, BeforeValidator(_one_component)] = Field(
        default="run", description="Name of the run, after which its directory is named."
    )
    seed: Integer = Field(default=0, ge=0, lt=2**63, description="Seed of weights, sample order, augmentation and dropout.")
    dtype: Literal["float32", "float64"] = Field(default="float32", description="Type of activations, parameters and gradients.")
    backend: Literal["auto", "numpy", "onednn", "cuda"] = Field(
        default="auto",
        description="Kernel set that computes; auto takes a GPU (cuda) where one can be used, else the fastest one on this "
        "machine that knows the dtype.",
    )
    precision: Literal["float32", "tf32", "bfloat16"] = Field(
        default="float32",
        description="Precision of products on a GPU, with dtype float32: tf32 rounds their factors, bfloat16 all activations; "
        "parameters stay float32.",
    )
    threads: Threads = Field(
        default="auto",
        description="Number of threads per rank; auto takes OMP_NUM_THREADS where it is set, else the rank's cores.",
    )
    model: ModelConfig = Field(description="The network: a name, or a mapping of name and options.")
    init: InitConfig = Field(
        default_factory=InitConfig, description="The start of a training: weights from a file, and frozen layers."
    )
    data: DataConfig = Field(description="The data files and what is done with their images.")
    batch: Integer = Field(ge=1, description="Global batch: number of samples of one step over all ranks.")
    micro_batches: Integer = Field(
        default=1, ge=1, description="Number of passes into which a rank splits its share of the batch."
    )
    exact: ExactConfig = Field(
        default_factory=ExactConfig,
        description="The order of sums, the same on any number of ranks: true, false, or a mapping of shards.",
    )
    epochs: Integer = Field(ge=0, description="Number of passes over the training file; 0 only evaluates.")
    optimizer: OptimizerConfig = Field(description="The optimiser: a name, or a mapping of name, learning rate and options.")
    schedule: ScheduleConfig = Field(description="The learning-rate schedule: a name, or a mapping of name and options.")
    ema: EmaConfig = Field(
        default_factory=EmaConfig, description="The exponential moving average of the weights, which is evaluated, too."
    )
    loss: LossConfig = Field(default_factory=LossConfig, description="The loss, which is softmax cross entropy.")
    averager: AveragerConfig = Field(
        default_factory=AveragerConfig,
        description="The averaging of gradients over ranks: a name, a mapping of name and options, or auto.",
    )
    grid: GridConfig = Field(default_factory=GridConfig, description="The process grid, rows x columns of ranks, or auto.")
    plan: PlanConfig = Field(
        default_factory=PlanConfig, description="The parallelism of each layer: what the ranks that share samples split; or auto."
    )
    machine: PathText | None = Field(
        default=None,
        description="Machine file, or the name of one that comes with hpctrain, from which auto chooses and step times are "
        "predicted; null measures the machine at the start, for a minute at most, where auto needs it.",
    )
    batch_norm: BatchNormConfig = Field(default_factory=BatchNormConfig, description="The statistics of batch normalisation.")
    on_nonfinite: NonFiniteConfig = Field(
        default_factory=NonFiniteConfig,
        description="The answer to values that are not finite: stop, skip, rollback, or a mapping of action and most.",
    )
    on_lost_rank: LostRankConfig = Field(
        default_factory=LostRankConfig,
        description="The answer to a rank that dies: stop, shrink, or a mapping of action and least.",
    )
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="The checkpoints of a run.")
    early_stop: EarlyStopConfig = Field(
        default_factory=EarlyStopConfig, description="The end of a training whose evaluations no longer improve."
    )
    evaluate: EvaluateConfig = Field(default_factory=EvaluateConfig, description="The evaluation on the test file.")
    progress: Literal["auto", "none", "test", "thread", "posting"] = Field(
        default="auto",
        description="Way in which messages move while kernels run: not at all (none), by tests after operators (test), by a "
        "thread too (thread), or one that starts operations as well (posting); auto takes test, unless another is surely faster.",
    )
    transport: Literal["auto", "staged", "mpi", "nccl"] = Field(
        default="auto",
        description="Way of gradients and parameters between GPUs: through the host's memory (staged), by an MPI that reads the "
        "GPU's (mpi), or by NCCL (nccl); auto takes mpi where a trial shows that MPI does, else staged. For backend cuda only.",
    )
    trace: bool = Field(default=False, description="Record every step, write trace.json and print where the time went.")
    metrics: MetricsConfig = Field(default_factory=MetricsConfig, description="The metrics that are reported.")
    deadline_seconds: Number = Field(
        default=300.0,
        gt=0,
        le=MOST_SECONDS,
        description="Longest time that a rank waits for the others, or makes no progress, before it ends the job, in seconds.",
    )
    max_time: Duration = Field(
        default=None,
        description='Wall time from the start by which the run has ended with a checkpoint, such as "3h50m", "00:50:00" or a '
        "number of "
        "seconds; slurm takes the end of the Slurm job; null sets no limit.",
    )
    checks: ChecksConfig = Field(default_factory=ChecksConfig, description="The checks of what ranks hold in memory.")
    hashes: HashesConfig = Field(default_factory=HashesConfig, description="The hashes by which runs are compared step by step.")
    flight: Text = Field(
        default="run",
        description="Directory in which each rank records what it posts and waits for, for hpctrain autopsy: run takes that of "
        "the run, none keeps nothing, any other is used as it is, such as one on the nodes' own disks.",
    )
    output: PathText = Field(
        default="runs",
        description="Directory in which run directories are made. As in all paths, ~ and $VARIABLE are filled in.",
    )

    @property
    def automatic(self) -> tuple[str, ...]:
        """The sections among grid, plan and averager that a run chooses at its start."""
        return tuple(key for key in OPEN_SECTIONS if getattr(self, key).automatic)
