"""A process of a job, from its launcher to its end: what a command and a program of the user's know of it at any point.

Imports no NumPy: thread counts must be set before it loads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from hpctrain import log
from hpctrain.flight import start_records
from hpctrain.flight.recorder import FlightRecorder
from hpctrain.launch.exit_codes import End
from hpctrain.launch import shared_segments
from hpctrain.launch.launcher import Launcher

if TYPE_CHECKING:
    from hpctrain.comm.base import Communicator
    from hpctrain.comm.progress import ProgressEngine

#: that the ranks may take to end MPI together
LEAVE_SECONDS = 60.0


class JobProcess:
    """The knowledge of this process so far: enough to end the job from any point.

    Attributes:
        world: of all ranks, from `start_world` on. flight: the process's record.
        exits: what is undone when the run is over. watched: of it, what watches the process in the present world.
    """

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self.world: Communicator | None = None
        self.flight: FlightRecorder = start_records.taken()
        self.exits, self.watched = contextlib.ExitStack(), contextlib.ExitStack()
        self._removed = shared_segments.Removed()

    def rank(self) -> int:
        """This process's rank, as far as it is known; else 0."""
        return self.world.rank if self.world is not None else self.launcher.rank or 0

    def abort(self, code: int) -> None:
        """End the whole job."""
        if self.world is not None:
            self.world.abort(code)

    def failed(self, sentence: str, ranks: Sequence[int] = ()) -> None:
        """Keep the error in the flight record, before anybody ends the job for it. ranks: at which its cause lies."""
        self.flight.ended(End.FAILED, sentence, ranks)

    def start_world(self, deadline_seconds: float) -> Communicator:
        """MPI's world, or one of this process alone (see `session.start_world`). Collective; removes what dead jobs have left."""
        from hpctrain.job import session

        if self.launcher.starts_mpi:
            shared_segments.announce()
            if not self.launcher.local_rank:
                self._removed = shared_segments.remove_stale()
        with self.flight.waiting("the start of MPI"):
            self.world = session.start_world(self.launcher, deadline_seconds, self.flight)
        if self.launcher.starts_mpi:
            log.configure(self.world.rank, self.world.size)
            shared_segments.remember()
            self.exits.callback(shared_segments.forget)
        return self.world

    def watch(self, world: Communicator, deadline_seconds: float) -> None:
        """From now on the heartbeat watches this process. Collective."""
        from hpctrain.job.flight_records import watched

        self.exits.push(self.watched)  # before what was there at the start
        self.watched.enter_context(watched(self.flight, world, deadline_seconds))

    def started(self, progress: ProgressEngine) -> None:
        """The engine is there: its deadlines are explained by all ranks' records, and what was removed is told."""
        from hpctrain.job.flight_records import explain_deadlines

        explain_deadlines(progress)
        if self._removed.count:
            log.get_logger(__name__).info(str(self._removed))
            self._removed = shared_segments.Removed()

    def finish(self) -> None:
        """The run is over, and well."""
        self.exits.close()

    def end_mpi(self) -> None:
        """End MPI, where it has started. Collective."""
        if self.launcher.starts_mpi:
            from hpctrain.comm import mpi

            mpi.finish(LEAVE_SECONDS)

    def leave(self, code: int) -> NoReturn:
        """End this process in good order. Collective: MPI ends first, so that no launcher takes the code for a crash."""
        self.end_mpi()
        raise SystemExit(code)
