"""The steps of `hpctrain doctor` on a rank: checks that need no other rank, start of MPI, collective checks, report."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from hpctrain.core.errors import HpctrainError, LaunchError, MissingLibraryError
from hpctrain.core.text import echo
from hpctrain.doctor.check import exit_code
from hpctrain.launch import shared_segments
from hpctrain.launch.keeper import Notebook, RankEnd
from hpctrain.launch.launcher import Launcher, environment_fault, place_of
from hpctrain.launch.process_end import FINISHED, USER_ERROR
from hpctrain.launch.threads import VARIABLES, set_threads

if TYPE_CHECKING:
    from hpctrain.comm.base import Communicator
    from hpctrain.config.schema import Config  # `hpctrain --help` loads this module and does not need them
    from hpctrain.core.yaml_source import Source
    from hpctrain.doctor.check import OwnPlace
    from hpctrain.doctor.job import Examination, RankNotes

#: time for which other ranks let rank 0 report first: launchers end a job with the first rank that fails
LATER_SECONDS = 5.0
_DEFAULT_DIRECTORY = Path("runs")

_Read: TypeAlias = "tuple[Config, Source] | HpctrainError | None"


@dataclass
class DoctorRank:
    """One rank of the doctor's job.

    Attributes:
        read: function that returns the configuration and its positions; None: no configuration was given.
        strict: whether warnings count as faults.
        seconds: time limit of the job.
        began: time by `time.monotonic` when this rank was started.
    """

    launcher: Launcher
    read: Callable[[], tuple[Config, Source]] | None
    strict: bool
    as_json: bool
    seconds: float
    began: float
    world: Communicator | None = field(default=None, init=False)

    def rank(self) -> int:
        """Return the rank of this process: from MPI if it has connected several ranks, otherwise from the launcher."""
        return self.world.rank if self.world is not None and self.world.size > 1 else self.launcher.rank or 0

    def abort(self, code: int) -> None:
        """End the whole job with exit code `code`, if MPI has started."""
        if self.world is not None:
            self.world.abort(code)

    def run(self, notebook: Notebook) -> int:
        """Run all checks and print the report, with notes in `notebook`; return the exit code. Collective if MPI starts.

        Raises:
            ConfigError: the configuration has a fault; on all ranks.
            LaunchError: the environment has variables of a launcher that no longer exists.
        """
        configuration = self._configuration()
        place = self._loaded_place(configuration[0] if isinstance(configuration, tuple) else None)
        configuration = _with_names_checked(configuration)
        if not self.launcher.starts_mpi:
            _refuse(configuration)  # no rank waits for this one
        from hpctrain.doctor import job, nodes

        notes = job.RankNotes(notebook, place.config)
        notes.phase("running the checks that need no other rank")
        if not isinstance(configuration, HpctrainError):
            notes.facts = job.gather_alone(place)
        if place.leads_job and nodes.from_start(str(notes.facts.get(nodes.GPUS.name))) is not None:
            return self._report(job.examine_alone(place, notes.facts))  # MPI would end the whole job
        notes.phase(job.STARTS)
        fault = environment_fault(os.environ)
        if fault is not None and self.launcher.starts_mpi:
            raise LaunchError(fault)
        from hpctrain.comm import mpi
        from hpctrain.comm.base import raise_on_all_ranks

        shared_segments.announce()  # if this rank is killed, a later training removes its segments
        try:
            self.world, notes.library = mpi.world(2 * self.seconds), mpi.describe()
        except MissingLibraryError as error:
            shared_segments.forget()
            _refuse(configuration)
            return self._without_mpi(place, notes, str(error))
        shared_segments.remember()
        raise_on_all_ranks(self.world, lambda: _refuse(configuration))
        code = self._with_mpi(self.world, place, notes)
        notes.phase("ending MPI", concluded=True)
        mpi.finish(2 * self.seconds)
        shared_segments.forget()
        return code

    def explain(self, end: RankEnd) -> int:
        """Report the findings in the notes of a rank that ended before its report; return the exit code.

        The parent process of that rank calls it.
        """
        from hpctrain.doctor import job
        from hpctrain.doctor.check import OwnPlace

        place = OwnPlace(self.launcher, None, _DEFAULT_DIRECTORY)
        if isinstance(end.note, job.Progression) and end.note.concluded:
            self._say(place, f"After its report, the doctor {end.in_words} while {end.note.phase}.")
            return USER_ERROR
        found, examine = job.explained(place, end)
        if place.leads_job:
            return self._report(examine())
        if end.code is not None:  # a rank at its time limit has waited longer than rank 0
            time.sleep(LATER_SECONDS)
        self._say(place, f"{found.sentence} {found.fix}")
        return USER_ERROR

    def _configuration(self) -> _Read:
        """Return the configuration, or the error in it."""
        try:
            return None if self.read is None else self.read()
        except HpctrainError as error:
            return error

    def _loaded_place(self, config: Config | None) -> OwnPlace:
        """Set the number of threads before NumPy is loaded, then load the modules of a training and measure the time.

        Return the facts that this rank has before MPI starts.
        """
        variables = {name: os.environ[name] for name in VARIABLES if name in os.environ}
        threads, fault = None, ""
        try:
            wanted = None if config is None or config.threads == "auto" else config.threads
            threads = set_threads(self.launcher, wanted).threads
        except LaunchError as error:
            fault = str(error)
        from hpctrain.doctor.check import OwnPlace, load_training

        seconds = load_training(self.began)
        directory = _DEFAULT_DIRECTORY if config is None else Path(config.output)
        return OwnPlace(self.launcher, config, directory, threads, fault, variables, seconds)

    def _without_mpi(self, place: OwnPlace, notes: RankNotes, error: str) -> int:
        """Report that this node has no MPI library; other nodes may have one."""
        from hpctrain.doctor import job

        if place.leads_job:
            return self._report(job.examine_alone(place, notes.facts, error=error))
        time.sleep(LATER_SECONDS)  # if rank 0 has no library either, it has ended the job by now
        self._say(place, error)
        return USER_ERROR

    def _with_mpi(self, world: Communicator, place: OwnPlace, notes: RankNotes) -> int:
        """Run the collective checks and report; return the exit code. Of processes that each form a job, only one reports."""
        from hpctrain.doctor import job

        if world.size == 1 and not place.leads_job:
            return FINISHED
        examination = job.examine_together(place, world, notes.facts, notes.library, notes.phase, 2 * self.seconds)
        code = None if examination is None else self._report(examination)
        return int(world.broadcast_object(code))

    def _report(self, examination: Examination) -> int:
        from hpctrain.doctor import report

        show = report.print_json if self.as_json else report.print_table
        show(examination, strict=self.strict)
        sys.stdout.flush()
        return exit_code(examination.all_findings, strict=self.strict)

    def _say(self, place: OwnPlace, sentence: str) -> None:
        """Print a sentence on standard error, once per node."""
        if place.leads_node:
            echo(f"hpctrain: {place_of(self.launcher.rank or 0)}{sentence}", err=True)


def _with_names_checked(configuration: _Read) -> _Read:
    """Return the configuration, or an error if one of its names or options is invalid."""
    if isinstance(configuration, tuple):
        from hpctrain.assembly.faults import check_config

        try:
            check_config(*configuration)
        except HpctrainError as error:
            return error
    return configuration


def _refuse(configuration: _Read) -> None:
    if isinstance(configuration, HpctrainError):
        raise configuration
