"""The tensors of a sharded checkpoint, read when they are asked for, and no more than the pieces that are needed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from hpctrain.core.intervals import Box, intersect, relative, shape_of, whole
from hpctrain.storage.shards import ShardFacts, ShardPlaces, ShardReader

#: more open files than this a process need not have
_MOST_READERS = 64


class ShardedTensors(Mapping[str, np.ndarray]):
    """Tensors by key, whole (`tensors[key]`) or a piece of them (`part`). Reading opens the shards that have it.

    Several readers of one checkpoint may share its verification: each verifies some of the shards and is told the places of the
    others' (`trust`). Until a shard is verified, its parts are read whole, and compared.

    Args:
        directory: of the shards.

    Raises:
        CheckpointError: on reading: a shard is missing or damaged.
    """

    def __init__(self, directory: Path, shards: Sequence[ShardFacts]) -> None:
        self._directory, self._shards = directory, shards
        self._verified: dict[int, ShardPlaces] = {}
        self._readers: dict[int, ShardReader] = {}
        self._facts: dict[str, tuple[tuple[int, ...], np.dtype]] = {}
        self._places: dict[str, list[tuple[int, Box]]] = {}
        for number, shard in enumerate(shards):
            for key, (shape, dtype, box) in shard.parts.items():
                self._facts[key] = shape, np.dtype(dtype)
                self._places.setdefault(key, []).append((number, box))

    def __getitem__(self, key: str) -> np.ndarray:
        return self.part(key, whole(self._facts[key][0]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._facts)

    def __len__(self) -> int:
        return len(self._facts)

    def __contains__(self, key: object) -> bool:
        return key in self._facts

    def facts(self, key: str) -> tuple[tuple[int, ...], np.dtype]:
        """Shape and dtype of a tensor; nothing is read."""
        return self._facts[key]

    @property
    def shards(self) -> Sequence[ShardFacts]:
        """The shards, by number."""
        return self._shards

    def part(self, key: str, box: Box) -> np.ndarray:
        """The elements of a box of a tensor, in a new array."""
        values = np.empty(shape_of(box), self._facts[key][1])
        for number, there in self._places[key]:
            common = intersect(box, there)
            if common is not None:
                values[relative(common, box)] = self._reader(number).read(key, common)
        return values

    def verify(self, numbers: Iterable[int] | None = None) -> dict[int, ShardPlaces]:
        """Read all of the shards of these numbers, or of all shards, one block at a time; the places of their parts."""
        chosen = list(range(len(self._shards)) if numbers is None else numbers)
        self._verified |= {number: self._reader(number).verify() for number in chosen}
        return {number: self._verified[number] for number in chosen}

    def trust(self, verified: Mapping[int, ShardPlaces]) -> None:
        """Take it that these shards were verified, by who gave the places of their parts."""
        self._verified |= verified
        self.close()

    def close(self) -> None:
        """Let go of all files; they are opened again where they are needed."""
        while self._readers:
            self._readers.popitem()[1].close()

    def _reader(self, number: int) -> ShardReader:
        if number not in self._readers:
            if len(self._readers) >= _MOST_READERS:
                self._readers.pop(next(iter(self._readers))).close()
            shard = self._shards[number]
            self._readers[number] = ShardReader(self._directory / shard.name, shard, self._verified.get(number))
        return self._readers[number]


def shares(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """Numbers of things of these sizes, shared out over so many ranks: the largest first, each to who has least so far."""
    loads = [0] * ranks
    numbers: list[list[int]] = [[] for _ in range(ranks)]
    for number in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
        rank = loads.index(min(loads))
        loads[rank] += sizes[number]
        numbers[rank].append(number)
    return numbers
