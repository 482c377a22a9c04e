"""The command line: each command in a file of its own, loaded when it is called, so that none pays for the others' imports."""

from __future__ import annotations

import importlib

import click

from hpctrain.cli.failure import Commands
from hpctrain.core.text import echo_block

# command -> (module, attribute); listed, not discovered, so that `hpctrain --help` imports nothing else
_COMMANDS = {
    "train": ("hpctrain.cli.train", "train"),
    "eval": ("hpctrain.cli.train", "evaluate"),
    "predict": ("hpctrain.cli.predict", "predict"),
    "script": ("hpctrain.cli.script", "script"),
    "run": ("hpctrain.cli.run_command", "run"),
    "submit": ("hpctrain.cli.submit", "submit"),
    "sites": ("hpctrain.cli.sites", "sites"),
    "config": ("hpctrain.cli.config", "config"),
    "plan": ("hpctrain.cli.plan", "plan"),
    "calibrate": ("hpctrain.cli.machine", "calibrate"),
    "doctor": ("hpctrain.cli.doctor", "doctor"),
    "bench": ("hpctrain.cli.bench_rest", "bench"),
    "data": ("hpctrain.cli.data", "data"),
    "checkpoint": ("hpctrain.cli.checkpoint", "checkpoint"),
    "weights": ("hpctrain.cli.weights", "weights"),
    "autopsy": ("hpctrain.cli.autopsy", "autopsy"),
    "trace": ("hpctrain.cli.trace", "trace"),
    "watch": ("hpctrain.cli.watch", "watch"),
    "report": ("hpctrain.cli.runs", "report"),
    "compare": ("hpctrain.cli.compare", "compare"),
    "list": ("hpctrain.cli.listing", "listing"),
    "completion": ("hpctrain.cli.completion", "completion"),
}


class LazyGroup(Commands):
    """Imports a command's module when the command is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, attribute = _COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command


def _print_versions(ctx: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from hpctrain.cli.versions import versions

        echo_block(versions())
        ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_versions,
    help="Print the versions of hpctrain, of the MPI that it would start, and of the kernels that it would compute with.",
)
def cli() -> None:
    """Train convolutional networks on supercomputers over MPI."""
