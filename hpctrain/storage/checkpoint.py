"""Checkpoints: one logical array per tensor, whole or not there at all.

A checkpoint knows neither grid nor ranks: each parameter, statistic and optimiser state is one array of its logical shape, so
that any number of ranks can continue from it. Here are plain arrays only; who gathers them, and that one rank writes, is the
caller's. There is no random state to keep: every draw is a function of seed, epoch, step and sample.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from hpctrain.core.intervals import Box, relative, whole
from hpctrain.core.errors import CheckpointError
from hpctrain.log import get_logger
from hpctrain.nearest import choices
from hpctrain.storage.atomic_write import not_written, replacing, synchronise_directory
from hpctrain.storage.hdf5_store import read_store, read_store_meta, write_store
from hpctrain.storage.leftovers import remove_left
from hpctrain.storage.sharded_checkpoint import BEFORE, MANIFEST, SUFFIX, delete, open_sharded
from hpctrain.storage.sharded_tensors import ShardedTensors

_log = get_logger(__name__)
#: broken links, each of which is logged once
_logged_broken_links: set[Path] = set()
#: metadata key: a checkpoint's number among all that its run has written, from 1
SEQUENCE = "sequence"
#: metadata key: the identity of the run (see `run_marker`)
RUN = "run"
_NAME = re.compile(rf"checkpoint-(\d{{8,}})(?:{BEFORE})?\.(h5|shards)")
_SET_ASIDE = re.compile(rf"checkpoint-(\d{{8,}})(?:{BEFORE})?-set-aside\.(h5|shards)")


@dataclass(frozen=True)
class CheckpointContent:
    """The content of a checkpoint.

    Args:
        tensors: by key (`parameter_key` and its like), of integers, booleans or floats of any shape. For writing it is read
            once, one tensor at a time, in its own order: it may be lazy.
        meta: what JSON can hold: epoch, step in epoch, global step, seed, resolved configuration, partial metric sums, plans.
    """

    tensors: Mapping[str, np.ndarray]
    meta: Mapping[str, object]


def parameter_key(name: str) -> str:
    """Key of a parameter."""
    return f"parameters/{name}"


def statistic_key(name: str) -> str:
    """Key of a running statistic."""
    return f"statistics/{name}"


def averaged_statistic_key(name: str) -> str:
    """Key of the average of a running statistic, beside those of weights."""
    return f"averaged_statistics/{name}"


def optimizer_key(state: str, parameter: str) -> str:
    """Key of an optimiser's state ("momentum") of one parameter."""
    return f"optimizer/{state}/{parameter}"


def checkpoint_path(directory: Path, global_step: int, *, sharded: bool = False) -> Path:
    """Where the checkpoint after `global_step` steps lies: a file, or a directory of shards."""
    return directory / f"checkpoint-{global_step:08d}{SUFFIX if sharded else '.h5'}"


def is_sharded(path: Path) -> bool:
    """Whether a path is that of a directory of shards, by its name."""
    return path.suffix == SUFFIX


def checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """(global step, path) of all checkpoints in `directory`, damaged ones too, oldest step first; none where it is missing."""
    return _matching(directory, _NAME)


def _matching(directory: Path, name: re.Pattern[str]) -> list[tuple[int, Path]]:
    if not directory.is_dir():
        return []
    matches = ((name.fullmatch(path.name), path) for path in directory.iterdir())
    return sorted((int(match[1]), path) for match, path in matches if match)


