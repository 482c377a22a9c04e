"""The launcher of this process and the job requested from it, read from the environment before MPI starts, or if it never starts.

This module imports neither NumPy nor mpi4py.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.core.errors import LaunchError
from hpctrain.core.text import counted, place

#: environment variable of the user with the number of ranks that the job must have
EXPECT_RANKS = "HPCTRAIN_EXPECT_RANKS"

#: prefixes of launchers' variables, without which MPI starts a process as a job of one rank
_VARIABLES = ("PMI", "PALS_", "MPI_LOCAL", "OMPI_", "PRTE_", "SLURM_", "HYDRA_", "HYDI_", "MV2_")

# Set for each rank: the descriptor of a socket (by MPICH's process managers), or the port of a server on its node.
_PMI_SOCKET, _SERVERS = "PMI_FD", ("PMIX_SERVER_URI", "PMI_PORT")
_CONNECTION_VARIABLES = (_PMI_SOCKET, *_SERVERS, "PMI_CONTROL", "PMIX_", "PALS_", "FLUX_", "SLURM_STEP_ID")
_LOCAL_PORT = re.compile(r"(?:^|;tcp[46]?://)(?:localhost|\[?::1\]?|127\.[0-9.]+):([0-9]+)")
_LEFT_OVER = ("PMI", "PALS_", "MPI_LOCAL", "OMPI_COMM_WORLD", "HYDI_", "MV2_COMM_WORLD")
_LISTENING_STATE = "0A"  # state of a listening socket in /proc/net/tcp

# Variables with the number of processes: of torchrun (also accelerate and deepspeed), Horovod, PaddlePaddle and BytePS.
_COPY_COUNTS = ("WORLD_SIZE", "HOROVOD_SIZE", "PADDLE_TRAINERS_NUM", "DMLC_NUM_WORKER")

# First step number of steps that srun did not start: interactive shell, batch script, external.
_FIRST_SPECIAL_STEP = 4294967290


@dataclass(frozen=True)
class Launcher:
    """The program that started this process, and the job requested from it. None stands for an unknown value.

    Attributes:
        name: "Slurm srun", "Open MPI mpiexec", ...; "none" for a process started by hand.
        expected_size: number of ranks of the job.
        local_size: number of ranks on this node.
        local_rank: rank of this process on its node.
        rank_variable: environment variable with the rank, which a launcher's child has and the launcher does not have.
        overruled_size: number of ranks according to the launcher, if HPCTRAIN_EXPECT_RANKS replaces it in expected_size.
    """

    name: str
    expected_size: int | None = None
    rank: int | None = None
    local_size: int | None = None
    local_rank: int | None = None
    rank_variable: str | None = None
    overruled_size: int | None = None

    @property
    def starts_mpi(self) -> bool:
        """Whether MPI is to be started: under a known launcher, or if HPCTRAIN_EXPECT_RANKS is greater than 1."""
        return self.name != "none" or (self.expected_size or 1) > 1


@dataclass(frozen=True)
class _Signature:
    """Variables of one launcher: the one that identifies it, then size, rank, local size and local rank."""

    name: str
    marker: str
    size: str
    rank: str
    local_size: str
    local_rank: str


def _world_signature(name: str, prefix: str) -> _Signature:
    size, rank = f"{prefix}_SIZE", f"{prefix}_RANK"
    return _Signature(name, size, size, rank, f"{prefix}_LOCAL_SIZE", f"{prefix}_LOCAL_RANK")


# The first one whose marker is set counts. A process manager that starts through another one (hydra in a Slurm job) precedes it.
_SIGNATURES = (
    _world_signature("Open MPI mpiexec", "OMPI_COMM_WORLD"),
    _world_signature("MVAPICH mpirun", "MV2_COMM_WORLD"),
    _Signature("Cray PALS mpiexec", "PALS_RANKID", "PMI_SIZE", "PALS_RANKID", "PALS_LOCAL_SIZE", "PALS_LOCAL_RANKID"),
    _Signature("MPICH hydra mpiexec", "MPI_LOCALNRANKS", "PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
)
_INTEL = "Intel MPI mpiexec"
_HYDRA_NAMES = ("MPICH hydra mpiexec", _INTEL)
_PMI = _Signature("a PMI launcher", "PMI_RANK", "PMI_SIZE", "PMI_RANK", "PMI_LOCAL_SIZE", "PMI_LOCAL_RANK")


def without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables of launchers."""
    return {name: value for name, value in environ.items() if not name.startswith(_VARIABLES)}


def detect(environ: Mapping[str, str]) -> Launcher:
    """Return the launcher that set the variables of this environment. HPCTRAIN_EXPECT_RANKS overrides its number of ranks.

    Raises:
        LaunchError: HPCTRAIN_EXPECT_RANKS is not a positive integer.
    """
    launcher = started_by(environ)
    wanted = environ.get(EXPECT_RANKS)
    if wanted is None:
        return launcher
    if not wanted.isdecimal() or int(wanted) < 1:
        raise LaunchError(f"{EXPECT_RANKS} is {wanted!r}, but must be an integer of at least 1.")
    return replace(launcher, expected_size=int(wanted), overruled_size=launcher.expected_size)


