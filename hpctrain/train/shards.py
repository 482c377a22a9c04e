"""Split parameters as whole arrays, and whole arrays as this rank's parts: a checkpoint knows no grid."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from hpctrain.core.intervals import Box, replace_dim, whole
from hpctrain.comm.base import Communicator
from hpctrain.comm.progress import ProgressEngine
from hpctrain.nn.distribution import Shard
from hpctrain.nn.network import Network


class Shards:
    """The tensors of one network, parameters or anything of their shape.

    Args:
        holders: the ranks that hold the parts, in order; None where nothing is split.
    """

    def __init__(self, network: Network, holders: Communicator | None, progress: ProgressEngine) -> None:
        self._network, self._holders, self._progress = network, holders, progress
        self._lengths: dict[str, list[int]] | None = None

    def whole_shape(self, name: str) -> tuple[int, ...]:
        """The parameter's, as the model declares it."""
        return self._network.parameter_specs[name].shape

    def is_whole(self, name: str) -> bool:
        """Whether this rank, as all others, holds all of it."""
        return self._network.shards[name] is None

    def box(self, name: str) -> Box:
        """The place of this rank's part in the whole."""
        shape, shard = self.whole_shape(name), self._network.shards[name]
        return whole(shape) if shard is None else replace_dim(whole(shape), shard.dim, shard.interval)

    def part(self, name: str, whole: np.ndarray) -> np.ndarray:
        """The part of it that this rank holds; a view."""
        shard = self._network.shards[name]
        return whole if shard is None else whole[shard.index]

    def whole(self, name: str, part: np.ndarray) -> np.ndarray:
        """All of it, from each rank's part in its parameter's shape; the part itself where nothing is split. Collective."""
        shard = self._network.shards[name]
        if shard is None:
            return part
        assert self._holders is not None, f"{name} is split, but there is nobody who holds the rest"
        if self._lengths is None:
            self._lengths = self._agree(self._holders)
        lengths = self._lengths[name]
        # The split dim first, so that every rank's part is one block.
        block = np.ascontiguousarray(np.moveaxis(part, shard.dim, 0))
        joined = np.empty((sum(lengths), *block.shape[1:]), block.dtype)
        unit = int(np.prod(block.shape[1:]))
        handle = self._holders.iallgather(block.reshape(-1), joined.reshape(-1), [length * unit for length in lengths])
        self._progress.wait_handle(handle, f"parts of {name}")
        return np.ascontiguousarray(np.moveaxis(joined, 0, shard.dim))

    def most(self, name: str, counts: Sequence[int]) -> list[int]:
        """The greatest that any rank has of each of `counts`, which are of a split parameter. Collective."""
        assert self._holders is not None, f"{name} is split, but there is nobody who holds the rest"
        of_ranks = np.empty((self._holders.size, len(counts)), np.int64)
        handle = self._holders.iallgather(np.array(counts, np.int64), of_ranks.reshape(-1), [len(counts)] * self._holders.size)
        self._progress.wait_handle(handle, f"counts of {name}")
        return [int(count) for count in of_ranks.max(axis=0)]

    def _agree(self, holders: Communicator) -> dict[str, list[int]]:
        """For each split parameter, how much each rank holds."""
        split = {name: shard for name, shard in self._network.shards.items() if shard is not None}
        of_holders: list[dict[str, Shard]] = holders.allgather_object(split)
        for name in split:
            intervals = [shards[name].interval for shards in of_holders]
            assert all(before[1] == after[0] for before, after in pairwise(intervals)), f"parts of {name}: {intervals}"
        return {name: [shards[name].interval[1] - shards[name].interval[0] for shards in of_holders] for name in split}
