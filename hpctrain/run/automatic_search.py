"""The choice of what a configuration leaves open: by a search at the start of a job, or as an earlier run keeps it.

This module loads the planner, so a training with nothing `auto` does not import it.
"""

from __future__ import annotations

import json
from pathlib import Path

from hpctrain.comm.base import Communicator
from hpctrain.comm.progress_mode import ProgressMode
from hpctrain.comm.raise_on_all_ranks import raise_on_all_ranks
from hpctrain.config.data_section import SYNTHETIC
from hpctrain.config.schema import Config
from hpctrain.core.errors import ConfigError, DataError
from hpctrain.config import grid
from hpctrain.experiment import planned_job, planner_costs
from hpctrain.job.automatic_choice import META, AutomaticChoice, Resolved, model_digest
from hpctrain.experiment.candidate_keys import with_candidate, with_defaults
from hpctrain.experiment.checkpoint_search import find_checkpoint
from hpctrain.planner.planned_run import prepare
from hpctrain.run.images import open_alike
from hpctrain.experiment.planned_run import Image, PlannedRun
from hpctrain.job.same_start import Subject, compare
from hpctrain.experiment.start_search import BestCandidate, best, find
from hpctrain.experiment.started_job import StartedJob
from hpctrain.core.files import read_text
from hpctrain.planner import machine_file
from hpctrain.planner.averaging_costs import AveragerChoice
from hpctrain.planner.prediction import SimulationOptions
from hpctrain.planner.search_space import SearchSpace
from hpctrain.storage import checkpoint
from hpctrain.storage.checkpoint import CheckpointContent
from hpctrain.runs.directory import RunDirectory


def choose(config: Config, started: StartedJob, resume: str | None, repeated: str | None) -> Resolved:
    """Do the work of `automatic.resolve` for a configuration that leaves something open. Collective over the world."""
    world = started.world
    source = None if resume is None else find_checkpoint(world, config.output, config.name, resume)
    kept, lines = started.on_root(lambda: _stored(config, world.size, source, repeated))
    if kept is not None:
        return Resolved(kept.applied(config), kept, None, lines)
    _check_same_images(config, world)
    task = raise_on_all_ranks(world, lambda: with_default_plan(config, world.size))
    outcome = find(started, planned_job.job(task), _space(config, task, world.size), config.machine)
    choice = _choice(config, world.size, task, outcome)
    resolved = choice.applied(config)
    return Resolved(resolved, choice, outcome.machine, (*lines, choice.line(resolved)))


def _check_same_images(config: Config, world: Communicator) -> None:
    """Compare between ranks the training file, whose header determines the job; it may not exist yet. Collective.

    Raises:
        DataError: a rank has another file than most ranks, or has one that others lack; on every rank.
    """
    path = config.data.train
    exists = path == SYNTHETIC or Path(path).exists()
    compare(
        world, Subject("another data.train", f"give all nodes the same {path}", {"whether it exists": exists}, error=DataError)
    )
    if exists:
        open_alike(world, config, ("train",))


def _stored(
    config: Config, ranks: int, source: tuple[Path, CheckpointContent] | None, repeated: str | None
) -> tuple[AutomaticChoice | None, tuple[str, ...]]:
    """Return the choice that an earlier run keeps, or None where it does not apply, and lines that say so."""
    stored = _of_checkpoint(source) or _of_run(repeated)
    if stored is None:
        return None, ()
    choice, place = stored
    open_sections = " and ".join(config.automatic)
    if choice.ranks != ranks:
        return None, (f"{ranks} ranks instead of {choice.ranks}: {open_sections} chosen again",)
    if set(choice.sections) != set(config.automatic):
        return None, (f"{' and '.join(choice.sections)} auto until now: {open_sections} chosen again",)
    choice.check_fits(with_default_plan(config, ranks), place)
    return choice, (f"{choice.line(choice.applied(config))}; kept from {place}",)


