"""Checks of a configuration that need neither data nor MPI: names, options, and values that must fit together.

Checks that need the number of ranks or the images are made when a run is built. Options that backend cuda does not support are
checked again if backend auto selects a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from hpctrain.assembly.images import chosen_metrics, size_faults
from hpctrain.assembly.options import LISTS, choice, kind_of, registry
from hpctrain.assembly.recipe import Recipe, check_batch
from hpctrain.averaging.averagers import AVERAGERS, make_strategy
from hpctrain.averaging.base import PlannedGroup
from hpctrain.backend.choice import precision_fault
from hpctrain.backend.graph import Graph
from hpctrain.backend.operators import KernelSet
from hpctrain.config.load import flow, nearest_key
from hpctrain.config.schema import Config
from hpctrain.config.values import Named
from hpctrain.core.errors import ConfigError, HpctrainError, OptionError
from hpctrain.core.yaml_source import KeyPath, Source, dotted
from hpctrain.data.augmentations import AUGMENTATIONS
from hpctrain.data.pipeline import check_order
from hpctrain.models import catalogue
from hpctrain.nn.layers import Layer
from hpctrain.nn.network import frozen_layers
from hpctrain.nn.parameter import GroupLayout
from hpctrain.nn.whitening import whitened_convolution
from hpctrain.optim.base import Optimizer
from hpctrain.optim.optimizers import OPTIMIZERS, Sgd
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.storage.weights_file import SUFFIXES
from hpctrain.training.passes import backend_fault, split_fault, statistics_fault

_HOST_SETS = 'or backend to "onednn" or "numpy"'


def device_faults(config: Config) -> Iterator[tuple[KeyPath, str]]:
    """Yield (key path, sentence) of each option that the configured backend does not support."""
    if config.backend == "cuda":
        yield from _faults(config)
    elif config.backend != "auto" and config.transport != "auto":
        yield ("transport",), transport_fault(config.transport)


def check_device(config: Config, kernels: KernelSet) -> None:
    """Raise if these kernels do not support an option. Not collective; the result is the same on every rank.

    Raises:
        ConfigError: the message names the first such option.
    """
    if not kernels.arithmetic.on_host:
        for _, sentence in _faults(config):
            raise ConfigError(sentence)


def _faults(config: Config) -> Iterator[tuple[KeyPath, str]]:
    if config.data.mixing.mixes:
        yield ("data", "mixing"), mixing_fault("cuda")
    if config.progress == "thread":
        yield ("progress",), progress_fault()
    wire = config.averager.options.get("wire_parameters", "float32")
    if wire != "float32":
        yield ("averager", "wire_parameters"), wire_fault(wire)

    if config.transport == "nccl" and _chooses_on_host(config.averager.name):
        yield ("transport",), host_choice_fault(config.averager.name)


def transport_fault(transport: str) -> str:
    """Return the error message for `transport` with a backend that does not run on GPUs."""
    return f'transport is {transport}, which applies to GPUs only; set it to auto, or backend to "cuda".'


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


def mixing_fault(kernels: str) -> str:
    """Return the error message for mixed images with a kernel set whose loss has one label per sample."""
    return (
        f"data.mixing mixes labels, but the loss of backend {kernels} does not support mixed labels yet; set "
        f"data.mixing.mixup and data.mixing.cutmix to 0, {_HOST_SETS}."
    )


def progress_fault() -> str:
    """Return the error message for a progress thread with a device, whose work a single thread enqueues."""
    return (
        "progress is thread, but backend cuda enqueues kernels and copies of messages from a single thread; set progress to "
        f"test, {_HOST_SETS}."
    )


def wire_fault(wire: str) -> str:
    """Return the error message for parameters in 16 bits with a device."""
    return (
        f"averager.wire_parameters is {wire}, but backend cuda does not convert parameters for messages yet; set it to float32, "
        f"{_HOST_SETS}."
    )


_THREADS_FAULT = (
    "threads is auto, which depends on the cores and ranks of a node, but exact needs the same number of threads per rank in all "
    "runs, because the order of sums in kernels may depend on it; set threads to a number that every run can use, such as 1."
)


def exact_faults(config: Config) -> Iterator[tuple[KeyPath, str]]:
    """Yield (key path, sentence) of each value that `exact` does not support; averagers check theirs when they are made."""
    if config.exact.shards is None:
        return
    for section in config.automatic:
        yield (
            (section,),
            f"{section} is auto, which depends on the ranks, but exact.shards needs the same {section} in all runs; "
            "write it out.",
        )
    if config.backend == "cuda":
        yield ("backend",), backend_fault("cuda")
    if config.threads == "auto":
        yield ("threads",), _THREADS_FAULT
    if (fault := split_fault(config.grid.rows)) is not None:
        yield ("grid", "rows"), fault
    synchronised = ["batch_norm.statistics"] if config.batch_norm.statistics == "synchronised" else []
    if (fault := statistics_fault(synchronised)) is not None:
        yield ("batch_norm", "statistics"), fault


def check_names(config: Config, source: Source) -> None:
    """Check every name and option of a registry, and the values that must fit together.

    Raises:
        ConfigError: one sentence for each fault, each with its position.
    """
    recipe = Recipe(config, grid=(config.grid.rows, config.grid.cols or 1))
    faults = [str(source.error(path, sentence)) for path, sentence in (*_value_faults(recipe), *_name_faults(recipe, source))]
    if faults:
        raise ConfigError("\n".join(faults))


def refusal(path: KeyPath, name: str) -> str | None:
    """Return the error message for the name of a section; None if its registry has the name."""
    try:
        choice(kind_of(path), name)
    except ConfigError as error:
        return str(error)
    return None


def _value_faults(recipe: Recipe) -> Iterator[tuple[KeyPath, str]]:
    """Yield (key path, sentence) of each value that does not fit another one."""
    config, batch, epochs = recipe.config, recipe.config.batch, recipe.config.epochs
    model, graph = None, None
    with suppress(HpctrainError):  # reported as a fault of the model
        model = recipe.model
        graph = recipe.graph
    yield from _grid_faults(recipe, graph)
    yield from _init_faults(config, model, graph)
    if config.micro_batches > batch:
        yield (
            ("micro_batches",),
            f"micro_batches is {config.micro_batches}, but a batch has {batch} samples; the largest value is {batch}.",
        )
    if config.dtype == "float64" and config.backend == "onednn":
        yield ("backend",), 'backend is onednn, which does not compute in float64; for dtype float64 set it to "numpy" or "auto".'
    if (fault := precision_fault(config.backend, config.dtype, config.precision)) is not None:
        yield ("precision",), fault
    yield from device_faults(config)
    yield from size_faults(recipe)
    yield from exact_faults(config)
    yield from _evaluation_faults(config)
    if 0 < epochs < config.schedule.warmup_epochs:
        yield (
            ("schedule", "warmup_epochs"),
            f"schedule.warmup_epochs is {config.schedule.warmup_epochs:g}, but the run has {epochs} epochs; "
            f"the largest value is {epochs}.",
        )


def _evaluation_faults(config: Config) -> Iterator[tuple[KeyPath, str]]:
    """Yield (key path, sentence) of each key that needs an evaluation or metric that the run does not compute."""
    stop, reduces = config.early_stop, config.schedule.name == "plateau"
    users = [(("early_stop", "patience"), "early_stop.patience", "patience to null")] if stop.patience is not None else []
    users += [(("schedule", "name"), "schedule plateau", "another schedule")] if reduces else []
    for path, label, instead in users:
        if config.data.evaluated is None:
            yield (
                path,
                f"{label} needs evaluations, but neither data.validation nor data.test is set; set data.validation, such as 0.1, "
                f"or {instead}.",
            )
        if not config.evaluate.every_epochs:
            yield path, f"{label} needs evaluations, but evaluate.every_epochs is 0; set it to at least 1."
    for path, measure in chosen_metrics(config).items():
        if measure in ("ema_loss", "ema_top1", "ema_top5") and config.ema.decay is None:
            yield (
                path,
                f"{'.'.join(path)} is {measure}, but no average of weights is kept; set ema.decay, such as 0.999, or "
                f"{'.'.join(path)} to {measure.removeprefix('ema_')}.",
            )


def _init_faults(config: Config, model: Layer | None, graph: Graph | None) -> Iterator[tuple[KeyPath, str]]:
    """Yield (key path, sentence) of each key of `init` that has no effect."""
    init = config.init
    if init.weights is not None and Path(init.weights).suffix.lower() not in SUFFIXES:
        yield (
            ("init", "weights"),
            f"init.weights is {init.weights}, but a file of weights ends in {', '.join(SUFFIXES)}; make one from a run with "
            "`hpctrain weights export RUN --out weights.safetensors`.",
        )
    if init.ignore and init.weights is None:
        yield (
            ("init", "ignore"),
            "init.ignore needs a file of weights, but init.weights is not set; set init.weights, or leave init.ignore out.",
        )
    if init.whiten is not None and graph is not None:
        yield from _refused(("init", "whiten"), partial(whitened_convolution, graph, init.whiten))
    if model is None:
        return
    idle: list[tuple[KeyPath, str]] = []
    for index, pattern in enumerate(init.freeze):
        idle += _refused(("init", "freeze", index), partial(frozen_layers, model, [pattern]))
    yield from idle or _refused(("init", "freeze"), partial(frozen_layers, model, init.freeze))


def _grid_faults(recipe: Recipe, graph: Graph | None) -> Iterator[tuple[KeyPath, str]]:
    """Yield (key path, sentence) of each fault of the grid and its plan that does not depend on the number of ranks."""
    config = recipe.config
    yield from _refused(("batch",), lambda: check_batch(config.batch, config.grid.rows, config.grid.cols or 1))
    yield from _refused(("grid", "tiles"), lambda: recipe.plan)
    names = () if graph is None else tuple(node.name for node in graph.nodes)
    for pattern in config.plan.patterns if names else ():
        plan = ParallelPlan(use={pattern: Parallelism.DOMAIN})
        yield from _refused(("plan", pattern), partial(plan.check, names))


def _refused(path: KeyPath, attempt: Callable[[], object]) -> Iterator[tuple[KeyPath, str]]:
    """Yield the path and the sentence of the error if the attempt raises one."""
    try:
        attempt()
    except ConfigError as error:
        yield path, str(error)


def _name_faults(recipe: Recipe, source: Source) -> Iterator[tuple[KeyPath, str]]:
    """Yield (key path, sentence) of each name and option that its registry refuses."""
    faults_of, config = partial(_faults_of, source), recipe.config
    model, optimizer = config.model, config.optimizer
    yield from faults_of(("model",), model, catalogue.build, lambda: recipe.model)
    yield from faults_of(("optimizer",), optimizer, OPTIMIZERS.create, lambda: recipe.prototype)
    yield from faults_of(("schedule",), config.schedule, lambda _, options: recipe.schedule(options=options))
    if config.averager.automatic:
        for option in config.averager.options:
            yield (
                ("averager", option),
                f"averager is auto, which also chooses the options, so averager.{option} cannot be set; "
                f"leave it out, or name the averager that has this option.",
            )
    else:
        yield from faults_of(("averager",), config.averager, partial(_make_strategy, recipe))
    for path, kind in LISTS.items():
        # A reporter is not constructed: its constructor may open files or connections.
        make = registry(kind).check if kind == "reporters" else registry(kind).create
        for index, item in enumerate(getattr(getattr(config, path[0]), path[1])):
            yield from faults_of((*path, index), item, make)
    yield from _order_faults(config)


def _order_faults(config: Config) -> Iterator[tuple[KeyPath, str]]:
    """Yield (key path, sentence) of each list of augmentations with an illegal order."""
    for key in ("augment", "evaluate_augment"):
        try:
            steps = [AUGMENTATIONS.create(step.name, step.options) for step in getattr(config.data, key)]
        except HpctrainError:  # reported as a fault of the augmentation
            continue
        yield from _refused(("data", key), partial(check_order, steps))


def _make_strategy(recipe: Recipe, name: str, options: Mapping[str, Any]) -> None:
    """Make the strategy for no parameters on one rank: its faults depend on neither."""
    config = recipe.config
    optimizer: Optimizer = Sgd()
    with suppress(HpctrainError):  # reported as a fault of the optimiser
        optimizer = recipe.prototype
    group = PlannedGroup(
        GroupLayout({}, config.dtype),
        1,
        nominal_batch=config.batch,
        micro_batches=config.micro_batches,
        norms_needed=optimizer.norms_needed,
        several_groups=recipe.splits_parameters,
        momentum=optimizer.momentum,
        shards=config.exact.shards,
    )
    make_strategy(name, options, group)


def _needed_examples(path: KeyPath, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return an example value of each needed option that is not given."""
    needed = (option for option in choice(kind_of(path), name).options if option.name not in given)
    return {option.name: option.example for option in needed if option.example is not None}


