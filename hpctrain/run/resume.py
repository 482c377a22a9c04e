"""The checkpoint that a run resumes from: found and verified by all ranks together, and compared with the configuration.

Each rank reads the whole of a checkpoint in a single file. Of a sharded one, it reads only the bytes that it verifies or uses.
Changes since the checkpoint was written are checked by `config/resume_rules.py`, reported and recorded.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from hpctrain.assembly.images import CHECKPOINT, validation_split
from hpctrain.assembly.options import defaults, filled
from hpctrain.assembly.recipe import ImageFacts, Recipe
from hpctrain.comm.base import Communicator, Subject, compare, raise_on_all_ranks
from hpctrain.config import resume_rules
from hpctrain.config.load import dump, parse
from hpctrain.config.resume_rules import Change, changes, check, flat
from hpctrain.config.schema import Config
from hpctrain.core import user_code
from hpctrain.core.errors import CheckpointError, HpctrainError
from hpctrain.core.text import counted
from hpctrain.data.image_file import DataFacts, ImageFile, with_class_order
from hpctrain.job.ownership import RunOwnership
from hpctrain.job.same_start import is_trusted
from hpctrain.job.session import Session, on_root
from hpctrain.launch.scheduler import own_job
from hpctrain.run.images import open_alike
from hpctrain.runs import directory
from hpctrain.runs.directory import AUTO, BEST, RunDirectory, containing_run, listed_runs, named_run, run_of_checkpoint
from hpctrain.runs.owner import read_marker, was_owned_by_job
from hpctrain.storage import checkpoint
from hpctrain.storage.checkpoint import CheckpointContent
from hpctrain.storage.hdf5_store import ShardedTensors, ShardFacts, root_digest
from hpctrain.storage.shards import manifest_digest, open_sharded, shares
from hpctrain.training.metrics import Reporter
from hpctrain.training.snapshot import Position

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Candidates:
    """Checkpoints that a source may refer to, in the order in which they are tried.

    Attributes:
        refusal: error message if no checkpoint is intact; None if the source names a single checkpoint, or if `paths` is empty.
    """

    paths: tuple[Path, ...]
    refusal: str | None = None


def find_checkpoint(
    world: Communicator, output: str, name: str, source: str, take: Callable[[Path], bool] | None = None
) -> tuple[Path, CheckpointContent] | None:
    """Return the newest intact checkpoint that a source refers to; None if there is none and the source is "auto". Collective.

    All ranks return the same checkpoint. A damaged checkpoint is skipped, with a line in the log.

    Args:
        output, name: directory and name of the runs.
        source: "auto" (newest intact checkpoint of the newest run that has any; a requeued job prefers its own run), "best" (best
            checkpoint of the newest run that has one), a run directory or a checkpoint.
        take: collective function that takes ownership of a checkpoint's run before the checkpoint is read. It returns True if the
            job did not own the run before. Another job may then have written to the run since the search, so the search starts
            again.

    Raises:
        CheckpointError: the source does not exist, cannot be read, or has no intact checkpoint.
    """
    candidates, tried = on_root(world, lambda: _candidates(output, name, source)), set[Path]()
    while (path := next((path for path in candidates.paths if path not in tried), None)) is not None:
        run = on_root(world, partial(_run_of, path))
        if take is not None and run is not None and take(run):
            candidates = on_root(world, lambda: _candidates(output, name, source))
            continue
        tried.add(path)
        try:
            return path, read_together(world, path)
        except CheckpointError as error:
            if candidates.refusal is None:
                raise
            if world.rank == 0:
                _log.warning("Skipping a checkpoint. %s", error)
    if candidates.refusal is not None:
        raise CheckpointError(candidates.refusal)
    return None


def read_together(world: Communicator, path: Path) -> CheckpointContent:
    """Return a checkpoint after verifying all its checksums. Collective.

    A single file is read completely by every rank, by rank 0 first. Shards are distributed over the ranks, by size, for
    verification; each rank then reads only the bytes that it uses.

    Raises:
        CheckpointError: the checkpoint is missing, damaged or of another version; on every rank.
        ConfigError: the checkpoint under that path differs from that of most ranks; on every rank.
    """
    if not checkpoint.is_sharded(path):
        there = raise_on_all_ranks(world, lambda: checkpoint.read(path) if world.rank == 0 else None)
        content = raise_on_all_ranks(world, lambda: checkpoint.read(path) if there is None else there)
        _compare(world, path, content.meta.get("global_step"), lambda: root_digest(path))
        return content
    _compare(world, path, None, lambda: manifest_digest(path))
    shards, meta = on_root(world, lambda: _manifest(path))
    tensors = ShardedTensors(path, shards)
    own = shares([shard.size for shard in shards], world.size)[world.rank]
    places = raise_on_all_ranks(world, lambda: tensors.verify(own))
    tensors.trust(dict(chain.from_iterable(others.items() for others in world.allgather_object(places))))
    return CheckpointContent(tensors, meta)


def _compare(world: Communicator, path: Path, step: object, digest: Callable[[], str]) -> None:
    """Check that all ranks have the same checkpoint under one path. Collective.

    A difference does not raise `CheckpointError`, after which the search would fall back to an older checkpoint.
    """
    if world.size > 1:
        sha256 = raise_on_all_ranks(world, digest)
        facts = {**({} if step is None else {"global_step": step}), "sha256": sha256[:16]}
        compare(world, Subject("another checkpoint", f"give all nodes the same {path}", facts))


def _manifest(path: Path) -> tuple[Sequence[ShardFacts], Mapping[str, object]]:
    tensors, meta = open_sharded(path)
    return tensors.shards, meta


def _candidates(output: str, name: str, source: str) -> _Candidates:
    if source == BEST:
        return _Candidates((directory.find_best(Path(output), name),))
    if source != AUTO and (Path(source).is_file() or checkpoint.is_sharded(Path(source))):
        return _Candidates((Path(source),))
    job = own_job(os.environ)
    # A requeued job continues with its own run, even if a newer run of this name exists.
    listed = listed_runs(Path(output), name) if source == AUTO else []
    by_owner = (run.open() for run in sorted(listed, key=lambda run: not was_owned_by_job(run.path, job)))
    for run in by_owner if source == AUTO else [named_run(source)]:
        if (paths := _newest_first(run)) or source != AUTO:
            refusal = f"The run {run.path} has no intact checkpoint; give another run or a checkpoint, or start a new training."
            return _Candidates(paths, refusal)
    return _Candidates(())


def _newest_first(run: RunDirectory) -> tuple[Path, ...]:
    """Return the checkpoints of a run, newest first. Copies of another run's checkpoints are left out, with a warning."""
    paths = []
    for _, path in reversed(checkpoint.by_age(run.checkpoints)):
        if _is_of(run.path, path):
            paths.append(path)
        else:
            _log.warning(
                "Skipping a checkpoint. %s belongs to another run; to begin a new run with its state, pass its path to --resume.",
                path,
            )
    return tuple(paths)


