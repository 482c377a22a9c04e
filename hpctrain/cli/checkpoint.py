"""`hpctrain checkpoint` and `hpctrain weights`: list, verify, show and prune checkpoints; import and export weights.

Neither needs MPI. Files of weights use torchvision's names.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpctrain.cli.arguments import Commands, FilePath, OutputFile, or_newest_trained
from hpctrain.core.errors import CheckpointError, ConfigError
from hpctrain.core.text import counted, echo, echo_block, echo_wrapped, shell_word, size_text

if TYPE_CHECKING:
    import numpy as np

_PATH = click.argument("path", required=False, type=FilePath(path_type=Path), callback=or_newest_trained)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print the content as JSON.")


@click.group(cls=Commands)
def checkpoint() -> None:
    """List, verify, show and prune checkpoints of runs."""


@checkpoint.command("list")
@_PATH
def listing(path: Path) -> None:
    """List the checkpoints of a run in the order of steps.

    PATH is a run directory, its directory of checkpoints, or a checkpoint. The default is the newest run in `runs` that has a
    checkpoint. The checkpoint with the best evaluation is marked. Only names, sizes and metadata are read, no tensors.
    """
    from hpctrain.runs.directory import StoredCheckpoint, read_best

    files = files_of(path)
    best = read_best(files[0][1].parent)
    mark = "" if best is None else f"best: {best}"
    for step, file in sorted(files):
        try:
            stored = StoredCheckpoint.of(step, file)
        except FileNotFoundError:
            echo(f"{file} of step {step} is a broken link", err=True)
            continue
        written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(stored.written))
        is_best = best is not None and best.checkpoint == file.name
        column = f"{mark if is_best else '':{len(mark)}}  " if mark else ""
        echo(f"step {step:>8}  {size_text(stored.n_bytes):>10}  {written}  {column}{file}")
    if best is not None and not (files[0][1].parent / best.checkpoint).exists():
        echo(f"the best checkpoint, {best.checkpoint} ({best}), no longer exists", err=True)


@checkpoint.command()
@_PATH
def verify(path: Path) -> None:
    """Read checkpoints completely and verify every checksum.

    PATH is a run directory, its directory of checkpoints, or a checkpoint. The default is the newest run in `runs` that has a
    checkpoint. The exit code is 2 if a checkpoint is damaged.
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
            echo(f"{file}: all checksums of {counted(tensors, 'tensor')} agree")
    if damaged:
        newest = next((file for _, file in reversed(files) if file not in damaged), None)
        advice = "no other checkpoint is left to resume from" if newest is None else f"the newest complete one is {newest}"
        raise CheckpointError(f"{len(damaged)} of {len(files)} checkpoints cannot be used; {advice}.")


@checkpoint.command()
@_PATH
@_JSON
def show(path: Path, as_json: bool) -> None:
    """Show the position and the tensors of a checkpoint.

    PATH is a checkpoint, or a run directory, whose newest checkpoint is shown. The default is the newest run in `runs` that has
    a checkpoint. Every checksum is verified.
    """
    import numpy as np

    from hpctrain.storage.checkpoint import facts as tensor_facts
    from hpctrain.storage.checkpoint import read

    _, file = files_of(path)[-1]
    content = read(file)
    of_each = ((name, tensor_facts(content, name)) for name in sorted(content.tensors))
    tensors: dict[str, dict[str, Any]] = {name: {"shape": list(shape), "dtype": str(dtype)} for name, (shape, dtype) in of_each}
    if as_json:
        echo_block(json.dumps({"file": str(file), "meta": _about(content.meta), "tensors": tensors}, indent=1))
        return
    _print_facts(file, _about(content.meta), tensors)
    size = sum(math.prod(facts["shape"]) * np.dtype(facts["dtype"]).itemsize for facts in tensors.values())
    echo(f"{counted(len(tensors), 'tensor')}, {size_text(size)}")


