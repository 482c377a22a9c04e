"""A process of a job, from its launcher to its end.

`JobProcess` is any process of a job. `ConfiguredProcess` has a configuration, and makes a session. This module imports no NumPy,
as the number of threads must be set before NumPy loads. The order of the start is in `start.py`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from hpctrain.cli.arguments import NONE, begin_log, load_config
from hpctrain.core import log, user_code
from hpctrain.core.errors import HpctrainError, LaunchError
from hpctrain.flight import start_records
from hpctrain.flight.recorder import FlightRecorder
from hpctrain.launch import shared_segments
from hpctrain.launch.launcher import Launcher, detect, lone_fault
from hpctrain.launch.process_end import End
from hpctrain.launch.process_start import forgive_writes
from hpctrain.launch.threads import ThreadPlan, check_fork, set_threads
from hpctrain.process.start import start_job
from hpctrain.version import __version__

if TYPE_CHECKING:
    from hpctrain.comm.base import Communicator
    from hpctrain.comm.progress import ProgressEngine
    from hpctrain.config.schema import Config
    from hpctrain.core.yaml_source import Source
    from hpctrain.job.session import Session
    from hpctrain.process.start import ReadConfig


#: time limit for all ranks to end MPI
LEAVE_SECONDS = 60.0


class JobProcess:
    """Process of a job, which can end the job at any point of its start.

    Attributes:
        world: communicator of all ranks; None until `start_world`.
        flight: flight record of the process.
        exits: callbacks that run when the run is over.
    """

    def __init__(self, launcher: Launcher) -> None:
        forgive_writes()  # for a program that was started without the command line
        check_fork()
        self.launcher = launcher
        self.world: Communicator | None = None
        self.flight: FlightRecorder = start_records.taken()
        self.exits = contextlib.ExitStack()
        self._removed = shared_segments.Removed()

    def rank(self) -> int:
        """Return this process's rank if it is known, else 0."""
        return self.world.rank if self.world is not None else self.launcher.rank or 0

    def abort(self, code: int) -> None:
        """End the whole job."""
        if self.world is not None:
            self.world.abort(code)

    def failed(self, sentence: str, ranks: Sequence[int] = ()) -> None:
        """Write an error into the flight record. Call this before any rank ends the job because of it.

        Args:
            ranks: ranks that caused the error.
        """
        self.flight.ended(End.FAILED, sentence, ranks)

    def start_world(self, deadline_seconds: float) -> Communicator:
        """Start MPI and return its world, or a world of this process alone. Collective over all ranks; see `session.start_world`.

        Removes shared-memory segments that dead jobs have left.
        """
        from hpctrain.job import session

        if self.launcher.starts_mpi:
            shared_segments.limit_ucx(self.launcher.local_size or self.launcher.expected_size or 1)
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
        """Start the heartbeat that watches this process. Collective over `world`."""
        from hpctrain.job.flight_records import watched

        self.exits.enter_context(watched(self.flight, world, deadline_seconds))

    def started(self, progress: ProgressEngine) -> None:
        """Add all ranks' flight records to the engine's deadline errors, and log the number of removed segments."""
        from hpctrain.job.flight_records import explain_deadlines

        explain_deadlines(progress)
        if self._removed.count:
            logging.getLogger(__name__).debug(str(self._removed))
            self._removed = shared_segments.Removed()

    def finish(self) -> None:
        """Run the callbacks of `exits`, the last one first."""
        self.exits.close()

    def end_mpi(self) -> None:
        """End MPI if it has started. Collective over all ranks."""
        if self.launcher.starts_mpi:
            from hpctrain.comm import mpi

            mpi.finish(LEAVE_SECONDS)

    def leave(self, code: int) -> NoReturn:
        """End MPI, then this process. Collective over all ranks.

        MPI ends first, so that no launcher mistakes the exit code for a crash.
        """
        self.end_mpi()
        raise SystemExit(code)


_log = logging.getLogger(__name__)

#: deadline of waits if the configuration could not be read
DEADLINE_SECONDS = 300.0