def place_of(rank: int | None) -> str:
    """Return the prefix of this process's lines among those of other ranks, such as "[3/64@node7] ".

    The prefix is "" without a rank, and for the only rank of a job.
    """
    launcher = started_by(os.environ)
    alone = launcher.expected_size == 1 or not launcher.starts_mpi
    return "" if alone and not rank else place(rank, launcher.expected_size)


def may_overlook_exit_codes(environ: Mapping[str, str]) -> bool:
    """Return whether the launcher notices a rank ended by a signal, but may miss one that exits with a code.

    The result is True for hydra, MPICH's launcher. If it learns of an exit before it sees the rank's descriptor close, for
    example while it forwards a last message, it closes the descriptor itself. It then keeps waiting for ranks that wait for the
    lost one.
    """
    return started_by(environ).name in _HYDRA_NAMES


def started_by(environ: Mapping[str, str]) -> Launcher:
    """Return the launcher as `detect` does, but ignore HPCTRAIN_EXPECT_RANKS and raise no error."""
    for signature in _SIGNATURES:
        if signature.marker in environ:
            return _by_signature(signature, environ)
    step = _integer(environ, "SLURM_STEP_ID")
    if step is not None and step < _FIRST_SPECIAL_STEP and "SLURM_PROCID" in environ:
        return _slurm(environ)
    if _PMI.marker in environ:
        return _by_signature(_PMI, environ)
    return Launcher("none")


def _by_signature(signature: _Signature, environ: Mapping[str, str]) -> Launcher:
    name = signature.name
    if signature.marker == "MPI_LOCALNRANKS" and any(variable.startswith("I_MPI_INFO") for variable in environ):
        name = _INTEL
    return Launcher(
        name,
        _integer(environ, signature.size),
        _integer(environ, signature.rank),
        _integer(environ, signature.local_size),
        _integer(environ, signature.local_rank),
        signature.rank,
    )


def _slurm(environ: Mapping[str, str]) -> Launcher:
    size = _integer(environ, "SLURM_STEP_NUM_TASKS") or _integer(environ, "SLURM_NTASKS")
    counts = expand_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = _integer(environ, "SLURM_NODEID")
    local_size = counts[node] if node is not None and node < len(counts) else None
    rank, local_rank = _integer(environ, "SLURM_PROCID"), _integer(environ, "SLURM_LOCALID")
    return Launcher("Slurm srun", size, rank, local_size, local_rank, "SLURM_PROCID")


def expand_counts(text: str) -> list[int]:
    """Return Slurm's tasks per node as a list: "2(x3),1" -> [2, 2, 2, 1]; [] for any other form."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _integer(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else None


def environment_fault(environ: Mapping[str, str], root: Path = Path("/")) -> str | None:
    """Return a sentence if the environment has variables of a launcher that no longer exists, which MPI would read; else None.

    Such variables stay in the shell of an interactive allocation and in processes started from it without a launcher. MPI would
    end the process with a stack trace.
    """
    launcher = started_by(environ)
    gone = _closed_descriptor(environ, root) or _gone_server(environ, root) or _missing_connection(launcher, environ)
    if gone is None:
        return None
    left = " ".join(sorted(name for name in environ if name.startswith(_LEFT_OVER)))
    return (
        f"{gone}: the variables of {launcher.name} are left over from another process, and this one is not a rank of its job; "
        f"start it by a launcher, such as `mpiexec -n 4 python -m mpi4py -m hpctrain ...`, or `unset {left}` for one rank."
    )


def _closed_descriptor(environ: Mapping[str, str], root: Path) -> str | None:
    """Return the fault of the socket that MPICH's process managers pass to each rank; None if no fault is known."""
    text = environ.get(_PMI_SOCKET, "")
    if not text.isdecimal():
        return None
    try:
        target = os.readlink(root / f"proc/self/fd/{text}")
    except FileNotFoundError:
        return f"{_PMI_SOCKET} is {text}, but no such descriptor is open"
    except OSError:
        return None
    return None if target.startswith("socket:") else f"{_PMI_SOCKET} is {text}, but this descriptor is {target}, no socket"


def _gone_server(environ: Mapping[str, str], root: Path) -> str | None:
    """Return the fault of the launcher's server for the ranks of this node; None if no fault is known."""
    servers = {name: value for name, value in environ.items() if name.startswith(_SERVERS)}
    ports = {name: _LOCAL_PORT.search(value) for name, value in servers.items()}
    found = {name: int(match[1]) for name, match in ports.items() if match is not None}
    if not found or len(found) < len(servers):
        return None
    try:
        tables = [
            table.read_text().splitlines()[1:] for table in (root / "proc/net/tcp", root / "proc/net/tcp6") if table.exists()
        ]
        rows = [line.split() for lines in tables for line in lines]
        listening = {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == _LISTENING_STATE}
    except (OSError, ValueError, IndexError):
        return None
    name = min(found)
    return (
        None if not tables or listening & set(found.values()) else f"{name} names port {found[name]}, on which no server listens"
    )


