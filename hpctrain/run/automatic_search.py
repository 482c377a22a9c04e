"""Choice of grid, plan and averager at the start of a job, by a search or from an earlier run.

The search covers the sections that a configuration leaves open, or those of a network built in Python (`Automatic`). It runs on
rank 0, for the job's machine, with times measured by all ranks; its result is sent to all ranks. This module loads the planner,
so a training without `auto` does not import it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from hpctrain.assembly.keywords import REPLICA_KEYS, keyword_config
from hpctrain.assembly.recipe import Recipe, with_defaults
from hpctrain.backend.choice import Backend, make_backend
from hpctrain.comm.base import Communicator, Subject, compare, raise_on_all_ranks
from hpctrain.config.schema import SYNTHETIC, Config
from hpctrain.core.errors import ConfigError, DataError
from hpctrain.core.text import shortened
from hpctrain.job.automatic_choice import (
    CHOICE_META,
    AutomaticChoice,
    PredictedStep,
    Resolved,
    model_digest,
    predicted_step_of,
)
from hpctrain.job.session import StartedJob, on_root
from hpctrain.nn.layers import Layer
from hpctrain.nn.network import Lowering
from hpctrain.optim.base import Optimizer
from hpctrain.optim.optimizers import OPTIMIZERS
from hpctrain.planner.costs import machine_file
from hpctrain.planner.costs.compute_costs import ComputeCosts, MeasuredCosts, RateCosts
from hpctrain.planner.costs.machine import Machine
from hpctrain.planner.job import Candidate, Job
from hpctrain.planner.measure.measurement import measured, measured_times
from hpctrain.planner.planned_run import PlannedRun, job_of, prepare
from hpctrain.planner.search.advantage import advantage
from hpctrain.planner.search.configured_search import with_candidate
from hpctrain.planner.search.search import search
from hpctrain.planner.search.search_space import SearchSpace, configured_space, kept_sections, open_grid
from hpctrain.run.images import open_alike
from hpctrain.run.resume import find_checkpoint
from hpctrain.storage.checkpoint import CheckpointContent

_log = logging.getLogger(__name__)

_TIMING_SECONDS = 6.2


@dataclass(frozen=True)
class BestCandidate:
    """Fastest grid, plan and averager that a search has found.

    Attributes:
        machine: machine that was measured for the search; None if it was read from a file.
        backend: backend of this rank, for which `Automatic` searched; None in other searches.
    """

    candidate: Candidate
    prediction: PredictedStep
    machine: Machine | None = None
    why: str = ""
    backend: Backend | None = field(default=None, compare=False)


def find(started: StartedJob, job: Job, space: SearchSpace, machine: str | None, links: Machine | None = None) -> BestCandidate:
    """Return the candidate with the shortest predicted step on the ranks of a started job. Collective; the same on every rank.

    Args:
        machine: machine file, or name of an installed one; None: measure the machine.
        links: machine with measured links, to be used if operators are timed; None: measure them.

    Raises:
        ConfigError: the machine file is invalid, or no plan fits the job.
    """
    used = None if machine is None else on_root(started.world, lambda: machine_file.read(machine).with_threads(started.threads))
    timed, limits = None, (started.threads, started.deadline_seconds)
    if job.kernels.arithmetic.on_host:
        memory_bytes = known.memory_bytes if (known := used or links) else None
        timed = measured_times(started.world, job, space, *limits, _TIMING_SECONDS, memory_bytes)
    rates_of_job = None if timed is None else timed.rates
    if used is None and links is not None and rates_of_job is not None:
        used = replace(links, rates=rates_of_job, sources={**links.sources, "rates": "fitted to times of operators"})
    elif used is None:
        dtypes = ("float32", "bfloat16") if job.dtype == "bfloat16" else ("float32",)
        used = measured(started.world, job.kernels, *limits, known_rates=rates_of_job, dtypes=dtypes)
    if note := used.estimate_note(job.dtype):
        _log.info(note)
    rates = RateCosts(used, job.dtype)
    costs: ComputeCosts = rates
    if timed is not None and timed.uses:
        costs, space = MeasuredCosts(timed.times, rates), replace(space, uses=timed.uses)

    def best() -> BestCandidate:
        result = search(job, used, costs, started.world.size, space)
        predicted = predicted_step_of(result.best.prediction, used)
        return BestCandidate(result.best.candidate, predicted, used if machine is None else None, advantage(job, result, used))

    return on_root(started.world, best)


#: name, or mapping of "name" and options, as in a configuration
Choice = str | Mapping[str, Any]


@dataclass(frozen=True)
class Automatic:
    """Network built in Python whose grid, plan and averager are chosen by a search.

    `start` chooses the grid; `Job.replica` applies plan and averager.

    Args:
        model, image_shape, optimizer, micro_batches, backend, dtype, precision, ema_decay: arguments of `Job.replica`.
        machine: file written by `hpctrain calibrate`, or name of an installed machine; None: measure the machine.
    """

    model: Layer
    image_shape: tuple[int, int, int]
    optimizer: Choice | Callable[[], Optimizer] = "sgd"
    micro_batches: int = 1
    backend: str = "auto"
    dtype: str = "float32"
    precision: str = "float32"
    machine: str | None = None
    ema_decay: float | None = None

    def best(self, started: StartedJob, batch: int) -> BestCandidate:
        """Return the fastest grid, plan and averager on the ranks of a started job. Collective.

        Raises:
            HpctrainError: `Job.replica` would refuse the arguments, the machine file is invalid, or no plan fits the network.
        """
        place = started.place()

        def planned() -> tuple[Job, Backend]:
            config = keyword_config(Automatic, REPLICA_KEYS, vars(self), batch=batch)
            chosen = make_backend(config.backend, config.dtype, config.precision, place)
            optimizer, lowering = optimizer_factory(self.optimizer)(), Lowering(self.model, dtype=chosen.dtype)
            name, averages = type(self.model).__name__, self.ema_decay is not None
            job = job_of(name, lowering, chosen.kernels, self.image_shape, batch, optimizer, averages=averages)
            return job, chosen

        job, backend = raise_on_all_ranks(started.world, planned)
        space = SearchSpace(open_grid(started.world.size, job.kernels), fixed_micro_batches=self.micro_batches)
        return replace(find(started, job, space, self.machine), backend=backend)


def optimizer_factory(optimizer: Choice | Callable[[], Optimizer]) -> Callable[[], Optimizer]:
    """Return a factory of optimisers that are not bound to parameters yet.

    Raises:
        ConfigError: the mapping has no "name", or the function returns no optimiser.
    """
    if not callable(optimizer):
        return partial(OPTIMIZERS.create, *named(optimizer))
    if not isinstance(made := optimizer(), Optimizer):
        raise ConfigError(f'optimizer returns {shortened(made)}, but must return an Optimizer; the default is "sgd".')
    return optimizer


def named(choice: Choice) -> tuple[str, dict[str, Any]]:
    """Return the name and the options of a choice.

    Raises:
        ConfigError: the mapping has no "name".
    """
    options = {"name": choice} if isinstance(choice, str) else dict(choice)
    if "name" not in options:
        raise ConfigError(f'{options} has no key "name"; give a name, or a mapping of "name" and options.')
    return options.pop("name"), options


def choose(
    config: Config, started: StartedJob, resume: str | None, backend: Backend | None = None, links: Machine | None = None
) -> Resolved:
    """Choose the sections that the configuration leaves open, from an earlier run or by a search. Collective over the world.

    Args:
        resume: run directory, checkpoint or keyword, see `find_checkpoint`; None: start a new run.
        backend: backend of this rank; None: make the configured one.
        links: machine with the links of these hosts; None: measure them.

    Raises:
        ConfigError, DataError: the machine file is invalid, no plan fits the job, or the training file differs between ranks.
        CheckpointError: the stored choice belongs to another model.
    """
    world, place = started.world, started.place()
    backend = backend or raise_on_all_ranks(world, lambda: make_backend(config.backend, config.dtype, config.precision, place))
    if world.size == 1:  # all choices are the same, so nothing is measured
        return Resolved(Recipe.of(with_defaults(config)), backend=backend)
    source = None if resume is None else find_checkpoint(world, config.output, config.name, resume)
    kept, lines = on_root(started.world, lambda: _stored(config, world.size, source, backend))
    if kept is not None:
        return Resolved(Recipe.of(kept.applied(config)), kept, None, lines, backend)
    _check_same_images(config, world)
    task = raise_on_all_ranks(world, lambda: with_default_plan(config, world.size, backend))
    space = configured_space(config, world.size, kept_sections(config), task.job.kernels)
    outcome = find(started, task.job, space, config.machine, links)
    values = with_candidate(config, outcome.candidate).model_dump(mode="json")
    chosen = {section: values[section] for section in config.automatic}
    choice = AutomaticChoice(chosen, world.size, model_digest(task), outcome.prediction, outcome.why)
    resolved = choice.applied(config)
    return Resolved(Recipe.of(resolved), choice, outcome.machine, (*lines, choice.line(resolved, task.job.graph_of(1))), backend)


def _check_same_images(config: Config, world: Communicator) -> None:
    """Check that all ranks have the same training file, or none, since its header determines the job. Collective.

    Raises:
        DataError: the file differs between ranks, or exists on some ranks only; on every rank.
    """
    path = config.data.train
    exists = path == SYNTHETIC or Path(path).exists()
    advice, facts = f"give all nodes the same {path}", {"whether it exists": exists}
    compare(world, Subject("another data.train", advice, facts, error=DataError))
    if exists:
        open_alike(world, config, ("train",))


def _stored(
    config: Config, ranks: int, source: tuple[Path, CheckpointContent] | None, backend: Backend | None
) -> tuple[AutomaticChoice | None, tuple[str, ...]]:
    """Return (choice in the checkpoint from which the run resumes, lines for the log).

    The choice is None if there is none or if it does not apply; in the latter case, a line states the reason.
    """
    if source is None or CHOICE_META not in source[1].meta:
        return None, ()
    place = str(source[0])
    choice = AutomaticChoice.from_meta(source[1].meta[CHOICE_META], place)
    open_sections = " and ".join(config.automatic)
    if choice.ranks != ranks:
        return None, (f"{ranks} ranks instead of {choice.ranks}: choosing {open_sections} again",)
    if set(choice.sections) != set(config.automatic):
        return None, (f"auto was set for {' and '.join(choice.sections)} until now: choosing {open_sections} again",)
    task = with_default_plan(config, ranks, backend)
    choice.check_fits(task, place)
    return choice, (f"{choice.line(choice.applied(config), task.job.graph_of(1))}; kept from {place}",)


def with_default_plan(config: Config, ranks: int, backend: Backend | None = None) -> PlannedRun:
    """Return the run with defaults for its open sections. Model, images and parameters are the same for every choice.

    Raises:
        HpctrainError: configuration and data do not fit each other under any choice.
    """
    return prepare(with_defaults(config), 1 if config.grid.automatic else ranks, backend=backend)
