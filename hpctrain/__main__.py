"""`python -m hpctrain` and the console script `hpctrain`. The order in which a process starts is in `cli/start.py`."""

from __future__ import annotations

from hpctrain.cli.start import main

if __name__ == "__main__":
    main()
