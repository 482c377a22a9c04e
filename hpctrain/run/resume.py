"""Going on from a checkpoint: which one, where it stands, what is other than when it was written, and what is kept of that."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from hpctrain.core import user_code
from hpctrain.comm.raise_on_all_ranks import raise_on_all_ranks
from hpctrain.config.dump import dump
from hpctrain.config.load import parse
from hpctrain.config.schema import Config
from hpctrain.data.classes import difference, in_order_of
from hpctrain.data.facts import DataFacts
from hpctrain.data.image_file import ImageFile
from hpctrain.core.errors import CheckpointError, HpctrainError
from hpctrain.config import resume_rules
from hpctrain.experiment.checkpoint_search import find_checkpoint
from hpctrain.run.images import CHECKPOINT, open_alike
from hpctrain.experiment.model import model_options
from hpctrain.config.options import defaults, filled
from hpctrain.config.resume_rules import Change, changes, check, flat
from hpctrain.experiment.run_ownership import RunOwnership
from hpctrain.job.session import Session
from hpctrain.experiment.user_code import is_trusted
from hpctrain.storage.checkpoint import CheckpointContent
from hpctrain.runs.directory import RunDirectory, run_of_checkpoint
from hpctrain.train.metrics_rest import Reporter
from hpctrain.train.snapshot import Position


@dataclass(frozen=True)
class Start:
    """A checkpoint that fits what is asked for, before anything is made from it.

    Args:
        directory: the run that goes on; None: the checkpoint lies outside its run, and a new run begins with its state.
        path: the file. position: where training goes on, in the data of now.
        changes: from the checkpoint's values to those of now. data: the training file as the checkpoint knows it, if it does.
    """

    directory: RunDirectory | None
    path: Path
    content: CheckpointContent
    position: Position
    changes: tuple[Change, ...]
    data: DataFacts | None

    def without_tensors(self) -> Start:
        """The same start without the checkpoint's tensors, for when they are in place; their memory is free then."""
        return replace(self, content=CheckpointContent({}, self.content.meta))


def find_start(session: Session, source: str, ownership: RunOwnership | None = None) -> Start | None:
    """The checkpoint that training goes on from; None where it is "auto" and no run of this name has one. Collective.

    Args:
        source: "auto", "best", a run directory or a checkpoint file. ownership: takes the run; None: it is owned already.

    Raises:
        CheckpointError: there is none, it is damaged, or it does not go together with what is asked for now.
        RunOwnedError: another job writes to its run.
    """
    config, take = session.config, None if ownership is None else partial(ownership.take, session)
    there = find_checkpoint(session.world, config.output, config.name, source, take)
    if there is None:
        return None
    file = open_alike(session.world, config, ("train",))["train"]
    return raise_on_all_ranks(session.world, lambda: _start(session, *there, file))


def _start(session: Session, path: Path, content: CheckpointContent, file: ImageFile) -> Start:
    """Check a checkpoint against the configuration and the training file, and return the start from it."""
    if "config" not in content.meta:
        raise CheckpointError(
            f"{path} was written by a program with a loop of its own, and does not say which model it is of; "
            f"load it in that program, or give a checkpoint of `hpctrain train`."
        )
    config, position = session.config, Position.from_meta(content.meta)
    data = data_of(content)
    if data is not None and difference(file.class_names, data.class_names) is None:
        file = in_order_of(file, data.class_names, CHECKPOINT)
    now = DataFacts.of(file)
    complete = data is not None and position.samples == data.samples
    differences = _changes(content, data, session, now)
    check(
        differences,
        between_epochs=complete or position.samples == 0,
        begun_epochs=position.epoch + (position.samples > 0),
        place=f"{path} (at {describe(position, None if data is None else data.samples)})",
    )
    if complete:  # of another file, too, an epoch that is over is over
        position = replace(position, samples=now.samples)
    if position.samples > now.samples:
        raise CheckpointError(
            f"{path} has seen {position.samples} images of its epoch, but {config.data.train} holds {now.samples} only; "
            f"give data.train the file that it was trained on."
        )
    return Start(run_of_checkpoint(path, content.meta), path, content, position, differences, data)