@checkpoint.command()
@click.argument("path", type=FilePath(path_type=Path))
@click.option("--keep", type=click.IntRange(min=1), required=True, help="Number of most recently written checkpoints to keep.")
@click.option(
    "--drop-best", is_flag=True, help="Also delete the checkpoint with the best evaluation, unless it is among the --keep newest."
)
def prune(path: Path, keep: int, drop_best: bool) -> None:
    """Delete old checkpoints of a run.

    The command keeps the most recently written checkpoints, regardless of their steps, and the checkpoint with the best
    evaluation. Checkpoints that a resume has set aside are counted separately, and the same number of them is kept. Unfinished
    checkpoints of killed runs are deleted if nothing was written to them for an hour. Checkpoints of a run that another job
    writes to are not deleted. PATH is a run directory or its directory of checkpoints. In any other directory, only files whose
    metadata identify them as checkpoints of a run are deleted.
    """
    from hpctrain.runs import directory as best_record
    from hpctrain.runs.owner import owned
    from hpctrain.storage import checkpoint as storage
    from hpctrain.storage.checkpoint import ABANDONED_SECONDS, remove_left

    directory = _directory(path)
    if not directory.is_dir():
        raise CheckpointError(f"{path} is not a directory; give a run directory to prune its checkpoints.")
    place = directory.absolute()
    run = best_record.containing_run(place) if place.name == "checkpoints" else None
    of_run = run is not None
    with owned(run, "hpctrain checkpoint prune"):
        best = best_record.read_best(directory)
        left = remove_left(directory, least_age_seconds=ABANDONED_SECONDS) if of_run else []
        for file in [*storage.prune(directory, keep, () if best is None or drop_best else {best.step}, is_run=of_run), *left]:
            echo(f"deleted {file}")
        if best is not None and not (directory / best.checkpoint).exists():
            best_record.write_best(directory, None)


def files_of(path: Path) -> list[tuple[int, Path]]:
    """Return (step, file) of the checkpoints at a path, oldest first; at least one. A file named without a step has step 0.

    Raises:
        CheckpointError: there are no checkpoints.
    """
    from hpctrain.storage.checkpoint import by_age, checkpoints, is_sharded

    if path.is_file() or (path.is_dir() and is_sharded(path)):
        matching = [entry for entry in checkpoints(path.parent) if entry[1].name == path.name]
        return matching or [(0, path)]
    files = by_age(_directory(path))
    if not files:
        raise CheckpointError(
            f"{path.absolute()} contains no checkpoints; give a run directory with checkpoints, or a checkpoint file."
        )
    return files


def _directory(path: Path) -> Path:
    below = path / "checkpoints"
    return below if below.is_dir() else path


def _print_facts(file: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Any]]) -> None:
    echo(str(file))
    for key, value in metadata.items():
        echo(f"{key}: {value}")
    for name, facts in tensors.items():
        echo(f"  {name}  {facts['shape']} {facts['dtype']}")


