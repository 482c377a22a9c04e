"""`python -m hpctrain` and the console script `hpctrain`. Imports no NumPy: thread counts must be set before it loads."""

from __future__ import annotations

import contextlib
import sys

# Commands whose process computes: their signals are blocked before anything else is loaded.
_COMPUTING = (["train"], ["eval"], ["script"], ["bench", "engine"])
# Commands that run on ranks: a small parent process reports every rank that ends without an explanation.
_RANKS = ("train", "eval", "script")
# pydantic looks for plugins in a file of each installed package, on every rank; a program of the user's may have some
_NO_PLUGINS = ("PYDANTIC_DISABLE_PLUGINS", "__all__")


def main() -> None:
    """Run the command line."""
    words = sys.argv[1:]
    if any(words[: len(command)] == command for command in _COMPUTING):
        _compute(words[0])
    else:
        from hpctrain.launch.streams import open_closed_streams

        open_closed_streams()
        _command(None)


def _compute(command: str) -> None:
    from hpctrain.launch.signal_mask import HELD, OF_PROGRAMS, hold

    # Before all else: until now a signal ends the process as usual.
    held = hold(OF_PROGRAMS if command == "script" else HELD)
    from hpctrain.launch.streams import open_closed_streams

    open_closed_streams()
    import faulthandler
    import gc
    import os

    from hpctrain.flight import start_records
    from hpctrain.flight.ring import mark_end
    from hpctrain.launch.keeper import Keeper, keep
    from hpctrain.launch.launcher import started_by
    from hpctrain.launch.signals import SignalWatch, of_process
    from hpctrain.launch.streams import go_on_without_output

    if command in ("train", "eval"):
        gc.disable()  # until all modules are loaded (see `ConfiguredProcess`): there is no garbage to collect among them
    if command != "script":
        os.environ.setdefault(*_NO_PLUGINS)
    launcher, keeper, recording = started_by(os.environ), Keeper(), contextlib.ExitStack()
    if command in _RANKS:
        record = start_records.place_of_start(os.environ, launcher)
        keeper = keep(launcher.rank, held, mark_end, record)
        recording.enter_context(start_records.recorded(record, launcher))
    go_on_without_output()
    faulthandler.enable()  # stacks at a crash, and where the keeper ends a process that hangs
    watch = SignalWatch(held, rank=launcher.rank, at_once=command != "train").start()
    if command == "script":
        of_process(watch)
    try:
        with recording:
            _command(watch)
    finally:
        gc.enable()
        watch.close()
        keeper.finished()


def _command(watch: object) -> None:
    from hpctrain.cli.main import cli

    cli(obj=watch)


if __name__ == "__main__":
    main()
