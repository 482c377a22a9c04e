"""Checkpoints: one array per tensor, in its logical shape; a checkpoint is either complete or absent.

A checkpoint contains no grid and no ranks. Each parameter, statistic and optimiser state is one array of its logical shape, so
any number of ranks can resume from it. This module handles plain arrays only: the caller gathers them and calls `write` on one
rank. No random state is stored, because each random number is a function of seed, epoch, step and sample.

Leftovers of interrupted writes and deletions are never read, and the next write removes them (`remove_left`). The name of each
leftover identifies the process that created it; the leftover is kept while that process is alive. Processes of other machines
cannot be checked. Their files are removed after ABANDONED_SECONDS without a write, or as soon as the directory has another owner
(`runs.owner`), which proves that the process is dead.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from hpctrain.core.errors import CheckpointError
from hpctrain.core.intervals import Box, relative, whole
from hpctrain.core.text import choices
from hpctrain.launch import processes
from hpctrain.storage.atomic_write import PARTIAL, not_written, replacing, synchronise_directory, writer_of
from hpctrain.storage.hdf5_store import ShardedTensors, open_file, read_store_meta, write_store
from hpctrain.storage.shards import BEFORE, MANIFEST, SUFFIX, delete, open_sharded

#: seconds without a write after which an unfinished file counts as abandoned
ABANDONED_SECONDS = 3600.0

_LEFT = re.compile(rf"(?P<of>.+?\.(?:h5|shards))(?:\..+)?{re.escape(PARTIAL)}", re.DOTALL)
_OF_A_RUN = re.compile(r"checkpoint-\d{8,}(?:-before)?(?:-set-aside)?\.(?:h5|shards)")


def remove_left(
    directory: Path, but: Path | None = None, *, of: Path | None = None, least_age_seconds: float = 0.0, owned: bool = False
) -> list[Path]:
    """Delete leftovers in a directory, and return the paths of those that were deleted.

    Args:
        but: path that is not deleted.
        of: checkpoint that is about to be written; None: a checkpoint of a run. If its name is not that of a run's checkpoint,
            the directory may belong to any program, and only leftovers of this checkpoint are deleted.
        least_age_seconds: minimum time since the last write to a deleted file.
        owned: whether the directory belongs to a run that this process owns, so that no process on another machine writes there.
            If so, unfinished files of any kind left by other processes are also deleted.
    """
    own = None if of is None or _OF_A_RUN.fullmatch(of.name) else of.name
    paths = [path for path in directory.iterdir() if path != but] if directory.is_dir() else []
    left = [path for path in paths if _is_left(path.name, own)]
    if owned:
        left += [path for path in paths if path not in left and path.name.endswith(PARTIAL) and writer_of(path) is not None]
    if not left:
        return []
    now = _now(directory)
    old = [path for path in left if _is_over(path, now, least_age_seconds, owned=owned)]
    for path in old:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
    return [path for path in old if not path.exists()]


def _is_left(name: str, own: str | None) -> bool:
    """Return whether a name is that of an unfinished checkpoint of a run, or of the checkpoint `own` if it is not None."""
    match = _LEFT.fullmatch(name)
    if match is None:
        return False
    return match["of"] == own if own is not None else _OF_A_RUN.fullmatch(match["of"]) is not None


def _is_over(path: Path, now: float, least_age_seconds: float, *, owned: bool) -> bool:
    """Return whether the write of an unfinished file has ended. `now` is in seconds of the file server's clock."""
    writer = writer_of(path)
    if writer is not None:
        if writer == processes.own_mark() or writer.lives:
            return False
        if writer.lives is None and not owned:
            least_age_seconds = max(least_age_seconds, ABANDONED_SECONDS)
    return not least_age_seconds or _last_write_seconds(path) <= now - least_age_seconds