def _about(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata with short values: numbers, flags and texts of less than 100 characters."""
    return {key: value for key, value in meta.items() if isinstance(value, int | float | str) and len(str(value)) < 100}


_FILE = click.argument("file", type=FilePath(path_type=Path))
_CLASSES = click.option(
    "--classes",
    type=click.IntRange(min=1),
    help="Number of classes of the model; default: that of the last layer in the file.",
)
_OPTIONS = click.option(
    "--option",
    "options",
    multiple=True,
    metavar="KEY=VALUE",
    help="Option of the model, such as width=0.5; may be given several times.",
)


@click.group(cls=Commands)
def weights() -> None:
    """Import, export and show weights under torchvision's names."""


@weights.command("import")
@_FILE
@click.option("--model", required=True, help="Name of the model in the catalogue (see `hpctrain list models`).")
@_CLASSES
@_OPTIONS
@click.option(
    "--out", type=OutputFile(makes_directory=True), required=True, help="File to write; its name must end in .safetensors."
)
def import_weights(file: Path, model: str, classes: int | None, options: tuple[str, ...], out: Path) -> None:
    """Convert weights of another program for training.

    FILE is a safetensors file, or a file of torch.save (.pt, .pth), which needs PyTorch and from which only tensors are read.
    Names and shapes must be those of torchvision's model. The arrays are copied bitwise. To train from the new file, set
    init.weights to its path.
    """
    from hpctrain.run.model_weights import of_file
    from hpctrain.storage.weights_file import SAFETENSORS, check_suffix

    check_suffix(out, (SAFETENSORS,))
    content = of_file(file, model, classes, _parsed(options))
    content.write(out)
    echo_wrapped(f"{out}: {_summary(content.state)} of {model}, bitwise equal to those of {file}")


@weights.command()
@click.argument("source", required=False, type=FilePath(path_type=Path), callback=or_newest_trained)
@click.option("--best", is_flag=True, help="Export the run's checkpoint with the best evaluation instead of the newest.")
@click.option("--averaged", is_flag=True, help="Export the averaged weights of a training with ema.decay.")
@click.option("--model", help="Name of the model; required if SOURCE does not contain it or if the model is your own code.")
@_CLASSES
@_OPTIONS
@click.option(
    "--out",
    type=OutputFile(makes_directory=True),
    required=True,
    help="File to write; its suffix selects the format: .safetensors, .pt, .pth or .onnx.",
)
def export(
    source: Path, best: bool, averaged: bool, model: str | None, classes: int | None, options: tuple[str, ...], out: Path
) -> None:
    """Write the weights of a run for other programs.

    SOURCE is a run directory, whose newest checkpoint is exported, a checkpoint of any layout and grid, or a file of weights.
    The default is the newest run in `runs` that has a checkpoint. PyTorch files need PyTorch, and ONNX files the extra `onnx`. An
    ONNX file also contains the model. The input of this model is a batch of normalised images (N, C, H, W) of the size used in
    training.
    """
    from hpctrain.run.model_weights import SUFFIXES, of_checkpoint, of_file
    from hpctrain.storage import weights_file

    weights_file.check_suffix(out, SUFFIXES)
    if source.suffix in weights_file.SUFFIXES:
        if best or averaged:
            raise CheckpointError(
                f"--{'best' if best else 'averaged'} applies to runs and checkpoints, but {source} is a file of weights; "
                f"leave --{'best' if best else 'averaged'} out."
            )
        path, content = source, of_file(source, model, classes, _parsed(options))
    else:
        path = _checkpoint(source, best=best)
        content = of_checkpoint(path, model, classes, _parsed(options), averaged=averaged)
    content.write(out)
    weights = ", averaged," if averaged else ""
    echo_wrapped(f"{out}: {_summary(content.state)}{weights} of {content.metadata['model']}, from {path}")
    for line in _use_lines(out, content.metadata):
        echo_wrapped(f"  {line}")


@weights.command("show")
@_FILE
@_JSON
def show_weights(file: Path, as_json: bool) -> None:
    """Show the arrays and metadata of a file of weights.

    FILE ends in .safetensors, .pt or .pth.
    """
    from hpctrain.storage.weights_file import read

    content = read(file)
    tensors = {name: {"shape": list(array.shape), "dtype": str(array.dtype)} for name, array in content.tensors.items()}
    if as_json:
        echo_block(json.dumps({"file": str(file), "metadata": dict(content.metadata), "tensors": tensors}, indent=1))
        return
    _print_facts(file, content.metadata, tensors)
    echo(f"{_summary(content.tensors)}, {size_text(sum(array.nbytes for array in content.tensors.values()))}")


def _use_lines(out: Path, metadata: Mapping[str, str]) -> Iterator[str]:
    """Yield sentences on the input and output of exported weights, if they are known, and on how to load the file."""
    known = {key: json.loads(metadata[key]) for key in ("image_shape", "mean", "std", "classes") if key in metadata}
    if "image_shape" in known:
        height, width, channels = known["image_shape"]
        yield f"Input: images of {height} x {width} pixels and {counted(channels, 'channel')}."
    if "mean" in known and "std" in known:
        mean, std = (" ".join(f"{value:.4g}" for value in known[key]) for key in ("mean", "std"))
        yield f"Divide pixels by 255, subtract the mean {mean} and divide by the standard deviation {std}."
    if "classes" in known:
        yield f"Output: a logit for each of {counted(len(known['classes']), 'class')}."
    name = shell_word(str(out))
    yield {
        ".safetensors": f"Train from it with init.weights={name}, or load it in PyTorch with safetensors.torch.load_file.",
        ".onnx": "Run it with onnxruntime: the input is `images`, the output `logits`.",
    }.get(out.suffix, f"Load it in PyTorch with torch.load; to train from it, run `hpctrain weights import {name}`.")


def _summary(state: Mapping[str, np.ndarray]) -> str:
    from hpctrain.models.state_dict import counts_of

    parameters, statistics = counts_of(state)
    others = f" and {statistics:,} running statistics" if statistics else ""
    return f"{parameters:,} parameters{others} in {counted(len(state), 'tensor')}"


def _parsed(options: Sequence[str]) -> dict[str, Any]:
    """Return options of a model from words such as "width=0.5"; each value is YAML.

    Raises:
        ConfigError: a word does not have the form KEY=VALUE, or its value is not YAML.
    """
    from hpctrain.core.yaml_source import read_yaml

    values = {}
    for word in options:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise ConfigError(f"--option {word} must have the form KEY=VALUE, such as width=0.5.")
        try:
            values[key], _ = read_yaml(text, "--option")
        except ConfigError as error:
            raise ConfigError(f"--option {word}: {str(error).partition(': ')[2]}") from None
    return values


def _checkpoint(source: Path, *, best: bool) -> Path:
    """Return the newest or the best checkpoint at a path.

    Raises:
        CheckpointError: there are no checkpoints, or none of them is the best.
    """
    from hpctrain.runs import directory

    _, newest = files_of(source)[-1]
    if not best:
        return newest
    record = directory.read_best(newest.parent)
    if record is None or not (newest.parent / record.checkpoint).exists():
        raise CheckpointError(f"{source} has no best checkpoint; leave --best out to export the newest, {newest.name}.")
    return newest.parent / record.checkpoint