def write(path: Path, content: CheckpointContent) -> None:
    """Write `path`, so that at every moment it is either what it was before or complete, on the disk.

    The file grows under a temporary name in the same directory, is synchronised, renamed, and the directory synchronised.
    Temporary files that an earlier kill has left of this checkpoint, or of other checkpoints of a run, are removed first. Only
    one process may write in a directory at a time.

    Raises:
        CheckpointError: the file cannot be written (disk full, no permission); nothing is left behind.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_left(path.parent, of=path)
        with replacing(path) as partial:
            write_store(partial, content.tensors, content.meta)
    except (OSError, RuntimeError) as error:
        raise not_written(f"The checkpoint {path}", error) from error


def read(path: Path) -> CheckpointContent:
    """All of a checkpoint, every checksum verified. The tensors are the caller's; those of shards are read again when asked for.

    Raises:
        CheckpointError: missing, truncated, damaged (names the tensor), of another format version.
    """
    content = open_checkpoint(path)
    if isinstance(content.tensors, ShardedTensors):
        try:
            content.tensors.verify()
        finally:
            content.tensors.close()
    return content


def open_checkpoint(path: Path) -> CheckpointContent:
    """As `read`, but the tensors of shards are not verified before they are read.

    Raises:
        CheckpointError: as `read`.
    """
    return CheckpointContent(*(open_sharded(path) if is_sharded(path) else read_store(path)))


def read_meta(path: Path) -> Mapping[str, object]:
    """Return the verified metadata of a checkpoint. Reads no tensor.

    Raises:
        CheckpointError: as `read`.
    """
    return open_sharded(path)[1] if is_sharded(path) else read_store_meta(path)


def read_newest(directory: Path) -> tuple[Path, CheckpointContent] | None:
    """Return the path and content of the latest written checkpoint with valid checksums; None if there is none.

    Each file is read once. Damaged ones are logged.
    """
    for _, path in reversed(by_age(directory)):
        try:
            return path, read(path)
        except CheckpointError as error:
            _log.warning("Skipping a checkpoint. %s", error)
    return None


def by_age(directory: Path) -> list[tuple[int, Path]]:
    """Return the same as `checkpoints`, but in the order of writing instead of steps. Does not depend on clocks.

    Reads the metadata, and orders checkpoints by the sequence number in them. A checkpoint without a number, as earlier versions
    wrote it, or with unreadable metadata, counts as written right after those of lower steps.
    """
    return _by_age(checkpoints(directory))


def _by_age(entries: Iterable[tuple[int, Path]]) -> list[tuple[int, Path]]:
    latest, aged = 0, []
    for step, path in entries:
        number = _sequence(path)
        latest = max(latest, number or 0)
        aged.append((latest if number is None else number, step, path))
    return [(step, path) for _, step, path in sorted(aged)]


def next_sequence(directory: Path) -> int:
    """Return the sequence number for the next checkpoint in `directory`. Counts checkpoints that are set aside as well."""
    paths = (path for name in (_NAME, _SET_ASIDE) for _, path in _matching(directory, name))
    return 1 + max((_sequence(path) or 0 for path in paths), default=0)


def run_identity(path: Path) -> str | None:
    """Return the identity of the run that has written a checkpoint; None if it is missing or cannot be read."""
    return _sequence_and_run(path)[1]


def _sequence(path: Path) -> int | None:
    """Return the sequence number in a checkpoint's metadata; None if it is missing or cannot be read."""
    return _sequence_and_run(path)[0]


def _sequence_and_run(path: Path) -> tuple[int | None, str | None]:
    try:
        status = (path / MANIFEST if is_sharded(path) else path).stat()
    except OSError:
        return None, None
    version = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
    return _read_sequence_and_run(path.absolute(), *version)


