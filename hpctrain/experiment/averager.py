"""The configured averager of a parameter group: made alike for a run, for a plan without ranks, and to check its options."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from hpctrain.averaging.base import GradientAverager
from hpctrain.averaging.norms import JointNorms
from hpctrain.comm.base import Communicator
from hpctrain.comm.progress import ProgressEngine
from hpctrain.config.schema import Config
from hpctrain.errors import ConfigError
from hpctrain.nn.parameter import FlatGroup
from hpctrain.optim.base import Optimizer
from hpctrain.registry import Registry

AVERAGERS: Registry[GradientAverager] = Registry("hpctrain.averaging", "averager", GradientAverager)


def make_averager(
    config: Config,
    group: FlatGroup,
    optimizer: Optimizer,
    comm: Communicator,
    progress: ProgressEngine,
    *,
    norms: JointNorms | None,
    nodes: Sequence[int] | None = None,
    options: Mapping[str, Any] | None = None,
) -> GradientAverager:
    """The averager of one group, which still has to agree. Not collective.

    Args:
        norms: shared by the averagers of all groups, where some layers are split; else None.
        nodes: of the ranks of `comm`. options: in place of the configured ones.

    Raises:
        ConfigError: an unknown name, an option that is wrong, or norms of split layers, which this averager cannot add up.
    """
    name = config.averager.name
    accepted = inspect.signature(AVERAGERS.find(name)).parameters
    if norms is not None and optimizer.needs_norms and "norms" not in accepted:
        raise ConfigError(
            f"The averager {name} cannot add up the norms of layers that are split; leave optimizer.clip_norm out and use sgd, "
            f"use another averager, or no layer that is model in the plan."
        )
    known = {"nominal_batch": config.batch, "micro_batches": config.micro_batches, "norms": norms, "nodes": nodes}
    return AVERAGERS.create(
        name,
        config.averager.options if options is None else options,
        group=group,
        optimizer=optimizer,
        comm=comm,
        progress=progress,
        **{key: value for key, value in known.items() if key in accepted},
    )
