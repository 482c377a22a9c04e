"""`hpctrain checkpoint`: list, verify, show, convert and prune the checkpoints of a run. Needs no MPI."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli.arguments import FilePath
from hpctrain.cli.failure import Commands
from hpctrain.core.errors import CheckpointError
from hpctrain.core.text import echo, echo_block

if TYPE_CHECKING:
    from hpctrain.storage.checkpoint import CheckpointContent

_PATH = click.argument("path", type=FilePath(path_type=Path))
_JSON = click.option("--json", "as_json", is_flag=True, help="Print the same as JSON.")


@click.group(cls=Commands)
def checkpoint() -> None:
    """List, verify, show, convert and prune checkpoints of runs."""


@checkpoint.command("list")
@_PATH
def listing(path: Path) -> None:
    """List the checkpoints of a run, oldest step first.

    PATH is a run directory, its directory of checkpoints, or a checkpoint. The one with the best evaluation is marked. No
    tensor is read, only names, sizes and metadata, and the record of the best one.
    """
    from hpctrain.runs.directory import StoredCheckpoint, read_best

    files = files_of(path)
    best = read_best(files[0][1].parent)
    mark = "" if best is None else f"best: {best}"
    for step, file in sorted(files):
        try:
            stored = StoredCheckpoint.of(step, file)
        except OSError:
            echo(f"step {step:>8}  a broken link: {file}")
            continue
        written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(stored.written))
        is_best = best is not None and best.checkpoint == file.name
        column = f"{mark if is_best else '':{len(mark)}}  " if mark else ""
        echo(f"step {step:>8}  {stored.n_bytes / 1e6:>10,.1f} MB  {written}  {column}{file}")
    if best is not None and not (files[0][1].parent / best.checkpoint).exists():
        echo(f"the best checkpoint, {best.checkpoint} ({best}), is not there any more")


@checkpoint.command()
@_PATH
def verify(path: Path) -> None:
    """Read checkpoints whole and compare every checksum.

    PATH is a run directory, its directory of checkpoints, or a checkpoint. The exit code is 2 where one is damaged.
    """
    from hpctrain.storage.checkpoint import read

    files = files_of(path)
    damaged = []
    for _, file in files:
        try:
            tensors = len(read(file).tensors)
        except CheckpointError as error:
            damaged.append(file)
            echo(str(error))
        else:
            echo(f"{file}: all {tensors} tensors have their checksums")
    if damaged:
        newest = next((file for _, file in reversed(files) if file not in damaged), None)
        advice = "none is left to go on from" if newest is None else f"the newest whole one is {newest}"
        raise CheckpointError(f"{len(damaged)} of {len(files)} checkpoints cannot be used; {advice}.")


@checkpoint.command()
@_PATH
@_JSON
def show(path: Path, as_json: bool) -> None:
    """Show the position and the tensors that a checkpoint holds.

    PATH is a checkpoint, or a run directory, of which the newest is shown. Every checksum is compared.
    """
    import numpy as np

    from hpctrain.storage.checkpoint import read

    _, file = files_of(path)[-1]
    content = read(file)
    tensors = _tensors(content)
    if as_json:
        echo_block(json.dumps({"file": str(file), "meta": _about(content.meta), "tensors": tensors}, indent=1))
        return
    echo(str(file))
    for key, value in _about(content.meta).items():
        echo(f"{key}: {value}")
    for name, facts in tensors.items():
        echo(f"  {name}  {facts['shape']} {facts['dtype']}")
    size = sum(math.prod(facts["shape"]) * np.dtype(facts["dtype"]).itemsize for facts in tensors.values())
    echo(f"{len(tensors)} tensors, {size / 1e6:,.1f} MB")


@checkpoint.command()
@_PATH
@click.option(
    "--layout",
    type=click.Choice(["single", "sharded"]),
    help="Layout of the new checkpoint: one file, or a directory of shards. By default the one that PATH has not.",
)
@click.option(
    "--shards", type=click.IntRange(min=1), help="Number of shards. By default that of the ranks that wrote the checkpoint."
)
@click.option("--out", type=FilePath(path_type=Path), required=True, help="Write to this path, which must not exist yet.")
def convert(path: Path, layout: str | None, shards: int | None, out: Path) -> None:
    """Write the same checkpoint in the other layout.

    PATH is a checkpoint, or a run directory, of which the newest is taken. The new checkpoint has the same tensors and metadata
    to the last bit; it is read again and compared before the command ends. The name of a directory of shards ends in .shards. A
    training goes on from the new checkpoint where it lies in the directory of checkpoints of a run.
    """
    from hpctrain.runs.owner import owned, run_of
    from hpctrain.storage.checkpoint import convert as write_converted
    from hpctrain.storage.checkpoint import is_sharded

    _, file = files_of(path)[-1]
    sharded = layout == "sharded" if layout is not None else not is_sharded(file)
    if shards is not None and not sharded:
        raise CheckpointError(f"--shards is {shards}, but the layout single has one file; leave --shards out.")
    with owned(run_of(out.absolute().parent), "hpctrain checkpoint convert"):
        tensors = write_converted(file, out, sharded=sharded, shards=shards).tensors
    echo(f"{out}: all {len(tensors)} tensors are those of {file}")


@checkpoint.command()
@_PATH
@click.option("--keep", type=click.IntRange(min=1), required=True, help="Keep this many, those that were written last.")
@click.option("--drop-best", is_flag=True, help="Delete the one with the best evaluation, too, unless it is among the latest.")
def prune(path: Path, keep: int, drop_best: bool) -> None:
    """Delete checkpoints of a run but the latest and the best.

    The latest are those that were written last, whatever their steps; as many that were set aside at a resume are kept beside
    them, and so is the one with the best evaluation. Unfinished checkpoints that killed runs have left go, too, once nothing
    was written to them for an hour. A run that another job writes to is refused. PATH is a run directory or its directory of
    checkpoints. In any other directory, only files whose metadata identify them as checkpoints of a run are deleted.
    """
    from hpctrain.runs import directory as best_record
    from hpctrain.runs.owner import is_run, owned
    from hpctrain.storage import checkpoint as storage
    from hpctrain.storage.checkpoint import ABANDONED_SECONDS, remove_left

    directory = _directory(path)
    if not directory.is_dir():
        raise CheckpointError(f"{path} is no directory; give a run directory to prune its checkpoints.")
    place = directory.absolute()
    of_run = place.name == "checkpoints" and is_run(place.parent)
    with owned(place.parent if of_run else None, "hpctrain checkpoint prune"):
        best = best_record.read_best(directory)
        left = remove_left(directory, least_age_seconds=ABANDONED_SECONDS) if of_run else []
        for file in [*storage.prune(directory, keep, () if best is None or drop_best else {best.step}, is_run=of_run), *left]:
            echo(f"deleted {file}")
        if best is not None and not (directory / best.checkpoint).exists():
            best_record.write_best(directory, None)


def files_of(path: Path) -> list[tuple[int, Path]]:
    """Return (step, file) of the checkpoints that a path stands for, oldest first; at least one.

    Raises:
        CheckpointError: there are none.
    """
    from hpctrain.storage.checkpoint import by_age, checkpoints, is_sharded

    if path.is_file() or (path.is_dir() and is_sharded(path)):
        matching = [entry for entry in checkpoints(path.parent) if entry[1].name == path.name]
        return matching or [(0, path)]
    files = by_age(_directory(path))
    if not files:
        raise CheckpointError(f"{path} holds no checkpoints; give a run directory that has some, or a checkpoint file.")
    return files


def _directory(path: Path) -> Path:
    below = path / "checkpoints"
    return below if below.is_dir() else path


def _about(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata that fit on a line each; configuration and schedules are long."""
    return {key: value for key, value in meta.items() if isinstance(value, int | float | str) and len(str(value)) < 100}


def _tensors(content: CheckpointContent) -> dict[str, dict[str, Any]]:
    from hpctrain.storage.checkpoint import facts

    of_each = ((name, facts(content, name)) for name in sorted(content.tensors))
    return {name: {"shape": list(shape), "dtype": str(dtype)} for name, (shape, dtype) in of_each}
