"""The state dictionary of a network in memory: to compare it with others, and to set it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hpctrain.models.state_dict import declared_state, is_counter
from hpctrain.models.state_dict import export as export
from hpctrain.nn.network import Network


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
