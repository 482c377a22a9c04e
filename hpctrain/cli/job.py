"""A process of a job: what it has made so far, from its launcher to its session, which is enough to end the job from any point.

Where ranks are lost and the configuration says so, it makes a new session over those that are left.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from hpctrain import log
from hpctrain.cli.loading import load_config
from hpctrain.config.schema import Config
from hpctrain.errors import HpctrainError, RankLostError
from hpctrain.experiment.lost_ranks import RunMemory, check_offered
from hpctrain.flight.recorder import FlightRecorder
from hpctrain.flight.ring import End
from hpctrain.launch import keeper, shared_segments
from hpctrain.launch.launcher import Launcher, detect
from hpctrain.launch.signals import SignalWatch
from hpctrain.launch.threads import ThreadPlan, set_threads

if TYPE_CHECKING:
    from hpctrain.comm.base import Communicator
    from hpctrain.experiment.session import Session

#: of a job whose configuration could not be read
DEADLINE_SECONDS = 300.0

#: that the ranks may take to end MPI together
LEAVE_SECONDS = 60.0

#: trains over a session, from a source or the beginning, repeating a run's averaging or not; calls the last argument once it is
#: done; True where it was stopped
Training = Callable[["Session", str | None, str | None, Callable[[], None]], bool]


class JobProcess:
    """A process of a job.

    Args:
        watch: of its signals, which is told where its rank has another number.

    Attributes:
        world: all ranks, once MPI has started, and later those that are left. memory: of the run, for where ranks are lost.
        flight: the record of the process in the present world.
    """

    def __init__(self, watch: SignalWatch | None = None) -> None:
        self.launcher: Launcher = detect(os.environ)
        self.world: Communicator | None = None
        self.flight = FlightRecorder()
        self.memory, self._watch = RunMemory(), watch
        self._exits, self._watched = contextlib.ExitStack(), contextlib.ExitStack()
        self._config: Config | None = None
        self._prepared: tuple[Config, ThreadPlan] | HpctrainError = HpctrainError("No configuration was read yet.")
        self._asked = False  # this rank was at the end of the run, and has asked the others
        self._revision: Mapping[str, object] = {}
        self._removed = shared_segments.Removed()

    def rank(self) -> int:
        return self.world.rank if self.world is not None else self.launcher.rank or 0

    def abort(self, code: int) -> None:
        if self.world is not None:
            self.world.abort(code)

    def failed(self, sentence: str) -> None:
        """Keep the error in the flight record, before anybody ends the job for it."""
        self.flight.ended(End.FAILED, sentence)

    def finish(self) -> None:
        """The run is over, and well."""
        self._watched.close()
        self._exits.close()

    def leave(self, code: int) -> NoReturn:
        """End this process in good order. Collective: MPI ends first, so that no launcher takes the code for a crash."""
        if self.launcher.name != "none":
            from hpctrain.comm import mpi

            if self.memory.shrunk and self.world is not None:
                keeper.own().finished()
                mpi.leave(self.world, code)
            mpi.finish(LEAVE_SECONDS)
        raise SystemExit(code)

    def start(self, file: Path, overrides: tuple[str, ...], resume: str | None = None, repeated: str | None = None) -> Session:
        """Configuration and threads (before NumPy is imported), then MPI; what is wrong with them, all ranks say alike.

        MPI starts in any case: a rank alone with its error would leave the others waiting for it.

        Args:
            resume, repeated: as `--resume` and `--schedule-from` name earlier runs, whose automatic choices go on.
        """
        self._begin(file, overrides)
        return self._session(resume, repeated)

    def train(self, file: Path, overrides: tuple[str, ...], work: Training, resume: str | None, repeated: str | None) -> bool:
        """The result of `work`, which starts again on the ranks that are left where some are lost and the configuration says so.

        Args:
            work: trains from a source, or the beginning, repeating a run's averaging or not. resume, repeated: as for `start`.
        """
        self._begin(file, overrides)
        while True:
            try:
                return self._attempt(work, resume, repeated)
            except RankLostError as error:
                if self._config is None or not self._goes_on():
                    raise
                self.flight.ended(End.WENT_ON, str(error))
            except HpctrainError as error:
                if self.memory.lost:  # the user knows nothing of the loss, without which there was no error; another start may do
                    raise RankLostError(f"{self.memory.loss()}, and without it the run cannot go on.\n{error}") from error
                raise
            self._watched.close()
            repeated = None
            self._shrink(self._config)

    def _attempt(self, work: Training, resume: str | None, repeated: str | None) -> bool:
        if self.memory.shrunk:
            self.memory.agree(self._joined)
            resume = self.memory.resume(resume)
        return work(self._session(resume, repeated, goes_on=True), resume, repeated, self._complete)

    def _goes_on(self) -> bool:
        """Whether this process, which has learnt of a loss, goes on without the rank."""
        from hpctrain.comm import mpi

        shrinks = self._config is not None and self._config.on_lost_rank.shrinks
        return shrinks and self.launcher.starts_mpi and mpi.goes_on_without_lost_ranks()

    def _complete(self) -> None:
        """Nothing, where all ranks are done, or the job ends without a lost one. Collective."""
        from hpctrain.comm import mpi

        self._asked = self._goes_on()
        if self._asked and not mpi.all_done(self._joined, done=True):
            raise RankLostError("A rank was lost at the end of the run; start again with --resume.")

    def _shrink(self, config: Config) -> None:
        """Go over to a world of the ranks that are left. Collective over them."""
        from hpctrain.comm import mpi

        before, step = self._joined, self.flight.step_begun
        self.flight = FlightRecorder()
        if not self._asked:  # ranks agree once in each world, here or at the end of the run, whichever a rank comes to
            mpi.all_done(before, done=False)
        self._asked = False
        self.world, lost = mpi.shrunk(before, self.flight)
        self.memory.loses(before.size, lost, step)
        if self._watch is not None:
            self._watch.renumber(self.world.rank)
        gc.collect()  # replica, loaders and groups of the old world, and the errors that hold them, refer to each other
        if self.world.size < config.on_lost_rank.least:
            raise RankLostError(
                f"{self.memory.loss()}, which leaves {self.world.size}, but on_lost_rank.least is {config.on_lost_rank.least}; "
                "start again with --resume."
            )

    @property
    def _joined(self) -> Communicator:
        assert self.world is not None, "MPI has started"
        return self.world

    def _begin(self, file: Path, overrides: tuple[str, ...]) -> None:
        """Read the configuration, set the threads, then start MPI, in any case."""
        try:
            self._prepared = self._prepare(file, overrides)
            self._config = self._prepared[0]
        except HpctrainError as error:
            self._prepared = error
        from hpctrain.experiment.session import start_world
        from hpctrain.storage.run_directory import git_state

        self._revision = git_state() if self.rank() == 0 else {}  # starts processes, which no one should once MPI runs
        if self.launcher.starts_mpi and not self.launcher.local_rank:
            self._removed = shared_segments.remove_stale()
        self.world = start_world(self.launcher, self._deadline_seconds, self.flight)
        if self.launcher.starts_mpi:
            shared_segments.remember()
            self._exits.callback(shared_segments.forget)

    @property
    def _deadline_seconds(self) -> float:
        return DEADLINE_SECONDS if self._config is None else self._config.deadline_seconds

    def _session(self, resume: str | None, repeated: str | None, *, goes_on: bool = False) -> Session:
        """A session over the world as it is now. Collective.

        goes_on: without lost ranks, where the configuration says so.
        """
        from hpctrain.comm.raise_on_all_ranks import raise_on_all_ranks
        from hpctrain.experiment.automatic import resolve
        from hpctrain.experiment.flight_records import explain_deadlines, watched
        from hpctrain.experiment.same_start import check_same_start
        from hpctrain.experiment.session import Session
        from hpctrain.experiment.start_search import StartedJob
        from hpctrain.experiment.user_code import check_alike

        world = self._joined
        self._watched.enter_context(watched(self.flight, world, self._deadline_seconds))
        config, threads = raise_on_all_ranks(world, lambda: _given(self._prepared))
        if goes_on:
            raise_on_all_ranks(world, lambda: check_offered(config, self.launcher))
        check_same_start(world, config, leads_node=not self.launcher.local_rank)
        check_alike(world)
        if goes_on and config.on_lost_rank.shrinks:  # any rank may be the first one of a smaller world
            self._revision = world.broadcast_object(self._revision)
        started = StartedJob(world, threads.threads, config.deadline_seconds)
        resolved = resolve(config, started, resume, repeated)
        session = Session.start(resolved, self.launcher, threads, world, self._revision, self.flight)
        explain_deadlines(session.progress)
        if self._removed.count:
            log.get_logger(__name__).info(str(self._removed))
            self._removed = shared_segments.Removed()
        return session

    def _prepare(self, file: Path, overrides: tuple[str, ...]) -> tuple[Config, ThreadPlan]:
        config, source = load_config(file, overrides)
        threads = set_threads(self.launcher, None if config.threads == "auto" else config.threads)
        from hpctrain.experiment.check import check_names
        from hpctrain.experiment.options import filled

        check_names(config, source)
        may_report = self.rank() == 0 or config.on_lost_rank.shrinks
        if may_report and any(reporter.name == "tensorboard" for reporter in config.metrics.all_reporters):
            from hpctrain.train.reporters.tensorboard import tensorboard_writer

            tensorboard_writer()  # what is missing is told before the job starts, and no process is started once MPI runs
        return filled(config), threads


def _given(prepared: tuple[Config, ThreadPlan] | HpctrainError) -> tuple[Config, ThreadPlan]:
    if isinstance(prepared, HpctrainError):
        raise prepared
    return prepared
