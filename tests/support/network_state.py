"""The state dictionary of a network in memory: to compare it with others, and to set it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hpctrain.models.state_dict import declared_state, is_counter
from hpctrain.nn.network import Network


def export(network: Network) -> dict[str, np.ndarray]:
    """Return copies of all parameters and running statistics, in torchvision's layouts and the parameters' dtype."""
    assert not any(network.shards.values()), "a rank of a split network has no whole parameters to export"
    state: dict[str, np.ndarray] = {}
    for name, entry in declared_state(network.model).items():
        if entry.spec is None:
            array = network.statistics.views[name]
        else:
            array = network.kernels.arithmetic.to_host(network.parameters[name].data)
        state[name] = np.array(entry.export(array), copy=True)
    return state


def restore(network: Network, state: Mapping[str, np.ndarray]) -> None:
    """Write a state dictionary into the network, cast to its parameters' dtype; torch's counters are ignored."""
    assert not any(network.shards.values()), "whole parameters do not fit into a rank of a split network"
    entries = declared_state(network.model)
    assert entries.keys() == {name for name in state if not is_counter(name)}
    for name, entry in entries.items():
        array = entry.restore(state[name])
        if entry.spec is None:
            network.statistics.views[name][...] = array
        else:
            network.kernels.arithmetic.from_host(network.parameters[name].data, array)
    network.parameters_changed()
