"""`hpctrain sites`: the machines for which job scripts can be written. Needs no MPI."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import click

from hpctrain.cli.arguments import sites as complete_sites
from hpctrain.core.text import echo, echo_block

if TYPE_CHECKING:
    from hpctrain.site.profile_files import Site

_MOST_COLUMNS = 100


@click.command()
@click.argument("name", required=False, shell_complete=complete_sites)
def sites(name: str | None) -> None:
    """Print the machines that jobs can be submitted on.

    With NAME, print all that is known of one as YAML, each setting with its source. Profiles of your own, which may extend
    another one, lie in sites/ of hpctrain's configuration directory.
    """
    from hpctrain.site import profile_files

    if name is not None:
        echo_block(_as_yaml(profile_files.read(name)))
        return
    formatter = click.HelpFormatter(width=min(shutil.get_terminal_size((80, 24)).columns, _MOST_COLUMNS))
    known = [profile_files.read(site) for site in profile_files.paths()]
    formatter.write_dl(
        [(site.name, site.profile.description + ("" if site.is_installed else f" ({site.path})")) for site in known]
    )
    echo_block(formatter.getvalue())
    echo()
    echo(f"Profiles of your own: {profile_files.where_own()}/NAME.yaml")


def _as_yaml(site: Site) -> str:
    import yaml

    head = f"# {site.path}\n"
    return head + yaml.safe_dump(site.profile.model_dump(mode="json", exclude_none=True), sort_keys=False, width=120)
