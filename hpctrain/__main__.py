"""Entry point of `python -m hpctrain` and of the console script. `cli/start.py` defines the order in which a process starts."""

from __future__ import annotations

from hpctrain.cli.start import main

if __name__ == "__main__":
    main()
