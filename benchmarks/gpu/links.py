"""Stage `links`: NCCL with one rank, every operation of the transport, and what MPI does with this GPU's memory.

One rank sends nothing to others, but all calls are made, with their streams, events and pointers, and their results compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.gpu.settings import Settings, SkippedError
from benchmarks.gpu.stage_report import StageReport
from hpctrain.backend.cuda.kernel_set import CudaKernelSet
from hpctrain.backend.cuda.runtime import CudaRuntime
from hpctrain.comm import device_probe, transports
from hpctrain.comm.base import Array, Handle, SingleCommunicator
from hpctrain.comm.progress import ProgressEngine

_SIZE = 100_003  # no multiple of any pack
_ROUNDS = 4
_DEADLINE_SECONDS = 20.0


def run(settings: Settings, report: StageReport) -> None:
    """Record the trial of MPI, which never fails the stage, then check the operations."""
    device = settings.make_device()
    kernels = CudaKernelSet(CudaRuntime(device, device.stream("compute"), "float32"))
    report.add("mpi", device_probe.trial())
    report.note(f"MPI and the memory of GPUs: {report.content['mpi'].partition(':')[0]}")
    fault = kernels.arithmetic.messages().group_fault()
    if fault is not None:
        raise SkippedError(fault)
    alone = SingleCommunicator()
    shared = transports.group_fault(alone, kernels.arithmetic.messages())
    report.check("this rank has a GPU of its own", shared is None, shared or "")
    comm = transports.over_nccl(alone, kernels.arithmetic)
    engine = ProgressEngine(rank=0, deadline_seconds=_DEADLINE_SECONDS, abort=comm.abort)
    for name, operation in operations(comm).items():
        check(name, operation, kernels, engine, report)


def operations(comm: transports.NcclCommunicator) -> dict[str, Callable[[Array, Array], Handle]]:
    """By name, what brings `recv` the values of `send`, in one rank's group."""

    def in_place(start: Callable[[Array], Handle]) -> Callable[[Array, Array], Handle]:
        def operation(send: Array, recv: Array) -> Handle:
            comm.ialltoall(send, recv, [_SIZE], [_SIZE])  # a copy, after which the next one comes
            return start(recv)

        return operation

    return {
        "allreduce": in_place(comm.iallreduce),
        "reduce-scatter": lambda send, recv: comm.ireduce_scatter(send, recv, [_SIZE]),
        "allgather": lambda send, recv: comm.iallgather(send, recv, [_SIZE]),
        "allgather in place": in_place(lambda recv: comm.iallgather(None, recv, [_SIZE])),
        "broadcast": in_place(lambda recv: comm.ibroadcast(recv, 0)),
        "all-to-all": lambda send, recv: comm.ialltoall(send, recv, [_SIZE], [_SIZE]),
    }


def check(
    name: str, operation: Callable[[Array, Array], Handle], kernels: Any, engine: ProgressEngine, report: StageReport
) -> None:
    """Kernels write what an operation sends, and add up what it brings, with no other waits than those of the transport."""
    arithmetic = kernels.arithmetic
    send, recv, total = (arithmetic.zeros(_SIZE, "float32") for _ in range(3))
    one = arithmetic.zeros(_SIZE, "float32")
    arithmetic.fill(one, 1.0)
    for _ in range(_ROUNDS):
        arithmetic.add(send, one)
        engine.wait_handle(operation(send, recv), name)
        arithmetic.add(total, recv)
    expected = _ROUNDS * (_ROUNDS + 1) / 2
    found = arithmetic.to_host(total)
    report.check(f"NCCL with one rank: {name}", bool(np.all(found == expected)), f"{found.min()} to {found.max()} of {expected}")