def _of_checkpoint(source: tuple[Path, CheckpointContent] | None) -> tuple[AutomaticChoice, str] | None:
    """Return the choice in the checkpoint that the run resumes from, and its path."""
    if source is None or META not in source[1].meta:
        return None
    place, meta = str(source[0]), source[1].meta[META]
    return AutomaticChoice.from_meta(meta, place), place


def _of_run(repeated: str | None) -> tuple[AutomaticChoice, str] | None:
    """Return the choice of a run whose averaging is repeated, from its directory or a checkpoint, and the path."""
    if repeated is None:
        return None
    if Path(repeated).is_file() or checkpoint.is_sharded(Path(repeated)):
        meta = checkpoint.open_checkpoint(Path(repeated)).meta.get(META)
        return None if meta is None else (AutomaticChoice.from_meta(meta, repeated), repeated)
    path = RunDirectory.open(Path(repeated)).choice_path
    return (AutomaticChoice.from_meta(json.loads(read_text(path)), str(path)), str(path)) if path.exists() else None


def planned(config: Config, ranks: int | None, machine: str | None, image: Image | None, classes: int | None) -> Config:
    """Return the configuration that a job with this number of ranks on a machine would run, without that job.

    Args:
        ranks: None: as many as the configured grid has. machine: a file or a name; None: the configured one.
        image, classes: as `prepare` takes them.

    Raises:
        ConfigError: something is left open, and ranks or a machine are missing; or no plan fits.
    """
    if not config.automatic:
        return config
    name = machine or config.machine
    if ranks is None and not config.grid.automatic and config.grid.cols is not None:
        ranks = config.grid.rows * config.grid.cols
    if ranks is None or name is None:
        lacks = "the number of ranks" if ranks is None else "the machine"
        option = "--ranks" if ranks is None else "--machine"
        raise ConfigError(
            f"{' and '.join(config.automatic)} {'is' if len(config.automatic) == 1 else 'are'} auto, which follows from {lacks}; "
            f"give {option}, or values in place of auto."
        )
    measured, task = machine_file.read(name), with_default_plan(config, ranks, image, classes)
    costs = planner_costs.costs(measured, task)
    outcome = best(planned_job.job(task), measured, costs, ranks, _space(config, task, ranks))
    return _choice(config, ranks, task, outcome).applied(config)


def _choice(config: Config, ranks: int, task: PlannedRun, outcome: BestCandidate) -> AutomaticChoice:
    chosen = with_candidate(config, outcome.candidate).model_dump(mode="json")
    sections = {section: chosen[section] for section in config.automatic}
    return AutomaticChoice(sections, ranks, model_digest(task), outcome.prediction, outcome.next_best)


def _space(config: Config, task: PlannedRun, ranks: int) -> SearchSpace:
    """Return what the configuration leaves open. Micro-batches are fixed, too, because they change batch statistics."""
    given = config.averager
    fixed_grid = None if config.grid.automatic else (config.grid.rows, grid.columns(config, ranks))
    if fixed_grid is None and not task.kernels.arithmetic.on_host:
        fixed_grid = (1, ranks)  # split layers exchange by way of the host, which has no costs in the model
    return SearchSpace(
        fixed_grid=fixed_grid,
        fixed_plan=None if config.plan.automatic else grid.parallel_plan(config, max(1, ranks // config.grid.rows)),
        fixed_averager=None if given.automatic else AveragerChoice(given.name, given.options),
        fixed_micro_batches=config.micro_batches,
        options=SimulationOptions(progress=ProgressMode.TEST if config.progress == "auto" else ProgressMode(config.progress)),
    )


def with_default_plan(config: Config, ranks: int, image: Image | None = None, classes: int | None = None) -> PlannedRun:
    """Return the run with defaults for what is open. Model, images and parameters are the same for any choice.

    Raises:
        HpctrainError: what configuration and data do not agree on, whatever is chosen.
    """
    return prepare(with_defaults(config), 1 if config.grid.automatic else ranks, image, classes)
