"""The start of a rank, in the only correct order of its steps. `main` runs steps 1 to 6, and `start_job` steps 7 to 11.

1. Block signals. Until then a signal ends the process without a message. Every later thread inherits the mask.
2. Open closed standard streams. Otherwise the next file that is opened would get the number of a stream, and MPI would write
   messages to it.
3. Fork: the child becomes the rank, and the parent watches it. A fork copies one thread only, so it precedes all threads, NumPy's
   included, and MPI.
4. Begin the flight record, so that it contains the end of every later step.
5. Make the standard streams drop what cannot be written, as `JobProcess` does for programs. Print stack traces at a crash.
6. Start the thread that receives signals. It follows the fork, which would lose it, and precedes everything that takes long.
7. Read the configuration, which contains the number of threads. This loads pydantic and YAML, but not NumPy.
8. Set the number of threads. BLAS and OpenMP read it from the environment once, when NumPy loads them.
9. Load the program: NumPy, the kernels, and h5py, which starts a process. No rank waits for another yet, so a slow file system on
   one node does not delay all ranks.
10. Start processes: git, and a trial of MPI with GPU memory. They are unsafe under MPI, as a fork copies memory that a network
    adapter has registered.
11. Start MPI. From here on steps are collective. An error of steps 7 and 8 is raised now, on all ranks alike.

Only light modules are imported at the top: until step 1 a signal ends the process.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # as in typing, which takes milliseconds to load
if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable
    from typing import Protocol

    from hpctrain.comm.base import Communicator
    from hpctrain.config.schema import Config
    from hpctrain.core.yaml_source import Source
    from hpctrain.flight.recorder import FlightRecorder

    #: callback that returns a configuration and the source positions of its values
    ReadConfig = Callable[[], tuple[Config, Source]]

    class StartedProcess(Protocol):
        """The process that `start_job` starts; see `ConfiguredProcess`."""

        flight: FlightRecorder
        exits: contextlib.ExitStack

        @property
        def deadline_seconds(self) -> float: ...
        def prepare(self, read: ReadConfig) -> None: ...
        def load(self, *, trains: bool) -> None: ...
        def start_processes(self) -> None: ...
        def start_world(self, deadline_seconds: float) -> Communicator: ...
        def end_mpi(self) -> None: ...


# Commands whose process computes: their signals are held back before anything else is loaded.
_COMPUTING = (["train"], ["eval"], ["script"], ["bench", "engine"])
# Commands that run on ranks: a small parent process reports every rank that ends without an explanation.
_RANKS = ("train", "eval", "script")
# Without this, every rank reads a file of each installed package to find pydantic's plugins. A user's program may need plugins.
_NO_PLUGINS = ("PYDANTIC_DISABLE_PLUGINS", "__all__")


def main() -> None:
    """Run the command line."""
    words = sys.argv[1:]
    if any(words[: len(command)] == command for command in _COMPUTING):
        _start_computing(words[0])
        return
    from hpctrain.launch.process_start import forgive_writes, open_closed_streams

    open_closed_streams()
    forgive_writes(raises=True)
    from hpctrain.cli.main import cli

    cli(obj=None)


def _start_computing(command: str) -> None:
    """Run steps 1 to 6, then the command."""
    from hpctrain.launch.process_start import HELD, OF_PROGRAMS, forgive_writes, hold, open_closed_streams

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
        gc.disable()  # until all modules are loaded (`start_job`): loading makes no garbage, so collections would be wasted
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
    try:
        with recording:
            from hpctrain.cli.main import cli

            cli(obj=watch)
    finally:
        gc.enable()
        watch.close()
        keeper.finished()


def start_job(process: StartedProcess, read: ReadConfig, *, trains: bool = False) -> None:
    """Run steps 7 to 11 in a process that has a configuration.

    Args:
        read: callback that returns the configuration and the source positions of its values. It may set the threads and load
            NumPy.
        trains: whether to load the modules of a training.
    """
    process.prepare(read)  # steps 7 and 8
    process.load(trains=trains)  # step 9
    import gc

    if not gc.isenabled():
        gc.freeze()  # the objects that exist now stay: collections need not visit them
        gc.enable()
    process.start_processes()  # step 10
    process.flight.phase("")
    process.start_world(process.deadline_seconds)  # step 11
    # MPI must end before its shared-memory segments are forgotten: a rank that is killed during the end leaves some.
    process.exits.callback(process.end_mpi)
