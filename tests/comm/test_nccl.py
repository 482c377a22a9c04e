"""Operations by NCCL, on emulated devices: order, waits, faults, texts. What they bring is in test_transports."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hpctrain.backend.cuda.emulator.device import EmulatedDevice
from hpctrain.backend.cuda.emulator.errors import EmulatedDeviceError
from hpctrain.backend.kernels.cuda.kernel_set import CudaKernelSet
from hpctrain.backend.kernels.cuda.runtime import CudaRuntime
from hpctrain.comm.base import Communicator
from hpctrain.comm.nccl import NcclCommunicator, NcclHandle, group_fault, over_nccl
from hpctrain.errors import BackendError, DeadlockError
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, wait
from tests.support.device_operations import DeviceRank, work_between_kernels
from tests.support.emulated import EmulatedDeviceFactory


def test_every_place_that_waits_matters(emulated_device: EmulatedDeviceFactory) -> None:
    """The stream of the links for kernels before an operation, and the host for the operation."""
    made: list[EmulatedDevice] = []

    def run(seed: int = 0, ignored_wait: int | None = None) -> list[np.ndarray]:
        def program(comm: ThreadCommunicator) -> np.ndarray:
            device = emulated_device(seed + comm.rank, ignored_wait=ignored_wait if comm.rank == 0 else None)
            made.extend([device] if comm.rank == 0 else [])
            return work_between_kernels(DeviceRank(comm, device, over_nccl))

        return run_virtual(2, program)

    expected = run()
    places: dict[str, list[int]] = {}
    for number, text in enumerate(made[0].waits):
        if "messages" in text:
            places.setdefault(text.rpartition(".")[2], []).append(number)
    assert sorted(places) == ["done", "wait_for_kernels"]

    def fails(seed: int, number: int) -> bool:
        try:
            found = run(seed, number)
        except (EmulatedDeviceError, DeadlockError):
            return True
        return any(not np.array_equal(*pair) for pair in zip(found, expected, strict=True))

    for place, numbers in places.items():
        assert any(fails(seed, number) for number in numbers for seed in range(6)), place


def test_an_operation_is_enqueued_when_it_is_started(emulated_device: EmulatedDeviceFactory) -> None:
    """Before anybody tests it, and before the kernels before it are done: the device waits, and not the host."""

    def program(comm: ThreadCommunicator) -> None:
        device = emulated_device(comm.rank)
        rank = DeviceRank(comm, device, over_nccl)
        buffers = [rank.on_device(np.ones(n + 1)) for n in range(5)]
        before = device.counters.enqueued["links"]
        handles = [rank.comm.iallreduce(buffer) for buffer in buffers]
        assert device.counters.enqueued["links"] - before == 5
        for handle in reversed(handles):  # whichever is tested first
            wait(handle)
        for buffer in buffers:
            np.testing.assert_array_equal(rank.on_host(buffer), np.full(buffer.size, 3.0))

    for seed in range(5):
        run_virtual(3, program, seed=seed)


def test_another_order_on_another_rank_is_an_error(emulated_device: EmulatedDeviceFactory) -> None:
    """Of operations of one group, which would mix arrays, and of two groups, which would wait for each other."""

    def mixed(comm: ThreadCommunicator) -> None:
        rank = DeviceRank(comm, emulated_device(comm.rank), over_nccl)
        buffers = [rank.on_device(np.ones(size)) for size in ((3, 4) if comm.rank == 0 else (4, 3))]
        wait(*[rank.comm.iallreduce(buffer) for buffer in buffers])

    with pytest.raises(
        EmulatedDeviceError, match=r"^The devices of ranks 0 and 1 do unlike things: sum to all of 3 float64; and sum to"
    ):
        run_virtual(2, mixed)

    def crossed(comm: ThreadCommunicator) -> None:
        rank = DeviceRank(comm, emulated_device(comm.rank), over_nccl)
        other = rank.comm.split(0, comm.rank, "others")
        assert other is not None
        ways: list[Communicator] = [rank.comm, other] if comm.rank == 0 else [other, rank.comm]
        wait(*[way.iallreduce(rank.on_device(np.ones(3))) for way in ways])

    with pytest.raises(DeadlockError):
        run_virtual(2, crossed)


def test_groups_in_one_order_go_on(emulated_device: EmulatedDeviceFactory) -> None:
    def program(comm: ThreadCommunicator) -> None:
        rank = DeviceRank(comm, emulated_device(comm.rank), over_nccl)
        other = rank.comm.split(0, comm.rank, "others")
        assert other is not None
        wait(*[way.iallreduce(rank.on_device(np.ones(3))) for way in (rank.comm, other, rank.comm)])

    run_virtual(3, program)


class _Links:
    """Links that have failed, or not."""

    def __init__(self) -> None:
        self.failed: str | None = None
        self.calls: list[str] = []

    def fault(self) -> str | None:
        self.calls.append("fault")
        return self.failed

    def abort(self) -> None:
        self.calls.append("abort")


class _Mark:
    done = False


class _Group:
    def __init__(self) -> None:
        self.links, self.last = _Links(), _Mark()

    def mark(self) -> _Mark:
        return self.last


def test_texts_and_faults() -> None:
    group: Any = _Group()
    handle = NcclHandle(group, "allreduce of 3 elements")
    assert not handle.test()
    assert str(handle) == "allreduce of 3 elements, enqueued, waiting for the device or its peers"
    group.links.failed = "NCCL_ERROR_SYSTEM_ERROR: remote process exited"
    message = (
        r"^NCCL failed in an allreduce of 3 elements: NCCL_ERROR_SYSTEM_ERROR: remote process exited; start again with --resume"
    )
    with pytest.raises(BackendError, match=message):
        handle.test()
    group.last.done = True
    assert handle.test()
    assert str(handle) == "allreduce of 3 elements, complete"


def test_an_abort_gives_up_what_is_on_its_way_first(emulated_device: EmulatedDeviceFactory) -> None:
    calls: list[Any] = []

    class Inner:
        rank, size, name, world_ranks = 0, 1, "world", (0,)

        def abort(self, code: int) -> None:
            calls.append(code)

    group: Any = _Group()
    group.links.calls = calls
    inner: Any = Inner()
    comm = NcclCommunicator(inner, CudaKernelSet(_runtime(emulated_device(0))).arithmetic, group)
    comm.abort(3)
    assert calls == ["abort", 3]


def _runtime(device: EmulatedDevice) -> CudaRuntime:
    return CudaRuntime(device, device.stream("compute"), "float64")


def test_ranks_that_share_a_gpu_are_told(emulated_device: EmulatedDeviceFactory) -> None:
    def program(comm: ThreadCommunicator) -> list[str | None]:
        device = emulated_device(comm.rank)
        own = group_fault(comm, CudaKernelSet(_runtime(device)).arithmetic.messages())
        device.identity = "n1 0000:01:00.0" if comm.rank in (1, 3) else device.identity
        shared = group_fault(comm, CudaKernelSet(_runtime(device)).arithmetic.messages())
        device.groups.fault = lambda: "there is no NCCL" if comm.rank == 2 else None  # type: ignore[method-assign]
        return [own, shared, group_fault(comm, CudaKernelSet(_runtime(device)).arithmetic.messages())]

    for own, shared, missing in run_virtual(4, program):
        assert own is None
        assert shared == "ranks 1 and 3 share a GPU, and NCCL takes one rank on each"
        assert missing == "on rank 2 there is no NCCL"