def data_of(content: CheckpointContent) -> DataFacts | None:
    """The facts that a checkpoint keeps of its training file; None in one of format version 1."""
    values: Mapping[str, Any] | None = content.meta.get("data")  # type: ignore[assignment]
    return None if values is None else DataFacts.from_meta(values)


def _changes(content: CheckpointContent, data: DataFacts | None, session: Session, now: DataFacts) -> tuple[Change, ...]:
    """From the checkpoint's configuration, ranks and data to those of now."""
    config = session.config
    old, new = _stored_values(content, config), _values(dump(config), config)
    old["ranks"], new["ranks"] = content.meta["ranks"], session.world.size
    stored_code: Mapping[str, str] = content.meta.get("code", {})  # type: ignore[assignment]
    old |= {f"code.{reference}": digest for reference, digest in stored_code.items()}
    new |= {f"code.{reference}": digest for reference, digest in user_code.digests().items()}
    if data is not None:
        old |= _data_values(data)
        new |= _data_values(now)
        differs = difference(data.class_names, now.class_names)
        if differs is not None:
            old["classes"], new["classes"] = f"as in {CHECKPOINT}", f"as in {config.data.train}, where {differs}"
    elif old.get("data.train") != config.data.train:  # all that is known of the images
        old["images"], new["images"] = old.get("data.train"), config.data.train
    return changes(old, new, _absent(config, data or now))


def check_model(content: CheckpointContent, data: DataFacts, config: Config, path: Path) -> None:
    """Nothing, where a configuration describes the network of a checkpoint.

    Raises:
        CheckpointError: it describes another one; the message lists the differences.
    """
    differences = changes(_stored_values(content, config), _values(dump(config), config), _absent(config, data))
    resume_rules.check_model(differences, str(path))


def stored_config(content: CheckpointContent, config: Config) -> Config | None:
    """The configuration that a checkpoint was written with.

    None where an earlier hpctrain wrote what this one refuses, or where it names code that `config`, that of now, does not.
    """
    with suppress(HpctrainError):
        stored = parse(str(content.meta["config"]))[0]
        return stored if is_trusted(stored, config) else None
    return None


def _stored_values(content: CheckpointContent, config: Config) -> dict[str, Any]:
    return _values(str(content.meta["config"]), config)


def _values(text: str, config: Config) -> dict[str, Any]:
    """A configuration's values, all options filled in.

    They are as they stand where an earlier hpctrain wrote what this one refuses, or where the options are those of code that
    `config` does not name: a checkpoint has nothing imported.
    """
    with suppress(HpctrainError):
        stored = parse(text)[0]
        if is_trusted(stored, config):
            text = dump(filled(stored))
    return flat(yaml.safe_load(text))


def _data_values(data: DataFacts) -> dict[str, str]:
    size = " x ".join(map(str, data.shape))
    return {
        "images": f"{data.samples} of {size}, sha256 {data.images[:12]}",
        "labels": f"sha256 {data.labels[:12]}",
    }


def _absent(config: Config, data: DataFacts) -> dict[str, Any]:
    """The value that a key has where it is not given."""
    height, width, channels = data.shape
    silent = config.model_copy(update={"model": config.model.model_validate(config.model.name)})
    options = model_options(silent, len(data.class_names), (height, width, channels))
    return flat(Config.model_construct().model_dump(mode="json")) | defaults(config) | flat({"model": options})


def describe(position: Position, samples: int | None) -> str:
    """A position in words, for people; samples: of an epoch, where that is known."""
    if not position.samples:
        return f"epoch {position.epoch + 1}, step {position.global_step}"
    of_all = "" if samples is None else f" of {samples:,}"
    return f"epoch {position.epoch + 1}, step {position.global_step}, {position.samples:,}{of_all} images of the epoch done"


def introduce(start: Start, config: Config, samples: int, reporter: Reporter) -> None:
    """Say where the run goes on, and each change; record both."""
    position = start.position
    epochs, over = config.epochs, position.samples == samples
    if start.directory is None:
        reporter.say(f"{start.path} lies outside of the run that it is of: a new run begins with its state")
    if position.epoch + over >= epochs:
        rest = "there is nothing to train" if config.data.test is None else "it is evaluated only"
        done = f"{epochs} {'epoch' if epochs == 1 else 'epochs'}"
        reporter.say(f"resumed a run that is finished after {done}, step {position.global_step}: {rest}")
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
