"""Entry point of `python -m hpctrain` and of the console script. `process/start.py` has the order in which a process starts."""

from __future__ import annotations

from hpctrain.process.start import main

if __name__ == "__main__":
    main()
