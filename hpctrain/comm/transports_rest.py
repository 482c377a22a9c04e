"""The ways of a device's arrays between ranks, of which a run takes one. Of arrays of the host there is nothing to choose."""

from __future__ import annotations

from functools import partial
from typing import Literal

from hpctrain.backend.arithmetic import Arithmetic
from hpctrain.comm.base import Array, Communicator
from hpctrain.comm.transports import StagedCommunicator
from hpctrain.comm.groups import TwoLevel

#: "staged": through the host's memory; "mpi": by an MPI library that reads the device's; "nccl": by NCCL
Transport = Literal["staged", "mpi", "nccl"]


def staged(comm: Communicator, arithmetic: Arithmetic) -> StagedCommunicator:
    """The ranks of `comm`, for arrays of the device of `arithmetic` too, by way of the host. Not collective."""
    mirrors = arithmetic.mirrors()
    assert mirrors is not None, "the arrays lie on a device"
    return StagedCommunicator(comm, mirrors)


def reaching(transport: Transport, comm: Communicator, arithmetic: Arithmetic) -> Communicator:
    """The ranks of `comm`, for arrays of the device of `arithmetic` too. Collective; set-up only.

    In two levels, MPI reaches devices in both; NCCL does within nodes, and between nodes arrays go by way of the host.
    """
    if transport == "staged":
        return staged(comm, arithmetic)
    from hpctrain.comm.device_mpi import over_mpi  # here: only jobs on GPUs need these modules
    from hpctrain.comm.nccl import joined, over_nccl

    match transport:
        case "mpi" if isinstance(comm, TwoLevel):
            return TwoLevel(over_mpi(comm.flat, arithmetic), comm.levels, partial(_buffer, arithmetic))
        case "mpi":
            return over_mpi(comm, arithmetic)
        case "nccl" if isinstance(comm, TwoLevel):
            by_host, within = staged(comm.flat, arithmetic), partial(joined, arithmetic=arithmetic)
            return TwoLevel(by_host, comm.levels, partial(_buffer, arithmetic), within)
        case "nccl":
            return over_nccl(comm, arithmetic)


def _buffer(arithmetic: Arithmetic, size: int, like: Array) -> Array:
    return arithmetic.zeros(size, like.dtype)
