"""The shape of a check of the doctor: facts are gathered on every rank, and judged from those of all ranks.

A judge is a pure function: it communicates with nobody and looks at nothing but the facts. A finding has a severity, a sentence
and the one line that fixes it. The start of a rank is measured here, too, so this module imports nothing that a training would
load.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.core.text import spans
from hpctrain.launch import process_end
from hpctrain.launch.launcher import Launcher

if TYPE_CHECKING:
    from hpctrain.comm.base import Communicator
    from hpctrain.comm.progress import ProgressEngine
    from hpctrain.config.schema import Config

#: the modules from which a training begins
TRAINING = ("hpctrain.run.training", "hpctrain.run.resume")


class Severity(StrEnum):
    """The severity of a finding, from the best to the worst."""

    OK = "ok"
    REMARK = "remark"
    WARNING = "warning"
    FAULT = "fault"


@dataclass(frozen=True)
class DoctorFinding:
    """One finding.

    Attributes:
        key: of its kind, for programs; empty if all is well. fix: a command, a setting or a short advice.
    """

    severity: Severity
    sentence: str
    fix: str = ""
    key: str = ""


@dataclass(frozen=True)
class FindingKind:
    """A kind of finding that a check may make.

    Attributes:
        key: its name for programs, which never changes. meaning: of the finding, for the documentation.
        remedy: what fixes it in general.
    """

    key: str
    severity: Severity
    meaning: str
    remedy: str

    def found(self, sentence: str, fix: str = "") -> DoctorFinding:
        """Return a finding of this kind.

        Args:
            fix: the remedy in this case; by default the general one.
        """
        return DoctorFinding(self.severity, sentence, fix or self.remedy, self.key)

    def from_error(self, error: str) -> DoctorFinding:
        """Return a finding from the sentence of an error, whose last part, after a semicolon, is the remedy."""
        fact, semicolon, fix = error.removesuffix(".").rpartition("; ")
        return self.found(f"{fact}.", capital(f"{fix}.")) if semicolon else self.found(error)


def fine(sentence: str) -> DoctorFinding:
    """Return a finding that all is well, or that there is nothing to examine."""
    return DoctorFinding(Severity.OK, sentence)


def capital(text: str) -> str:
    """Return the text with a capital at its beginning, unless it begins with a name, such as that of a key."""
    word = text.partition(" ")[0]
    return text[:1].upper() + text[1:] if word.rstrip(".,:").isalpha() else text


def exit_code(findings: Iterable[DoctorFinding], *, strict: bool) -> int:
    """Return 0 if nothing stops or spoils a training, else 2.

    Args:
        strict: warnings count, too.
    """
    bad = (Severity.FAULT, Severity.WARNING) if strict else (Severity.FAULT,)
    return process_end.USER_ERROR if any(finding.severity in bad for finding in findings) else process_end.FINISHED


@dataclass(frozen=True)
class StartFacts:
    """The start of one rank.

    Attributes:
        seconds: wall time until everything was loaded, without waits for a core.
        cpu_seconds: processor time of all threads, which may exceed the wall time.
        files: number of opened files.
    """

    seconds: float
    cpu_seconds: float
    files: int


class OpenedFiles:
    """Counts the files that this process opens, for its whole life: the system's hooks cannot be removed.

    Attributes:
        begin, queued_seconds: the time by `time.perf_counter`, and the waits for a core, when counting began.
    """

    def __init__(self) -> None:
        self.count = 0
        self.begin = time.perf_counter()
        self.queued_seconds = queued_seconds()
        sys.addaudithook(self._see)

    def _see(self, event: str, arguments: tuple[object, ...]) -> None:
        if event == "open":
            self.count += 1


def load_training(age_seconds: float, opened: OpenedFiles, modules: Sequence[str] = TRAINING) -> StartFacts:
    """Load what a training loads; return how long the start took up to the end of it.

    Args:
        age_seconds: time until `opened` began to count, without waits for a core.
    """
    for module in modules:
        importlib.import_module(module)
    seconds = time.perf_counter() - opened.begin - (queued_seconds() - opened.queued_seconds)
    return StartFacts(age_seconds + seconds, time.process_time(), opened.count)


def queued_seconds(statistics: Path = Path("/proc/self/schedstat")) -> float:
    """Return the seconds that this process was ready and waited for a core; 0 if the system does not count them."""
    try:
        return int(statistics.read_text().split()[1]) * 1e-9
    except (OSError, ValueError, IndexError):
        return 0.0


@dataclass(frozen=True)
class OwnPlace:
    """What one rank knows before MPI starts.

    Attributes:
        config: None without a configuration. directory: in which run directories are made.
        threads: of this rank; None: threads_fault says what is wrong with the requested number.
        start: how this rank started, if that was measured.
        variables: those of the environment that set numbers of threads, as the rank was started with them.
    """

    launcher: Launcher
    config: Config | None
    directory: Path
    threads: int | None = 1
    threads_fault: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    start: StartFacts | None = None

    @property
    def leads_node(self) -> bool:
        """Return whether this rank examines what is the same for all ranks of its node."""
        return not self.launcher.local_rank

    @property
    def leads_job(self) -> bool:
        """Return whether this rank examines what is the same for all ranks, and prints."""
        return not self.launcher.rank


@dataclass(frozen=True)
class JoinedPlace:
    """What one rank knows once MPI has started.

    Attributes:
        node: the ranks of this rank's node.
    """

    own: OwnPlace
    world: Communicator
    node: Communicator
    progress: ProgressEngine


@dataclass(frozen=True)
class JobView:
    """The job as all its ranks see it, for judges.

    Attributes:
        launcher: of rank 0. size: of MPI's world. hosts, node_of: by rank, the name and the number of its node.
        library: the MPI library with its version and thread level; empty if it could not be started.
    """

    launcher: Launcher
    size: int
    hosts: tuple[str, ...]
    node_of: tuple[int, ...]
    library: str
    config: Config | None = None

    @property
    def nodes(self) -> dict[int, list[int]]:
        """Return the ranks of each node."""
        found: dict[int, list[int]] = {}
        for rank, node in enumerate(self.node_of):
            found.setdefault(node, []).append(rank)
        return found

    def on(self, ranks: Sequence[int]) -> str:
        """Return the end of a sentence, " on rank 3 (nid001)"; empty if `ranks` are all ranks."""
        if len(ranks) == self.size:
            return ""
        hosts = list(dict.fromkeys(self.hosts[rank] for rank in ranks))
        where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} nodes, the first is {hosts[0]}"
        return f" on {'rank' if len(ranks) == 1 else 'ranks'} {spans(ranks)} ({where})"


@dataclass(frozen=True)
class Check:
    """A check of one subject.

    Attributes:
        name: in the table. looks_at: for the documentation. kinds: of the findings that it may make.
        gather: returns the facts of this rank, picklable; None if another rank gathers them. Takes an `OwnPlace`, or a
            `JoinedPlace` if `joined`; it is collective then, on all ranks in the same order.
        judge: returns at least one finding, from the facts of all ranks in rank order. If MPI could not be started these are the
            facts of one rank.
    """

    name: str
    looks_at: str
    kinds: tuple[FindingKind, ...]
    gather: Callable[[Any], Any]
    judge: Callable[[JobView, Sequence[Any]], list[DoctorFinding]]
    joined: bool = False


def present(facts: Sequence[Any]) -> list[tuple[int, Any]]:
    """Return (rank, facts) of the ranks that gathered facts."""
    return [(rank, fact) for rank, fact in enumerate(facts) if fact is not None]


def nothing(_: Any) -> None:
    """Return no facts, for a check that needs none."""
