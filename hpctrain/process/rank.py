"""A rank of a job, from its launcher to its end.

`RankProcess` is any process of a job. Commands and `hpctrain.train` call `session`, which runs steps 7 to 11 of `start.py`.
`hpctrain.start` has no configuration, and calls `start_world` itself. This module imports no NumPy, as the number of threads must
be set before NumPy loads.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, NoReturn

from hpctrain.core import log, user_code
from hpctrain.core.errors import HpctrainError, LaunchError
from hpctrain.flight import start_records
from hpctrain.flight.recorder import FlightRecorder
from hpctrain.launch import shared_segments
from hpctrain.launch.launcher import Launcher, check_world, detect, environment_fault, is_copy, lone_fault
from hpctrain.launch.process_end import End
from hpctrain.launch.process_start import forgive_writes
from hpctrain.launch.threads import ThreadPlan, check_fork, outnumbers_cores, set_threads
from hpctrain.process.start import NO_RANK, begin_log
from hpctrain.version import __version__

if TYPE_CHECKING:
    from hpctrain.assembly.recipe import Recipe
    from hpctrain.comm.base import Communicator
    from hpctrain.config.schema import Config
    from hpctrain.core.yaml_source import Source
    from hpctrain.job.ownership import RunOwnership
    from hpctrain.job.session import Session

    #: function that returns a configuration and the source positions of its values; it may set the threads and load NumPy
    ReadConfig = Callable[[], tuple[Config, Source]]

_log = logging.getLogger(__name__)

#: time limit for all ranks to end MPI
LEAVE_SECONDS = 60.0
#: deadline of waits if the configuration could not be read
DEADLINE_SECONDS = 300.0


class RankProcess:
    """Process of a job, which can end the job at any point of its start.

    Args:
        launcher: launcher of the process; None: the one that the environment names.
        log_ranks: value of --log-ranks; see `begin_log`.
        smoke: whether the session is a short trial of the configuration.
        stays: whether the process belongs to a program that may train again, so that MPI stays when the run is over.
        options: options of the command or arguments of the program; they must be equal on all ranks.

    Attributes:
        world: communicator of all ranks; None until MPI has started.
        flight: flight record of the process.
        ownership: ownership of the run that the process trains; None until `session`.
        exits: callbacks that run when the run is over.
    """

    #: revision of the repository and outcome of the trial of MPI, from the first training of a program: processes must not start
    #: under MPI
    _first: ClassVar[tuple[Mapping[str, object], str | None] | None] = None

    def __init__(
        self,
        launcher: Launcher | None = None,
        log_ranks: str = NO_RANK,
        *,
        smoke: bool = False,
        stays: bool = False,
        **options: object,
    ) -> None:
        forgive_writes()  # for a program that was started without the command line
        check_fork()
        self.launcher = detect(os.environ) if launcher is None else launcher
        self.world: Communicator | None = None
        self.flight: FlightRecorder = start_records.taken()
        self.ownership: RunOwnership | None = None
        self.exits = contextlib.ExitStack()
        self._log_ranks, self._smoke, self._stays = log_ranks, smoke, stays
        self._options = {"smoke": smoke, **options}

    def rank(self) -> int:
        """Return this process's rank if it is known, else 0."""
        return self.world.rank if self.world is not None else self.launcher.rank or 0

    def abort(self, code: int) -> None:
        """End the whole job with exit code `code`, if MPI has started."""
        if self.world is not None:
            self.world.abort(code)

    def failed(self, sentence: str, ranks: Sequence[int] = ()) -> None:
        """Write an error into the flight record. Call this before any rank ends the job because of it.

        Args:
            ranks: ranks that caused the error.
        """
        self.flight.ended(End.FAILED, sentence, ranks)

    def refuse_alone(self) -> None:
        """Raise if this process would train alone although its job was allocated several ranks.

        Raises:
            LaunchError: this process is the only rank of a job with several ranks.
        """
        fault = lone_fault(self.launcher, os.environ)
        if fault is not None:
            raise LaunchError(fault)

    def session(self, read: ReadConfig, *, trains: bool = False, resume: str | None = None) -> Session:
        """Read the configuration, start MPI, and return a session. All ranks raise the same error if there is one. Collective.

        MPI starts even if this rank cannot read the configuration: if it left alone, the other ranks would wait for it.

        Args:
            read: see `ReadConfig`.
            trains: whether to load the modules of a training, and to check its data files before `auto` measures.
            resume: earlier run of `--resume`, whose automatic choices are reused.
        """
        prepared = self._prepared(read)  # steps 7 and 8
        known = None if isinstance(prepared, HpctrainError) else prepared[0].config
        self._load(known, trains=trains)  # step 9
        if not gc.isenabled():
            gc.freeze()  # the objects that exist now stay: collections need not visit them
            gc.enable()
        from hpctrain.job.ownership import RunOwnership
        from hpctrain.run.messages import try_transport
        from hpctrain.runs.directory import git_state

        self.ownership = RunOwnership()
        found = RankProcess._first if self._stays and self.launcher.starts_mpi else None
        if found is None:  # step 10
            found = git_state() if self.rank() == 0 else {}, try_transport(known, self.launcher)
            if self._stays:
                RankProcess._first = found
        revision, device_messages = found
        self.flight.phase("")
        deadline_seconds = DEADLINE_SECONDS if known is None else known.deadline_seconds
        world = self.start_world(deadline_seconds)  # step 11
        if not self._stays:
            # MPI must end before its shared-memory segments are forgotten: a rank that is killed during the end leaves some.
            self.exits.callback(self.end_mpi)
        from hpctrain.comm.base import raise_on_all_ranks
        from hpctrain.job.automatic_choice import Resolved
        from hpctrain.job.flight_records import watched
        from hpctrain.job.same_start import check_same_code, check_same_start
        from hpctrain.job.session import Session, StartedJob

        self.exits.enter_context(watched(self.flight, world, deadline_seconds))

        def given() -> tuple[Recipe, ThreadPlan]:
            if isinstance(prepared, HpctrainError):
                raise prepared
            return prepared

        recipe, threads = raise_on_all_ranks(world, given)
        config = recipe.config
        check_same_start(world, config, leads_node=not self.launcher.local_rank, options=self._options)
        check_same_code(world)
        started = StartedJob(world, threads.threads, config.deadline_seconds)
        notes: tuple[str, ...] = ()
        if self._smoke:
            from hpctrain.run.smoke import smoke_trial

            trial = smoke_trial(config, started)
            config, notes = trial.config, trial.notes
        resolved = Resolved(replace(recipe, config=config))
        if config.automatic:
            from hpctrain.comm import mpi
            from hpctrain.process.earlier_choices import choose_again
            from hpctrain.run.images import open_alike

            if trains:
                open_alike(world, config, tuple(config.data.files))
            resolved = choose_again(config, started, resume, mpi.library() if self.launcher.starts_mpi else "")
        resolved = replace(resolved, lines=(*notes, *resolved.lines))
        return Session.start(resolved, self.launcher, threads, world, revision, self.flight, device_messages)

    def _prepared(self, read: ReadConfig) -> tuple[Recipe, ThreadPlan] | HpctrainError:
        """Return the recipe of the checked configuration with all defaults, and the plan of the threads, which are now set.

        An error is returned: all ranks raise it once MPI has started.
        """
        self.flight.phase("reading the configuration")
        try:
            begin_log(self._log_ranks, self.launcher)
            self.exits.callback(log.end_rank_log)
            _log.debug("flight record until there is a run directory: %s", self.flight.begun_at)
            facts = (os.getpid(), platform.node(), __version__, self.launcher.name, " ".join(sys.argv[1:]))
            _log.debug("process %d on %s, hpctrain %s, launcher %s: %s", *facts)
            config, source = read()
            threads = set_threads(self.launcher, None if config.threads == "auto" else config.threads, measures=True)
            from hpctrain.assembly.faults import check_config

            recipe = check_config(config, source)
            if self.rank() == 0 and any(reporter.name == "tensorboard" for reporter in config.metrics.all_reporters):
                from hpctrain.training.reporters.tensorboard import tensorboard_writer

                tensorboard_writer()  # reports a missing package before the job starts
            return recipe, threads
        except HpctrainError as error:
            return error
        except Exception as error:
            fault = user_code.fault(error)
            if fault is None:
                raise
            return fault

    def _load(self, config: Config | None, *, trains: bool) -> None:
        """Load the modules of the job before ranks wait for each other, so that one slow file system does not delay all ranks."""
        from hpctrain.run import build  # noqa: F401
        from hpctrain.storage import checkpoint  # noqa: F401  loads h5py

        if config is not None:
            if config.automatic:
                from hpctrain.process import earlier_choices  # noqa: F401
            if config.trace:
                from hpctrain.run import trace_report  # noqa: F401
        if trains:
            from hpctrain.run import training  # noqa: F401

    def start_world(self, deadline_seconds: float) -> Communicator:
        """Start MPI and return its world; without MPI, return a communicator of one rank. Collective over all ranks.

        MPI is started under a launcher, or if HPCTRAIN_EXPECT_RANKS requests several ranks. The call also removes shared-memory
        segments that dead jobs have left.

        Raises:
            LaunchError: the launcher has ended or does not start MPI, or the world's size differs from the number that the
                launcher or HPCTRAIN_EXPECT_RANKS requested.
        """
        launcher = self.launcher
        if not launcher.starts_mpi:
            alone = lone_fault(launcher, os.environ)
            if alone is not None and is_copy(os.environ):
                raise LaunchError(alone)
            if alone is not None:
                _log.warning(alone)
            from hpctrain.comm.base import SingleCommunicator

            self.world = SingleCommunicator()
            log.configure(0, 1)
            return self.world
        fault = environment_fault(os.environ)
        if fault is not None:
            raise LaunchError(fault)
        from hpctrain.comm import mpi
        from hpctrain.comm.waiting import MORE_RANKS_THAN_CORES, WaitPolicy, guard

        shared_segments.limit_ucx(launcher.local_size or launcher.expected_size or 1)
        shared_segments.announce()
        removed = shared_segments.Removed() if launcher.local_rank else shared_segments.remove_stale()
        policy = MORE_RANKS_THAN_CORES if outnumbers_cores(launcher) else WaitPolicy()
        with self.flight.waiting("the start of MPI"):
            with guard("The start of MPI", deadline_seconds, rank=launcher.rank):
                world = mpi.world(deadline_seconds, self.flight, policy)
            check_world(launcher, world.size, mpi.describe())
        self.world = world
        log.configure(world.rank, world.size)
        if removed.count:
            _log.debug(str(removed))
        shared_segments.remember()
        self.exits.callback(shared_segments.forget)
        return world

    def finish(self) -> None:
        """Run the callbacks of `exits`, the last one first."""
        self.exits.close()

    def end_mpi(self) -> None:
        """End MPI if it has started. Collective over all ranks."""
        if self.launcher.starts_mpi:
            from hpctrain.comm import mpi

            mpi.finish(LEAVE_SECONDS)

    def leave(self, code: int) -> NoReturn:
        """End MPI, then this process, so that no launcher mistakes the exit code for a crash. Collective over all ranks."""
        self.end_mpi()
        raise SystemExit(code)
