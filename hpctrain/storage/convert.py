"""A checkpoint in the other layout, a file or shards: the same tensors and metadata to the last bit."""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path

import numpy as np

from hpctrain.core.intervals import Box, whole
from hpctrain.core.errors import CheckpointError
from hpctrain.storage.atomic_write import replacing
from hpctrain.storage.checkpoint import CheckpointContent, facts, is_sharded, read, remove, restore
from hpctrain.storage.hdf5_store import digest_of, write_store
from hpctrain.storage.shards import Part, write_shard
from hpctrain.storage.sharded_checkpoint import SUFFIX, publish, unfinished
from hpctrain.storage.write_shares import WriteShares


def convert(source: Path, out: Path, *, sharded: bool, shards: int | None = None) -> CheckpointContent:
    """Write the checkpoint `source` to `out` in that layout, read it again and compare; the content of the new one.

    Nothing that others write in the directory of `out` is touched. In memory is, of a file, all of it; of shards, the shard that
    is written, or a tensor.

    Args:
        shards: their number, where it has some; by default as many as ranks wrote the source. None is made without parts.

    Raises:
        CheckpointError: the source is damaged, `out` is there already, has the name of the other layout or cannot be written.
    """
    _check(out, sharded)
    content = read(source)
    if sharded:
        _write_shards(out, content, shards or int(str(content.meta.get("ranks", 1))))
    else:
        _write_file(out, content)
    try:
        again = read(out)
        _compare(content, again, out)
    except CheckpointError:
        remove(out)
        raise
    return again


def _check(out: Path, sharded: bool) -> None:
    if out.exists() or out.is_symlink():
        raise CheckpointError(f"{out} is there already, and nothing is overwritten; give another path, or delete it first.")
    if is_sharded(out) != sharded:
        legal = out.with_suffix(SUFFIX if sharded else ".h5")
        raise CheckpointError(
            f"{out} would be taken for {'a file' if sharded else 'a directory of shards'}: the name of a checkpoint ends in "
            f"{SUFFIX} exactly where it is a directory of shards; give {legal}."
        )


def _write_file(out: Path, content: CheckpointContent) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with replacing(out) as partial:
            write_store(partial, content.tensors, content.meta)
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"The checkpoint {out} cannot be written ({reason}); make room or choose another path.") from error


def _write_shards(out: Path, content: CheckpointContent, shards: int) -> None:
    partial = unfinished(out, secrets.token_hex(4))
    each = (_parts(content, number, shards) for number in range(shards))
    try:
        publish(partial, out, [write_shard(partial, number, parts) for number, parts in enumerate(each) if parts], content.meta)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _parts(content: CheckpointContent, number: int, shards: int) -> dict[str, Part]:
    """The parts of one shard."""
    shares, parts = WriteShares(number, shards), {}
    for key in content.tensors:
        shape, dtype = facts(content, key)
        box: Box | None = whole(shape)
        if 0 not in shape:
            box = shares.own(whole(shape), dtype.itemsize)
        elif number != 0:  # of a tensor without elements, the first shard has name and shape
            box = None
        if box is not None:
            parts[key] = Part(shape, box, np.array(restore(content, key, shape, dtype, box), order="C"))
    return parts


def _compare(content: CheckpointContent, again: CheckpointContent, out: Path) -> None:
    differs = [key for key in content.tensors if key not in again.tensors or _digest(content, key) != _digest(again, key)]
    if differs or len(again.tensors) != len(content.tensors) or again.meta != content.meta:
        what = f"tensor {differs[0]}" if differs else "its metadata or the list of its tensors"
        raise CheckpointError(
            f"The new checkpoint {out} differs from its source in {what} and is deleted; convert again, on another disk."
        )


def _digest(content: CheckpointContent, key: str) -> str:
    return digest_of(np.asarray(content.tensors[key], order="C"))
