"""Checks of a configuration that need the program's parts, but neither data nor MPI: names, options, values that must fit.

Those that need the number of ranks or the images are made where these are known, when a run is built. Options that backend cuda
does not take are checked again where backend auto has taken a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from hpctrain.averaging.averagers import AVERAGERS, make_strategy
from hpctrain.averaging.base import PlannedGroup
from hpctrain.backend.choice import precision_fault
from hpctrain.backend.graph import Graph
from hpctrain.backend.operators import KernelSet
from hpctrain.comm.progress_mode import ProgressMode
from hpctrain.config import grid
from hpctrain.config.images import size_faults
from hpctrain.config.options import LISTS, choice, kind_of, registry
from hpctrain.config.schema import Config
from hpctrain.config.values import Named
from hpctrain.core.errors import ConfigError, HpctrainError, OptionError
from hpctrain.core.yaml_source import KeyPath, Source
from hpctrain.data.augmentations import AUGMENTATIONS
from hpctrain.data.pipeline import check_order
from hpctrain.models import catalogue
from hpctrain.nn.network import frozen_layers
from hpctrain.nn.parameter import GroupLayout
from hpctrain.optim.base import Optimizer
from hpctrain.optim.optimizers import OPTIMIZERS, Sgd
from hpctrain.optim.schedules import SCHEDULES
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.storage.weights_file import SUFFIXES
from hpctrain.train.passes import backend_fault, split_fault, statistics_fault

_HOST_SETS = 'or backend to "onednn" or "numpy"'


def device_faults(config: Config) -> Iterator[tuple[KeyPath, str]]:
    """Yield (key path, sentence) of each option that the configured backend, cuda, does not take, or that others do not."""
    if config.backend == "cuda":
        yield from _faults(config)
    elif config.backend != "auto" and config.transport != "auto":
        yield ("transport",), transport_fault(config.transport)


def check_device(config: Config, kernels: KernelSet) -> None:
    """Refuse options that these kernels do not take. Not collective, and alike on every rank.

    Raises:
        ConfigError: the first of them.
    """
    if not kernels.arithmetic.on_host:
        for _, sentence in _faults(config):
            raise ConfigError(sentence)


def _faults(config: Config) -> Iterator[tuple[KeyPath, str]]:
    if config.data.mixing.mixes:
        yield ("data", "mixing"), mixing_fault("cuda")
    if config.progress in (ProgressMode.THREAD, ProgressMode.POSTING):
        yield ("progress",), progress_fault(config.progress)
    wire = config.averager.options.get("wire_parameters", "float32")
    if wire != "float32":
        yield ("averager", "wire_parameters"), wire_fault(wire)

    if config.transport == "nccl" and _chooses_on_host(config.averager.name):
        yield ("transport",), host_choice_fault(config.averager.name)
    if config.transport == "nccl" and config.on_lost_rank.shrinks:
        yield ("transport",), shrink_fault()


def transport_fault(transport: str) -> str:
    """Return the sentence that refuses a way between GPUs where none compute."""
    return f'transport is {transport}, which is a way between GPUs; set it to auto, or backend to "cuda".'


def _chooses_on_host(averager: str) -> bool:
    with suppress(ConfigError):  # unknown names have an error of their own
        return bool(getattr(AVERAGERS.find(averager), "chooses_on_host", False))
    return False


def host_choice_fault(averager: str) -> str:
    """Return the error message for transport nccl with an averager whose host chooses the elements to send."""
    return (
        f"transport is nccl, but averager {averager} chooses the elements to send on the host; set transport to auto, staged "
        "or mpi."
    )


def shrink_fault() -> str:
    """Return the sentence that refuses NCCL where a run is to continue without lost ranks."""
    return (
        "transport is nccl, whose operations do not end when a rank is lost, and on_lost_rank is shrink; set transport to "
        "staged, or on_lost_rank to stop."
    )


def mixing_fault(kernels: str) -> str:
    """Return the sentence that refuses mixed images with a kernel set whose loss takes one label of each sample."""
    return (
        f"data.mixing mixes the labels of images, which the loss of backend {kernels} does not take so far; set "
        f"data.mixing.mixup and data.mixing.cutmix to 0, {_HOST_SETS}."
    )


def progress_fault(mode: str) -> str:
    """Return the sentence that refuses a thread for messages with a device, whose work one thread enqueues."""
    return (
        f"progress is {mode}, but one thread enqueues the work of backend cuda, copies of what travels included, and its kernels "
        f"need no core; set progress to auto or test, {_HOST_SETS}."
    )


def wire_fault(wire: str) -> str:
    """Return the sentence that refuses parameters in 16 bits with a device."""
    return (
        f"averager.wire_parameters is {wire}, but on backend cuda parameters travel as they are so far; set it to float32, "
        f"{_HOST_SETS}."
    )


_THREADS_FAULT = (
    "threads is auto, which shares out a node's cores among its ranks, but with exact all runs need the same number of threads "
    "per rank, as kernels may add in another order on another number; set threads to the number that a rank has in every run, "
    "such as 1."
)


def exact_faults(config: Config) -> Iterator[tuple[KeyPath, str]]:
    """Yield (key path, sentence) of each value that `exact` does not take; those of averagers are found where these are made."""
    if config.exact.shards is None:
        return
    for section in config.automatic:
        yield (section,), _open_fault(section)
    if config.backend == "cuda":
        yield ("backend",), backend_fault("cuda")
    if config.threads == "auto":
        yield ("threads",), _THREADS_FAULT
    synchronised = config.batch_norm.statistics == "synchronised"
    faults = {
        ("grid", "rows"): split_fault(config.grid.rows),
        ("batch_norm", "statistics"): statistics_fault(["batch_norm.statistics"]) if synchronised else None,
    }
    for path, sentence in faults.items():
        if sentence is not None:
            yield path, sentence


def _open_fault(section: str) -> str:
    """Return the sentence that refuses a section whose values would follow from the number of ranks."""
    return f"{section} is auto, which chooses by the ranks, but exact.shards asks for the same bits on any; write {section} out."


def check_names(config: Config, source: Source) -> None:
    """Check every name and option that a registry knows, and the values that must fit together.

    Raises:
        ConfigError: one sentence for each fault, each with its place.
    """
    faults = [str(source.error(path, sentence)) for path, sentence in (*_value_faults(config), *_name_faults(config))]
    if faults:
        raise ConfigError("\n".join(faults))


def refusal(path: KeyPath, name: str) -> str | None:
    """Return the sentence that refuses the name of a section; None if its registry has it."""
    try:
        choice(kind_of(path), name)
    except ConfigError as error:
        return str(error)
    return None


def _value_faults(config: Config) -> Iterator[tuple[KeyPath, str]]:
    """Yield (key path, sentence) of each value that does not fit another one."""
    batch, epochs = config.batch, config.epochs
    yield from _grid_faults(config)
    yield from _init_faults(config)
    if config.micro_batches > batch:
        yield (
            ("micro_batches",),
            f"micro_batches is {config.micro_batches}, but a batch has {batch} samples; the largest value is {batch}.",
        )
    if config.dtype == "float64" and config.backend == "onednn":
        yield ("backend",), 'backend is onednn, which computes in float32 only; for dtype float64 set it to "numpy" or "auto".'
    fault = precision_fault(config.backend, config.dtype, config.precision)
    if fault is not None:
        yield ("precision",), fault
    yield from device_faults(config)
    yield from size_faults(config)
    yield from exact_faults(config)
    yield from _evaluation_faults(config)
    if 0 < epochs < config.schedule.warmup_epochs:
        yield (
            ("schedule", "warmup_epochs"),
            f"schedule.warmup_epochs is {config.schedule.warmup_epochs:g}, but the run has {epochs} epochs; "
            f"the largest value is {epochs}.",
        )


def _evaluation_faults(config: Config) -> Iterator[tuple[KeyPath, str]]:
    """Yield (key path, sentence) of each measure that no evaluation gives."""
    stop = config.early_stop
    if stop.patience is not None and config.data.test is None:
        yield ("early_stop", "patience"), "early_stop.patience needs evaluations, but data.test is not set; give it, or set null."
    if stop.patience is not None and not config.evaluate.every_epochs:
        yield (
            ("early_stop", "patience"),
            "early_stop.patience needs evaluations, but evaluate.every_epochs is 0; the smallest value is 1.",
        )
    measures = {("checkpoint", "best"): config.checkpoint.best, ("early_stop", "metric"): stop.metric}
    for path, measure in measures.items():
        if measure.startswith("ema_") and config.ema.decay is None:
            yield (
                path,
                f"{'.'.join(path)} is {measure}, but no average of weights is kept; set ema.decay, such as 0.999, or "
                f"{'.'.join(path)} to {measure.removeprefix('ema_')}.",
            )


def _init_faults(config: Config) -> Iterator[tuple[KeyPath, str]]:
    """Yield (key path, sentence) of patterns that have nothing to work on."""
    init = config.init
    if init.weights is not None and Path(init.weights).suffix.lower() not in SUFFIXES:
        yield (
            ("init", "weights"),
            f"init.weights is {init.weights}, but a file of weights ends in {', '.join(SUFFIXES)}; make one from a run with "
            "`hpctrain weights export RUN --out weights.safetensors`.",
        )
    if init.ignore and init.weights is None:
        yield ("init", "ignore"), "init.ignore is given, but init.weights names no file of which something could be left out."
    try:
        model = catalogue.build(config.model.name, config.model.options)
    except HpctrainError:  # which has its own sentence
        return
    idle = False
    for index, pattern in enumerate(init.freeze):
        try:
            frozen_layers(model, [pattern])
        except ConfigError as error:
            idle = True
            yield ("init", "freeze", index), str(error)
    if not idle:
        try:
            frozen_layers(model, init.freeze)
        except ConfigError as error:
            yield ("init", "freeze"), str(error)


def _grid_faults(config: Config) -> Iterator[tuple[KeyPath, str]]:
    """Yield (key path, sentence) of what is wrong with the grid and its plan, whatever the number of ranks."""
    cols = config.grid.cols or 1
    for path, attempt in (
        (("batch",), partial(grid.check_batch, config.batch, config.grid.rows, cols)),
        (("grid", "tiles"), partial(grid.parallel_plan, config, cols)),
    ):
        try:
            attempt()
        except ConfigError as error:
            yield path, str(error)
    graph = grid.model_graph(config)
    names = () if graph is None else tuple(node.name for node in graph.nodes)
    patterns: list[tuple[KeyPath, str]] = [(("plan", pattern), pattern) for pattern in config.plan.patterns]
    patterns += [(("grid", "overlap", index), pattern) for index, pattern in enumerate(config.grid.overlap)]
    for where, pattern in patterns if names else ():
        try:
            ParallelPlan(use={pattern: Parallelism.DOMAIN}).check(names)
        except ConfigError as error:
            yield where, str(error)
    if graph is not None:
        yield from _overlap_faults(config, graph, cols)


def _overlap_faults(config: Config, graph: Graph, cols: int) -> Iterator[tuple[KeyPath, str]]:
    """Yield (key path, sentence) of patterns of `grid.overlap` that serve no layer, whatever the images' size."""
    try:
        faults = tuple(grid.overlap_faults(config, graph, grid.parallel_plan(config, cols)))
    except HpctrainError:  # what is wrong with the grid has its own sentence
        return
    for number, sentence, by_size in faults:
        if not by_size:
            yield ("grid", "overlap", number), sentence


