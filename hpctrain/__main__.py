"""Entry point of `python -m hpctrain` and of the console script. `process/start.py` has the order in which a process starts."""

from __future__ import annotations

import sys

from hpctrain.process.start import StartedProcess


def main() -> None:
    """Run the command line."""
    with StartedProcess(sys.argv[1:]) as watch:
        from hpctrain.cli.main import cli

        cli(obj=watch)


if __name__ == "__main__":
    main()
