"""The state of optimisers and averagers for checkpoints: the same names on all ranks that hold parts of a split parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from hpctrain.averaging.base import GradientAverager
from hpctrain.averaging.rounded_parameters import PARAMETER_ERROR
from hpctrain.nn.parameter import Parameter
from hpctrain.train.shards import Shards


def full_states(averager: GradientAverager, shards: Shards) -> Iterator[tuple[Parameter, dict[str, np.ndarray]]]:
    """Each parameter of the averager with its `full_state`. After a drain; collective where anything is sharded or split.

    The other parts of a split parameter are in other averaging groups, which may treat theirs in another way, as parts differ in
    size: one group exchanges gradients or keeps them back where another does not, or every rank of one group updates what ranks
    of another own and round. So states that one part has and another lacks are zeros there.
    """
    for name, parameter in averager.group.parameters.items():
        state = averager.full_state(parameter)
        yield parameter, state if shards.is_whole(name) else _as_others(averager, parameter, state, shards)


def _as_others(
    averager: GradientAverager, parameter: Parameter, state: Mapping[str, np.ndarray], shards: Shards
) -> dict[str, np.ndarray]:
    """Return the state of this rank's part with all names that any part has, in one order. Collective.

    What is kept back has as many holders as in any part.
    """
    kept_back = tuple(averager.by_holder)
    optional = kept_back if averager.rounded is None else (*kept_back, PARAMETER_ERROR)
    if not optional:
        return dict(state)
    same = {key: values for key, values in state.items() if key not in kept_back}
    counts = [(len(state[key]) if key in kept_back else 1) if key in state else 0 for key in optional]
    for key, count in zip(optional, shards.most(parameter.name, counts), strict=True):
        if count and key in kept_back:
            same[key] = np.zeros((count, parameter.size), averager.group.dtype)
            same[key][: len(state.get(key, ()))] = state.get(key, 0.0)
        elif count and key not in same:
            same[key] = np.zeros(parameter.size, averager.group.dtype)
    return dict(sorted(same.items()))