@lru_cache(maxsize=1 << 14)
def _read_sequence_and_run(path: Path, *version: int) -> tuple[int | None, str | None]:
    """Return (sequence number, identity of the run) from a checkpoint's metadata.

    Cached per version of the file, as a directory may hold many checkpoints.
    """
    try:
        meta = read_meta(path)
    except (CheckpointError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return None, None
    number, identity = meta.get(SEQUENCE), meta.get(RUN)
    return number if isinstance(number, int) and number > 0 else None, identity if isinstance(identity, str) else None


def prune(directory: Path, keep: int, spared: Collection[int] = (), *, is_run: bool = True) -> list[Path]:
    """Delete all but the `keep` latest written checkpoints and as many set-aside ones, and return the deleted paths.

    Steps do not decide: after a resume from before a damaged checkpoint, the damaged one would displace the new ones. Broken
    links are skipped, with a warning.

    Args:
        spared: steps whose checkpoints stay as well, however old they are.
        is_run: whether the directory is proven to be that of a run. If not, it may belong to any program, and only files whose
            metadata identify them as checkpoints of a run are considered.
    """
    assert keep >= 1, "a directory keeps at least one checkpoint"
    there, aside = (
        [(step, path) for step, path in _by_age(_matching(directory, name)) if _may_be_pruned(path, is_run=is_run)]
        for name in (_NAME, _SET_ASIDE)
    )
    deleted = [path for step, path in there[:-keep] if step not in spared]
    deleted += [path for _, path in aside[:-keep]]
    for path in deleted:
        remove(path)
    return deleted


def _may_be_pruned(path: Path, *, is_run: bool) -> bool:
    """Return whether a path is a checkpoint that `prune` may count and delete."""
    if not path.exists():
        if path not in _logged_broken_links:
            _logged_broken_links.add(path)
            _log.warning("Skipping the checkpoint %s: it is a broken link.", path)
        return False
    if is_run:
        return True
    try:
        return "global_step" in read_meta(path)
    except (CheckpointError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def remove(path: Path) -> None:
    """Delete a checkpoint; nothing where there is none.

    Raises:
        OSError: it cannot be deleted.
    """
    if is_sharded(path) and path.is_dir() and not path.is_symlink():
        delete(path)
    else:
        path.unlink(missing_ok=True)


def set_aside(directory: Path, step: int) -> list[Path]:
    """Rename the checkpoints behind `step`, which a run that goes on from there will not come by; give their new names.

    Left as they are, the next `read_newest` would take one of them for the run's newest. One process writes in a directory.

    Raises:
        CheckpointError: the directory cannot be written.
    """
    later = [path for number, path in checkpoints(directory) if number > step]
    behind = [(path, path.with_name(f"{path.stem}-set-aside{path.suffix}")) for path in later]
    if not behind:
        return []
    try:
        for path, other in behind:
            if os.path.lexists(other):  # left from an earlier time; a directory cannot be replaced by a rename
                remove(other)
            os.replace(path, other)
        synchronise_directory(directory)
    except OSError as error:
        raise CheckpointError(
            f"The checkpoints behind step {step} in {directory} cannot be renamed ({error.strerror}); allow it, or delete them."
        ) from error
    names = ", ".join(other.name for _, other in behind)
    _log.warning("The run goes on from step %d; its checkpoints of later steps are set aside: %s in %s.", step, names, directory)
    return [other for _, other in behind]


def restore(
    content: CheckpointContent, key: str, shape: tuple[int, ...], dtype: str | np.dtype, box: Box | None = None
) -> np.ndarray:
    """The tensor of that key, of exactly that shape and dtype, or the part of it in `box`.

    Raises:
        CheckpointError: it is not there, or is another.
    """
    tensors = content.tensors
    if key not in tensors:
        raise CheckpointError(
            f"The checkpoint has no tensor {key}; {choices(key, tensors)}. It probably belongs to another model or optimizer."
        )
    stored_shape, stored_dtype = facts(content, key)
    if stored_shape != tuple(shape):
        raise CheckpointError(
            f"Tensor {key} has shape {stored_shape} in the checkpoint and {tuple(shape)} here; "
            f"the checkpoint probably belongs to another model or number of classes."
        )
    if stored_dtype != np.dtype(dtype):
        raise CheckpointError(
            f"Tensor {key} is {stored_dtype} in the checkpoint and {np.dtype(dtype)} here; "
            f"set dtype to {stored_dtype} to continue."
        )
    if box is None:
        return tensors[key]
    return tensors.part(key, box) if isinstance(tensors, ShardedTensors) else tensors[key][relative(box, whole(shape))]


def facts(content: CheckpointContent, key: str) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype of a tensor; shards are not read for that."""
    if isinstance(content.tensors, ShardedTensors):
        return content.tensors.facts(key)
    tensor = content.tensors[key]
    return tensor.shape, tensor.dtype
