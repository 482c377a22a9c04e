"""State dictionaries in torchvision's names, shapes and order, so that weights travel to and from other frameworks.

Torch's `num_batches_tracked` is neither written nor asked for; where it is given it is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hpctrain.core.errors import CheckpointError
from hpctrain.nn.layers import join
from hpctrain.nn.network import Network
from hpctrain.nn.parameter import ParameterSpec

_IGNORED = "num_batches_tracked"


def export(network: Network) -> dict[str, np.ndarray]:
    """Copies of all parameters and running statistics: convolutions (K, C, R, S), linear (out, in), the parameters' dtype."""
    assert not any(network.shards.values()), "a rank of a split network has no whole parameters to export"
    to_host = network.kernels.arithmetic.to_host
    state: dict[str, np.ndarray] = {}
    for prefix, layer in network.model.walk():
        for name in (join(prefix, role) for role in layer.parameters()):
            parameter = network.parameters[name]
            state[name] = np.array(parameter.spec.interchange.export(to_host(parameter.data)), copy=True)
        for name in (join(prefix, role) for role in layer.statistics()):
            state[name] = network.statistics.views[name].copy()
    return state


def restore(network: Network, state: Mapping[str, np.ndarray]) -> None:
    """Write a state dictionary into the network, cast to its parameters' dtype; nothing is written unless all of it fits.

    Raises:
        CheckpointError: a name that is missing or unknown, or an array of another shape.
    """
    assert not any(network.shards.values()), "whole parameters do not fit into a rank of a split network"
    expected = {name: exported_shape(parameter.spec) for name, parameter in network.parameters.items()}
    expected |= {name: view.shape for name, view in network.statistics.views.items()}
    given = {name: array for name, array in state.items() if name.rpartition(".")[2] != _IGNORED}
    _check(expected, {name: array.shape for name, array in given.items()})
    for name, parameter in network.parameters.items():
        value = parameter.spec.interchange.restore(given[name], parameter.spec.shape)
        network.kernels.arithmetic.from_host(parameter.data, value)
    for name, view in network.statistics.views.items():
        view[...] = given[name]
    network.parameters_changed()


def exported_shape(spec: ParameterSpec) -> tuple[int, ...]:
    """Shape of a parameter in torchvision's layout."""
    layout = spec.interchange
    if layout.final is not None:
        return layout.final
    shape = spec.shape if layout.shape is None else layout.shape
    return shape if layout.axes is None else tuple(shape[axis] for axis in layout.axes)


def _check(expected: Mapping[str, tuple[int, ...]], given: Mapping[str, tuple[int, ...]]) -> None:
    missing, unknown = sorted(expected.keys() - given.keys()), sorted(given.keys() - expected.keys())
    if missing or unknown:
        raise CheckpointError(
            f"The state belongs to another model: it lacks {len(missing)} of {len(expected)} arrays ({_some(missing)}) and has "
            f"{len(unknown)} that the model does not know ({_some(unknown)})."
        )
    for name, shape in expected.items():
        if given[name] != shape:
            raise CheckpointError(f"Array {name} of the state has shape {given[name]}, the model's has {shape}.")


def _some(found: list[str], limit: int = 3) -> str:
    more = f", {len(found) - limit} more" if len(found) > limit else ""
    return (", ".join(found[:limit]) or "none") + more
