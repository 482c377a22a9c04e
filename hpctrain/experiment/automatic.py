"""Sections that a configuration leaves to the start of a run: decided on rank 0 before there is a grid, told to all, and kept.

A run that goes on from a checkpoint on as many ranks keeps what was decided then: another grid adds numbers in another order.
"""

from __future__ import annotations

from hpctrain.config.schema import Config
from hpctrain.job.automatic_choice import Resolved
from hpctrain.experiment.started_job import StartedJob
from hpctrain.storage.atomic_write import write_json
from hpctrain.runs.directory import RunDirectory


def resolve(config: Config, started: StartedJob, resume: str | None = None, repeated: str | None = None) -> Resolved:
    """Choose what the configuration leaves open, as an earlier run keeps it or by a search. Collective over the world.

    Args:
        resume: what the run goes on from, as `find_start` takes it; None: it starts again. repeated: a run, a directory or a
            checkpoint, whose averaging is repeated.

    Raises:
        ConfigError: a machine file with a fault, or a job that fits in no plan.
        CheckpointError: a stored choice for another model.
    """
    if not config.automatic:
        return Resolved(config)
    from hpctrain.run.automatic_search import choose  # loaded earlier, by `load`

    return choose(config, started, resume, repeated)


def load(config: Config) -> None:
    """Load the modules of `resolve` before ranks wait for each other, so that one slow file system does not delay all ranks."""
    if config.automatic:
        from hpctrain.run import automatic_search  # noqa: F401


def keep(resolved: Resolved, directory: RunDirectory) -> None:
    """Write the choice, and the machine that was measured for it, into the run directory; one rank. An old choice goes."""
    if resolved.choice is None:
        directory.choice_path.unlink(missing_ok=True)
        return
    write_json(directory.choice_path, resolved.choice.to_meta())
    if resolved.machine is not None:
        from hpctrain.planner import machine_file  # loaded earlier, to measure the machine

        machine_file.write(directory.machine_path, resolved.machine)
