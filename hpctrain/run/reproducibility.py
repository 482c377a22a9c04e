"""The averagers' schedules beside a run: agreed on before the first step, kept in its directory and its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

from hpctrain.averaging.collective_schedule import CollectiveSchedule
from hpctrain.averaging.strategy import Strategy
from hpctrain.comm.grid import GridAxis
from hpctrain.comm.raise_on_all_ranks import raise_on_all_ranks
from hpctrain.comm.watchdog import guard
from hpctrain.core.errors import CheckpointError, ConfigError
from hpctrain.run.build import Parts
from hpctrain.job.session import Session
from hpctrain.nn.network import ALL
from hpctrain.storage import checkpoint
from hpctrain.storage.checkpoint import CheckpointContent
from hpctrain.runs.directory import RunDirectory

_META = "schedules"
#: the link is measured meanwhile, where a strategy needs that, and NCCL looks for networks
_LEAST_JOIN_SECONDS = 60.0


def agree(session: Session, parts: Parts, start: CheckpointContent | None = None, schedule_from: str | None = None) -> None:
    """Fix what each averager posts in a step: as the checkpoint has it, where that fits. Collective.

    Args:
        schedule_from: a run directory or a checkpoint whose schedules are used where `start` has none that fit.

    Raises:
        CheckpointError: a schedule that cannot be read, or none in `schedule_from`. ConfigError: none there that fits.
        CollectiveMismatchError: ranks with different schedules.
    """
    stored = raise_on_all_ranks(session.world, lambda: _stored(session, parts.replica.strategies, start, schedule_from))
    with _guarded(session, parts):
        parts.replica.agree(stored)


def _guarded(session: Session, parts: Parts) -> AbstractContextManager[None]:
    """A deadline where NCCL joins GPUs, as it waits for all ranks and asks nobody."""
    if parts.replica.transport != "nccl":
        return nullcontext()
    seconds = max(session.config.deadline_seconds, _LEAST_JOIN_SECONDS)
    return guard("The start of NCCL", seconds, rank=session.world.rank)


def _stored(
    session: Session, strategies: Mapping[str, Strategy], start: CheckpointContent | None, schedule_from: str | None
) -> dict[str, CollectiveSchedule]:
    """A schedule that fits, by group, for those groups that have one."""
    kept = {} if start is None else _of_checkpoint(start)
    keys = {group: _key(group, session.grid.row) for group in strategies}
    stored = {group: kept[key] for group, key in keys.items() if key in kept and strategies[group].accepts(kept[key])}
    if schedule_from is None or len(stored) == len(keys):
        return stored
    others = of_run(schedule_from)
    for group, strategy in strategies.items():
        if group not in stored:
            stored[group] = fitting(schedule_from, keys[group], others, strategy)
    return stored


def fitting(source: str, key: str, schedules: Mapping[str, CollectiveSchedule], strategy: Strategy) -> CollectiveSchedule:
    """The schedule of that key.

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


def keep(session: Session, parts: Parts, directory: RunDirectory) -> dict[str, object]:
    """Write the schedules, as they are now, into the run directory; give what a checkpoint's metadata holds. Collective.

    A disk that refuses them ends nothing: a checkpoint holds them, too.
    """
    texts_here = {
        _key(group, session.grid.row): averager.schedule.to_json()
        for group, averager in parts.replica.averagers.items()
        if averager.schedule is not None
    }
    gathered = [texts_here] if session.grid.rows == 1 else session.grid.along(GridAxis.SPLIT).allgather_object(texts_here)
    texts = {key: text for texts_of_rank in gathered for key, text in texts_of_rank.items()}
    if session.is_root:
        for key, text in texts.items():
            directory.bookkeeping.attempt("schedules", partial(directory.write_schedule, key, text))
    return {_META: texts}


def _key(group: str, split_rank: int) -> str:
    """The name of a parameter group's schedule: each rank of a split group has split parameters of other sizes.

    Whole parameters have one schedule on all ranks. Under one name, a run that goes on with larger split groups finds it.
    """
    return group if group == ALL or split_rank == 0 else f"{group}-row{split_rank}"


def _of_checkpoint(content: CheckpointContent) -> dict[str, CollectiveSchedule]:
    texts: Mapping[str, str] = content.meta.get(_META, {})  # type: ignore[assignment]
    return {key: CollectiveSchedule.from_json(text) for key, text in texts.items()}


def of_run(source: str) -> dict[str, CollectiveSchedule]:
    """The schedules of a run directory, or of a checkpoint.

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
