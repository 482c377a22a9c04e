"""The choice of the way between devices: what the configuration asks for, as far as MPI, NCCL and the GPUs have it."""

from __future__ import annotations

import os

from hpctrain.backend.arithmetic import Arithmetic
from hpctrain.backend.cuda import choose
from hpctrain.comm.base import Communicator
from hpctrain.comm.transports_rest import Transport
from hpctrain.config.schema import Config
from hpctrain.core.errors import BackendError, ConfigError
from hpctrain.experiment.device_faults import transport_fault
from hpctrain.launch.launcher import Launcher

#: a remark on transports that have only been run on emulated devices, and on one GPU
_UNPROVED = "not yet run between GPUs"


def tried(config: Config | None, launcher: Launcher) -> str | None:
    """The outcome of a trial whether MPI takes messages from GPUs; None where it does not matter, or where another rank tries.

    It starts a process: call it before MPI starts.
    """
    matters = config is not None and config.backend in ("cuda", "auto") and config.transport in ("auto", "mpi")
    if not matters or not launcher.starts_mpi or launcher.expected_size == 1 or launcher.local_rank:
        return None
    if choose.DEVICE_VARIABLE in os.environ or not choose.cupy_is_installed():
        return None
    from hpctrain.comm.device_probe import trial  # here: only nodes that may have a GPU need it

    return trial()


def chosen(config: Config, world: Communicator, arithmetic: Arithmetic, found: str | None) -> tuple[Transport, tuple[str, ...]]:
    """The way, and a line for the start of the run that says which it is and why; no line where nothing travels. Collective.

    Args:
        found: by this rank's `tried`.

    Raises:
        ConfigError: a way between GPUs where there are none. BackendError: one that MPI, NCCL or the GPUs do not have.
        Both on every rank.
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
        from hpctrain.comm import nccl

        fault = nccl.group_fault(world, messages)
        if fault is not None:
            raise BackendError(f"transport is nccl, but {fault}; set transport to auto or staged.")
        return "nccl", (f"transport nccl: as the configuration says ({_UNPROVED})",)
    if config.transport == "mpi":
        if reason is not None:
            raise BackendError(f"transport is mpi, but MPI takes no messages from a GPU's memory ({reason}); set it to staged.")
        tested = "as the configuration says, and a trial has shown that MPI can" if outcomes else "as the configuration says"
        return "mpi", (f"transport mpi: {tested} ({_UNPROVED})",)
    if config.transport == "auto" and outcomes and reason is None:
        return "mpi", (f"transport mpi: a trial has shown that MPI takes messages from a GPU's memory ({_UNPROVED})",)
    because = "" if reason is None else f"; from a GPU's own this one takes none: {reason.rstrip('.')}"
    return "staged", (f"transport staged: through the host's memory, as every MPI can{because}",)