def _now(directory: Path) -> float:
    """Return the current time of the clock that dates files in a directory; minus infinity if it is unknown."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return -math.inf


def _last_write_seconds(path: Path) -> float:
    """Return the time of the last write to a file, or to a directory and its files; infinity if it has been deleted."""
    try:
        files = list(path.iterdir()) if path.is_dir() else []
        return max(each.stat().st_mtime for each in (path, *files))
    except OSError:  # another process has deleted it
        return math.inf


_log = logging.getLogger(__name__)
#: broken links that were logged; each is logged once
_logged_broken_links: set[Path] = set()
#: metadata key: number of the checkpoint among those of its run, in the order of writing, from 1
SEQUENCE = "sequence"
#: metadata key: the identity of the run (see `run_identity`)
RUN = "run"
_NAME = re.compile(rf"checkpoint-(\d{{8,}})(?:{BEFORE})?\.(h5|shards)")
_SET_ASIDE = re.compile(rf"checkpoint-(\d{{8,}})(?:{BEFORE})?-set-aside\.(h5|shards)")


@dataclass(frozen=True)
class CheckpointContent:
    """Content of a checkpoint.

    Args:
        tensors: integer, boolean or float arrays of any shape, by key (see `parameter_key` and the functions after it). `write`
            reads them once, one at a time, in the order of the mapping, so the mapping may be lazy.
        meta: JSON-compatible values: epoch, step in epoch, global step, seed, resolved configuration, partial metric sums, plans.
    """

    tensors: Mapping[str, np.ndarray]
    meta: Mapping[str, object]


def parameter_key(name: str) -> str:
    """Return the key of a parameter in a checkpoint."""
    return f"parameters/{name}"


def statistic_key(name: str) -> str:
    """Return the key of a running statistic in a checkpoint."""
    return f"statistics/{name}"


def averaged_statistic_key(name: str) -> str:
    """Return the key of the average of a running statistic, which belongs to the averaged weights."""
    return f"averaged_statistics/{name}"


def optimizer_key(state: str, parameter: str) -> str:
    """Return the key, in a checkpoint, of one parameter's optimiser state, such as "momentum"."""
    return f"optimizer/{state}/{parameter}"


def checkpoint_path(directory: Path, global_step: int, *, sharded: bool = False) -> Path:
    """Return the path of the checkpoint after `global_step` steps: a file, or a directory of shards."""
    return directory / f"checkpoint-{global_step:08d}{SUFFIX if sharded else '.h5'}"


def is_sharded(path: Path) -> bool:
    """Return whether a path is that of a directory of shards, judged by its name."""
    return path.suffix == SUFFIX


def checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """Return (global step, path) of all checkpoints in `directory`, including damaged ones, in the order of steps."""
    return _matching(directory, _NAME)


def _matching(directory: Path, name: re.Pattern[str]) -> list[tuple[int, Path]]:
    if not directory.is_dir():
        return []
    matches = ((name.fullmatch(path.name), path) for path in directory.iterdir())
    return sorted((int(match[1]), path) for match, path in matches if match)


def write(path: Path, content: CheckpointContent) -> None:
    """Write a checkpoint as one file, atomically.

    Temporary files left by killed processes, of this checkpoint or of other checkpoints of a run, are removed first. The file is
    written under a temporary name in the same directory, synchronised and renamed; then the directory is synchronised. Only one
    process may write in a directory at a time.

    Raises:
        CheckpointError: the file cannot be written (disk full, no permission). No partial file is left.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_left(path.parent, of=path)
        with replacing(path) as partial:
            write_store(partial, content.tensors, content.meta)
    except (OSError, RuntimeError) as error:
        raise not_written(f"The checkpoint {path}", error) from error


def read(path: Path) -> CheckpointContent:
    """Read a whole checkpoint, and verify every checksum. The caller owns the tensors.

    Tensors of shards are read again on access.

    Raises:
        CheckpointError: the checkpoint is missing, truncated, damaged (the message names the tensor), or has another format
            version.
    """
    sharded = is_sharded(path)
    tensors, meta = open_sharded(path) if sharded else open_file(path)
    with contextlib.closing(tensors):
        if not sharded:
            return CheckpointContent(dict(tensors), meta)
        tensors.verify()
    return CheckpointContent(tensors, meta)


def open_checkpoint(path: Path) -> CheckpointContent:
    """Return a checkpoint whose tensors are read and verified on access.

    Raises:
        CheckpointError: see `read`; for a damaged tensor, raised on access.
    """
    return CheckpointContent(*(open_sharded(path) if is_sharded(path) else open_file(path)))


def read_meta(path: Path) -> Mapping[str, object]:
    """Return the verified metadata of a checkpoint, without reading tensors.

    Raises:
        CheckpointError: see `read`.
    """
    return open_sharded(path)[1] if is_sharded(path) else read_store_meta(path)


def by_age(directory: Path) -> list[tuple[int, Path]]:
    """Return (global step, path) of all checkpoints in `directory`, in the order of writing, whatever the clocks show.

    The order is that of the sequence numbers in the metadata. A checkpoint without a number (written by `job.save`) or with
    unreadable metadata counts as written directly after those of lower steps.
    """
    return _by_age(checkpoints(directory))


def _by_age(entries: Iterable[tuple[int, Path]]) -> list[tuple[int, Path]]:
    latest, aged = 0, []
    for step, path in entries:
        number = _sequence_and_run(path)[0]
        latest = max(latest, number or 0)
        aged.append((latest if number is None else number, step, path))
    return [(step, path) for _, step, path in sorted(aged)]


def next_sequence(directory: Path) -> int:
    """Return the sequence number for the next checkpoint in `directory`. Checkpoints that are set aside are counted."""
    paths = (path for name in (_NAME, _SET_ASIDE) for _, path in _matching(directory, name))
    return 1 + max((_sequence_and_run(path)[0] or 0 for path in paths), default=0)


def run_identity(path: Path) -> str | None:
    """Return the identity of the run that wrote a checkpoint; None if the metadata lack it or cannot be read."""
    return _sequence_and_run(path)[1]


def _sequence_and_run(path: Path) -> tuple[int | None, str | None]:
    """Return sequence number and run from a checkpoint's metadata; None for what is missing or cannot be read."""
    try:
        status = (path / MANIFEST if is_sharded(path) else path).stat()
    except OSError:
        return None, None
    version = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
    return _read_sequence_and_run(path.absolute(), *version)


