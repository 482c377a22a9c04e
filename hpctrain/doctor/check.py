"""The shape of a check: facts are gathered on every rank, and judged from those of all ranks by a function that asks nobody."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.comm.base import Communicator
from hpctrain.comm.progress import ProgressEngine
from hpctrain.config.schema import Config
from hpctrain.core.text import spans
from hpctrain.doctor.findings import DoctorFinding, FindingKind
from hpctrain.doctor.start_facts import StartFacts
from hpctrain.launch.launcher import Launcher


@dataclass(frozen=True)
class OwnPlace:
    """The knowledge of one rank before MPI starts.

    Attributes:
        config: None: no configuration was given. directory: in which run directories are made.
        threads: of this rank; None: threads_fault says what is wrong with what was asked for.
        start: how this rank has started, where that was measured.
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
        """This rank looks at what is the same for all ranks of its node."""
        return not self.launcher.local_rank

    @property
    def leads_job(self) -> bool:
        """This rank looks at what is the same for all ranks, and prints."""
        return not self.launcher.rank


@dataclass(frozen=True)
class JoinedPlace:
    """The same once MPI has started. node: the ranks of this rank's node."""

    own: OwnPlace
    world: Communicator
    node: Communicator
    progress: ProgressEngine


@dataclass(frozen=True)
class JobView:
    """The job as all its ranks see it, for judges.

    Attributes:
        launcher: of rank 0. size: of MPI's world. hosts, node_of: by rank, the name and the number of its node.
        library: the MPI library with its version and thread level; empty where it could not be started.
    """

    launcher: Launcher
    size: int
    hosts: tuple[str, ...]
    node_of: tuple[int, ...]
    library: str
    config: Config | None = None

    @property
    def nodes(self) -> dict[int, list[int]]:
        """The ranks of each node."""
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
        gather: the facts of this rank, picklable; None where another rank looks. Takes an `OwnPlace`, or a `JoinedPlace` where
            `joined`; collective then, on all ranks in the same order.
        judge: at least one finding, from the facts of all ranks in rank order. Where MPI could not be started these are the
            facts of one rank.
    """

    name: str
    looks_at: str
    kinds: tuple[FindingKind, ...]
    gather: Callable[[Any], Any]
    judge: Callable[[JobView, Sequence[Any]], list[DoctorFinding]]
    joined: bool = False


def present(facts: Sequence[Any]) -> list[tuple[int, Any]]:
    """(rank, facts) of the ranks that looked."""
    return [(rank, fact) for rank, fact in enumerate(facts) if fact is not None]


def nothing(_: Any) -> None:
    """The facts of a check that needs none."""
