"""`hpctrain weights`: import, export and show weights in torchvision's names. Needs no MPI and no data."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from hpctrain.cli.arguments import FilePath, OutputFile
from hpctrain.cli.failure import Commands
from hpctrain.core.errors import CheckpointError, ConfigError
from hpctrain.core.text import echo, echo_block

_FILE = click.argument("file", type=FilePath(path_type=Path))
_CLASSES = click.option(
    "--classes",
    type=click.IntRange(min=1),
    help="Number of classes of the model; by default it is read off the last layer in FILE.",
)
_OPTIONS = click.option(
    "--option",
    "options",
    multiple=True,
    metavar="KEY=VALUE",
    help="Give an option of the model, such as width=0.5; may be given several times.",
)


@click.group(cls=Commands)
def weights() -> None:
    """Import, export and show weights in torchvision's names."""


@weights.command("import")
@_FILE
@click.option("--model", required=True, help="Name of the model in the catalogue (see `hpctrain list models`).")
@_CLASSES
@_OPTIONS
@click.option("--out", type=OutputFile(makes_directory=True), required=True, help="File to write, which ends in .safetensors.")
def import_weights(file: Path, model: str, classes: int | None, options: tuple[str, ...], out: Path) -> None:
    """Check weights from elsewhere and write them for training.

    FILE is a safetensors file, or one that torch.save has written (.pt, .pth), which needs PyTorch and is read as tensors alone.
    Its names and shapes must be those of torchvision's model. The new file has the same arrays to the last bit; give its path
    as init.weights in a configuration.
    """
    from hpctrain.run.model_weights import of_file
    from hpctrain.storage.weights_file import SAFETENSORS, check_suffix

    check_suffix(out, (SAFETENSORS,))
    content = of_file(file, model, classes, _parsed(options))
    content.write(out)
    echo(f"{out}: {_summary(content.state)} of {model}, all those of {file}")


@weights.command()
@click.argument("source", type=FilePath(path_type=Path))
@click.option("--best", is_flag=True, help="Take the checkpoint with the best evaluation of a run instead of the newest.")
@click.option("--averaged", is_flag=True, help="Take the average of the weights, which a training with ema.decay keeps.")
@click.option("--model", help="Name of the model: of a file that does not say it, or of code of your own, to have it loaded.")
@_CLASSES
@_OPTIONS
@click.option(
    "--out", type=OutputFile(makes_directory=True), required=True, help="File to write: .safetensors, .pt, .pth or .onnx."
)
def export(
    source: Path, best: bool, averaged: bool, model: str | None, classes: int | None, options: tuple[str, ...], out: Path
) -> None:
    """Write the weights of a run for other programs.

    SOURCE is a run directory, of which the newest checkpoint is taken, a checkpoint of any layout and grid, or a file of weights.
    PyTorch files need PyTorch, and ONNX files the extra `onnx`: these have the model too, for images (N, C, H, W) of the size
    that it was trained on, normalised.
    """
    from hpctrain.run.model_weights import SUFFIXES, of_checkpoint, of_file
    from hpctrain.storage import weights_file

    weights_file.check_suffix(out, SUFFIXES)
    if source.suffix in weights_file.SUFFIXES:
        if best or averaged:
            raise CheckpointError(
                f"--{'best' if best else 'averaged'} chooses among what a run keeps, and {source} is a file of weights; "
                f"leave --{'best' if best else 'averaged'} out."
            )
        path, content = source, of_file(source, model, classes, _parsed(options))
    elif classes is not None or options:
        raise CheckpointError(f"{source} knows its model's options itself; leave --classes and --option out.")
    else:
        path = _checkpoint(source, best=best)
        content = of_checkpoint(path, model, averaged=averaged)
    content.write(out)
    weights = ", averaged," if averaged else ""
    echo(f"{out}: {_summary(content.state)}{weights} of {content.metadata['model']}, from {path}")


@weights.command()
@_FILE
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON.")
def show(file: Path, as_json: bool) -> None:
    """Show the arrays and the notes that a file of weights holds.

    FILE ends in .safetensors, .pt or .pth.
    """
    from hpctrain.storage.weights_file import read

    content = read(file)
    tensors = {name: {"shape": list(array.shape), "dtype": str(array.dtype)} for name, array in content.tensors.items()}
    if as_json:
        echo_block(json.dumps({"file": str(file), "metadata": dict(content.metadata), "tensors": tensors}, indent=1))
        return
    echo(str(file))
    for key, value in content.metadata.items():
        echo(f"{key}: {value}")
    for name, facts in tensors.items():
        echo(f"  {name}  {facts['shape']} {facts['dtype']}")
    echo(f"{_summary(content.tensors)}, {sum(array.nbytes for array in content.tensors.values()) / 1e6:,.1f} MB")


def _summary(state: Any) -> str:
    return f"{len(state)} tensors with {sum(math.prod(array.shape) for array in state.values()):,} numbers"


def _parsed(options: Sequence[str]) -> dict[str, Any]:
    """Options of a model from words such as "width=0.5"; each value is YAML.

    Raises:
        ConfigError: a word of another form.
    """
    from hpctrain.core.yaml_source import read_yaml

    values = {}
    for word in options:
        key, equals, text = word.partition("=")
        if not equals or not key:
            raise ConfigError(f"--option {word} must have the form KEY=VALUE, such as width=0.5.")
        try:
            values[key], _ = read_yaml(text, "--option")
        except ConfigError:
            raise ConfigError(f"The value of --option {word} is not valid YAML; an example is width=0.5.") from None
    return values


def _checkpoint(source: Path, *, best: bool) -> Path:
    """The checkpoint that a path stands for.

    Raises:
        CheckpointError: there is none.
    """
    from hpctrain.cli.checkpoint import files_of
    from hpctrain.runs import directory

    _, newest = files_of(source)[-1]
    if not best:
        return newest
    record = directory.read_best(newest.parent)
    if record is None or not (newest.parent / record.checkpoint).exists():
        raise CheckpointError(f"{source} has no best checkpoint; leave --best out to take the newest, {newest.name}.")
    return newest.parent / record.checkpoint
