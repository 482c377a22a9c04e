"""Read the newest checkpoint of a directory, and write a checkpoint as shards."""

from pathlib import Path

import numpy as np

from hpctrain.core.errors import CheckpointError
from hpctrain.core.intervals import slices, whole
from hpctrain.storage.atomic_write import partial_path
from hpctrain.storage.checkpoint import CheckpointContent, by_age, read
from hpctrain.storage.shards import Part, WriteShares, publish, write_shard


def read_newest(directory: Path) -> tuple[Path, CheckpointContent] | None:
    """Return the path and content of the last written checkpoint with valid checksums; None if there is none."""
    for _, path in reversed(by_age(directory)):
        try:
            return path, read(path)
        except CheckpointError:
            pass
    return None


def write_shards(path: Path, content: CheckpointContent, shards: int) -> None:
    """Write a checkpoint as a directory of shards, as so many ranks would that all hold every tensor."""
    partial, facts = partial_path(path), []
    for number in range(shards):
        shares, parts = WriteShares(number, shards), {}
        for key, values in content.tensors.items():
            box = whole(values.shape)
            if values.size:
                box = shares.own(box, values.itemsize)
            if box is not None and (values.size or not number):
                parts[key] = Part(values.shape, box, np.array(values[slices(box)], order="C"))
        if parts:
            facts.append(write_shard(partial, number, parts))
    publish(partial, path, facts, content.meta)
