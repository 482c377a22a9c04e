"""The averagers' schedules beside a run: agreed on before the first step, kept in its directory and its checkpoints."""

from __future__ import annotations

from hpctrain.averaging.schedule import Schedule
from hpctrain.comm.agreement import raise_alike
from hpctrain.comm.grid import GridAxis
from hpctrain.experiment.build import Parts
from hpctrain.experiment.session import Session
from hpctrain.train.checkpoint import CheckpointContent
from hpctrain.train.run_directory import RunDirectory

_META = "schedules"


def agree(session: Session, parts: Parts, start: CheckpointContent | None = None) -> None:
    """Fix what each averager posts in a step: as the checkpoint has it, where that fits. Collective.

    Raises:
        CheckpointError: a schedule in the checkpoint that cannot be read.
        CollectiveMismatchError: ranks with different schedules.
    """
    stored = raise_alike(session.world, lambda: _read(start))
    for group, averager in parts.averagers.items():
        averager.agree(stored.get(_key(group, session.grid.row)))


def keep(session: Session, parts: Parts, directory: RunDirectory) -> dict[str, object]:
    """Write the schedules, as they are now, into the run directory; give what a checkpoint's metadata holds. Collective."""
    own = {
        _key(group, session.grid.row): averager.schedule.to_json()
        for group, averager in parts.averagers.items()
        if averager.schedule is not None
    }
    every = [own] if session.grid.rows == 1 else session.grid.along(GridAxis.ROW).allgather_object(own)
    texts = {key: text for each in every for key, text in each.items()}
    if session.is_root:
        for key, text in texts.items():
            directory.write_schedule(key, text)
    return {_META: texts}


def _key(group: str, row: int) -> str:
    """Split parameters have other sizes in each row of the grid."""
    return group if row == 0 else f"{group}-row{row}"


def _read(start: CheckpointContent | None) -> dict[str, Schedule]:
    if start is None:
        return {}
    texts: dict[str, str] = start.meta.get(_META, {})  # type: ignore[assignment]
    return {key: Schedule.from_json(text) for key, text in texts.items()}
