"""The MPI library: whether there is one, whether the mpiexec on PATH is its own, and from which threads it may be called."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.config.schema import Config
from hpctrain.doctor.check import Check, JobView, OwnPlace
from hpctrain.doctor.findings import DoctorFinding, FindingKind, Severity, fine
from hpctrain.doctor.ranks import mpiexec_beside_python
from hpctrain.launch.launcher import without_launcher

NO_LIBRARY = FindingKind(
    "no-mpi-library",
    Severity.FAULT,
    "mpi4py finds no MPI library; under a launcher no training starts.",
    "pip install mpich",
)
OTHER_MPIEXEC = FindingKind(
    "other-mpiexec",
    Severity.WARNING,
    "The first mpiexec on PATH is of another MPI than the library that mpi4py loads: started by it, each rank is alone.",
    "Put the folder of the right mpiexec first: `export PATH=FOLDER:$PATH`.",
)
THREAD_LEVEL = FindingKind(
    "thread-level",
    Severity.WARNING,
    "MPI has started at thread level single or funneled: no thread can move messages while layers compute.",
    "unset MPI4PY_RC_THREAD_LEVEL",
)
THREAD_NEEDED = FindingKind(
    "thread-level-needed",
    Severity.FAULT,
    "The same, and the configuration's `progress` is a mode with a thread: the training is refused.",
    "unset MPI4PY_RC_THREAD_LEVEL",
)

_LEVEL = "MPI4PY_RC_THREAD_LEVEL"
_SECONDS = 5.0
#: words of a library's or a launcher's own text -> the MPI
_FAMILIES = (
    ("Open MPI", "Open MPI"),
    ("OpenRTE", "Open MPI"),
    ("PRRTE", "Open MPI"),
    ("prte", "Open MPI"),
    ("Intel", "Intel MPI"),
    ("MPICH", "MPICH"),
    ("HYDRA", "MPICH"),
    ("MVAPICH", "MVAPICH"),
)


@dataclass(frozen=True)
class LibraryFacts:
    """The launchers on PATH, in its order.

    Attributes:
        launchers: (path of an mpiexec, its MPI, "" where it does not say). beside: the mpiexec in the folder of this Python.
        library: that mpi4py loads, by a process that starts no MPI. level_asked: the thread level that the environment asks for.
        error: why no library could be loaded.
    """

    launchers: tuple[tuple[str, str], ...] = ()
    beside: str = ""
    library: str = ""
    level_asked: str = ""
    error: str = ""


def gather(place: OwnPlace) -> LibraryFacts | None:
    """The facts of the first rank; starts processes."""
    if not place.leads_job:
        return None
    folders = dict.fromkeys(os.environ.get("PATH", "").split(os.pathsep))
    paths = [path for path in (shutil.which("mpiexec", path=folder) for folder in folders) if path]
    launchers = tuple((path, family(_said_by([path, "--version"]))) for path in paths)
    library = _said_by([sys.executable, "-m", "mpi4py", "--mpi-lib-version"])
    name = " ".join(library.partition("\n")[0].split()) if family(library) else ""
    return LibraryFacts(launchers, mpiexec_beside_python(), name, os.environ.get(_LEVEL, ""))


def family(text: str) -> str:
    """The MPI that a library or a launcher calls itself; empty where it is none that is known."""
    return next((name for word, name in _FAMILIES if word in text), "")


def _said_by(command: Sequence[str]) -> str:
    """All that a short command prints, as by a process that no launcher has started; empty where it does not end in time."""
    try:
        done = subprocess.run(
            command, env=without_launcher(os.environ), capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout + done.stderr


def judge(job: JobView, facts: Sequence[LibraryFacts]) -> list[DoctorFinding]:
    """All that is wrong with the library, or its name."""
    first = facts[0]
    library = job.library or first.library
    if first.error or not library:
        return [NO_LIBRARY.from_error(first.error or "mpi4py loads no MPI library that is known here.")]
    found = [*_other_launcher(first, family(library)), *_thread_level(library, first, job.config)]
    return found or [fine(f"{library}.")]


def _other_launcher(facts: LibraryFacts, library: str) -> list[DoctorFinding]:
    """The warning where the first mpiexec on PATH is of another MPI."""
    families = {path: name for path, name in facts.launchers if name}
    if not families or not library or next(iter(families.values())) == library:
        return []
    path, name = next(iter(families.items()))
    right = facts.beside or next((other for other, its in families.items() if its == library), "")
    mend = f"export PATH={shlex.quote(str(Path(right).parent))}:$PATH" if right else f"Use the mpiexec of {library}."
    return [OTHER_MPIEXEC.found(f"The first mpiexec on PATH ({path}) is of {name}, but mpi4py loads {library}.", mend)]


def _thread_level(library: str, facts: LibraryFacts, config: Config | None) -> list[DoctorFinding]:
    """The finding where MPI lets only one thread call it."""
    level = library.rpartition("thread level ")[2]  # the library's name where it has not started
    if level not in ("single", "funneled"):
        return []
    progress = "" if config is None else config.progress
    kind = THREAD_NEEDED if progress in ("thread", "posting") else THREAD_LEVEL
    wish = f", and progress is {progress}" if kind is THREAD_NEEDED else ""
    if facts.level_asked:
        return [kind.found(f"MPI has started at thread level {level}, as {_LEVEL} asks{wish}.", f"unset {_LEVEL}")]
    sentence = f"MPI has started at thread level {level}, though serialized was asked for{wish}."
    return [kind.found(sentence, "export MPICH_MAX_THREAD_SAFETY=multiple, or use an MPI that was built for threads.")]


CHECK = Check(
    "MPI",
    "the MPI library of mpi4py, the mpiexec on PATH, and the thread level",
    (NO_LIBRARY, OTHER_MPIEXEC, THREAD_LEVEL, THREAD_NEEDED),
    gather,
    judge,
)
