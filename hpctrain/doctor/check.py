"""Interface of the doctor's checks: each rank gathers facts, and a judge evaluates the facts of all ranks.

A judge is a pure function of the facts and does not communicate. A finding has a severity, a sentence and a one-line fix. This
module also measures the start-up time of a rank, and therefore imports no module of a training.
"""

from __future__ import annotations

import importlib
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

#: modules that import everything that a training needs
TRAINING = ("hpctrain.run.training", "hpctrain.run.resume")


class Severity(StrEnum):
    """Severity of a finding, in ascending order."""

    OK = "ok"
    REMARK = "remark"
    WARNING = "warning"
    FAULT = "fault"


@dataclass(frozen=True)
class DoctorFinding:
    """Finding of a check.

    Attributes:
        fix: command, setting or short advice.
        key: key of its kind, for programs; "" if all is well.
    """

    severity: Severity
    sentence: str
    fix: str = ""
    key: str = ""


@dataclass(frozen=True)
class FindingKind:
    """Kind of finding that a check may report.

    Attributes:
        meaning: explanation of the finding, for the documentation.
        remedy: general fix.
    """

    key: str
    severity: Severity
    meaning: str
    remedy: str

    def found(self, sentence: str, fix: str = "") -> DoctorFinding:
        """Return a finding of this kind; its fix is the general one unless another is given."""
        return DoctorFinding(self.severity, sentence, fix or self.remedy, self.key)

    def from_error(self, error: str) -> DoctorFinding:
        """Return a finding from an error message. The part of the message after the last semicolon is the fix."""
        fact, semicolon, fix = error.removesuffix(".").rpartition("; ")
        return self.found(f"{fact}.", capital(f"{fix}.")) if semicolon else self.found(error)


def fine(sentence: str) -> DoctorFinding:
    """Return a finding for a check that found no fault or had nothing to check."""
    return DoctorFinding(Severity.OK, sentence)


def capital(text: str) -> str:
    """Return the text with a capital first letter, unless it begins with a word that is not purely alphabetic, such as a key."""
    word = text.partition(" ")[0]
    return text[:1].upper() + text[1:] if word.rstrip(".,:").isalpha() else text


def exit_code(findings: Iterable[DoctorFinding], *, strict: bool) -> int:
    """Return 0 if the findings allow a training, else 2; with `strict`, warnings count as faults."""
    bad = (Severity.FAULT, Severity.WARNING) if strict else (Severity.FAULT,)
    return process_end.USER_ERROR if any(finding.severity in bad for finding in findings) else process_end.FINISHED


def load_training(began: float, modules: Sequence[str] = TRAINING) -> float:
    """Load the modules that a training imports, and return the seconds since `began`, by `time.monotonic`."""
    for module in modules:
        importlib.import_module(module)
    return time.monotonic() - began


@dataclass(frozen=True)
class OwnPlace:
    """Facts that a rank has before MPI starts.

    Attributes:
        directory: directory in which run directories are created.
        threads: number of threads of this rank; None if the requested number was refused.
        threads_fault: why the requested number of threads was refused; "" if it was not.
        variables: environment variables with numbers of threads, as set when the rank was started.
        start_seconds: start-up time of this rank; None if it was not measured.
    """

    launcher: Launcher
    config: Config | None
    directory: Path
    threads: int | None = 1
    threads_fault: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    start_seconds: float | None = None

    @property
    def leads_node(self) -> bool:
        """Whether this rank runs the checks that one rank per node runs."""
        return not self.launcher.local_rank

    @property
    def leads_job(self) -> bool:
        """Whether this rank runs the checks that one rank per job runs, and prints the report."""
        return not self.launcher.rank


@dataclass(frozen=True)
class JoinedPlace:
    """Facts and communicators that a rank has after MPI has started."""

    own: OwnPlace
    world: Communicator
    node: Communicator
    progress: ProgressEngine


@dataclass(frozen=True)
class JobView:
    """Facts about the job that judges receive.

    Attributes:
        size: number of ranks.
        hosts, node_of: host name and node number of each rank.
        library: MPI library with its version and thread level; "" if it could not be started.
    """

    launcher: Launcher
    size: int
    hosts: tuple[str, ...]
    node_of: tuple[int, ...]
    library: str
    config: Config | None = None

    @property
    def nodes(self) -> dict[int, list[int]]:
        """Ranks of each node, by the node's number."""
        found: dict[int, list[int]] = {}
        for rank, node in enumerate(self.node_of):
            found.setdefault(node, []).append(rank)
        return found

    def on(self, ranks: Sequence[int]) -> str:
        """Return the ranks as the end of a sentence, such as " on rank 3 (nid001)"; "" if `ranks` are all ranks."""
        if len(ranks) == self.size:
            return ""
        hosts = list(dict.fromkeys(self.hosts[rank] for rank in ranks))
        where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} nodes, the first is {hosts[0]}"
        return f" on {'rank' if len(ranks) == 1 else 'ranks'} {spans(ranks)} ({where})"


@dataclass(frozen=True)
class Check:
    """A check of one subject.

    Attributes:
        looks_at: subject, for the documentation.
        kinds: kinds of findings that the check may report.
        gather: function from an `OwnPlace`, or a `JoinedPlace` if `joined`, to the picklable facts of this rank; None if another
            rank gathers them.
        judge: pure function from the job and the facts of all ranks, in rank order, to at least one finding. If MPI could not be
            started, the facts are those of one rank.
        joined: whether `gather` is collective, called on all ranks in the same order.
    """

    name: str
    looks_at: str
    kinds: tuple[FindingKind, ...]
    gather: Callable[[Any], Any]
    judge: Callable[[JobView, Sequence[Any]], list[DoctorFinding]]
    joined: bool = False


def present(facts: Sequence[Any]) -> list[tuple[int, Any]]:
    """Return pairs (rank, facts) for the ranks that gathered facts."""
    return [(rank, fact) for rank, fact in enumerate(facts) if fact is not None]