def _faults_of(
    source: Source,
    path: KeyPath,
    section: Named,
    make: Callable[[str, Mapping[str, Any]], object],
    made: Callable[[], object] | None = None,
) -> Iterator[tuple[KeyPath, str]]:
    """Yield all faults in making a named object. After the fault of an option, the others are checked without it.

    `made` returns the object with all options, which is made elsewhere.
    """
    removed: set[str] = set()
    last_advice = ""
    while True:
        options = {key: value for key, value in section.options.items() if key not in removed}
        try:
            choice(kind_of(path), section.name)
            _ = made() if made and not removed else make(section.name, options)
            return
        except OptionError as error:
            if removed and error.option not in options:  # it has no default, or a faulty key stands for it
                return
            at = (*path, error.option if error.option in options else "name")
            advice = nearest_key(at, error.known)
            overridden = source.places.get((*path, "name"), "")
            if error.known and overridden.startswith("override") and not source.places.get(at, "").startswith("override"):
                fits = section.model_dump(mode="json", include={*type(section).model_fields, *error.known}, exclude_unset=True)
                fits |= _needed_examples(path, section.name, fits)
                advice = f'{overridden} keeps the other keys of the section, so write "{dotted(path)}={flow(fits)}"'
                if path == ("optimizer",) and source.places.get((*path, "lr"), "").startswith(source.label):
                    advice += f". Choose lr for {section.name}, as the value of the file was chosen for another optimiser"
                last_advice, advice = advice, advice if advice != last_advice else "the line above leaves it out, too"
            sentence = f"{error.fault}; {advice}." if error.fault and error.option in options else str(error)
            if error.fault and error.option not in options and (examples := _needed_examples(path, section.name, options)):
                whole = flow({**section.model_dump(mode="json", exclude_unset=True), **examples})
                written = f'"{dotted(path)}={whole}"' if source.locate(at).startswith("override") else whole
                sentence = f"{error.fault}; write for example {written}."
            yield at, sentence
            if error.option not in options:
                return
            removed.add(error.option)
        except HpctrainError as error:
            yield (*path, "name"), str(error)
            return
