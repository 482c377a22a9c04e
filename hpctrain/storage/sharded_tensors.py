"""The tensors of a sharded checkpoint, read when they are asked for, and no more than the parts that are needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from hpctrain.boxes import Box, intersect, relative, shape_of, whole
from hpctrain.storage.shard_file import ShardFacts, ShardReader

#: more open files than this a process need not have
_MOST_READERS = 64


class ShardedTensors(Mapping[str, np.ndarray]):
    """Tensors by key, whole (`tensors[key]`) or a part of them (`part`). Reading opens the shards that have it, and verifies it.

    Raises:
        CheckpointError: on reading: a shard is missing or damaged.
    """

    def __init__(self, directory: Path, shards: Sequence[ShardFacts]) -> None:
        self._directory, self._shards = directory, shards
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

    def part(self, key: str, box: Box) -> np.ndarray:
        """The elements of a box of a tensor, in a new array."""
        values = np.empty(shape_of(box), self._facts[key][1])
        for number, there in self._places[key]:
            common = intersect(box, there)
            if common is not None:
                part = self._reader(number).read(key, there)
                values[relative(common, box)] = part[relative(common, there)]
        return values

    def verify(self) -> None:
        """Read all of it, one part at a time, shard after shard."""
        for number, shard in enumerate(self._shards):
            reader = self._reader(number)
            for key, (_, _, box) in shard.parts.items():
                reader.read(key, box)

    def close(self) -> None:
        """Let go of all files; they are opened again where they are needed."""
        while self._readers:
            self._readers.popitem()[1].close()

    def _reader(self, number: int) -> ShardReader:
        if number not in self._readers:
            if len(self._readers) >= _MOST_READERS:
                self._readers.pop(next(iter(self._readers))).close()
            shard = self._shards[number]
            self._readers[number] = ShardReader(self._directory / shard.name, shard)
        return self._readers[number]
