"""Checks of a configuration that need the program's parts, but neither data nor MPI: names, their options, values that must fit.

Those that need the number of ranks or the images are made where these are known, when a run is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from hpctrain.averaging.strategy import PlannedGroup
from hpctrain.config.schema import Config, Named
from hpctrain.config.source import KeyPath, Source
from hpctrain.errors import ConfigError, HpctrainError, OptionError
from hpctrain.experiment import grid
from hpctrain.experiment.averager import make_strategy
from hpctrain.experiment.options import LISTS, choice, kind_of, registry
from hpctrain.models import catalogue
from hpctrain.nn.parameter import GroupLayout
from hpctrain.optim.base import Optimizer
from hpctrain.optim.optimizers import OPTIMIZERS
from hpctrain.optim.optimizers.sgd import Sgd
from hpctrain.optim.schedules import SCHEDULES
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan

Options = Mapping[str, Any]


def check_names(config: Config, source: Source) -> None:
    """Check every name and option that a registry knows, and the values that must fit together.

    Raises:
        ConfigError: one sentence for each fault, each with its place.
    """
    found = [str(source.error(path, sentence)) for path, sentence in (*_value_faults(config), *_name_faults(config))]
    if found:
        raise ConfigError("\n".join(found))


def refusal(path: KeyPath, name: str) -> str | None:
    """The sentence that refuses the name of a section; None where its registry has it."""
    try:
        choice(kind_of(path), name)
    except ConfigError as error:
        return str(error)
    return None


def _value_faults(config: Config) -> Iterator[tuple[KeyPath, str]]:
    """(key path, sentence) of each value that does not fit another one."""
    batch, epochs = config.batch, config.epochs
    yield from _grid_faults(config)
    if config.micro_batches > batch:
        yield (
            ("micro_batches",),
            f"micro_batches is {config.micro_batches}, but a batch has {batch} samples; the largest value is {batch}.",
        )
    if config.dtype == "float64" and config.backend == "onednn":
        yield ("backend",), 'backend is onednn, which computes in float32 only; for dtype float64 set it to "numpy" or "auto".'
    if 0 < epochs < config.schedule.warmup_epochs:
        yield (
            ("schedule", "warmup_epochs"),
            f"schedule.warmup_epochs is {config.schedule.warmup_epochs:g}, but the run has {epochs} epochs; "
            f"the largest value is {epochs}.",
        )


def _grid_faults(config: Config) -> Iterator[tuple[KeyPath, str]]:
    """(key path, sentence) of what is wrong with the grid and its plan, whatever the number of ranks."""
    cols = config.grid.cols or 1
    for path, attempt in (
        (("batch",), partial(grid.check_batch, config.batch, config.grid.rows, cols)),
        (("grid", "tiles"), partial(grid.parallel_plan, config, cols)),
    ):
        try:
            attempt()
        except ConfigError as error:
            yield path, str(error)
    names = grid.layer_names(config)
    patterns: list[tuple[KeyPath, str]] = [(("plan", pattern), pattern) for pattern in config.plan.patterns]
    patterns += [(("grid", "overlap", index), pattern) for index, pattern in enumerate(config.grid.overlap)]
    for where, pattern in patterns if names else ():
        try:
            ParallelPlan(use={pattern: Parallelism.DOMAIN}).check(names)
        except ConfigError as error:
            yield where, str(error)
    yield from _overlap_faults(config, cols)


def _overlap_faults(config: Config, cols: int) -> Iterator[tuple[KeyPath, str]]:
    """(key path, sentence) of patterns of `grid.overlap` that serve no layer, whatever the images' size."""
    graph = grid.model_graph(config)
    try:
        faults = () if graph is None else tuple(grid.overlap_faults(config, graph, grid.parallel_plan(config, cols)))
    except HpctrainError:  # what is wrong with the grid has its own sentence
        return
    for number, sentence, by_size in faults:
        if not by_size:
            yield ("grid", "overlap", number), sentence


def _name_faults(config: Config) -> Iterator[tuple[KeyPath, str]]:
    """(key path, sentence) of each name and option that its registry refuses."""
    model, optimizer, averager, schedule = config.model, config.optimizer, config.averager, config.schedule
    yield from _fault(("model",), model, partial(catalogue.build, model.name))
    yield from _fault(("optimizer",), optimizer, partial(OPTIMIZERS.create, optimizer.name))
    yield from _fault(("schedule",), schedule, partial(_make_schedule, config))
    yield from _fault(("averager",), averager, partial(_make_strategy, config, grid.splits_parameters(config)))
    for path, kind in LISTS.items():
        for index, item in enumerate(getattr(getattr(config, path[0]), path[1])):
            # A reporter may open files or connections where it is made.
            attempt = registry(kind).check if kind == "reporters" else registry(kind).create
            yield from _fault((*path, index), item, partial(attempt, item.name))


def _optimizer(config: Config) -> Optimizer:
    """The configured one; any, where that has a fault, which is told at its own place."""
    try:
        return OPTIMIZERS.create(config.optimizer.name, config.optimizer.options)
    except HpctrainError:
        return Sgd()


def _make_strategy(config: Config, splits_parameters: bool, options: Options) -> None:
    """Over no parameters and on one rank: what is refused depends on neither."""
    group = PlannedGroup(
        GroupLayout({}, config.dtype),
        1,
        nominal_batch=config.batch,
        micro_batches=config.micro_batches,
        needs_norms=_optimizer(config).needs_norms,
        several_groups=splits_parameters,
    )
    make_strategy(config, group, options)


def _make_schedule(config: Config, options: Options) -> None:
    epochs = max(1, config.epochs)
    # A warm-up longer than the run has its own sentence above.
    warmup = min(config.schedule.warmup_epochs, epochs)
    lr = config.optimizer.lr
    SCHEDULES.create(config.schedule.name, options, base_lr=lr, epochs=epochs, steps_per_epoch=1, warmup_epochs=warmup)


def _fault(path: KeyPath, section: Named, attempt: Callable[[Options], object]) -> Iterator[tuple[KeyPath, str]]:
    """The fault that an attempt with a section's options finds, at the option that causes it or else at the name."""
    options = section.options
    error = _error(lambda given: choice(kind_of(path), section.name), options) or _error(attempt, options)
    if error is not None:
        yield (*path, _culprit(error, options, attempt)), str(error)


def _error(attempt: Callable[[Options], object], options: Options) -> HpctrainError | None:
    try:
        attempt(options)
    except HpctrainError as error:
        return error
    return None


def _culprit(error: HpctrainError, options: Options, attempt: Callable[[Options], object]) -> str:
    """The option that the error names, else the one without which it is gone or another one, else "name"."""
    if isinstance(error, OptionError):
        return error.option if error.option in options else "name"
    left = {key: _error(attempt, {other: options[other] for other in options if other != key}) for key in options}
    gone = (key for key, after in left.items() if after is None)
    # Without a needed option the complaint is that it is missing.
    changed = (key for key, after in left.items() if str(after) != str(error))
    return next(gone, next(changed, "name"))
