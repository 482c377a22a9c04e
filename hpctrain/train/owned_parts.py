"""The parts of a checkpoint's tensors that each rank writes: everything once, whatever is split and whatever all ranks hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from hpctrain.averaging.base import GradientAverager
from hpctrain.boxes import Box, even_interval, relative, replace_dim, shape_of, size_of, whole
from hpctrain.comm.base import Communicator
from hpctrain.nn.network import Network
from hpctrain.storage.checkpoint import optimizer_key, parameter_key, statistic_key
from hpctrain.storage.shard_file import Part
from hpctrain.train.shards import Shards

#: a smaller part is written by one of those that hold it, for each part of a file costs some time of its own
_SMALLEST_SHARED_BYTES = 1 << 16


class _Sharing:
    """Shares parts out over ranks that hold the same: large ones evenly, small ones to those that have least so far."""

    def __init__(self, holders: Communicator) -> None:
        self._rank, self._loads = holders.rank, [0] * holders.size

    def own(self, box: Box, itemsize: int) -> Box | None:
        """The box of this rank within one that all of them hold; None: nothing of it. Asked alike on each."""
        size, ranks = size_of(box) * itemsize, len(self._loads)
        lengths = shape_of(box)
        dim = int(np.argmax(lengths)) if lengths else 0
        if size >= _SMALLEST_SHARED_BYTES and lengths[dim] >= ranks:
            begin = box[dim][0]
            start, stop = even_interval(lengths[dim], ranks, self._rank)
            return replace_dim(box, dim, (begin + start, begin + stop))
        owner = self._loads.index(min(self._loads))
        self._loads[owner] += size
        return box if owner == self._rank else None


def take(network: Network, averagers: Mapping[str, GradientAverager], shards: Shards, everyone: Communicator) -> dict[str, Part]:
    """This rank's parts, copied. After a drain; collective where optimiser state is sharded.

    everyone: the ranks of all groups.
    """
    for_all = _Sharing(everyone)
    parts: dict[str, Part] = {}
    for key, shape, held, values, sharing in _held(network, averagers, shards, for_all):
        empty = size_of(held) == 0
        box = sharing.own(held, values.itemsize) if not empty else None
        if 0 in shape and everyone.rank == 0:  # of a tensor without elements, its name and shape
            box = whole(shape)
        if box is not None:
            parts[key] = Part(shape, box, np.array(values[relative(box, held)], order="C"))
    return parts


def _held(
    network: Network, averagers: Mapping[str, GradientAverager], shards: Shards, for_all: _Sharing
) -> Iterator[tuple[str, tuple[int, ...], Box, np.ndarray, _Sharing]]:
    """(key, shape of the tensor, box that this rank holds, its values, those who hold it, too)."""
    to_host = network.kernels.arithmetic.to_host
    for averager in averagers.values():
        of_group = _Sharing(averager.comm)
        for name, parameter in averager.group.parameters.items():
            sharing = for_all if shards.is_whole(name) else of_group
            shape, box = shards.whole_shape(name), shards.box(name)
            yield parameter_key(name), shape, box, to_host(parameter.data), sharing
            for state, values in averager.full_state(parameter).items():
                if state in averager.by_holder:
                    count = len(values)
                    holders = values.reshape(count, *parameter.spec.shape)
                    yield optimizer_key(state, name), (count, *shape), ((0, count), *box), holders, sharing
                else:
                    yield optimizer_key(state, name), shape, box, values.reshape(parameter.spec.shape), sharing
    for name, statistic in network.statistics.views.items():
        yield statistic_key(name), statistic.shape, whole(statistic.shape), statistic, for_all
