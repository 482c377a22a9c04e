"""A process of a job, from its launcher to its end: what a command or a user's program knows of it at any point.

`JobProcess` is any process of a job. `ConfiguredProcess` has a configuration, and leads from its launcher to a session. If ranks
are lost and the configuration says so, it makes a new session over the ranks that are left. Imports no NumPy: thread counts must
be set before it loads. The order of the start is in `start.py`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from hpctrain.cli.arguments import NONE, begin_log, load_config
from hpctrain.cli.start import start_job
from hpctrain.core import log
from hpctrain.core.errors import HpctrainError, LaunchError, RankLostError
from hpctrain.core.log import get_logger
from hpctrain.flight import start_records
from hpctrain.flight.recorder import FlightRecorder
from hpctrain.launch import keeper, shared_segments
from hpctrain.launch.launcher import Launcher, detect, lone_fault
from hpctrain.launch.process_end import End
from hpctrain.launch.signals import SignalWatch
from hpctrain.launch.threads import ThreadPlan, set_threads
from hpctrain.version import __version__

if TYPE_CHECKING:
    from hpctrain.cli.start import ReadConfig
    from hpctrain.comm.base import Communicator
    from hpctrain.comm.progress import ProgressEngine
    from hpctrain.config.schema import Config
    from hpctrain.core.yaml_source import Source
    from hpctrain.job.session import Session
    from hpctrain.run.smoke import SmokeTrial


#: time limit of the ranks to end MPI together
LEAVE_SECONDS = 60.0


class JobProcess:
    """What this process knows so far: enough to end the job from any point.

    Attributes:
        world: of all ranks, from `start_world` on. flight: the process's record.
        exits: undone when the run is over. watched: the part of it that watches the process in the present world.
    """

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self.world: Communicator | None = None
        self.flight: FlightRecorder = start_records.taken()
        self.exits, self.watched = contextlib.ExitStack(), contextlib.ExitStack()
        self._removed = shared_segments.Removed()

    def rank(self) -> int:
        """Return this process's rank as far as it is known; else 0."""
        return self.world.rank if self.world is not None else self.launcher.rank or 0

    def abort(self, code: int) -> None:
        """End the whole job."""
        if self.world is not None:
            self.world.abort(code)

    def failed(self, sentence: str, ranks: Sequence[int] = ()) -> None:
        """Keep the error in the flight record, before any rank ends the job for it.

        Args:
            ranks: that caused it.
        """
        self.flight.ended(End.FAILED, sentence, ranks)

    def start_world(self, deadline_seconds: float) -> Communicator:
        """Start MPI; return its world, or one of this process alone (see `session.start_world`). Collective.

        Segments of shared memory that dead jobs left are removed.
        """
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
        """Let the heartbeat watch this process from now on. Collective."""
        from hpctrain.job.flight_records import watched

        self.exits.push(self.watched)  # undone before what was there at the start
        self.watched.enter_context(watched(self.flight, world, deadline_seconds))

    def started(self, progress: ProgressEngine) -> None:
        """Let records of all ranks explain the engine's deadlines, and report what was removed."""
        from hpctrain.job.flight_records import explain_deadlines

        explain_deadlines(progress)
        if self._removed.count:
            log.get_logger(__name__).info(str(self._removed))
            self._removed = shared_segments.Removed()

    def finish(self) -> None:
        """End the run in good order."""
        self.exits.close()

    def end_mpi(self) -> None:
        """End MPI if it has started. Collective."""
        if self.launcher.starts_mpi:
            from hpctrain.comm import mpi

            mpi.finish(LEAVE_SECONDS)

    def leave(self, code: int) -> NoReturn:
        """End this process in good order. Collective: MPI ends first, so that no launcher takes the code for a crash."""
        self.end_mpi()
        raise SystemExit(code)


_log = get_logger(__name__)

#: deadline of a job whose configuration could not be read
DEADLINE_SECONDS = 300.0

#: trains over a session, from a source or the beginning, repeating a run's averaging or not; calls the last argument once it is
#: done; returns whether it was stopped
Training = Callable[["Session", str | None, str | None, Callable[[], None]], bool]


