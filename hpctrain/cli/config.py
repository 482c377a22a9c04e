"""`hpctrain config` and `hpctrain list`: show, check, describe and copy configuration files, and list the names they can use.

Neither needs MPI or data.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from hpctrain.cli.arguments import FILE, OVERRIDES, Commands, FilePath
from hpctrain.cli.arguments import examples as complete_examples
from hpctrain.core.files import nearest_file
from hpctrain.core.text import counted, echo, echo_block, echo_wrapped


@click.group(cls=Commands)
def config() -> None:
    """Show, check, describe and copy configuration files."""


@config.command()
@FILE
@OVERRIDES
def show(file: Path, overrides: tuple[str, ...]) -> None:
    """Print a configuration with all defaults.

    The output is FILE with OVERRIDES such as optimizer.lr=0.2 and the defaults of all keys and options, as YAML. This
    configuration starts the same run. It lacks options of the model that follow from the data, such as the number of classes.
    """
    from hpctrain.assembly.faults import check_config, refusal
    from hpctrain.config.load import dump, load

    echo_block(dump(check_config(*load(file, overrides, refusal)).config))


@config.command()
@FILE
@OVERRIDES
def check(file: Path, overrides: tuple[str, ...]) -> None:
    """Check a configuration without running it.

    The command checks the keys, types, ranges, names and options of FILE with OVERRIDES such as optimizer.lr=0.2. Each fault is
    one line on standard error; the exit code is then 2. If the training file exists, the command prints the number of training
    images and the steps per epoch, builds the network for the sizes of the images, and checks that the other data files and the
    tensors of init.weights fit. It prints what it has not checked. If the configuration needs a GPU, or a processor that
    multiplies bfloat16, and this machine lacks it, the command only warns: the training may run on another machine.
    """
    from hpctrain.assembly.faults import load_checked
    from hpctrain.assembly.images import check_files, check_single_values, data_line
    from hpctrain.config.schema import SYNTHETIC
    from hpctrain.storage.weights_file import SAFETENSORS

    loaded = load_checked(file, overrides)
    recipe, images = check_files(loaded) or (None, None)
    single = "" if recipe is None else check_single_values(recipe)
    for warning in (single and f"warning: {single}", *(() if images is None else images.notes)):
        if warning:
            echo(warning, err=True)
    if loaded.backend == "cuda" or loaded.precision != "float32":
        from hpctrain.backend.choice import machine_fault

        fault = machine_fault(loaded.backend, loaded.precision)
        if fault is not None:
            echo(f"warning: {fault}", err=True)
    echo(f"ok: {file}")
    echo(
        f"  {loaded.model.name}, {counted(loaded.epochs, 'epoch')} in batches of {loaded.batch}, {loaded.optimizer.name} with "
        f"lr {loaded.optimizer.lr:g}, schedule {loaded.schedule.name}"
    )
    if images is not None:
        echo_wrapped(f"  {data_line(loaded, len(images), 0 if images.split is None else len(images.split.validation))}")
    else:
        train = Path(loaded.data.train)
        reason = f"{train} cannot be read" if train.exists() else f"there is no {train} yet{nearest_file(train)}"
        echo("  checked: keys, types, names, options, and the values that must fit together")
        echo_wrapped(f"  not checked: the data, and the network for the sizes of its images, as {reason}")
    for split, path in loaded.data.files.items():
        if split != "train" and path != SYNTHETIC and not Path(path).exists():
            echo_wrapped(f"  not checked: the {split} data, as there is no {path} yet{nearest_file(Path(path))}")
    weights = None if loaded.init.weights is None else Path(loaded.init.weights)
    if weights is not None and not weights.exists():
        echo_wrapped(f"  not checked: the initial weights, as there is no {weights} yet{nearest_file(weights)}")
    elif weights is not None and weights.suffix.lower() != SAFETENSORS:
        echo_wrapped(f"  not checked: the initial weights, as {weights} has no header; only .safetensors files have one")
    elif weights is not None and images is None:
        echo_wrapped("  not checked: the initial weights, as the number of classes follows from the data")


@config.command(name="list")
def list_() -> None:
    """List the installed examples.

    Examples are configurations, machine models and job scripts.
    """
    from hpctrain.config import examples

    echo_block(two_columns([(name, examples.purpose(name)) for name in examples.names()]))


@config.command()
@click.argument("names", nargs=-1, shell_complete=complete_examples)
@click.option(
    "--to",
    "directory",
    type=FilePath(file_okay=False, path_type=Path),
    default=Path(),
    help="Directory for the copies, which are written to its configs/ and jobs/; default: the current one.",
)
def copy(names: tuple[str, ...], directory: Path) -> None:
    """Copy installed examples to a directory for editing.

    NAMES are examples, such as quickstart or slurm.sbatch; without NAMES, all are copied. Files that exist are not changed. If
    one differs from its example, nothing is copied.
    """
    from hpctrain.config import examples

    copies = examples.copy(names, directory)
    for path in copies:
        echo(path)
    unchanged = [path for path, is_new in copies.items() if not is_new]
    if len(unchanged) == 1:
        echo(f"{unchanged[0]} exists already and is unchanged", err=True)
    elif unchanged:
        echo(f"{len(unchanged)} of these files exist already and are unchanged", err=True)


@config.command()
def schema() -> None:
    """Print the JSON schema of configurations.

    Editors use it to complete and check configurations. It contains every key, and every name with its options.
    """
    from hpctrain.assembly.options import json_schema

    echo_block(json.dumps(json_schema(), indent=2))


# The same kinds as in `assembly/options.py`, which imports NumPy; a test compares both.
KINDS = ("models", "optimizers", "averagers", "schedules", "augmentations", "reporters")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print names with their options, types and defaults as JSON.")
_MOST_COLUMNS = 100


@click.group("list", cls=Commands)
def listing() -> None:
    """List the names that a configuration can use.

    Their options are described in docs/options.md, by --json and by `hpctrain config schema`.
    """


def _command(kind: str) -> click.Command:
    @click.command(kind, help=f"List all {kind} with one sentence each.")
    @_JSON
    def show(as_json: bool) -> None:
        echo_block(_as_json(kind) if as_json else _table(kind))

    return show


for _kind in KINDS:
    if _kind != "models":
        listing.add_command(_command(_kind))


@listing.command()
@click.option("--json", "as_json", is_flag=True, help="Print names with sizes, options, types and defaults as JSON.")
def models(as_json: bool) -> None:
    """List all models with their sizes.

    GFLOP is the number of floating-point operations of the convolutions and linear layers in the forward pass of one image, in
    billions (a multiply-add counts as two). MiB is the memory that each image of a batch needs in training, in addition to the
    parameters. Both are for the images and classes that the model is designed for.
    """
    if as_json:
        echo_block(_as_json("models"))
        return
    _print_sizes()
    echo()
    echo_block(_table("models"))


def _print_sizes() -> None:
    from hpctrain.assembly.options import choices
    from hpctrain.core.console import output_console, plain_table
    from hpctrain.models.sizes import size_of_model

    table = plain_table("model", "family", "image", "parameters", "GFLOP", "MiB", left=3)
    for choice in choices("models"):
        size = size_of_model(choice.name)
        image = " x ".join(map(str, size.image_shape))
        figures = (f"{size.parameters:,}", f"{size.flops / 1e9:,.3f}", f"{size.memory_bytes / 2**20:,.1f}")
        table.add_row(choice.name, choice.family, image, *figures)
    output_console().print(table)


def _table(kind: str) -> str:
    """Return names and their descriptions in two columns, as wide as the terminal; names from installed packages come last.

    For models, the rows are the families.
    """
    from hpctrain.assembly.options import choices, registry

    offers = [(offer.name, f"Of the package {offer.package}: {offer.reference}.") for offer in registry(kind).offers()]
    known = (choice for choice in choices(kind) if choice.family == choice.name)
    return two_columns([*((choice.name, choice.sentence) for choice in known), *offers])


def two_columns(rows: Sequence[tuple[str, str]]) -> str:
    """Return names and their descriptions as text, as wide as the terminal."""
    formatter = click.HelpFormatter(width=min(shutil.get_terminal_size((80, 24)).columns, _MOST_COLUMNS))
    formatter.write_dl(rows, col_max=45)
    return formatter.getvalue()


def _as_json(kind: str) -> str:
    from hpctrain.assembly.options import choices, registry
    from hpctrain.models.sizes import size_of_model

    content: dict[str, object] = {
        choice.name: {
            "sentence": choice.sentence,
            **(asdict(size_of_model(choice.name)) if kind == "models" else {}),
            "settled": dict(choice.fixed),
            "options": {
                option.name: {**option.schema, "description": option.meaning}
                | ({"needed": True} if option.needed else {"default": option.default})
                for option in choice.options
            },
        }
        for choice in choices(kind)
    }
    offers = registry(kind).offers()
    content |= {offer.name: {"package": offer.package, "reference": offer.reference} for offer in offers}
    return json.dumps(content, indent=1)
