"""The ways of a device's arrays between ranks, of which a run takes one. Of arrays of the host there is nothing to choose."""

from __future__ import annotations

from typing import Literal

from hpctrain.backend.arithmetic import Arithmetic
from hpctrain.comm.base import Communicator
from hpctrain.comm.device_mpi import over_mpi
from hpctrain.comm.nccl import over_nccl
from hpctrain.comm.staged import StagedCommunicator
from hpctrain.comm.two_level import TwoLevel

#: "staged": through the host's memory; "mpi": by an MPI library that reads the device's; "nccl": by NCCL
Transport = Literal["staged", "mpi", "nccl"]


def staged(comm: Communicator, arithmetic: Arithmetic) -> StagedCommunicator:
    """The ranks of `comm`, for arrays of the device of `arithmetic` too, by way of the host. Not collective."""
    mirrors = arithmetic.mirrors()
    assert mirrors is not None, "the arrays lie on a device"
    return StagedCommunicator(comm, mirrors)


def reaching(transport: Transport, comm: Communicator, arithmetic: Arithmetic) -> Communicator:
    """The ranks of `comm`, for arrays of the device of `arithmetic` too. Collective; set-up only.

    NCCL has the links between nodes and within them in view: it takes the ranks in the order of two levels, but makes none.
    """
    match transport:
        case "staged":
            return staged(comm, arithmetic)
        case "mpi" if isinstance(comm, TwoLevel):
            flat = over_mpi(comm.flat, arithmetic)
            return TwoLevel(flat, comm.levels, lambda size, like: arithmetic.zeros(size, like.dtype))
        case "mpi":
            return over_mpi(comm, arithmetic)
        case "nccl":
            return over_nccl(comm.flat if isinstance(comm, TwoLevel) else comm, arithmetic)