def _name_faults(config: Config) -> Iterator[tuple[KeyPath, str]]:
    """Yield (key path, sentence) of each name and option that its registry refuses."""
    model, optimizer = config.model, config.optimizer
    yield from _fault(("model",), model, lambda: catalogue.build(model.name, model.options))
    yield from _fault(("optimizer",), optimizer, lambda: OPTIMIZERS.create(optimizer.name, optimizer.options))
    yield from _fault(("schedule",), config.schedule, lambda: _make_schedule(config))
    if config.averager.automatic:
        yield from _automatic_faults(config)
    else:
        yield from _fault(("averager",), config.averager, lambda: _make_strategy(config))
    for path, kind in LISTS.items():
        # A reporter may open files or connections when it is made.
        make = registry(kind).check if kind == "reporters" else registry(kind).create
        for index, item in enumerate(getattr(getattr(config, path[0]), path[1])):
            yield from _fault((*path, index), item, partial(make, item.name, item.options))
    yield from _order_faults(config)


def _order_faults(config: Config) -> Iterator[tuple[KeyPath, str]]:
    """Yield (key path, sentence) of each list of augmentations of which one cannot stand at its place."""
    for key in ("augment", "evaluate_augment"):
        try:
            steps = [AUGMENTATIONS.create(step.name, step.options) for step in getattr(config.data, key)]
        except HpctrainError:  # which has its own sentence
            continue
        try:
            check_order(steps)
        except ConfigError as error:
            yield ("data", key), str(error)


