"""`python -m hpctrain` and the console script `hpctrain`. Imports no NumPy: thread counts must be set before it loads."""

from __future__ import annotations

import sys

# Commands whose process computes: their signals are blocked before anything else is loaded.
_COMPUTING = (["train"], ["eval"], ["bench", "engine"])
# Those that run on ranks: a small parent sees to it that none leaves without a word.
_RANKS = ("train", "eval")


def main() -> None:
    """Run the command line."""
    from hpctrain.launch.streams import open_closed_streams

    open_closed_streams()
    words = sys.argv[1:]
    if any(words[: len(command)] == command for command in _COMPUTING):
        _compute(words[0])
    else:
        _command(None)


def _compute(command: str) -> None:
    from hpctrain.launch.signals import SignalWatch, hold

    held = hold()
    import os

    from hpctrain.launch.keeper import keep
    from hpctrain.launch.launcher import rank_of

    rank = rank_of(os.environ)
    end = keep(rank, held) if command in _RANKS else lambda: None
    watch = SignalWatch(held, rank=rank, at_once=command != "train").start()
    try:
        _command(watch)
    finally:
        watch.close()
        end()


def _command(watch: object) -> None:
    from hpctrain.cli.main import cli

    cli(obj=watch)


if __name__ == "__main__":
    main()
