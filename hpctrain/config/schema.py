"""A run as frozen data: every field with its unit, its meaning and its range.

Objects made by a registry (model, optimiser, schedule, averager, augmentation) are a name and free options; the options are
the constructor's keywords and are checked by the registry, which this module does not know.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from hpctrain.config.data_section import DataConfig
from hpctrain.config.duration import Duration
from hpctrain.config.evaluation_sections import EarlyStopConfig, EmaConfig, EvaluateConfig
from hpctrain.config.exact_section import ExactConfig
from hpctrain.config.open_section import AUTO, OPEN_SECTIONS, OpenSection, or_auto
from hpctrain.config.values import Integer, Named, Number, PathText, Section, Text, Threads

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
        """True where the strategy is still to be chosen."""
        return self.name == AUTO


class LossConfig(Section):
    """Softmax cross entropy."""

    label_smoothing: Number = Field(
        default=0.0, ge=0, lt=1, description="Share of the target probability that is spread evenly over all classes, in [0, 1)."
    )


class GridConfig(Section, OpenSection):
    """The process grid: the ranks of a split group share samples, those of a data group share weights."""

    model_config = ConfigDict(frozen=True, extra="forbid", json_schema_extra=or_auto)

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

    model_config = ConfigDict(frozen=True, extra="allow", json_schema_extra=or_auto)
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
        description="Measure by which the checkpoint with the best evaluation is kept beside the newest ones: the highest top1 "
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
        description="Write a checkpoint from a copy while training goes on, which takes the memory of the copy meanwhile; false "
        "makes all ranks wait until it is on the disk.",
    )


def _or_action(schema: dict[str, Any]) -> None:
    """JSON schema of a section that may also be written as its action alone."""
    whole = dict(schema)
    action = {key: value for key, value in whole["properties"]["action"].items() if key in {"enum", "type"}}
    schema.clear()
    schema["anyOf"] = [{**action, "description": "Shorthand for {action: ...}."}, whole]


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

    model_config = ConfigDict(frozen=True, extra="forbid", json_schema_extra=_or_action)

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

    model_config = ConfigDict(frozen=True, extra="forbid", json_schema_extra=_or_action)

    action: Literal["stop", "shrink"] = Field(
        default="stop",
        description="Answer to a rank or node that dies: end the run (stop), or go on without it from the newest checkpoint, in "
        "the same job (shrink, experimental), which needs Open MPI 5 under mpiexec --with-ft ulfm.",
    )
    least: Integer = Field(
        default=1, ge=1, le=MOST_RANKS, description="Smallest number of ranks to go on with; where fewer are left, the run ends."
    )

    @model_validator(mode="before")
    @classmethod
    def _from_action(cls, value: Any) -> Any:
        return {"action": value} if isinstance(value, str) else value

    @property
    def shrinks(self) -> bool:
        """True where the run goes on without ranks that die."""
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
    """Hashes of all that a run goes on from, by which two runs are compared step by step."""

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
        """The reporters, and that of `tensorboard` where it is switched on."""
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
        description="Precision of products on a GPU, beside dtype float32: tf32 rounds their factors, bfloat16 all activations; "
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
        default_factory=EarlyStopConfig, description="The end of a training whose evaluations do not get better."
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
        description="Longest time that a rank waits for the others, or gets on with nothing, before it ends the job, in seconds.",
    )
    max_time: Duration = Field(
        default=None,
        description='Wall time after whose start the run has ended with a checkpoint, such as "3h50m", "00:50:00" or a number of '
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
