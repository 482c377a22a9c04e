"""`hpctrain completion`: the tab key completes commands, options, keys of configurations, and names of sites and examples."""

from __future__ import annotations

import click

from hpctrain.core.errors import ConfigError

_VARIABLE = "_HPCTRAIN_COMPLETE"

# Values follow a key's = without a blank, and keys a section's dot.
_NO_BLANK = "    [[ ${COMPREPLY[0]-} == *[=.] ]] && compopt -o nospace\n"


@click.command()
@click.argument("shell", metavar="bash|zsh|fish")
def completion(shell: str) -> None:
    """Print what makes a shell complete hpctrain's words.

    For bash, put this line into ~/.bashrc: eval "$(hpctrain completion bash)".
    """
    from click.shell_completion import BashComplete, get_completion_class

    from hpctrain.cli.main import cli

    kind = get_completion_class(shell)
    if kind is None:
        raise ConfigError(f'The words of a shell "{shell}" cannot be completed; those of bash, zsh and fish can.')
    source = kind(cli, {}, "hpctrain", _VARIABLE).source()
    if issubclass(kind, BashComplete):
        source = source.replace("\n    return 0\n", f"\n{_NO_BLANK}    return 0\n")
    click.echo(source)
