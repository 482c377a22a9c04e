"""What the bits of a run follow from besides its configuration: agreed by all ranks, kept, compared at a resume.

These are the averagers' schedules, kept in the run's directory and in its checkpoints, and, with `exact`, the kernels, NumPy
and the
number of threads, kept in checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.averaging.base import Strategy
from hpctrain.averaging.collective_schedule import CollectiveSchedule
from hpctrain.backend.operators import KernelSet
from hpctrain.comm.base import Communicator, raise_on_all_ranks
from hpctrain.comm.groups import GridAxis
from hpctrain.comm.waiting import guard
from hpctrain.core.errors import CheckpointError, ConfigError
from hpctrain.job.session import Session
from hpctrain.launch.threads import ThreadPlan
from hpctrain.nn.network import ALL
from hpctrain.run.build import TrainingSetup
from hpctrain.run.resume import Start
from hpctrain.runs.directory import RunDirectory
from hpctrain.storage import checkpoint
from hpctrain.storage.checkpoint import CheckpointContent

_META = "schedules"
#: the link is measured meanwhile, where a strategy needs that, and NCCL looks for networks
_LEAST_JOIN_SECONDS = 60.0


def agree_schedules(
    session: Session, setup: TrainingSetup, start: CheckpointContent | None = None, schedule_from: str | None = None
) -> None:
    """Fix what each averager posts in a step: as the checkpoint has it, where that fits. Collective.

    Args:
        schedule_from: a run directory or a checkpoint whose schedules are used where `start` has none that fit.

    Raises:
        CheckpointError: a schedule that cannot be read, or none in `schedule_from`. ConfigError: none there that fits.
        CollectiveMismatchError: ranks with different schedules.
    """
    stored = raise_on_all_ranks(session.world, lambda: _stored(session, setup.replica.strategies, start, schedule_from))
    with _guarded(session, setup):
        setup.replica.agree(stored)


def _guarded(session: Session, setup: TrainingSetup) -> AbstractContextManager[None]:
    """Return a deadline where NCCL joins GPUs, as it waits for all ranks and asks nobody."""
    if setup.replica.transport != "nccl":
        return nullcontext()
    seconds = max(session.config.deadline_seconds, _LEAST_JOIN_SECONDS)
    return guard("The start of NCCL", seconds, rank=session.world.rank)


def _stored(
    session: Session, strategies: Mapping[str, Strategy], start: CheckpointContent | None, schedule_from: str | None
) -> dict[str, CollectiveSchedule]:
    """Return a schedule that fits, by group, for those groups that have one."""
    kept = {} if start is None else _of_checkpoint(start)
    keys = {group: _key(group, session.grid.row) for group in strategies}
    stored = {group: kept[key] for group, key in keys.items() if key in kept and strategies[group].accepts(kept[key])}
    if schedule_from is None or len(stored) == len(keys):
        return stored
    others = schedules_of_run(schedule_from)
    for group, strategy in strategies.items():
        if group not in stored:
            stored[group] = fitting_schedule(schedule_from, keys[group], others, strategy)
    return stored


def fitting_schedule(
    source: str, key: str, schedules: Mapping[str, CollectiveSchedule], strategy: Strategy
) -> CollectiveSchedule:
    """Return the schedule of that key.

    Raises:
        ConfigError: it is not there, or is one for something else.
    """
    if strategy.request() is None:
        raise ConfigError("The averager has no schedule, so its runs repeat as they are; leave --schedule-from out.")
    if key not in schedules:
        raise ConfigError(
            f"{source} has schedules of {', '.join(sorted(schedules))}, but this run needs one of {key}; "
            f"set grid and plan as they were there, or leave --schedule-from out."
        )
    stored = schedules[key]
    if stored.ranks != strategy.group.ranks:
        raise ConfigError(
            f"The schedule of {key} in {source} is one of {stored.ranks} ranks, but here are {strategy.group.ranks}; "
            f"start as many ranks on the same grid, or leave --schedule-from out."
        )
    if stored.request != strategy.request():
        raise ConfigError(
            f"The schedule of {key} in {source} was made for {stored.request!r}, but this run asks for {strategy.request()!r}; "
            f"give it the same averager, options and model, or leave --schedule-from out."
        )
    if not strategy.accepts(stored):
        norms = "no norms" if strategy.group.needs_norms else "norms"
        raise ConfigError(
            f"The schedule of {key} in {source} was made for an optimizer that needs {norms} (lars and clip_norm do); "
            f"give this run the same optimizer, or leave --schedule-from out."
        )
    return stored


def keep_schedules(session: Session, setup: TrainingSetup, directory: RunDirectory) -> dict[str, object]:
    """Write the schedules, as they are now, into the run directory; give what a checkpoint's metadata holds. Collective.

    A disk that refuses them ends nothing: a checkpoint holds them, too.
    """
    texts_here = {
        _key(group, session.grid.row): averager.schedule.to_json()
        for group, averager in setup.replica.averagers.items()
        if averager.schedule is not None
    }
    gathered = [texts_here] if session.grid.rows == 1 else session.grid.along(GridAxis.SPLIT).allgather_object(texts_here)
    texts = {key: text for texts_of_rank in gathered for key, text in texts_of_rank.items()}
    if session.is_root:
        for key, text in texts.items():
            directory.bookkeeping.attempt("schedules", partial(directory.write_schedule, key, text))
    return {_META: texts}


def _key(group: str, split_rank: int) -> str:
    """Return the name of a parameter group's schedule: each rank of a split group has split parameters of other sizes.

    Whole parameters have one schedule on all ranks. Under one name, a run that continues with larger split groups finds it.
    """
    return group if group == ALL or split_rank == 0 else f"{group}-row{split_rank}"


def _of_checkpoint(content: CheckpointContent) -> dict[str, CollectiveSchedule]:
    texts: Mapping[str, str] = content.meta.get(_META, {})  # type: ignore[assignment]
    return {key: CollectiveSchedule.from_json(text) for key, text in texts.items()}


def schedules_of_run(source: str) -> dict[str, CollectiveSchedule]:
    """Return the schedules of a run directory, or of a checkpoint.

    Raises:
        CheckpointError: it is neither, or has none.
    """
    path = Path(source)
    if path.is_file() or checkpoint.is_sharded(path):
        schedules = _of_checkpoint(checkpoint.open_checkpoint(path))
    else:
        schedules = {key: CollectiveSchedule.from_json(text) for key, text in RunDirectory.open(path).schedules().items()}
    if not schedules:
        raise CheckpointError(f"{source} holds no schedule: its averager has none, or it ended before its first step.")
    return schedules


#: the key of a checkpoint's metadata
EXACT_META = "exact"


def reproducibility_record(kernels: KernelSet, threads: ThreadPlan) -> dict[str, str]:
    """Return the things that compute on this rank, by their names in messages."""
    return {
        "kernels": f"{kernels.name} {kernels.version}".rstrip(),
        "numpy": np.__version__,
        "threads": str(threads.threads),
    }


def agree_record(session: Session, setup: TrainingSetup, start: Start | None) -> None:
    """Make sure that all ranks compute with the same things, and with those of the start, if any. Collective.

    Nothing where the configuration asks for no order of sums.

    Raises:
        ConfigError: ranks that differ. CheckpointError: a start that differs; both on every rank.
    """
    if session.config.exact.shards is None:
        return
    present = reproducibility_record(setup.replica.network.kernels, session.threads)
    check_same_record(session.world, present)
    if start is not None:
        check_kept_record(session.world, start.content.meta, present, str(start.path))


def check_same_record(world: Communicator, present: Mapping[str, str]) -> None:
    """Make sure that all ranks compute with the same things. Collective.

    Raises:
        ConfigError: they do not, on every rank.
    """
    of_ranks = world.allgather_object(dict(present))
    for rank, other in enumerate(of_ranks):
        for name, value in other.items():
            if value != of_ranks[0][name]:
                raise ConfigError(
                    f"With exact all ranks compute with the same {name}, but rank 0 has {of_ranks[0][name]} and rank {rank} has "
                    f"{value}; give all ranks what rank 0 has, or leave exact out.",
                    ranks=[rank],
                ).of_all_ranks()


def check_kept_record(world: Communicator, meta: Mapping[str, Any], present: Mapping[str, str], place: str) -> None:
    """Make sure that a run continues with what its checkpoint was made with. Collective.

    Args:
        meta: of the checkpoint, of a run with `exact`. place: of the checkpoint, for messages.

    Raises:
        CheckpointError: something is another, or the checkpoint does not tell it, on every rank.
    """
    kept: Mapping[str, str] = meta.get(EXACT_META, {})

    def compare() -> None:
        before = {name: kept.get(name, "unknown") for name in present}
        differing = [f"{name}: {before[name]} -> {value}" for name, value in present.items() if before[name] != value]
        if differing:
            raise CheckpointError(
                f"A run with exact cannot resume from {place} with {'; '.join(differing)}, as its bits would be others. Start it "
                "with what it had, on any number of ranks, or start a new training without --resume."
            )

    raise_on_all_ranks(world, compare)
