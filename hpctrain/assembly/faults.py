"""Faults of a configuration that need neither data nor MPI: names, options, and values that must fit together.

Checks that need the number of ranks or the images are made when a run is built. If backend auto then selects a GPU,
`check_device` checks the options that backend cuda does not support.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hpctrain.assembly.images import chosen_metrics, size_faults
from hpctrain.assembly.options import LISTS, choice, filled, kind_of, registry
from hpctrain.assembly.recipe import Recipe, check_batch
from hpctrain.averaging.base import PlannedGroup
from hpctrain.backend.choice import precision_fault
from hpctrain.backend.operators import KernelSet
from hpctrain.config.load import flow, load, nearest_key
from hpctrain.config.schema import Config
from hpctrain.config.values import Named
from hpctrain.core.answers import WHOLE, Fault, config_error
from hpctrain.core.errors import ConfigError, HpctrainError, OptionError
from hpctrain.core.text import counted
from hpctrain.core.yaml_source import KeyPath, Source, dotted
from hpctrain.data.augmentations import AUGMENTATIONS
from hpctrain.data.pipeline import check_order
from hpctrain.nn.network import frozen_layers
from hpctrain.nn.parameter import GroupLayout
from hpctrain.nn.whitening import whitened_convolution
from hpctrain.optim.base import Optimizer
from hpctrain.optim.optimizers import Sgd
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.storage.weights_file import SUFFIXES
from hpctrain.training.passes import backend_fault, split_fault, statistics_fault

_HOST_SETS = 'or backend to "onednn" or "numpy"'

#: sentence on `data.mixing` with kernels whose loss takes one label per sample
MIXING_FAULT = (
    "data.mixing mixes labels, but the loss of backend cuda does not support mixed labels yet; set data.mixing.mixup and "
    f"data.mixing.cutmix to 0, {_HOST_SETS}."
)
#: sentence on `progress: thread` with a device, whose work a single thread enqueues
PROGRESS_FAULT = (
    "progress is thread, but backend cuda enqueues kernels and copies of messages from a single thread; set progress to test, "
    f"{_HOST_SETS}."
)


def transport_fault(transport: str) -> str:
    """Return the error message for `transport` with a backend that does not run on GPUs."""
    return f'transport is {transport}, which applies to GPUs only; set it to auto, or backend to "cuda".'


def load_checked(file: str | Path, overrides: Collection[str] = ()) -> Config:
    """Return the configuration in a file with overrides, after all checks that need neither data nor MPI.

    Raises:
        ConfigError: one sentence for each fault, each with its position.
    """
    config, source = load(file, tuple(overrides), refusal)
    check_config(config, source)
    return config


def check_config(config: Config, source: Source) -> Recipe:
    """Return the recipe of the configuration with the default of every option, after all checks that need neither data nor MPI.

    Raises:
        ConfigError: one sentence for each fault, each with its position.
    """
    recipe = Recipe.of(config, grid=(config.grid.rows, config.grid.cols or 1))
    found = list(faults(recipe, source))
    if found:
        raise config_error(found, source)
    return replace(recipe, config=filled(config))


def refusal(path: KeyPath, name: str) -> str | None:
    """Return the error message for the name of a section at `path` that cannot be used; None if it can."""
    try:
        choice(kind_of(path), name)
    except ConfigError as error:
        return str(error)
    return None


def faults(recipe: Recipe, source: Source) -> Iterator[Fault]:
    """Yield all faults of a recipe with a grid: values that do not fit another one, then names and options."""
    yield from _model_faults(recipe)
    yield from _value_faults(recipe.config)
    yield from size_faults(recipe)
    yield from exact_faults(recipe.config)
    yield from _evaluation_faults(recipe.config)
    yield from _named_faults(recipe, source)


def _refused(path: KeyPath, attempt: Callable[[], object]) -> Iterator[Fault]:
    """Yield the fault with the sentence of the error if the attempt raises one."""
    try:
        attempt()
    except ConfigError as error:
        yield Fault(path, str(error), WHOLE)


def _model_faults(recipe: Recipe) -> Iterator[Fault]:
    """Yield the faults of the grid, and of patterns and layers that the model must have.

    What needs a model is left out if the model itself has a fault.
    """
    config, model, graph = recipe.config, None, None
    with suppress(HpctrainError):  # reported as a fault of the model
        model = recipe.model
        graph = recipe.graph
    yield from _refused(("batch",), lambda: check_batch(config.batch, config.grid.rows, config.grid.cols or 1))
    yield from _refused(("grid", "tiles"), lambda: recipe.plan)
    names = () if graph is None else tuple(node.name for node in graph.nodes)
    for pattern in config.plan.patterns if names else ():
        plan = ParallelPlan(use={pattern: Parallelism.DOMAIN})
        yield from _refused(("plan", pattern), partial(plan.check, names))
    init = config.init
    if init.weights is not None and Path(init.weights).suffix.lower() not in SUFFIXES:
        yield Fault(
            ("init", "weights"),
            f"init.weights is {init.weights}, but a file of weights ends in {', '.join(SUFFIXES)}; make one from a run with "
            "`hpctrain weights export RUN --out weights.safetensors`.",
            WHOLE,
        )
    if init.ignore and init.weights is None:
        rule = "needs a file of weights, but init.weights is not set; set init.weights, or leave init.ignore out"
        yield Fault(("init", "ignore"), rule)
    if init.whiten is not None and graph is not None:
        yield from _refused(("init", "whiten"), partial(whitened_convolution, graph, init.whiten))
    if model is None:
        return
    idle = [
        fault
        for index, pattern in enumerate(init.freeze)
        for fault in _refused(("init", "freeze", index), partial(frozen_layers, model, [pattern]))
    ]
    yield from idle or _refused(("init", "freeze"), partial(frozen_layers, model, init.freeze))


def _value_faults(config: Config) -> Iterator[Fault]:
    """Yield the faults of micro-batches, number formats and backends."""
    batch = config.batch
    if config.micro_batches > batch:
        rule = f"a batch has {counted(batch, 'sample')}; the largest value is {batch}"
        yield Fault(("micro_batches",), rule, config.micro_batches)
    if config.dtype == "float64" and config.backend == "onednn":
        sentence = 'backend is onednn, which does not compute in float64; for dtype float64 set it to "numpy" or "auto".'
        yield Fault(("backend",), sentence, WHOLE)
    if (fault := precision_fault(config.backend, config.dtype, config.precision)) is not None:
        yield Fault(("precision",), fault, WHOLE)
    yield from device_faults(config)


def device_faults(config: Config) -> Iterator[Fault]:
    """Yield the fault of each option that the configured backend does not support."""
    if config.backend == "cuda":
        yield from _cuda_faults(config)
    elif config.backend != "auto" and config.transport != "auto":
        yield Fault(("transport",), transport_fault(config.transport), WHOLE)


def check_device(config: Config, kernels: KernelSet) -> None:
    """Raise if these kernels do not support an option. Not collective; the result is the same on every rank.

    Raises:
        ConfigError: the message names the first such option.
    """
    if not kernels.arithmetic.on_host:
        for fault in _cuda_faults(config):
            raise ConfigError(str(fault))


def _cuda_faults(config: Config) -> Iterator[Fault]:
    averager, wire = config.averager.name, config.averager.options.get("wire_parameters", "float32")
    if config.data.mixing.mixes:
        yield Fault(("data", "mixing"), MIXING_FAULT, WHOLE)
    if config.progress == "thread":
        yield Fault(("progress",), PROGRESS_FAULT, WHOLE)
    if wire != "float32":
        words = f"averager.wire_parameters is {wire}, but backend cuda does not convert parameters for messages yet; set it to"
        yield Fault(("averager", "wire_parameters"), f"{words} float32, {_HOST_SETS}.", WHOLE)
    with suppress(ConfigError):  # unknown names have an error of their own
        if config.transport == "nccl" and Recipe.of(config).averager.kind.chooses_on_host:
            words = f"transport is nccl, but averager {averager} chooses the elements to send on the host; set transport to"
            yield Fault(("transport",), f"{words} auto, staged or mpi.", WHOLE)


def exact_faults(config: Config) -> Iterator[Fault]:
    """Yield the fault of each value that `exact` does not support; averagers check theirs when they are made."""
    if config.exact.shards is None:
        return
    for section in config.automatic:
        rule = f"is auto, which depends on the ranks, but exact.shards needs the same {section} in all runs; write it out"
        yield Fault((section,), rule)
    if config.backend == "cuda":
        yield Fault(("backend",), backend_fault("cuda"), WHOLE)
    if config.threads == "auto":
        rule = (
            "is auto, which depends on the cores and ranks of a node, but exact needs the same number of threads per rank in "
            "all runs, because the order of sums in kernels may depend on it; set threads to a number that every run can use, "
            "such as 1"
        )
        yield Fault(("threads",), rule)
    if (fault := split_fault(config.grid.rows)) is not None:
        yield Fault(("grid", "rows"), fault, WHOLE)
    synchronised = ["batch_norm.statistics"] if config.batch_norm.statistics == "synchronised" else []
    if (fault := statistics_fault(synchronised)) is not None:
        yield Fault(("batch_norm", "statistics"), fault, WHOLE)


def _evaluation_faults(config: Config) -> Iterator[Fault]:
    """Yield the fault of each key that needs an evaluation, a metric or an epoch that the run does not have."""
    users: list[tuple[KeyPath, str, str]] = []
    if config.early_stop.patience is not None:
        users.append((("early_stop", "patience"), "early_stop.patience", "patience to null"))
    if config.schedule.name == "plateau":
        users.append((("schedule", "name"), "schedule plateau", "another schedule"))
    for path, label, instead in users:
        if config.data.evaluated is None:
            why = "neither data.validation nor data.test is set; set data.validation, such as 0.1, or"
            yield Fault(path, f"{label} needs evaluations, but {why} {instead}.", WHOLE)
        if not config.evaluate.every_epochs:
            yield Fault(path, f"{label} needs evaluations, but evaluate.every_epochs is 0; set it to at least 1.", WHOLE)
    for path, measure in chosen_metrics(config).items():
        if measure in ("ema_loss", "ema_top1", "ema_top5") and config.ema.decay is None:
            others = f"{dotted(path)} to {measure.removeprefix('ema_')}"
            yield Fault(path, f"no average of weights is kept; set ema.decay, such as 0.999, or {others}", measure)
    epochs, warmup = config.epochs, config.schedule.warmup_epochs
    if 0 < epochs < warmup:
        has = f"the run has {counted(epochs, 'epoch')}; the largest value is {epochs}."
        sentence = f"schedule.warmup_epochs is {warmup:g}, but {has}"
        yield Fault(("schedule", "warmup_epochs"), sentence, WHOLE)


def _named_faults(recipe: Recipe, source: Source) -> Iterator[Fault]:
    """Yield the faults of names and of their options."""
    config = recipe.config
    for key in ("model", "optimizer", "schedule", "averager"):
        if key == "averager" and config.averager.automatic:
            for option in config.averager.options:
                words = f"averager is auto, which also chooses the options, so averager.{option} cannot be set; leave it out, or"
                yield Fault((key, option), f"{words} name the averager that has this option.", WHOLE)
        else:
            yield from _option_faults(recipe, source, (key,), getattr(config, key))
    for path in LISTS:
        for index, item in enumerate(getattr(getattr(config, path[0]), path[1])):
            yield from _option_faults(recipe, source, (*path, index), item)
    for key in ("augment", "evaluate_augment"):
        with suppress(HpctrainError):  # reported as a fault of the augmentation
            steps = [AUGMENTATIONS.create(step.name, step.options) for step in getattr(config.data, key)]
            yield from _refused(("data", key), partial(check_order, steps))


def _make(recipe: Recipe, path: KeyPath, section: Named) -> object:
    """Make the object that a section or an item of a list names, only to raise its errors.

    Args:
        section: section at the path in the recipe's configuration, or one that replaces it.
    """
    kind, key = kind_of(path), str(path[0])
    if kind == "reporters":  # their constructors may open files or connections
        registry(kind).check(section.name, section.options)
        return None
    if len(path) > 1:
        return registry(kind).create(section.name, section.options)
    if section is not getattr(recipe.config, key):
        recipe = Recipe.of(recipe.config.model_copy(update={key: section}), grid=recipe.grid)
    if key == "model":
        return recipe.model
    if key == "optimizer":
        return recipe.prototype
    if key == "schedule":
        return recipe.schedule()
    config = recipe.config
    optimizer: Optimizer = Sgd()
    with suppress(HpctrainError):  # reported as a fault of the optimiser
        optimizer = recipe.prototype
    group = PlannedGroup(
        GroupLayout({}, config.dtype),  # faults depend on neither parameters nor ranks
        1,
        nominal_batch=config.batch,
        micro_batches=config.micro_batches,
        norms_needed=optimizer.norms_needed,
        several_groups=recipe.splits_parameters,
        momentum=optimizer.momentum,
        shards=config.exact.shards,
    )
    recipe.averager.check(group)
    return None


def _option_faults(recipe: Recipe, source: Source, path: KeyPath, section: Named) -> Iterator[Fault]:
    """Yield all faults in making a named object. After the fault of an option, the others are checked without it."""
    removed = False
    while True:
        try:
            choice(kind_of(path), section.name)
            _make(recipe, path, section)
            return
        except OptionError as error:
            is_given = error.option in section.options
            if removed and not is_given:  # it has no default, or a faulty key stands for it
                return
            yield _option_fault(source, path, section, error)
            if not is_given:
                return
            removed, given = True, section.model_dump(exclude_unset=True, exclude={error.option})
            section = type(section).model_validate(given)
        except HpctrainError as error:
            yield Fault((*path, "name"), str(error), WHOLE)
            return


def _option_fault(source: Source, path: KeyPath, section: Named, error: OptionError) -> Fault:
    """Return the fault of an option. It contains a legal value if the rule does not imply one."""
    if error.option not in section.options:
        at = (*path, "name")
        examples = _needed_examples(path, section.name, section.options)
        if not (error.fault and examples):
            return Fault(at, str(error), WHOLE)
        whole = flow({**section.model_dump(mode="json", exclude_unset=True), **examples})
        written = f'"{dotted(path)}={whole}"' if source.locate(at).startswith("override") else whole
        return Fault(at, f"{error.fault}; write for example {written}", WHOLE)
    at = (*path, error.option)
    if not error.fault:
        return Fault(at, str(error), WHOLE)
    advice, overridden = nearest_key(at, error.known), source.places.get((*path, "name"), "")
    if error.known and overridden.startswith("override") and not source.places.get(at, "").startswith("override"):
        fits = section.model_dump(mode="json", include={*type(section).model_fields, *error.known}, exclude_unset=True)
        fits |= _needed_examples(path, section.name, fits)
        advice = f'{overridden} keeps the other keys of the section, so write "{dotted(path)}={flow(fits)}"'
    return Fault(at, f"{error.fault}; {advice}", WHOLE)


def _needed_examples(path: KeyPath, name: str, given: Collection[str]) -> dict[str, Any]:
    """Return an example value of each needed option that is not given."""
    needed = (option for option in choice(kind_of(path), name).options if option.name not in given)
    return {option.name: option.example for option in needed if option.example is not None}