def _automatic_faults(config: Config) -> Iterator[tuple[KeyPath, str]]:
    """Yield (key path, sentence) of each option of a strategy that is still to be chosen."""
    for option in config.averager.options:
        yield (
            ("averager", option),
            f"averager is auto, which chooses options as well, so averager.{option} cannot be set; "
            f"leave it out, or name the averager that it belongs to.",
        )


def _optimizer(config: Config) -> Optimizer:
    """Return the configured optimiser; any other if that has a fault, which is reported at its own place."""
    try:
        return OPTIMIZERS.create(config.optimizer.name, config.optimizer.options)
    except HpctrainError:
        return Sgd()


def _make_strategy(config: Config) -> None:
    """Make the strategy for no parameters on one rank: what is refused depends on neither."""
    group = PlannedGroup(
        GroupLayout({}, config.dtype),
        1,
        nominal_batch=config.batch,
        micro_batches=config.micro_batches,
        norms_needed=_optimizer(config).norms_needed,
        several_groups=grid.splits_parameters(config),
        momentum=_optimizer(config).momentum,
        shards=config.exact.shards,
    )
    make_strategy(config.averager.name, config.averager.options, group)


def _make_schedule(config: Config) -> None:
    schedule, epochs = config.schedule, max(1, config.epochs)
    SCHEDULES.create(
        schedule.name,
        schedule.options,
        base_lr=config.optimizer.lr,
        epochs=epochs,
        steps_per_epoch=1,
        warmup_epochs=min(schedule.warmup_epochs, epochs),  # a warm-up longer than the run has its own sentence above
    )


def _fault(path: KeyPath, section: Named, make: Callable[[], object]) -> Iterator[tuple[KeyPath, str]]:
    """Yield the fault that making what a section names finds, at the option that causes it or else at the name."""
    try:
        choice(kind_of(path), section.name)
        make()
    except OptionError as error:
        yield (*path, error.option if error.option in section.options else "name"), str(error)
    except HpctrainError as error:
        yield (*path, "name"), str(error)