class ConfiguredProcess(JobProcess):
    """Process of a configured job.

    Args:
        log_ranks: value of --log-ranks; see `begin_log`.
        smoke: whether sessions are short trials of the configuration.
        options: options of the command; they must be equal on all ranks.

    Attributes:
        ownership: ownership of the run that this process trains.
    """

    def __init__(self, log_ranks: str = NONE, *, smoke: bool = False, **options: object) -> None:
        super().__init__(detect(os.environ))
        self._log_ranks, self._smoke = log_ranks, smoke
        self._options = {"smoke": smoke, **options}
        from hpctrain.job.ownership import RunOwnership  # here: `hpctrain --help` loads this module and does not need it

        self.ownership = RunOwnership()
        self._config: Config | None = None
        self._prepared: tuple[Config, ThreadPlan] | HpctrainError = HpctrainError("No configuration was read yet.")
        self._revision: Mapping[str, object] = {}
        self._device_messages: str | None = None

    def refuse_alone(self) -> None:
        """Raise if this process would train alone although its job was allocated several ranks.

        Raises:
            LaunchError: this process is the only rank of a job with several ranks.
        """
        fault = lone_fault(self.launcher, os.environ)
        if fault is not None:
            raise LaunchError(fault)

    def start(self, file: Path, overrides: tuple[str, ...], resume: str | None = None, repeated: str | None = None) -> Session:
        """Read the configuration, start MPI, and return a session. All ranks raise the same error if there is one.

        MPI starts even if this rank cannot read the configuration: if it left alone, the other ranks would wait for it.

        Args:
            resume, repeated: earlier runs of `--resume` and `--schedule-from`, whose automatic choices are reused.
        """
        return self.start_from(partial(load_config, file, overrides), resume, repeated)

    def start_from(
        self, read: ReadConfig, resume: str | None = None, repeated: str | None = None, *, trains: bool = False
    ) -> Session:
        """Start with the configuration that `read` returns. `read` may set the threads and load NumPy.

        Args:
            resume, repeated: as for `start`.
            trains: whether to load the modules of a training.
        """
        start_job(self, read, trains=trains)
        return self._session(resume, repeated)

    def prepare(self, read: ReadConfig) -> None:
        """Read the configuration and set the threads. An error is stored: all ranks raise it once MPI has started."""
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
        except Exception as error:
            fault = user_code.fault(error)
            if fault is None:
                raise
            self._prepared = fault

    def _checked(self, config: Config, source: Source) -> tuple[Config, ThreadPlan]:
        """Set the threads; return them with the checked configuration, all defaults filled in."""
        threads = set_threads(self.launcher, None if config.threads == "auto" else config.threads, measures=True)
        from hpctrain.config.checks import check_names
        from hpctrain.config.options import filled

        check_names(config, source)
        if self.rank() == 0 and any(reporter.name == "tensorboard" for reporter in config.metrics.all_reporters):
            from hpctrain.training.reporters.tensorboard import tensorboard_writer

            tensorboard_writer()  # reports a missing package before the job starts
        return filled(config), threads

    def load(self, *, trains: bool) -> None:
        """Load the modules of the job.

        Args:
            trains: whether to load the modules of a training.
        """
        from hpctrain.run import build
        from hpctrain.storage import checkpoint  # noqa: F401  loads h5py

        if self._config is not None:
            build.load_search(self._config)
            if self._config.trace:
                from hpctrain.run import trace_report  # noqa: F401
        if trains:
            from hpctrain.run import training  # noqa: F401

    def start_processes(self) -> None:
        """Read the revision from git on rank 0, and test MPI with GPU memory if necessary."""
        from hpctrain.run.messages import try_transport
        from hpctrain.runs.directory import git_state

        self._revision = git_state() if self.rank() == 0 else {}
        self._device_messages = try_transport(self._config, self.launcher)

    @property
    def deadline_seconds(self) -> float:
        """Configured deadline of waits; 5 minutes until the configuration is read."""
        return DEADLINE_SECONDS if self._config is None else self._config.deadline_seconds

    def _session(self, resume: str | None, repeated: str | None) -> Session:
        """Return a session over the world. Collective over all ranks."""
        from hpctrain.comm.base import raise_on_all_ranks
        from hpctrain.job.same_start import check_same_code, check_same_start
        from hpctrain.job.session import Session, StartedJob
        from hpctrain.run.build import resolve

        world = self.world
        assert world is not None, "MPI has started"
        self.watch(world, self.deadline_seconds)
        config, threads = raise_on_all_ranks(world, lambda: _given(self._prepared))
        check_same_start(world, config, leads_node=not self.launcher.local_rank, options=self._options)
        check_same_code(world)
        started = StartedJob(world, threads.threads, config.deadline_seconds)
        notes: tuple[str, ...] = ()
        if self._smoke:
            from hpctrain.run.smoke import smoke_trial

            trial = smoke_trial(config, started)
            config, notes = trial.config, trial.notes
        resolved = resolve(config, started, resume, repeated)
        resolved = replace(resolved, lines=(*notes, *resolved.lines))
        session = Session.start(resolved, self.launcher, threads, world, self._revision, self.flight, self._device_messages)
        self.started(session.progress)
        return session


def _given(prepared: tuple[Config, ThreadPlan] | HpctrainError) -> tuple[Config, ThreadPlan]:
    if isinstance(prepared, HpctrainError):
        raise prepared
    return prepared
