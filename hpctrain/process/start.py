"""The start of a rank, in the only correct order of its steps.

`StartedProcess` runs steps 1 to 6, `RankProcess.session` steps 7 to 11.

1. Block signals. Until then a signal ends the process without a message. Every later thread inherits the mask.
2. Open closed standard streams. Otherwise the next file that is opened would get the number of a stream, and MPI would write
   messages to it.
3. Fork: the child becomes the rank, and the parent watches it. A fork copies one thread only, so it precedes all threads, NumPy's
   included, and MPI.
4. Begin the flight record, so that it contains the end of every later step.
5. Make the standard streams drop what cannot be written, as `RankProcess` does for programs. Print stack traces at a crash.
6. Start the thread that receives signals. It follows the fork, which would lose it, and precedes everything that takes long.
7. Read the configuration, which contains the number of threads. This loads pydantic and YAML, but not NumPy.
8. Set the number of threads. BLAS and OpenMP read it from the environment once, when NumPy loads them.
9. Load the program: NumPy, the kernels, and h5py, which starts a process. No rank waits for another yet, so a slow file system on
   one node does not delay all ranks.
10. Start processes: git, and a trial of MPI with GPU memory. They are unsafe under MPI, as a fork copies memory that a network
    adapter has registered.
11. Start MPI. From here on steps are collective. An error of steps 7 and 8 is raised now, on all ranks alike.

Only `sys` is imported at the top: until step 1 a signal ends the process.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as in typing, which takes milliseconds to load
if TYPE_CHECKING:
    import contextlib
    from collections.abc import Sequence
    from pathlib import Path
    from types import TracebackType

    from hpctrain.config.schema import Config
    from hpctrain.core.yaml_source import KeyPath, Source
    from hpctrain.launch.launcher import Launcher
    from hpctrain.launch.signals import SignalWatch

# Commands whose process computes: their signals are held back before anything else is loaded.
_COMPUTING = (["train"], ["eval"], ["script"], ["bench", "engine"])
# Commands that run on ranks: a small parent process reports every rank that ends without an explanation.
_RANKS = ("train", "eval", "script")
# Without this, every rank reads a file of each installed package to find pydantic's plugins. A user's program may need plugins.
_NO_PLUGINS = ("PYDANTIC_DISABLE_PLUGINS", "__all__")


class StartedProcess:
    """Context in which a process runs a command, after steps 1 to 6 of its start.

    Only commands that run on ranks take steps 3 and 4, and commands that do not compute take steps 2 and 5 alone.

    The value is the watch of the process's signals; None if the command does not compute.

    Args:
        words: words of the command line after the program.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._words = list(words)
        self._ends: contextlib.ExitStack | None = None

    def __enter__(self) -> SignalWatch | None:
        from hpctrain.launch.process_start import HELD, OF_PROGRAMS, forgive_writes, hold, open_closed_streams

        if not any(self._words[: len(command)] == command for command in _COMPUTING):
            open_closed_streams()
            forgive_writes(raises=True)
            return None
        command = self._words[0]
        held = hold(OF_PROGRAMS if command == "script" else HELD)  # step 1
        open_closed_streams()  # step 2
        import contextlib
        import faulthandler
        import gc
        import os

        from hpctrain.flight import start_records
        from hpctrain.flight.ring import mark_end
        from hpctrain.launch.keeper import Keeper, keep
        from hpctrain.launch.launcher import started_by
        from hpctrain.launch.signals import SignalWatch, of_process

        if command in ("train", "eval"):
            gc.disable()  # until all modules are loaded (`RankProcess.session`): loading makes no garbage for collections to find
        if command != "script":
            os.environ.setdefault(*_NO_PLUGINS)
        launcher, keeper, recording = started_by(os.environ), Keeper(), contextlib.ExitStack()
        if command in _RANKS:
            record = start_records.place_of_start(os.environ, launcher)
            keeper = keep(launcher.rank, held, mark_end, record)  # step 3: from here on this process is the child
            recording.enter_context(start_records.recorded(record, launcher))  # step 4
        forgive_writes()  # step 5
        faulthandler.enable()  # also prints stacks if the keeper ends a process that hangs
        watch = SignalWatch(held, rank=launcher.rank, at_once=command != "train").start()  # step 6
        if command == "script":
            of_process(watch)
        ends = self._ends = contextlib.ExitStack()  # ends in reverse order, with the record first
        ends.callback(keeper.finished)
        ends.callback(watch.close)
        ends.callback(gc.enable)
        ends.push(recording)
        return watch

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._ends is not None:
            self._ends.__exit__(kind, error, trace)


def load_config(file: Path, overrides: tuple[str, ...]) -> tuple[Config, Source]:
    """Return the configuration in a file with overrides, checked against its schema. NumPy is imported only if there is a fault.

    Options of named objects are not checked here; see `assembly.faults`.

    Raises:
        ConfigError: the configuration has faults; one sentence for each, with its position.
    """
    from hpctrain.config.load import load  # here: it loads pydantic and YAML, which `hpctrain --help` does not need

    return load(file, overrides, _refusal)


def _refusal(path: KeyPath, name: str) -> str | None:
    from hpctrain.assembly.faults import refusal

    return refusal(path, name)


ALL_RANKS, NO_RANK = "all", "none"


def begin_log(text: str, launcher: Launcher) -> None:
    """Configure the log of this rank by the value of --log-ranks. Records are buffered until the log file exists.

    Raises:
        ConfigError: the value names no ranks, or a rank that the job does not have.
    """
    from hpctrain.core import log

    rank, size = launcher.rank or 0, launcher.expected_size or 1
    if names_rank(text, size, rank):
        log.begin_rank_log()
    log.configure(rank, size)
    log.leave_warnings_to_rank_0(rank)


def names_rank(text: str, size: int, rank: int) -> bool:
    """Return whether a list of ranks contains `rank`, in a job of `size` ranks.

    Raises:
        ConfigError: as for `begin_log`.
    """
    if text in (ALL_RANKS, NO_RANK):
        return text == ALL_RANKS
    import re

    from hpctrain.core.errors import ConfigError
    from hpctrain.core.text import counted, nearest

    words = text.replace(" ", "")
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", words):
        near = nearest(text, (ALL_RANKS, NO_RANK)) or ALL_RANKS
        raise ConfigError(f"--log-ranks is {text!r}, but must be all, none, or ranks such as 0,3,8-15; the nearest is {near}.")
    is_named = False
    for span in words.split(","):
        first, _, end = span.partition("-")
        last = end or first
        if int(first) > int(last):
            raise ConfigError(
                f"--log-ranks has {span}, but the first rank of a range must not exceed the last; use {last}-{first}."
            )
        if int(last) >= size:
            raise ConfigError(
                f"--log-ranks names rank {int(last)}, but the job has {counted(size, 'rank')}; the largest number is {size - 1}."
            )
        is_named = is_named or int(first) <= rank <= int(last)
    return is_named