def _missing_connection(launcher: Launcher, environ: Mapping[str, str]) -> str | None:
    """Return a clause if a rank of a PMI launcher has no variable by which it could connect to the others; otherwise None."""
    if launcher.name not in (*_HYDRA_NAMES, _PMI.name) or (launcher.expected_size or 1) == 1:
        return None
    if any(name.startswith(_CONNECTION_VARIABLES) for name in environ):
        return None
    return f"{launcher.rank_variable} is set, but neither {_PMI_SOCKET} nor PMI_PORT"


def is_copy(environ: Mapping[str, str]) -> bool:
    """Return whether a launcher without MPI, such as torchrun, has started several copies of this process."""
    return any((_integer(environ, variable) or 1) > 1 for variable in _COPY_COUNTS)


def lone_fault(launcher: Launcher, environ: Mapping[str, str]) -> str | None:
    """Return a sentence if a process without a launcher is the only rank of a job with several tasks or nodes; otherwise None.

    The result is also None if HPCTRAIN_EXPECT_RANKS is set. This is a fault only for a training, which should use all ranks.
    Other commands usually run like this in a batch script.
    """
    if launcher.name != "none" or EXPECT_RANKS in environ:
        return None
    for variable in (*_COPY_COUNTS, "SLURM_NTASKS", "SLURM_JOB_NUM_NODES"):
        count = _integer(environ, variable) or 1
        if count > 1:
            start = f"mpiexec -n {count}" if variable in _COPY_COUNTS else "srun"
            return _alone(f"{variable} is {count}", f"`{start} python -m mpi4py -m hpctrain ...`")
    hosts: set[str] = set()
    with contextlib.suppress(OSError, UnicodeDecodeError):
        name = environ.get("PBS_NODEFILE", "")
        hosts = set(Path(name).read_text(encoding="utf-8").split()) if name and "PBS_JOBID" in environ else hosts
    if len(hosts) > 1:
        return _alone(f"PBS_NODEFILE names {len(hosts)} hosts", f"`mpiexec -n {len(hosts)} python -m mpi4py -m hpctrain ...`")
    return None


def _alone(request: str, command: str) -> str:
    return (
        f"{request}, but this process was started without an MPI launcher, so it is the only rank; start it as {command}, or set "
        f"{EXPECT_RANKS}=1 for one rank alone."
    )


# The option of srun with which the ranks of an MPI find each other: (word in the library's name, usual name, option).
_SRUN_OPTIONS = (
    ("CRAY", "Cray MPICH", "--mpi=cray_shasta"),
    ("MPICH", "MPICH", "--mpi=pmi2"),
    ("Open MPI", "Open MPI", "--mpi=pmix"),
)


def check_world(launcher: Launcher, world_size: int, library: str = "") -> None:
    """Raise a LaunchError unless MPI's world has the size that was requested from the launcher.

    If the sizes differ, the launcher has usually started N jobs of one rank each, none of which reports an error.

    Raises:
        LaunchError: the sizes differ; the message names the launcher, both sizes and the likely cause.
    """
    fault = world_fault(launcher, world_size, library)
    if fault is not None:
        raise LaunchError(f"{fault[0]}; {fault[1]}.")


def world_fault(launcher: Launcher, world_size: int, library: str = "") -> tuple[str, str] | None:
    """Return (both sizes, the remedy) as parts of a sentence if the world does not have the requested size; otherwise None."""
    expected = launcher.expected_size
    if expected is None or expected == world_size:
        return None
    if launcher.name == "none":
        return (
            f"{EXPECT_RANKS} is {expected}, but no MPI launcher known to hpctrain started this process, and MPI's world has "
            f"{counted(world_size, 'rank')}",
            f"start it as `mpiexec -n {expected} python -m mpi4py -m hpctrain ...`",
        )
    if launcher.overruled_size == world_size:
        return (
            f"{EXPECT_RANKS} is {expected}, but {launcher.name} has started {counted(world_size, 'rank')}",
            f"start {expected} ranks, or unset {EXPECT_RANKS}",
        )
    if world_size != 1:
        cause = f"start {expected} ranks, or unset {EXPECT_RANKS}"
    elif launcher.name.startswith("Slurm"):
        cause = _srun_advice(library)
    else:
        cause = (
            "most likely mpi4py is linked to another MPI than the launcher's; use the mpiexec of the MPI that "
            "`python -m mpi4py --mpi-lib-version` names"
        )
    return f"{launcher.name} was asked for {expected} ranks, but MPI's world has {world_size}", cause


def _srun_advice(library: str) -> str:
    """Return advice on the `--mpi` option that srun needs for this MPI library."""
    others = "set it as MPI in jobs/slurm.sbatch; `srun --mpi=list` lists the options of this Slurm"
    for word, name, option in _SRUN_OPTIONS:
        if word in library:
            return f"{name} needs `srun {option}` ({others})"
    return f"give srun the --mpi option of your MPI, pmi2 for MPICH and pmix for Open MPI ({others})"
