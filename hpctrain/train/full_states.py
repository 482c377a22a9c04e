"""The state of optimisers and averagers for checkpoints: the same names on all ranks that hold parts of a split parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from hpctrain.averaging.base import GradientAverager
from hpctrain.averaging.sixteen_bits import PARAMETER_ERROR
from hpctrain.nn.parameter import Parameter
from hpctrain.train.shards import Shards


def full_states(averager: GradientAverager, shards: Shards) -> Iterator[tuple[Parameter, dict[str, np.ndarray]]]:
    """Yield each parameter of the averager with its `full_state`. After a drain; collective if anything is sharded or split.

    The parts of a split parameter are in several averaging groups. As parts differ in size, a group may exchange or keep back
    gradients while another does not, and all ranks of a group may update its part while those of another own and round shares of
    theirs. If a part lacks a state that another part has, the state is zero for it.
    """
    for name, parameter in averager.group.parameters.items():
        state = averager.full_state(parameter)
        yield parameter, state if shards.is_whole(name) else _with_states_of_all_parts(averager, parameter, state, shards)


def _with_states_of_all_parts(
    averager: GradientAverager, parameter: Parameter, state: Mapping[str, np.ndarray], shards: Shards
) -> dict[str, np.ndarray]:
    """Return the state of this rank's part, sorted by name, with zeros for states that only other parts have. Collective.

    Gradients that are kept back have as many holders as in the part with the most.
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