@lru_cache(maxsize=1 << 14)
def _read_sequence_and_run(path: Path, *version: int) -> tuple[int | None, str | None]:
    """Implement `_sequence_and_run`, cached per version of the file, because a directory may hold many checkpoints."""
    try:
        meta = read_meta(path)
    except (CheckpointError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return None, None
    number, identity = meta.get(SEQUENCE), meta.get(RUN)
    return number if isinstance(number, int) and number > 0 else None, identity if isinstance(identity, str) else None


def prune(directory: Path, keep: int, spared: Collection[int] = (), *, is_run: bool = True) -> list[Path]:
    """Delete all but the last `keep` checkpoints and the last `keep` set-aside ones, and return the deleted paths.

    The order is that of writing, not that of steps: if a run resumed from before a damaged checkpoint, that checkpoint may have a
    higher step than newer ones. Broken links are skipped with a warning.

    Args:
        spared: steps whose checkpoints are kept regardless of their age.
        is_run: whether the directory is known to be that of a run. If not, it may belong to any program, and only files whose
            metadata identify them as checkpoints of a run are considered.

    Raises:
        OSError: a checkpoint cannot be deleted.
    """
    assert keep >= 1, "a directory keeps at least one checkpoint"
    present, aside = (
        [(step, path) for step, path in _by_age(_matching(directory, name)) if _may_be_pruned(path, is_run=is_run)]
        for name in (_NAME, _SET_ASIDE)
    )
    deleted = [path for step, path in present[:-keep] if step not in spared]
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
    """Delete a checkpoint if it exists.

    Raises:
        OSError: the checkpoint cannot be deleted.
    """
    if is_sharded(path) and path.is_dir() and not path.is_symlink():
        delete(path)
    else:
        path.unlink(missing_ok=True)


def set_aside(directory: Path, step: int) -> list[Path]:
    """Rename the checkpoints of steps after `step`, and return their new names.

    Call it when a run resumes from `step` with other settings or data: otherwise the next resume would continue from a later
    checkpoint of the old settings. Only one process may write in a directory at a time.

    Raises:
        CheckpointError: a checkpoint cannot be renamed.
    """
    later = [path for number, path in checkpoints(directory) if number > step]
    later_names = [(path, path.with_name(f"{path.stem}-set-aside{path.suffix}")) for path in later]
    if not later_names:
        return []
    try:
        for path, other in later_names:
            if os.path.lexists(other):  # left by an earlier call; a rename cannot replace a directory
                remove(other)
            os.replace(path, other)
        synchronise_directory(directory)
    except OSError as error:
        raise CheckpointError(
            f"Cannot rename the checkpoints after step {step} in {directory} ({error.strerror}); grant write permission, or "
            "delete them."
        ) from error
    names = ", ".join(other.name for _, other in later_names)
    _log.warning("The run resumes from step %d; its checkpoints of later steps were set aside: %s in %s.", step, names, directory)
    return [other for _, other in later_names]


def restore(
    content: CheckpointContent, key: str, shape: tuple[int, ...], dtype: str | np.dtype, box: Box | None = None
) -> np.ndarray:
    """Return the tensor `key`, or its part in `box`, after checking its shape and dtype.

    Raises:
        CheckpointError: the tensor is missing or damaged, or its shape or dtype differs.
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
    if stored_dtype.newbyteorder("=") != np.dtype(dtype).newbyteorder("="):  # files are little-endian on every host
        raise CheckpointError(
            f"Tensor {key} is {stored_dtype} in the checkpoint and {np.dtype(dtype)} here; "
            f"set dtype to {stored_dtype} to continue."
        )
    if box is None:
        return tensors[key]
    return tensors.part(key, box) if isinstance(tensors, ShardedTensors) else tensors[key][relative(box, whole(shape))]


def facts(content: CheckpointContent, key: str) -> tuple[tuple[int, ...], np.dtype]:
    """Return shape and dtype of a tensor, without reading shards."""
    if isinstance(content.tensors, ShardedTensors):
        return content.tensors.facts(key)
    tensor = content.tensors[key]
    return tensor.shape, tensor.dtype
