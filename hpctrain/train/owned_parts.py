"""The parts of a checkpoint's tensors that each rank writes: everything once, whatever is split and whatever all ranks hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from hpctrain.averaging.base import GradientAverager
from hpctrain.core.intervals import Box, relative, size_of, whole
from hpctrain.comm.base import Communicator
from hpctrain.nn.network import Network
from hpctrain.parallel.groups import GridGroups
from hpctrain.storage.checkpoint import optimizer_key, parameter_key
from hpctrain.storage.shards import Part
from hpctrain.storage.write_shares import WriteShares
from hpctrain.train.full_states import full_states
from hpctrain.train.shards import Shards
from hpctrain.train.snapshot import statistics_of
from hpctrain.train.weight_average import WeightAverage


def take(
    network: Network,
    averagers: Mapping[str, GradientAverager],
    shards: Shards,
    groups: GridGroups,
    average: WeightAverage | None = None,
) -> dict[str, Part]:
    """This rank's parts, copied. After a drain; collective where optimiser state is sharded."""
    everyone = groups.all_ranks
    parts: dict[str, Part] = {}
    for key, shape, held, values, shares in _held(network, averagers, shards, groups, average):
        empty = size_of(held) == 0
        box = shares.own(held, values.itemsize) if not empty else None
        if 0 in shape and everyone.rank == 0:  # of a tensor without elements, its name and shape
            box = whole(shape)
        if box is not None:
            parts[key] = Part(shape, box, np.array(values[relative(box, held)], order="C"))
    return parts


def _held(
    network: Network,
    averagers: Mapping[str, GradientAverager],
    shards: Shards,
    groups: GridGroups,
    average: WeightAverage | None,
) -> Iterator[tuple[str, tuple[int, ...], Box, np.ndarray, WriteShares]]:
    """(key, shape of the tensor, box that this rank holds, its values, those who hold it, too)."""
    to_host, for_all = network.kernels.arithmetic.to_host, _shares(groups.all_ranks)
    for averager in averagers.values():
        of_group = _shares(averager.comm)
        for parameter, states in full_states(averager, shards):
            name = parameter.name
            shares = for_all if shards.is_whole(name) else of_group
            shape, box = shards.whole_shape(name), shards.box(name)
            yield parameter_key(name), shape, box, to_host(parameter.data), shares
            for state, values in states.items():
                if state in averager.by_holder:
                    count = len(values)
                    holders = values.reshape(count, *parameter.spec.shape)
                    yield optimizer_key(state, name), (count, *shape), ((0, count), *box), holders, shares
                else:
                    yield optimizer_key(state, name), shape, box, values.reshape(parameter.spec.shape), shares
    for group, frozen in network.frozen_groups.items():
        for name, parameter in frozen.parameters.items():
            shares = for_all if shards.is_whole(name) else _shares(groups.gradients[group])
            yield parameter_key(name), shards.whole_shape(name), shards.box(name), to_host(parameter.data), shares
    for key, statistic in statistics_of(network, average).items():
        yield key, statistic.shape, whole(statistic.shape), statistic, for_all


def _shares(comm: Communicator) -> WriteShares:
    return WriteShares(comm.rank, comm.size)
