"""The checkpoint that a job goes on from: one that all ranks have verified together, and of which each reads what it needs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeVar

from hpctrain.comm.base import Communicator
from hpctrain.comm.raise_on_all_ranks import raise_on_all_ranks
from hpctrain.core.errors import CheckpointError
from hpctrain.job.same_start import Subject, compare
from hpctrain.launch.scheduler import own_job
from hpctrain.log import get_logger
from hpctrain.storage import best_record, checkpoint
from hpctrain.storage.checkpoint import CheckpointContent
from hpctrain.storage.hdf5_store import root_digest
from hpctrain.runs.directory import RunDirectory, runs
from hpctrain.storage.run_marker import marker_of
from hpctrain.runs.owner import run_of, was_owned_by_job
from hpctrain.storage.shards import ShardFacts
from hpctrain.storage.sharded_checkpoint import manifest_digest, open_sharded
from hpctrain.storage.sharded_tensors import ShardedTensors, shares

AUTO, BEST = "auto", "best"

Told = TypeVar("Told")

_log = get_logger(__name__)


@dataclass(frozen=True)
class _Candidates:
    """The checkpoints that a source may stand for, in the order in which they are tried.

    named: the source names the only one, and no other will do. refusal: the sentence where none is whole; None: then none is
    found.
    """

    paths: tuple[Path, ...]
    named: bool
    refusal: str | None


def find_checkpoint(
    world: Communicator, output: str, name: str, source: str, take: Callable[[Path], bool] | None = None
) -> tuple[Path, CheckpointContent] | None:
    """The newest whole checkpoint that a source stands for; None where there is none and the source is "auto". Collective.

    All ranks find the same one. A damaged one is passed over, with one line in the log.

    Args:
        output, name: of the runs.
        source: "auto" (the newest run that has a whole one), "best" (that of the newest run that has one), a run directory or a
            checkpoint.
        take: takes ownership of a checkpoint's run before the checkpoint is read. Returns True if the job did not own the run
            before: another job may have written to it since the search, which then starts again. Collective.

    Raises:
        CheckpointError: a source that names nothing, or of which nothing is whole.
    """
    candidates, tried = _of_root(world, lambda: _candidates(output, name, source)), set[Path]()
    while (path := next((path for path in candidates.paths if path not in tried), None)) is not None:
        run = _of_root(world, partial(_run_of, path))
        if take is not None and run is not None and take(run):
            candidates = _of_root(world, lambda: _candidates(output, name, source))
            continue
        tried.add(path)
        try:
            return path, read_together(world, path)
        except CheckpointError as error:
            if candidates.named:
                raise
            if world.rank == 0:
                _log.warning("Skipping a checkpoint. %s", error)
    if candidates.refusal is not None:
        raise CheckpointError(candidates.refusal)
    return None


def read_together(world: Communicator, path: Path) -> CheckpointContent:
    """A checkpoint whose every checksum holds. Collective.

    A file is read whole by every rank, after rank 0. Shards are verified by one rank each, as evenly as their sizes allow; the
    tensors then read, on each rank, the bytes that it asks for.

    Raises:
        CheckpointError: missing, damaged or of another version, alike on all ranks.
        ConfigError: a rank has another checkpoint than most ranks under that path; the same error on all ranks.
    """
    if not checkpoint.is_sharded(path):
        there = raise_on_all_ranks(world, lambda: checkpoint.read(path) if world.rank == 0 else None)
        content = raise_on_all_ranks(world, lambda: checkpoint.read(path) if there is None else there)
        _compare(world, path, content.meta.get("global_step"), lambda: root_digest(path))
        return content
    _compare(world, path, None, lambda: manifest_digest(path))
    shards, meta = _of_root(world, lambda: _manifest(path))
    tensors = ShardedTensors(path, shards)
    own = shares([shard.size for shard in shards], world.size)[world.rank]
    places = raise_on_all_ranks(world, lambda: tensors.verify(own))
    tensors.trust(dict(chain.from_iterable(others.items() for others in world.allgather_object(places))))
    return CheckpointContent(tensors, meta)


def _compare(world: Communicator, path: Path, step: object, digest: Callable[[], str]) -> None:
    """Compare the checkpoint that the ranks have found under one path. Collective.

    A difference is no `CheckpointError`, after which the search would fall back to an older checkpoint.
    """
    if world.size > 1:
        sha256 = raise_on_all_ranks(world, digest)
        facts = {**({} if step is None else {"global_step": step}), "sha256": sha256[:16]}
        compare(world, Subject("another checkpoint", f"give all nodes the same {path}", facts))


def _of_root(world: Communicator, work: Callable[[], Told]) -> Told:
    """The result of rank 0's work, on every rank; an error, too. Collective."""
    told: Told = world.broadcast_object(raise_on_all_ranks(world, lambda: work() if world.rank == 0 else None))
    return told


def _manifest(path: Path) -> tuple[Sequence[ShardFacts], Mapping[str, object]]:
    tensors, meta = open_sharded(path)
    return tensors.shards, meta


def _candidates(output: str, name: str, source: str) -> _Candidates:
    if source == BEST:
        return _Candidates((best_record.find(Path(output), name),), True, None)
    if source != AUTO and (Path(source).is_file() or checkpoint.is_sharded(Path(source))):
        return _Candidates((Path(source),), True, None)
    if source != AUTO:
        refusal = f"The run {source} holds no valid checkpoint; train one without --resume first."
        return _Candidates(_newest_first(RunDirectory.open(Path(source))), False, refusal)
    job = own_job(os.environ)
    # A requeued job goes on with its own run, even if a newer run of this name exists.
    by_owner = sorted(runs(Path(output), name), key=lambda run: not was_owned_by_job(run.path, job))
    having = {run.path: paths for run in by_owner if (paths := _newest_first(run))}
    if not having:
        return _Candidates((), False, None)
    refusal = (
        f"Every checkpoint of the runs of {name!r} in {output} is damaged, {next(iter(having))} is the newest run; "
        f"start a new training without --resume."
    )
    return _Candidates(tuple(chain.from_iterable(having.values())), False, refusal)


def _newest_first(run: RunDirectory) -> tuple[Path, ...]:
    """Return the checkpoints of a run, newest first. Leave out copies of another run's checkpoints, with a warning."""
    paths = []
    for _, path in reversed(checkpoint.by_age(run.checkpoints)):
        if _is_of(run.path, path):
            paths.append(path)
        else:
            _log.warning(
                "Skipping a checkpoint. %s is of another run; name it to --resume to begin a new run with its state.", path
            )
    return tuple(paths)


def _run_of(path: Path) -> Path | None:
    """Return the run directory that contains a checkpoint and that it belongs to; None if there is none."""
    run = run_of(path.parent)
    return run if run is not None and _is_of(run, path) else None


def _is_of(run: Path, path: Path) -> bool:
    """Return False if a checkpoint's metadata name another run."""
    marker, identity = marker_of(run), checkpoint.run_identity(path)
    return marker is None or identity is None or identity == marker.identity