class ConfiguredProcess(JobProcess):
    """A process of a configured job.

    Args:
        watch: of its signals; it is given the rank's new number after a loss. log_ranks: that keep log files, see `begin_log`.
        smoke: whether sessions only try the configuration out. options: of the command; they must be equal on all ranks.

    Attributes:
        world: all ranks, once MPI has started, and later those that are left. shrink_state: what outlives lost ranks.
        flight: the record of the process in the present world.
    """

    def __init__(
        self, watch: SignalWatch | None = None, log_ranks: str = NONE, *, smoke: bool = False, **options: object
    ) -> None:
        super().__init__(detect(os.environ))
        self._log_ranks, self._smoke = log_ranks, smoke
        self._options = {"smoke": smoke, **options}
        self._trial: SmokeTrial | None = None
        from hpctrain.job.lost_ranks import ShrinkState  # here: `hpctrain --help` loads this module and does not need it

        self.shrink_state, self._watch = ShrinkState(), watch
        self._config: Config | None = None
        self._prepared: tuple[Config, ThreadPlan] | HpctrainError = HpctrainError("No configuration was read yet.")
        self._asked_at_end = False  # whether this rank reached the end of the run and asked the others
        self._revision: Mapping[str, object] = {}
        self._device_messages: str | None = None

    def end_mpi(self) -> None:
        if not self.shrink_state.shrunk:  # MPI cannot always end after a loss: see `leave`
            super().end_mpi()

    def leave(self, code: int) -> NoReturn:
        if self.shrink_state.shrunk and self.world is not None:
            from hpctrain.comm import mpi

            keeper.current_keeper().finished()
            mpi.leave(self.world, code)
        super().leave(code)

    def refuse_alone(self) -> None:
        """Raise if this process would train alone although its job was allocated several ranks.

        Raises:
            LaunchError: this process is the only rank of a job with several.
        """
        fault = lone_fault(self.launcher, os.environ)
        if fault is not None:
            raise LaunchError(fault)

    def start(self, file: Path, overrides: tuple[str, ...], resume: str | None = None, repeated: str | None = None) -> Session:
        """Read the configuration, start MPI, and return a session. All ranks raise the same error if it has a fault.

        MPI starts in any case: a rank alone with its error would leave the others waiting for it.

        Args:
            resume, repeated: earlier runs by `--resume` and `--schedule-from`, whose automatic choices continue.
        """
        return self.start_from(partial(load_config, file, overrides), resume, repeated)

    def start_from(self, read: ReadConfig, resume: str | None = None, repeated: str | None = None) -> Session:
        """Start with a configuration that `read` returns. It may set the threads, and load NumPy then."""
        start_job(self, read)
        return self._session(resume, repeated)

    def train(self, file: Path, overrides: tuple[str, ...], work: Training, resume: str | None, repeated: str | None) -> bool:
        """Return the result of `work`. If ranks are lost and the configuration says so, start again on the ranks that are left.

        Args:
            work: trains from a source, or from the beginning, repeating a run's averaging or not. resume, repeated: as for
                `start`.
        """
        start_job(self, partial(load_config, file, overrides), trains=True)
        while True:
            try:
                return self._attempt(work, resume, repeated)
            except RankLostError as error:
                if self._config is None or not self._continues():
                    raise
                self.flight.ended(End.CONTINUED, str(error))
            except HpctrainError as error:
                if self.shrink_state.lost:  # the loss, which the user has not seen, caused the error; another start may succeed
                    raise RankLostError(
                        f"{self.shrink_state.loss()}, and without it the run cannot continue.\n{error}"
                    ) from error
                raise
            self.watched.close()
            repeated = None
            self._shrink(self._config)

    def _attempt(self, work: Training, resume: str | None, repeated: str | None) -> bool:
        if self.shrink_state.shrunk:
            self.shrink_state.agree(self._joined)
            resume = self.shrink_state.resume(resume)
        return work(self._session(resume, repeated, continues=True), resume, repeated, self._complete)

    def _continues(self) -> bool:
        """Return whether this process, which has learnt of a loss, continues without the rank."""
        from hpctrain.comm import mpi

        shrinks = self._config is not None and self._config.on_lost_rank.shrinks
        return shrinks and self.launcher.starts_mpi and mpi.goes_on_without_lost_ranks()

    def _complete(self) -> None:
        """Raise if another rank was lost at the end of the run and this job continues without lost ranks. Collective."""
        from hpctrain.comm import mpi

        self._asked_at_end = self._continues()
        if self._asked_at_end and not mpi.all_done(self._joined, done=True):
            raise RankLostError("A rank was lost at the end of the run; start again with --resume.")

    def _shrink(self, config: Config) -> None:
        """Change to a world of the ranks that are left. Collective over them."""
        from hpctrain.comm import mpi

        before, step = self._joined, self.flight.step_begun
        self.flight = FlightRecorder()
        if not self._asked_at_end:  # ranks agree once in each world: here or at the end of the run
            mpi.all_done(before, done=False)
        self._asked_at_end = False
        self.world, lost = mpi.shrunk(before, self.flight)
        self.shrink_state.loses(before.size, lost, step)
        if self._watch is not None:
            self._watch.renumber(self.world.rank)
        gc.collect()  # replica, loaders and groups of the old world, and the errors that hold them, refer to each other
        if self.world.size < config.on_lost_rank.least:
            raise RankLostError(
                f"{self.shrink_state.loss()}, which leaves {self.world.size}, "
                f"but on_lost_rank.least is {config.on_lost_rank.least}; "
                "start again with --resume."
            )

    @property
    def _joined(self) -> Communicator:
        assert self.world is not None, "MPI has started"
        return self.world

    def prepare(self, read: ReadConfig) -> None:
        """Read the configuration and set the threads. An error is kept: all ranks raise it once MPI has started."""
        self.flight.phase("reading the configuration")
        try:
            begin_log(self._log_ranks, self.launcher)
            self.exits.callback(log.end_rank_log)
            _log.debug("flight record until there is a run directory: %s", self.flight.begun_at)
            facts = (os.getpid(), platform.node(), __version__, self.launcher.name, " ".join(sys.argv[1:]))
            _log.debug("process %d on %s, hpctrain %s, launcher %s: %s", *facts)
            self._prepared = self._checked(*read())
            self._config = self._prepared[0]
        except HpctrainError as error:
            self._prepared = error

    def _checked(self, config: Config, source: Source) -> tuple[Config, ThreadPlan]:
        """Set the threads; return them with the configuration, checked and with all defaults."""
        threads = set_threads(self.launcher, None if config.threads == "auto" else config.threads)
        from hpctrain.config.checks import check_names
        from hpctrain.config.options import filled

        check_names(config, source)
        may_report = self.rank() == 0 or config.on_lost_rank.shrinks
        if may_report and any(reporter.name == "tensorboard" for reporter in config.metrics.all_reporters):
            from hpctrain.train.reporters.tensorboard import tensorboard_writer

            tensorboard_writer()  # a missing package is reported before the job starts; under MPI no process is started
        return filled(config), threads

    def load(self, *, trains: bool) -> None:
        """Load the job's modules."""
        from hpctrain.run import build
        from hpctrain.storage import checkpoint  # noqa: F401  loads h5py

        if self._config is not None:
            build.load_search(self._config)
            if self._config.trace:
                from hpctrain.run import trace_report  # noqa: F401
        if trains:
            from hpctrain.run import training  # noqa: F401

    def start_processes(self) -> None:
        """Ask git for the revision on rank 0, and try out MPI with a GPU's memory where that is needed."""
        from hpctrain.run.messages import try_transport
        from hpctrain.runs.directory import git_state

        self._revision = git_state() if self.rank() == 0 else {}
        self._device_messages = try_transport(self._config, self.launcher)

    @property
    def deadline_seconds(self) -> float:
        """The deadline of waits, as configured; 5 minutes until the configuration is read."""
        return DEADLINE_SECONDS if self._config is None else self._config.deadline_seconds

    def _session(self, resume: str | None, repeated: str | None, *, continues: bool = False) -> Session:
        """Return a session over the present world. Collective.

        Args:
            continues: continue without lost ranks if the configuration says so.
        """
        from hpctrain.comm.base import raise_on_all_ranks
        from hpctrain.job.lost_ranks import check_offered
        from hpctrain.job.same_start import check_same_code, check_same_start
        from hpctrain.job.session import Session, StartedJob
        from hpctrain.run.build import resolve

        world = self._joined
        self.watch(world, self.deadline_seconds)
        config, threads = raise_on_all_ranks(world, lambda: _given(self._prepared))
        if continues:
            raise_on_all_ranks(world, lambda: check_offered(config, self.launcher))
        check_same_start(world, config, leads_node=not self.launcher.local_rank, options=self._options)
        check_same_code(world)
        if continues and config.on_lost_rank.shrinks:  # any rank may be the first one of a smaller world
            self._revision = world.broadcast_object(self._revision)
        started = StartedJob(world, threads.threads, config.deadline_seconds)
        notes: tuple[str, ...] = ()
        if self._smoke:
            from hpctrain.run.smoke import smoke_trial

            self._trial = self._trial or smoke_trial(config, started)  # the ranks that are left continue with it
            config, notes = self._trial.config, self._trial.notes
        resolved = resolve(config, started, resume, repeated)
        resolved = replace(resolved, lines=(*notes, *resolved.lines))
        session = Session.start(resolved, self.launcher, threads, world, self._revision, self.flight, self._device_messages)
        self.started(session.progress)
        return session


def _given(prepared: tuple[Config, ThreadPlan] | HpctrainError) -> tuple[Config, ThreadPlan]:
    if isinstance(prepared, HpctrainError):
        raise prepared
    return prepared
