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

AVERAGERS: Registry[GradientAverager] = Registry(
    "hpctrain.averaging.strategies",
    "averager",
    GradientAverager,
    given=("group", "optimizer", "comm", "progress", "norms", "nodes", "nominal_batch", "micro_batches"),
)


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
        ConfigError: an unknown name, an option that is wrong, or norms, which an averager without the keyword `norms` does not
            add up for its optimiser.
    """
    name = config.averager.name
    accepted = inspect.signature(AVERAGERS.find(name)).parameters
    if optimizer.needs_norms and "norms" not in accepted:
        raise ConfigError(
            f"The averager {name} adds up no norms (it takes no keyword norms), which optimizer.clip_norm and lars need; leave "
            f"clip_norm out and use sgd, or use another averager."
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
