"""NCCL by way of a CuPy whose GPU is this host: the calls that are made, and their faults; and the real package's signatures."""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from hpctrain.backend.cuda.emulator.rounding import read, write
from hpctrain.backend.kernels.cuda.kernel_set import CudaKernelSet
from hpctrain.backend.kernels.cuda.runtime import CudaRuntime
from hpctrain.comm.nccl import group_fault, over_nccl
from hpctrain.comm.single import SingleCommunicator
from hpctrain.errors import BackendError
from tests.support.emulated import EmulatedDeviceFactory
from tests.support.fake_cupy import IMPORTER, LINKS, FakeCupy

Load = Callable[..., tuple[ModuleType, FakeCupy]]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """(the module that imports CuPy for devices, loaded with a fake one; the fake)."""

    def make(**options: Any) -> tuple[ModuleType, FakeCupy]:
        fake = FakeCupy(**options)
        fake.install(monkeypatch)
        return importlib.import_module(IMPORTER), fake

    yield make
    for name in (IMPORTER, LINKS):
        sys.modules.pop(name, None)


class _Peers:
    """Two ranks, of which the other one says what rank 0 says."""

    size = 2

    def __init__(self, rank: int, said: Any = None) -> None:
        self.rank, self.said = rank, said

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        return value if self.rank == root else self.said

    iallgather = isend = irecv = None


def test_identities_tell_gpus_of_a_node_apart(load: Load) -> None:
    module, _ = load(gpus=2)
    assert module.CupyDevice(0).identity != module.CupyDevice(1).identity
    assert module.CupyDevice(1).identity == module.CupyDevice(1).identity


def test_a_group_of_one_brings_what_it_has(load: Load, emulated_device: EmulatedDeviceFactory) -> None:
    """The whole communicator over the calls of CuPy, each operation in its place."""
    module, fake = load()
    device = module.CupyDevice()
    kernels = CudaKernelSet(CudaRuntime(device, device.stream("compute"), "float32"))
    alone = SingleCommunicator()
    assert group_fault(alone, kernels.arithmetic.messages()) is None
    comm = over_nccl(alone, kernels.arithmetic)
    buffer, other = (kernels.arithmetic.zeros(5, "float32") for _ in range(2))
    write(buffer, np.arange(5.0))
    fake.calls.clear()
    handles = [
        comm.iallreduce(buffer),
        comm.ireduce_scatter(buffer, other, [5]),
        comm.iallgather(None, buffer, [5]),
        comm.ibroadcast(buffer, 0),
        comm.ialltoall(buffer, other, [5], [5]),
    ]
    assert all(handle.test() for handle in handles)
    np.testing.assert_array_equal(read(other), np.arange(5.0))
    names = [name for name in fake.names() if name not in ("record", "memcpyAsync", "eventQuery")]
    group = ["wait_event", "groupStart"]
    reduction = [*group, "reduce", "nccl", "groupEnd"]
    gather = [*group, "broadcast", "nccl", "groupEnd"]
    assert names == [
        "wait_event",
        "allReduce",
        "nccl",
        *reduction,
        *gather,
        "wait_event",
        "broadcast",
        "nccl",
        *group,
        "groupEnd",
    ]
    moved = {call[2] for call in fake.calls if call[0] == "nccl"}
    assert len(moved) == 1, "all of a process goes on one stream"
    fake.nccl_failing = "check_async_error"
    assert comm._links.fault() == "NCCL_ERROR_SYSTEM_ERROR: check_async_error"
    fake.nccl_failing = ""
    assert comm._links.fault() is None
    comm._links.abort()
    assert fake.names()[-1] == "abort"


def test_messages_and_bits_move_as_bytes(load: Load) -> None:
    module, fake = load()
    device = module.CupyDevice()
    links = device.groups.join(_Peers(0), device.stream("between"))
    array = device.allocate(6).view("bfloat16")
    with links.together():
        links.send(array, 1)
        links.receive(array, 1)
    assert [call[1] for call in fake.calls if call[0] == "nccl"] == [6, 6]
    with pytest.raises(KeyError):
        links.sum_to_all(array)  # there are no sums of bits


@pytest.mark.parametrize("call", ["get_unique_id", "NcclCommunicator"])
def test_what_nccl_refuses_is_one_sentence(call: str, load: Load) -> None:
    module, _ = load(nccl_failing=call)
    device = module.CupyDevice()
    with pytest.raises(
        BackendError, match=r"^NCCL does not join the GPUs of these 2 ranks \(NCCL_ERROR.*; set transport to staged\.$"
    ):
        device.groups.join(_Peers(0), device.stream("between"))


def test_all_hear_that_the_first_has_no_number(load: Load) -> None:
    module, _ = load()
    device = module.CupyDevice()
    with pytest.raises(BackendError, match=r"ranks \(no network\); set transport"):
        device.groups.join(_Peers(1, (None, "no network")), device.stream("between"))


def test_nccl_that_is_not_there_is_told(load: Load) -> None:
    module, _ = load(without_nccl=True)
    assert module.CupyDevice().groups.fault().startswith("CuPy finds no NCCL, which comes with the package nvidia-nccl-cu12")
    module, _ = load()
    assert module.CupyDevice().groups.fault() is None


def test_nccl_of_a_wheel_is_loaded_first(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its path, so that CuPy's module finds it by its name; one that cannot be loaded is left to CuPy to tell of."""
    module, _ = load()
    library = tmp_path / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"no library")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "nvidia"]:
        monkeypatch.delitem(sys.modules, name)
    loaded: list[str] = []

    def load_library(name: str, mode: int = 0) -> None:
        loaded.append(name)
        raise OSError("file too short")

    monkeypatch.setattr(ctypes, "CDLL", load_library)
    assert module.nccl_fault() is None
    assert loaded == [str(library)]


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")
@pytest.mark.job  # CUDA's search for its libraries starts ldconfig
def test_the_calls_of_the_real_cupy() -> None:
    """By their documentation, where CuPy was built with it; by their presence elsewhere."""
    from cupy.cuda import nccl

    if not nccl.available:
        pytest.skip("NCCL is not installed")
    assert (nccl.NCCL_UINT8, nccl.NCCL_FLOAT32, nccl.NCCL_FLOAT64, nccl.NCCL_SUM) == (1, 7, 8, 0)
    assert issubclass(nccl.NcclError, RuntimeError)
    calls = {
        "allReduce": ["sendbuf", "recvbuf", "count", "datatype", "op", "stream"],
        "reduce": ["sendbuf", "recvbuf", "count", "datatype", "op", "root", "stream"],
        "broadcast": ["sendbuff", "recvbuff", "count", "datatype", "root", "stream"],
        "send": ["sendbuf", "count", "datatype", "peer", "stream"],
        "recv": ["recvbuf", "count", "datatype", "peer", "stream"],
        "check_async_error": [],
        "abort": [],
    }
    for name, parameters in calls.items():
        text = getattr(nccl.NcclCommunicator, name).__doc__ or ""
        inside = text.splitlines()[0].partition("(")[2].rpartition(")")[0] if text else ""
        found = [item.partition("=")[0].split()[-1] for item in inside.split(", ") if item and item != "self"]
        assert not text or found == parameters, f"{name}({inside})"
    assert all(callable(getattr(nccl, name)) for name in ("get_unique_id", "groupStart", "groupEnd"))
