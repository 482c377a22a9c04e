"""The command line. Each command is in a module that is loaded only when the command is called.

`hpctrain completion` and `hpctrain --version` are implemented here. Shell completion covers commands, options, keys of
configurations, and names of sites and examples. `--version` loads MPI and the kernels, but starts neither.
"""

from __future__ import annotations

import importlib
import platform

import click

from hpctrain.cli.arguments import Commands
from hpctrain.core.errors import ConfigError, MissingLibraryError
from hpctrain.core.text import echo_block
from hpctrain.version import __version__

_PACKAGES = ("numpy", "mpi4py", "h5py", "cupy-cuda12x", "cupy-cuda13x")
_VARIABLE = "_HPCTRAIN_COMPLETE"

# No blank may follow the = of a key or the dot of a section: the value or the key comes next.
_NO_BLANK = "    [[ ${COMPREPLY[0]-} == *[=.] ]] && compopt -o nospace\n"


@click.command()
@click.argument("shell", metavar="bash|zsh|fish")
def completion(shell: str) -> None:
    """Print the shell completion script of hpctrain.

    For bash, add this line to ~/.bashrc: eval "$(hpctrain completion bash)".
    """
    from click.shell_completion import BashComplete, get_completion_class

    kind = get_completion_class(shell)
    if kind is None:
        raise ConfigError(f'There is no completion for the shell "{shell}"; choose bash, zsh or fish.')
    source = kind(cli, {}, "hpctrain", _VARIABLE).source()
    if issubclass(kind, BashComplete):
        source = source.replace("\n    return 0\n", f"\n{_NO_BLANK}    return 0\n")
    click.echo(source)


# command -> (module, attribute); listed explicitly, so that a command imports only its own module
_COMMANDS = {
    "train": ("hpctrain.cli.train", "train"),
    "eval": ("hpctrain.cli.train", "evaluate"),
    "predict": ("hpctrain.cli.train", "predict"),
    "script": ("hpctrain.cli.train", "script"),
    "run": ("hpctrain.cli.run_command", "run"),
    "submit": ("hpctrain.cli.submit", "submit"),
    "sites": ("hpctrain.cli.submit", "sites"),
    "config": ("hpctrain.cli.config", "config"),
    "plan": ("hpctrain.cli.plan", "plan"),
    "calibrate": ("hpctrain.cli.machine", "calibrate"),
    "doctor": ("hpctrain.cli.machine", "doctor"),
    "bench": ("hpctrain.cli.bench", "bench"),
    "data": ("hpctrain.cli.data", "data"),
    "checkpoint": ("hpctrain.cli.checkpoint", "checkpoint"),
    "weights": ("hpctrain.cli.checkpoint", "weights"),
    "autopsy": ("hpctrain.cli.runs", "autopsy"),
    "trace": ("hpctrain.cli.runs", "trace"),
    "watch": ("hpctrain.cli.runs", "watch"),
    "report": ("hpctrain.cli.runs", "report"),
    "compare": ("hpctrain.cli.runs", "compare"),
    "list": ("hpctrain.cli.config", "listing"),
    "completion": ("hpctrain.cli.main", "completion"),
}


class LazyGroup(Commands):
    """Group that imports the module of a command when the command is needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, attribute = _COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command


def versions() -> str:
    """Return four lines with the versions of hpctrain, its packages, the MPI library and the kernel sets."""
    packages = [f"{name} {number}" for name in _PACKAGES if (number := _installed(name))]
    return "\n".join(
        [
            f"hpctrain {__version__}",
            f"Python {platform.python_version()}, {', '.join(packages)}",
            f"MPI: {_mpi()}",
            f"kernels: {_kernels()}",
        ]
    )


def _installed(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _mpi() -> str:
    from hpctrain.comm import mpi

    try:
        return mpi.library()
    except MissingLibraryError as error:
        return f"none. {error}"


def _kernels() -> str:
    from hpctrain.backend.onednn import binding
    from hpctrain.backend.onednn.kernel_set import available

    reason = available()
    if reason is not None:
        return f"numpy. oneDNN cannot be used: {reason}"
    number = binding.version(binding.load())
    return f"onednn {number.major}.{number.minor}.{number.patch}, numpy"


def _print_versions(ctx: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        echo_block(versions())
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_versions,
    help="Print the versions of hpctrain, of its MPI library and of its kernels.",
)
def cli() -> None:
    """Train convolutional networks on supercomputers over MPI."""
