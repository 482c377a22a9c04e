"""`hpctrain list`: the names that a configuration can choose, with a sentence each. Needs no MPI and no data."""

from __future__ import annotations

import json
import shutil

import click

from hpctrain.cli.failure import Commands
from hpctrain.core.text import echo_block

# The kinds of `config/options.py`, which imports NumPy; a test compares them.
KINDS = ("models", "optimizers", "averagers", "schedules", "augmentations", "reporters")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print names with their options, types and defaults as JSON.")
_MOST_COLUMNS = 100


@click.group("list", cls=Commands)
def listing() -> None:
    """Print names that a configuration can have.

    Their options are described in docs/options.md, by --json, and by `hpctrain config schema`.
    """


def _command(kind: str) -> click.Command:
    @click.command(kind, help=f"Print all {kind} with one sentence each.")
    @_JSON
    def show(as_json: bool) -> None:
        echo_block(_as_json(kind) if as_json else _table(kind))

    return show


for _kind in KINDS:
    listing.add_command(_command(_kind))


def _table(kind: str) -> str:
    """Names and sentences in two columns, as wide as the terminal; those of installed packages last."""
    from hpctrain.config.options import choices, registry

    width = min(shutil.get_terminal_size((80, 24)).columns, _MOST_COLUMNS)
    formatter = click.HelpFormatter(width=width)
    offers = [(offer.name, f"Of the package {offer.package}: {offer.reference}.") for offer in registry(kind).offers()]
    formatter.write_dl([*((choice.name, choice.sentence) for choice in choices(kind)), *offers])
    return formatter.getvalue()


def _as_json(kind: str) -> str:
    from hpctrain.config.options import choices, registry

    content: dict[str, object] = {
        choice.name: {
            "sentence": choice.sentence,
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
