"""Choice of the transport of messages between devices (MPI, NCCL or host memory), and of their progress mode.

If the configuration does not set the transport, it is chosen after a trial at the start of the run.
"""

from __future__ import annotations

import os

from hpctrain.assembly.faults import PROGRESS_FAULT, transport_fault
from hpctrain.backend import choice
from hpctrain.backend.arithmetic import Arithmetic
from hpctrain.comm.base import Communicator
from hpctrain.comm.progress import ProgressMode
from hpctrain.comm.transports import Transport
from hpctrain.config.schema import Config
from hpctrain.core.errors import BackendError, ConfigError
from hpctrain.job.session import StartedRank
from hpctrain.launch.launcher import Launcher
from hpctrain.nn.network import Network

#: remark on transports that have only been run on emulated devices and on one GPU
_UNPROVED = "not yet run between GPUs"


def try_transport(config: Config | None, launcher: Launcher) -> str | None:
    """Test whether MPI can send from GPU memory, and return the outcome.

    The result is None if the outcome does not matter or another rank tests. Call it before MPI, because it starts a process.
    """
    matters = config is not None and config.backend in ("cuda", "auto") and config.transport in ("auto", "mpi")
    if not matters or not launcher.starts_mpi or launcher.expected_size == 1 or launcher.local_rank:
        return None
    if choice.DEVICE_VARIABLE in os.environ or not choice.cupy_is_installed():
        return None
    from hpctrain.comm.device_probe import trial  # here: only nodes that may have a GPU need it

    return trial()


def choose_transport(
    config: Config, world: Communicator, arithmetic: Arithmetic, found: str | None
) -> tuple[Transport, tuple[str, ...]]:
    """Return the transport, and the line of the run's log with the reason; no line on one rank or without GPUs. Collective.

    Args:
        found: result of `try_transport` on this rank.

    Raises:
        ConfigError: a transport between GPUs is configured without GPUs; on every rank.
        BackendError: MPI, NCCL or the GPUs do not support the configured transport; on every rank.
    """
    messages = arithmetic.messages()
    if messages is None:
        if config.transport != "auto":
            raise ConfigError(transport_fault(config.transport))
        return "staged", ()
    if world.size == 1:
        return "staged", ()
    from hpctrain.comm.device_probe import AWARE, UNTRIED, last_line

    outcomes = [outcome for outcome in world.allgather_object(found) if outcome not in (None, UNTRIED)]
    refused = next((outcome for outcome in outcomes if outcome != AWARE), None)
    reason = None if refused is None else last_line(refused).partition(": ")[2] or last_line(refused)
    if config.transport == "nccl":
        from hpctrain.comm import transports

        fault = transports.group_fault(world, messages)
        if fault is not None:
            raise BackendError(f"transport is nccl, but {fault}; set transport to auto or staged.")
        return "nccl", (f"transport nccl: as configured ({_UNPROVED})",)
    if config.transport == "mpi":
        if reason is not None:
            raise BackendError(f"transport is mpi, but MPI cannot send from GPU memory ({reason}); set transport to staged.")
        tested = "as configured, and a trial has shown that MPI can send from GPU memory" if outcomes else "as configured"
        return "mpi", (f"transport mpi: {tested} ({_UNPROVED})",)
    if config.transport == "auto" and outcomes and reason is None:
        return "mpi", (f"transport mpi: a trial has shown that MPI can send from GPU memory ({_UNPROVED})",)
    because = "" if reason is None else f"; MPI cannot send from GPU memory: {reason.rstrip('.')}"
    return "staged", (f"transport staged: messages pass through host memory{because}",)


def set_progress(rank: StartedRank, network: Network, wanted: str) -> ProgressMode:
    """Apply a progress mode to the engine, and return it. Call it after the averagers are made.

    Raises:
        ConfigError: the mode has a thread, but kernels run on a device, or MPI does not allow calls from a second thread.
    """
    mode = ProgressMode(wanted)
    if mode is ProgressMode.THREAD and rank.world.size > 1 and not network.kernels.arithmetic.on_host:
        raise ConfigError(PROGRESS_FAULT)
    if mode is ProgressMode.THREAD and not rank.threads_may_communicate:
        raise ConfigError(
            f'progress is {mode}, which needs the MPI thread level "serialized" or "multiple", but MPI has started at '
            f"{rank.mpi_library.rpartition(', ')[2]}; set progress to test, or use an MPI library with that level."
        )
    rank.progress.set_mode(mode)
    return mode
