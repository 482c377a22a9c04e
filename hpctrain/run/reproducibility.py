"""Facts other than the configuration that determine the bits of a run: agreed on, stored, and compared at a resume.

They are the schedules of averagers, which are stored in the run directory and in checkpoints. With `exact`, they also include the
versions of kernels and NumPy and the number of threads, which are stored in checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from hpctrain.averaging.collective_schedule import CollectiveSchedule
from hpctrain.backend.operators import KernelSet
from hpctrain.comm.base import Communicator, raise_on_all_ranks
from hpctrain.comm.groups import GridAxis
from hpctrain.core.errors import CheckpointError, ConfigError
from hpctrain.job.session import Session
from hpctrain.launch.threads import ThreadPlan
from hpctrain.nn.network import ALL
from hpctrain.run.build import TrainingSetup
from hpctrain.run.resume import Start
from hpctrain.runs.directory import RunDirectory
from hpctrain.storage.atomic_write import write_text

_META = "schedules"


def stored_schedules(session: Session, setup: TrainingSetup, start: Start | None) -> dict[str, CollectiveSchedule]:
    """Return the schedules of this rank's parameter groups in the checkpoint; empty if there is no checkpoint. Collective.

    Raises:
        CheckpointError: a schedule cannot be read; on every rank.
    """

    def read() -> dict[str, CollectiveSchedule]:
        texts: Any = {} if start is None else start.content.meta.get(_META, {})
        kept = {key: CollectiveSchedule.from_json(text) for key, text in texts.items()}
        return {group: kept[key] for group in setup.replica.strategies if (key := _key(group, session.grid.row)) in kept}

    return raise_on_all_ranks(session.world, read)


def keep_schedules(session: Session, setup: TrainingSetup, directory: RunDirectory) -> dict[str, object]:
    """Write the current schedules into the run directory; return them as metadata for a checkpoint. Collective.

    A full disk does not end the run, since checkpoints hold the schedules as well.
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
            directory.bookkeeping.attempt("schedules", partial(write_text, directory.schedule_path(key), text))
    return {_META: texts}


def _key(group: str, split_rank: int) -> str:
    """Return the name under which a parameter group's schedule is stored.

    Split parameters differ in size between the ranks of a split group, so each of its ranks has a schedule. Whole parameters have
    one schedule on all ranks; its name does not depend on the size of split groups, so that a resume with larger ones finds it.
    """
    return group if group == ALL or split_rank == 0 else f"{group}-row{split_rank}"


#: key of the record in a checkpoint's metadata
EXACT_META = "exact"


def reproducibility_record(kernels: KernelSet, threads: ThreadPlan) -> dict[str, str]:
    """Return the versions of kernels and NumPy and the number of threads of this rank, by name."""
    return {
        "kernels": f"{kernels.name} {kernels.version}".rstrip(),
        "numpy": np.__version__,
        "threads": str(threads.threads),
    }


def agree_record(session: Session, setup: TrainingSetup, start: Start | None) -> None:
    """Check that all ranks have the same reproducibility record, and that it equals the checkpoint's, if any. Collective.

    No effect unless `exact.shards` is set.

    Raises:
        ConfigError: the record differs between ranks; on every rank.
        CheckpointError: the record differs from the checkpoint's; on every rank.
    """
    if session.config.exact.shards is None:
        return
    present = reproducibility_record(setup.replica.network.kernels, session.threads)
    check_same_record(session.world, present)
    if start is not None:
        check_kept_record(session.world, start.content.meta, present, str(start.path))


def check_same_record(world: Communicator, present: Mapping[str, str]) -> None:
    """Check that all ranks have the same reproducibility record. Collective.

    Raises:
        ConfigError: the record differs between ranks; on every rank.
    """
    of_ranks = world.allgather_object(dict(present))
    for rank, other in enumerate(of_ranks):
        for name, value in other.items():
            if value != of_ranks[0][name]:
                raise ConfigError(
                    f"With exact, all ranks must have the same {name}, but rank 0 has {of_ranks[0][name]} and rank {rank} has "
                    f"{value}; use that of rank 0 on all ranks, or leave exact out.",
                    ranks=[rank],
                ).of_all_ranks()


def check_kept_record(world: Communicator, meta: Mapping[str, Any], present: Mapping[str, str], place: str) -> None:
    """Check that the reproducibility record `present` equals that in a checkpoint's metadata `meta`. Collective.

    Raises:
        CheckpointError: a value differs from the checkpoint's or is missing there; on every rank.
    """
    kept: Mapping[str, str] = meta.get(EXACT_META, {})

    def compare() -> None:
        before = {name: kept.get(name, "unknown") for name in present}
        differing = [f"{name}: {before[name]} -> {value}" for name, value in present.items() if before[name] != value]
        if differing:
            raise CheckpointError(
                f"A run with exact cannot resume from {place} with {'; '.join(differing)}, as its results would differ bitwise; "
                "restore the earlier values (the number of ranks may differ), or start a new training."
            )

    raise_on_all_ranks(world, compare)