def _run_of(path: Path) -> Path | None:
    """Return the run directory that contains a checkpoint, if the checkpoint belongs to that run; otherwise None."""
    run = containing_run(path.parent)
    return run if run is not None and _is_of(run, path) else None


def _is_of(run: Path, path: Path) -> bool:
    """Return False if a checkpoint's metadata name another run."""
    marker, identity = read_marker(run), checkpoint.run_identity(path)
    return marker is None or identity is None or identity == marker.identity


@dataclass(frozen=True)
class Start:
    """A checkpoint that fits the configuration, before the replica and the data are made from it.

    Attributes:
        directory: directory of the run that continues; None if the checkpoint lies outside its run, so a new run begins with its
            state.
        path: path of the checkpoint.
        position: position at which training continues, in terms of the current training file.
        changes: changes from the checkpoint's values to the current ones.
        data: facts about the training file stored in the checkpoint.
    """

    directory: RunDirectory | None
    path: Path
    content: CheckpointContent
    position: Position
    changes: tuple[Change, ...]
    data: DataFacts


def find_start(session: Session, source: str, ownership: RunOwnership | None = None) -> Start | None:
    """Return the checkpoint that training resumes from; None if the source is "auto" and no run of this name has one. Collective.

    Args:
        source: "auto", "best", a run directory or a checkpoint.
        ownership: ownership with which this job takes the run; None: this job owns the run already.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or it does not fit the configuration.
        RunOwnedError: another job writes to its run.
    """
    config, take = session.config, None if ownership is None else partial(ownership.take, session)
    there = find_checkpoint(session.world, config.output, config.name, source, take)
    if there is None:
        return None
    file = open_alike(session.world, config, ("train",))["train"]
    return raise_on_all_ranks(session.world, lambda: _start(session, *there, file))


def _start(session: Session, path: Path, content: CheckpointContent, opened: ImageFile) -> Start:
    """Check a checkpoint against the configuration and the training file, and return the start from it."""
    data = stored_data(content, path)
    config, position = session.config, Position.from_meta(content.meta)
    file = with_class_order(opened, data.class_names, CHECKPOINT)
    split = validation_split(config, opened)
    now = DataFacts.of(file, None if split is None else split.validation)
    complete = position.samples == data.training_samples
    differences = _changes(content, data, session, now)
    check(
        differences,
        between_epochs=complete or position.samples == 0,
        begun_epochs=position.epoch + (position.samples > 0),
        place=f"{path} (at {describe(position, data.training_samples)})",
    )
    if complete:  # a finished epoch is finished for another file as well
        position = replace(position, samples=now.training_samples)
    if position.samples > now.training_samples:
        raise CheckpointError(
            f"{path} was written after {counted(position.samples, 'image')} of its epoch, but {config.data.train} has only "
            f"{now.training_samples:,} training images; set data.train to the file that it was trained on."
        )
    return Start(run_of_checkpoint(path, content.meta), path, content, position, differences, data)


