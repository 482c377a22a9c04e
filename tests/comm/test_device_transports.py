"""Transports of device arrays: equal results; their order, waits, faults and texts; and the probe of MPI."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.backend import choice
from hpctrain.backend.arithmetic import Arithmetic, Transit
from hpctrain.backend.cuda.kernel_set import CudaKernelSet
from hpctrain.backend.cuda.runtime import CudaRuntime
from hpctrain.comm import device_probe, mpi, transports
from hpctrain.comm.base import Communicator, Complete, Handle
from hpctrain.comm.device_probe import AWARE, UNAWARE, UNTRIED
from hpctrain.comm.groups import TwoLevel, in_levels, levels
from hpctrain.comm.transports import (
    DeviceMpiCommunicator,
    NcclCommunicator,
    NcclHandle,
    StagedCommunicator,
    StagedOperation,
    Transport,
    group_fault,
    over_mpi,
    over_nccl,
    reaching,
)
from hpctrain.core.errors import BackendError, DeadlockError, MissingLibraryError
from hpctrain_testing.emulator.device import EmulatedDevice
from hpctrain_testing.emulator.memory import EmulatedDeviceError
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.run import run_virtual, wait
from tests.support.device_operations import (
    OPERATIONS,
    DeviceRank,
    allgather_in_place,
    of_the_host,
    reduce_scatter,
    work_between_kernels,
)
from tests.support.device_views import ViewingCommunicator
from tests.support.emulated import EmulatedDeviceFactory

WAYS: tuple[Transport, ...] = ("staged", "mpi", "nccl")


def reach(way: Transport) -> Callable[[Communicator, Arithmetic], Communicator]:
    """The way over virtual ranks, which read memory of devices for "mpi" alone."""
    return lambda comm, arithmetic: reaching(way, ViewingCommunicator(comm) if way == "mpi" else comm, arithmetic)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_operations_bring_what_they_bring_on_the_host(
    way: Transport, ranks: int, operation: Callable[[DeviceRank], tuple[Any, np.ndarray]], emulated_device: EmulatedDeviceFactory
) -> None:
    def program(comm: ThreadCommunicator) -> None:
        rank = DeviceRank(comm, emulated_device(comm.rank), reach(way))
        for _ in range(3):  # mirrors are used again
            array, expected = operation(rank)
            found = array if isinstance(array, np.ndarray) else rank.on_host(array)
            np.testing.assert_array_equal(found, expected)

    for seed in range(3):
        run_virtual(ranks, program, seed=seed)


@pytest.mark.sample(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(20))
def test_many_on_their_way_at_once(way: Transport, seed: int, emulated_device: EmulatedDeviceFactory) -> None:
    """Twenty orders of the devices' work, each with several of the messages'."""

    def program(comm: ThreadCommunicator) -> None:
        rank = DeviceRank(comm, emulated_device(seed * 10 + comm.rank), reach(way))
        total, arithmetic = rank.on_device(np.zeros(7)), rank.kernels.arithmetic
        buffers = [rank.on_device(rank.values(comm.rank, 7) + number) for number in range(4)]
        for _ in range(2):
            handles = [rank.comm.iallreduce(buffer) for buffer in buffers]
            for handle, buffer in zip(handles, buffers, strict=True):
                wait(handle)
                arithmetic.add(total, buffer)  # enqueued at once: it comes after the copy back
        sums = [sum(rank.values(other, 7) + number for other in range(3)) for number in range(4)]
        np.testing.assert_array_equal(rank.on_host(total), sum(sums) * 4)

    for scheduling in range(20 if way == "staged" else 5):
        run_virtual(3, program, seed=scheduling)


@pytest.mark.parametrize("way", WAYS)
def test_groups_of_a_communicator_reach_the_device_too(way: Transport, emulated_device: EmulatedDeviceFactory) -> None:
    def program(comm: ThreadCommunicator) -> None:
        rank = DeviceRank(comm, emulated_device(comm.rank), reach(way))
        pair, here = rank.comm.split(comm.rank // 2, comm.rank, "pairs"), rank.comm.split_shared_memory("node")
        assert rank.comm.split(None, 0, "none") is None
        for group in (pair, here):
            assert group is not None
            buffer = rank.on_device([1.0])
            wait(group.iallreduce(buffer))
            assert rank.on_host(buffer) == 2.0

    run_virtual(4, program, ranks_per_node=2)


@pytest.mark.sample(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", range(4))
def test_two_levels_reach_the_device(way: Transport, seed: int, emulated_device: EmulatedDeviceFactory) -> None:
    """By MPI each level reaches the device itself, by NCCL the one within nodes does."""

    def program(comm: ThreadCommunicator) -> None:
        two = levels([0, 0, 1, 1])
        assert two is not None

        def reach_levels(flat: Communicator, arithmetic: Arithmetic) -> Communicator:
            read = ViewingCommunicator(flat) if way == "mpi" else flat
            return reaching(way, in_levels(read, two, "gradients"), arithmetic)

        rank = DeviceRank(comm, emulated_device(10 * seed + comm.rank), reach_levels)
        place = two.order.index(comm.rank)
        counts = (3, 0, 1, 2)
        begin = sum(counts[:place])
        send, recv, gathered = rank.on_device(rank.values(comm.rank, 6)), rank.on_device(np.zeros(counts[place])), None
        for _ in range(3):
            handle = rank.comm.ireduce_scatter(send, recv, counts)
            wait(handle)
            total = sum(rank.values(other, 6) for other in range(4))
            np.testing.assert_array_equal(rank.on_host(recv), total[begin : begin + counts[place]])
            gathered = rank.on_device(np.zeros(6))
            wait(rank.comm.iallgather(recv, gathered, counts))
            np.testing.assert_array_equal(rank.on_host(gathered), total)
        assert (rank.comm.rank, isinstance(rank.comm, TwoLevel)) == (place, way != "staged")

    run_virtual(4, program, seed=seed, ranks_per_node=2)


def _mixed(comm: ThreadCommunicator, device: Any, seed: int) -> None:
    """Reductions and gathers of four ranks on two nodes, each of which drives its messages when it likes."""
    two = levels([0, 0, 1, 1])
    assert two is not None
    rank = DeviceRank(comm, device, lambda ranks, arithmetic: reaching("nccl", in_levels(ranks, two, "gradients"), arithmetic))
    place, counts, source = two.order.index(comm.rank), (3, 1, 2, 2), random.Random(100 * seed + comm.rank)
    begin = sum(counts[:place])
    own = slice(begin, begin + counts[place])
    flying, checks = [], []
    total = sum(rank.values(other, 8) for other in range(4))
    for _ in range(4):
        send, recv = rank.on_device(rank.values(comm.rank, 8)), rank.on_device(np.zeros(counts[place]))
        mine = np.zeros(8)
        mine[own] = total[own]
        gathered = rank.on_device(mine)
        flying.append(rank.comm.ireduce_scatter(send, recv, counts))
        _drive(flying, source.randrange(30))
        flying.append(rank.comm.iallgather(None, gathered, counts))
        _drive(flying, source.randrange(30))
        checks += [(recv, total[own]), (gathered, total)]
    while _drive(flying, 1):
        pass
    for array, expected in checks:
        np.testing.assert_array_equal(rank.on_host(array), expected)


def _drive(flying: list[Handle], times: int) -> list[Handle]:
    left = flying
    for _ in range(times):
        left = [handle for handle in flying if not handle.test()]
    return left


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(10))
def test_stages_within_nodes_have_one_order(seed: int, emulated_device: EmulatedDeviceFactory) -> None:
    run_virtual(4, lambda comm: _mixed(comm, emulated_device(seed + comm.rank), seed), seed=seed, ranks_per_node=2)


@pytest.mark.slow
@pytest.mark.usefixtures("emulated_device")  # has its kernels built; what hangs is not done at the end
def test_without_turns_ranks_wait_for_each_other(monkeypatch: pytest.MonkeyPatch, emulated_device: EmulatedDeviceFactory) -> None:
    """Gathers within a node begin when those between nodes are complete, which is another moment on each rank."""
    monkeypatch.setattr(TwoLevel, "_turn", lambda self: lambda start: start())
    wrong = 0
    for seed in range(10):
        try:
            run_virtual(4, lambda comm: _mixed(comm, EmulatedDevice(seed + comm.rank), seed), seed=seed, ranks_per_node=2)  # noqa: B023
        except (EmulatedDeviceError, DeadlockError, AssertionError):
            wrong += 1
    assert wrong > 2


def _reach(comm: Communicator, arithmetic: Arithmetic) -> Communicator:
    return over_mpi(ViewingCommunicator(comm), arithmetic)


class _TwoRanks:
    """Work of two ranks between kernels, of which rank 0 may go on at one of its waits before its kernels are done.

    expected: the results if no wait is ignored. places: the numbers of the waits at each place of the program.
    """

    def __init__(self, emulated_device: EmulatedDeviceFactory, reach: Callable[[Communicator, Arithmetic], Communicator]) -> None:
        self._devices, self._reach, self._made = emulated_device, reach, list[EmulatedDevice]()
        self.expected = self.run()
        self.places: dict[str, list[int]] = {}
        for number, text in enumerate(self._made[0].waits):
            if "CudaMark" in text or "CudaMessages" in text:
                self.places.setdefault(text.rpartition(" at ")[2], []).append(number)

    def run(self, seed: int = 0, ignored_wait: int | None = None) -> list[np.ndarray]:
        def program(comm: ThreadCommunicator) -> np.ndarray:
            device = self._devices(seed + comm.rank, ignored_wait=ignored_wait if comm.rank == 0 else None)
            self._made.extend([device] if comm.rank == 0 else [])
            return work_between_kernels(DeviceRank(comm, device, self._reach))

        return run_virtual(2, program)

    def differs(self, seed: int, number: int) -> bool:
        """Return whether a run without the wait of this number has other results."""
        return any(not np.array_equal(*pair) for pair in zip(self.run(seed, number), self.expected, strict=True))


@pytest.mark.slow
def test_every_place_that_waits_matters(emulated_device: EmulatedDeviceFactory) -> None:
    ranks = _TwoRanks(emulated_device, _reach)
    assert list(ranks.places) == ["hpctrain.backend.cuda.transports.CudaMark.done"]
    for numbers in ranks.places.values():
        wrong = [any(ranks.differs(seed, number) for seed in range(4)) for number in numbers]
        assert sum(wrong) > len(numbers) // 2, "most of them matter"


def test_steps_allocate_nothing(emulated_device: EmulatedDeviceFactory) -> None:
    """Buffers of parts and events are made by the first operations, and used by later ones."""

    def program(comm: ThreadCommunicator) -> list[str]:
        device = emulated_device(comm.rank)
        rank = DeviceRank(comm, device, _reach)
        buffer = rank.on_device(rank.values(comm.rank, 9))
        for step in range(6):
            wait(rank.comm.iallreduce(buffer))
            if step == 1:
                device.seal()
        return device.counters.late_allocations

    assert run_virtual(3, program) == [[], [], []]


def test_only_those_with_a_second_stage_sum(emulated_device: EmulatedDeviceFactory) -> None:
    def program(comm: ThreadCommunicator) -> None:
        rank = DeviceRank(comm, emulated_device(0), lambda inner, arithmetic: DeviceMpiCommunicator(inner, arithmetic))
        with pytest.raises(AssertionError, match="does not sum device arrays"):
            rank.comm.iallreduce(rank.on_device([1.0]))

    run_virtual(1, program)


def test_bytes_are_those_of_the_operations(emulated_device: EmulatedDeviceFactory) -> None:
    def program(comm: ThreadCommunicator) -> None:
        device = emulated_device(comm.rank)
        rank = DeviceRank(comm, device, transports.staged)
        for operation in (reduce_scatter, allgather_in_place, of_the_host):
            operation(rank)
        mirrors = rank.kernels.arithmetic.mirrors()
        assert mirrors is not None
        whole, own = 8 * sum(rank.counts), 8 * rank.counts[comm.rank]
        # A whole slice leaves and the own part of its sum arrives; the own part leaves, and those of others arrive.
        assert device.counters.downloaded_bytes["to the host"] == whole + own
        assert device.counters.uploaded_bytes["from the host"] == own + whole - own
        assert mirrors.pinned_bytes <= 2 * whole + own

    run_virtual(3, program)


class _Transit:
    """A way to the host that ends when the test says so."""

    def __init__(self) -> None:
        self.done = False

    def on_host(self) -> bool:
        return self.done


class _Mirrors:
    """Mirrors of arrays that are not there: only the order matters."""

    pinned_bytes = 0

    def __init__(self) -> None:
        self.transits: list[_Transit] = []

    def mirror(self, array: Any) -> np.ndarray:
        return np.zeros(array.size)

    def leave(self, copies: Sequence[Any]) -> Transit:
        transit = _Transit()
        transit.done = not copies
        self.transits.append(transit)
        return transit

    def arrive(self, transit: Transit, array: Any, intervals: Sequence[tuple[int, int]]) -> None: ...


class _Elsewhere:
    """An array that is not on the host."""

    dtype, nbytes = "float64", 8

    def __init__(self, size: int) -> None:
        self.size = size

    def reshape(self, *_: int) -> _Elsewhere:
        return self

    def __getitem__(self, part: slice) -> _Elsewhere:
        return self


class _Remembering:
    """A communicator that remembers what is posted on it."""

    rank, size, name, world_ranks = 0, 1, "world", (0,)

    def __init__(self) -> None:
        self.posted: list[int] = []

    def iallreduce(self, buffer: np.ndarray) -> Handle:
        self.posted.append(buffer.size)
        return Complete()


def _scene() -> tuple[_Remembering, _Mirrors, StagedCommunicator]:
    inner: Any = _Remembering()
    mirrors = _Mirrors()
    return inner, mirrors, StagedCommunicator(inner, mirrors)


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_operations_are_posted_in_the_order_in_which_they_were_started(on_host: list[bool], source: random.Random) -> None:
    """Whichever is ready first, whichever is tested first, and whether an array lies on the host or elsewhere."""
    inner, mirrors, comm = _scene()
    handles = [comm.iallreduce(np.zeros(n + 1) if here else _Elsewhere(n + 1)) for n, here in enumerate(on_host)]
    while not all(list(map(StagedOperation.test, source.sample(handles, len(handles))))):
        assert inner.posted == list(range(1, len(inner.posted) + 1))
        source.choice([transit for transit in mirrors.transits if not transit.done]).done = True
    assert inner.posted == list(range(1, len(on_host) + 1))


def test_every_place_of_nccl_that_waits_matters(emulated_device: EmulatedDeviceFactory) -> None:
    """The stream of the links for kernels before an operation, and the host for the operation."""
    ranks = _TwoRanks(emulated_device, over_nccl)
    assert sorted(place.rpartition(".")[2] for place in ranks.places) == ["done", "wait_for_kernels"]

    def fails(seed: int, number: int) -> bool:
        try:
            return ranks.differs(seed, number)
        except (EmulatedDeviceError, DeadlockError):
            return True

    for place, numbers in ranks.places.items():
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
        EmulatedDeviceError,
        match=r"^The devices of ranks 0 and 1 have enqueued different calls: sum to all of 3 float64; and sum to",
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


class _NeverDone:
    done = False


def test_texts_and_faults() -> None:
    links: Any = _Links()
    last = _NeverDone()
    handle = NcclHandle(links, last, "allreduce of 3 elements")
    assert not handle.test()
    assert str(handle) == "allreduce of 3 elements, enqueued, waiting for the device or its peers"
    links.failed = "NCCL_ERROR_SYSTEM_ERROR: remote process exited"
    message = (
        r"^NCCL failed in allreduce of 3 elements: NCCL_ERROR_SYSTEM_ERROR: remote process exited; start again with --resume"
    )
    with pytest.raises(BackendError, match=message):
        handle.test()
    last.done = True
    assert handle.test()
    assert str(handle) == "allreduce of 3 elements, complete"


def test_an_abort_drops_what_is_on_its_way_first(emulated_device: EmulatedDeviceFactory) -> None:
    calls: list[Any] = []

    class Inner:
        rank, size, name, world_ranks = 0, 1, "world", (0,)

        def abort(self, code: int) -> None:
            calls.append(code)

    links: Any = _Links()
    links.calls = calls
    inner: Any = Inner()
    arithmetic = CudaKernelSet(_runtime(emulated_device(0))).arithmetic
    comm = NcclCommunicator(inner, arithmetic, arithmetic.messages(), links)
    comm.abort(3)
    assert calls == ["abort", 3]


def _runtime(device: EmulatedDevice) -> CudaRuntime:
    return CudaRuntime(device, device.stream("compute"), "float64")


def test_ranks_that_share_a_gpu_are_reported(emulated_device: EmulatedDeviceFactory) -> None:
    def program(comm: ThreadCommunicator) -> list[str | None]:
        device = emulated_device(comm.rank)
        own = group_fault(comm, CudaKernelSet(_runtime(device)).arithmetic.messages())
        device.identity = "n1 0000:01:00.0" if comm.rank in (1, 3) else device.identity
        shared = group_fault(comm, CudaKernelSet(_runtime(device)).arithmetic.messages())
        device.link_fault = lambda: "there is no NCCL" if comm.rank == 2 else None  # type: ignore[method-assign]
        return [own, shared, group_fault(comm, CudaKernelSet(_runtime(device)).arithmetic.messages())]

    for own, shared, missing in run_virtual(4, program):
        assert own is None
        assert shared == "ranks 1 and 3 share a GPU, but NCCL allows one rank per GPU"
        assert missing == "on rank 2 there is no NCCL"


class _Device:
    """A device whose memory is this process's."""

    def __init__(self, index: int) -> None:
        self.memory: list[np.ndarray] = []

    def allocate(self, size_bytes: int) -> SimpleNamespace:
        self.memory.append(np.zeros(size_bytes, np.uint8))
        return SimpleNamespace(pointer=self.memory[-1].ctypes.data, number=len(self.memory) - 1)

    def stream(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(synchronize=lambda: None)

    def pinned(self, size_bytes: int) -> np.ndarray:
        return np.zeros(size_bytes, np.uint8)

    def upload(self, stream: object, target: SimpleNamespace, source: np.ndarray) -> None:
        self.memory[target.number][...] = source

    def download(self, stream: object, target: np.ndarray, source: SimpleNamespace) -> None:
        target[...] = self.memory[source.number]


class _NoDevice:
    def __init__(self, index: int) -> None:
        raise BackendError("GPU 0 cannot be used (no driver).")


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module in place of the one that imports CuPy."""
    module = ModuleType("hpctrain.backend.cuda.cupy_device")
    module.CupyDevice = _Device  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(choice, "cupy_is_installed", lambda: True)
    monkeypatch.setattr(mpi, "world", lambda seconds: None)
    return module


def test_messages_that_arrive_are_compared(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_probe.outcome() == AWARE  # through MPI itself: this process's memory is what it can take
    monkeypatch.setattr(mpi, "send_to_itself", lambda *words: None)
    assert device_probe.outcome() == f"{UNAWARE}: the received bytes differ from the sent bytes"


def test_a_gpu_that_cannot_be_used_is_reported(cupy: Any) -> None:
    cupy.CupyDevice = _NoDevice
    assert device_probe.outcome() == f"{UNAWARE}: GPU 0 cannot be used (no driver)."


def test_nothing_is_tried_without_mpi_or_cupy(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "cupy_is_installed", lambda: False)
    assert device_probe.outcome() == UNTRIED

    def missing(seconds: float) -> None:
        raise MissingLibraryError("There is none.")

    monkeypatch.setattr(mpi, "world", missing)
    assert device_probe.outcome() == UNTRIED


@pytest.mark.job
@pytest.mark.slow
def test_what_the_process_says_is_reported_whatever_becomes_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says its word and ends; or MPI ends it, with or without words of GPUs; or it does not end."""

    def says(*words: str, code: int = 0) -> None:
        program = f"import sys; print({chr(10).join(words)!r}); sys.exit({code})"
        monkeypatch.setattr(device_probe, "_COMMAND", ("-c", program))

    tried = f"{UNAWARE}: {device_probe._PROGRAM}"
    says("aware")
    assert device_probe.trial() == AWARE
    says("first", "Fatal error in MPI_Sendrecv", code=11)
    assert device_probe.trial() == f"{tried} ended with exit code 11; its last line was: Fatal error in MPI_Sendrecv"
    says("abort", device_probe.GTL_WORDS, code=1)
    assert device_probe.trial() == f"abort\n{device_probe.GTL_WORDS}"
    monkeypatch.setattr(device_probe, "_COMMAND", ("-c", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"))
    assert device_probe.trial() == f"{tried} ended with signal SIGSEGV and printed nothing"
    monkeypatch.setattr(device_probe, "_COMMAND", ("-c", "import time; time.sleep(60)"))
    monkeypatch.setattr(device_probe, "_SECONDS", 0.2)
    assert device_probe.trial() == f"{tried} did not end within 0.2 s"


@pytest.mark.job
@pytest.mark.slow
def test_the_process_is_an_mpi_job_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beneath a launcher, whose ranks it must not disturb: without CuPy it says that it has tried nothing."""
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("PMI_FD", "999")
    found = device_probe.trial()
    assert found in (UNTRIED, AWARE) or found.startswith(UNAWARE)
    assert choice.cupy_is_installed() or found == UNTRIED
