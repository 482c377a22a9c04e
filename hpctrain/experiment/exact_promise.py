"""The things that bits of a run with `exact` follow from, beside its configuration: kept in checkpoints, compared at a resume."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hpctrain.backend.operators import KernelSet
from hpctrain.comm.base import Communicator
from hpctrain.comm.raise_on_all_ranks import raise_on_all_ranks
from hpctrain.core.errors import CheckpointError, ConfigError
from hpctrain.run.build import Parts
from hpctrain.run.resume import Start
from hpctrain.job.session import Session
from hpctrain.launch.threads import ThreadPlan

#: the key of a checkpoint's metadata
META = "exact"


def promise(kernels: KernelSet, threads: ThreadPlan) -> dict[str, str]:
    """The things that compute on this rank, by their names in messages."""
    return {
        "kernels": f"{kernels.name} {kernels.version}".rstrip(),
        "numpy": np.__version__,
        "threads": str(threads.threads),
    }


def agree(session: Session, parts: Parts, start: Start | None) -> None:
    """Make sure that all ranks compute with the same things, and with those of the start, if any. Collective.

    Nothing where the configuration asks for no order of sums.

    Raises:
        ConfigError: ranks that differ. CheckpointError: a start that differs; both on every rank.
    """
    if session.config.exact.shards is None:
        return
    present = promise(parts.replica.network.kernels, session.threads)
    check_alike(session.world, present)
    if start is not None:
        check_kept(session.world, start.content.meta, present, str(start.path))


def check_alike(world: Communicator, present: Mapping[str, str]) -> None:
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


def check_kept(world: Communicator, meta: Mapping[str, Any], present: Mapping[str, str], place: str) -> None:
    """Make sure that a run goes on with what its checkpoint was made with. Collective.

    Args:
        meta: of the checkpoint, of a run with `exact`. place: of the checkpoint, for messages.

    Raises:
        CheckpointError: something is another, or the checkpoint does not tell it, on every rank.
    """
    kept: Mapping[str, str] = meta.get(META, {})

    def compare() -> None:
        before = {name: kept.get(name, "not told") for name in present}
        differing = [f"{name}: {before[name]} -> {value}" for name, value in present.items() if before[name] != value]
        if differing:
            raise CheckpointError(
                f"A run with exact cannot go on from {place} with {'; '.join(differing)}, as its bits would be others. Start it "
                "with what it had, on any number of ranks, or start a new training without --resume."
            )

    raise_on_all_ranks(world, compare)