def stored_data(content: CheckpointContent, path: Path) -> DataFacts:
    """Return the facts about the training file that a checkpoint stores.

    Raises:
        CheckpointError: `job.save` wrote the checkpoint.
    """
    values: Any = content.meta.get("data")
    if values is None:
        raise CheckpointError(
            f"{path} was written by a Python program with its own training loop, and does not name its model; "
            f"load it in that program, or give a checkpoint of `hpctrain train`."
        )
    return DataFacts.from_meta(values)


def _changes(content: CheckpointContent, data: DataFacts, session: Session, now: DataFacts) -> tuple[Change, ...]:
    """Return the changes from the checkpoint's configuration, ranks and data to the current ones."""
    config = session.config
    old, new = _stored_values(content, config), _values(dump(config), config)
    old["ranks"], new["ranks"] = content.meta["ranks"], session.world.size
    stored_code: Mapping[str, str] = content.meta.get("code", {})  # type: ignore[assignment]
    old |= {f"code.{reference}": digest for reference, digest in stored_code.items()}
    new |= {f"code.{reference}": digest for reference, digest in user_code.digests().items()}
    old |= _data_values(data)
    new |= _data_values(now)
    return changes(old, new, _absent(config, data))


def check_model(content: CheckpointContent, data: DataFacts, config: Config, path: Path) -> None:
    """Raise unless a configuration describes the network of a checkpoint.

    Raises:
        CheckpointError: the configuration describes another network; the message lists the differences.
    """
    differences = changes(_stored_values(content, config), _values(dump(config), config), _absent(config, data))
    resume_rules.check_model(differences, str(path))


def stored_config(content: CheckpointContent, config: Config) -> Config | None:
    """Return the configuration stored in a checkpoint.

    The result is None if the stored configuration is no longer valid, or if it names user code that `config` does not name.
    """
    with suppress(HpctrainError):
        stored = parse(str(content.meta["config"]), stored=True)[0]
        return stored if is_trusted(stored, config) else None
    return None


def _stored_values(content: CheckpointContent, config: Config) -> dict[str, Any]:
    return _values(str(content.meta["config"]), config)


def _values(text: str, config: Config) -> dict[str, Any]:
    """Return a configuration's values with all options filled in.

    The values are returned as written if the configuration is no longer valid, or if it names user code that `config` does not
    name: reading a checkpoint must not import code.
    """
    with suppress(HpctrainError):
        stored = parse(text, stored=True)[0]
        if is_trusted(stored, config):
            text = dump(filled(stored))
    return flat(yaml.safe_load(text))


def _data_values(data: DataFacts) -> dict[str, str]:
    size = " x ".join(map(str, data.shape))
    values = {
        "images": f"{data.samples} of {size}, sha256 {data.images[:12]}",
        "labels": f"sha256 {data.labels[:12]}",
    }
    if data.held_out is not None:
        count, digest = data.held_out
        values["held_out"] = f"{count} samples for validation, sha256 {digest[:12]}"
    return values


def _absent(config: Config, data: DataFacts) -> dict[str, Any]:
    """Return the default of each key, which applies if the key is not set."""
    silent = config.model_copy(update={"model": config.model.model_validate(config.model.name)})
    height, width, channels = data.shape
    options = Recipe.of(silent, ImageFacts(((height, width, channels),), len(data.class_names))).model_options
    return flat(Config.model_construct().model_dump(mode="json")) | defaults(config) | flat({"model": options})


def describe(position: Position, samples: int) -> str:
    """Return a position in a training as text: its epoch, its step, and its share of the epoch's `samples` if it is inside."""
    if not position.samples:
        return f"epoch {position.epoch + 1}, step {position.global_step}"
    done = f"{position.samples:,} of {samples:,} images of the epoch done"
    return f"epoch {position.epoch + 1}, step {position.global_step}, {done}"


def introduce(start: Start, config: Config, samples: int, reporter: Reporter) -> None:
    """Report and record the position at which the run resumes, and each change; an epoch has `samples` samples."""
    position = start.position
    epochs, over = config.epochs, position.samples == samples
    if start.directory is None:
        reporter.say(f"{start.path} is outside its run's directory: a new run begins with its state")
    if position.epoch + over >= epochs:
        rest = "there is nothing to train" if config.data.evaluated is None else "it is only evaluated"
        reporter.say(f"resumed a run that is finished after {counted(epochs, 'epoch')}, step {position.global_step}: {rest}")
        reporter.say(f"give a larger number of epochs to train further, such as epochs={epochs + 5}")
    else:
        reporter.say(f"resumed at {describe(position, samples)}")
    for change in start.changes:
        reporter.say(f"  {change}")
    reporter.record(
        "resume",
        {
            "epoch": position.epoch + 1,
            "step": position.global_step,
            "samples": position.samples,
            "checkpoint": start.path.name,
            "changes": {change.key: [change.old, change.new] for change in start.changes},
        },
    )
