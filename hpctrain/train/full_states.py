"""The state of optimisers and averagers for checkpoints: the same names on all ranks that hold parts of a split parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from hpctrain.averaging.base import GradientAverager
from hpctrain.nn.parameter import Parameter
from hpctrain.train.shards import Shards


def full_states(averager: GradientAverager, shards: Shards) -> Iterator[tuple[Parameter, dict[str, np.ndarray]]]:
    """Each parameter of the averager with its `full_state`. After a drain; collective where anything is sharded or split.

    The other parts of a split parameter are in other averaging groups. These may keep back gradients of theirs where this group
    keeps back none, as parts differ in size, and their holders may be more; here zeros stand for both.
    """
    for name, parameter in averager.group.parameters.items():
        state = averager.full_state(parameter)
        yield parameter, state if shards.is_whole(name) else _as_others(averager, parameter, state, shards)


def _as_others(
    averager: GradientAverager, parameter: Parameter, state: Mapping[str, np.ndarray], shards: Shards
) -> dict[str, np.ndarray]:
    """The state of this rank's part with as many holders of what is kept back as any part has. Collective."""
    kept_back = tuple(averager.by_holder)
    same = {key: values for key, values in state.items() if key not in kept_back}
    if not kept_back:
        return same
    holders = [len(state[key]) if key in state else 0 for key in kept_back]
    for key, count in zip(kept_back, shards.most(parameter.name, holders), strict=True):
        if count:
            same[key] = np.zeros((count, parameter.size), averager.group.dtype)
            same[key][: len(state.get(key, ()))] = state.get(key, 0.0)
    return same
