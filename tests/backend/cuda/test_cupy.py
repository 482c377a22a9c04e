"""`CupyDevice` and NCCL on a CuPy whose GPU is this host; their calls against the real CuPy where that is installed."""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import importlib.util
import inspect
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from hpctrain.backend.choice import Backend
from hpctrain.backend.cuda import sources
from hpctrain.backend.cuda.device import Device, DeviceArray, Precision
from hpctrain.backend.cuda.kernel_set import CudaKernelSet
from hpctrain.backend.cuda.runtime import CudaRuntime
from hpctrain.bench import engine_step
from hpctrain.bench.engine_step import workload
from hpctrain.comm.base import SingleCommunicator
from hpctrain.comm.transports import group_fault, over_nccl
from hpctrain.core.errors import BackendError
from hpctrain_testing.emulator.memory import read, write
from hpctrain_testing.emulator.products import NumpyConvolution
from tests.support.emulated import ADDING_TEXTS, EmulatedDeviceFactory, kernels_on
from tests.support.fake_cupy import IMPORTER, FakeCublas, FakeCupy, FakeNvrtc

Load = Callable[..., tuple[ModuleType, FakeCupy]]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Load]:
    """(the module, loaded with a fake CuPy; the fake). Binaries are kept in the test's own folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def make(**options: Any) -> tuple[ModuleType, FakeCupy]:
        fake = FakeCupy(**options)
        fake.install(monkeypatch)
        return importlib.import_module(IMPORTER), fake

    yield make
    sys.modules.pop(IMPORTER, None)


def test_the_device_is_the_one_of_the_index(load: Load) -> None:
    module, fake = load(gpus=4)
    device: Device = module.CupyDevice(2)
    assert fake.current == 2
    assert (device.name, device.capability, device.multiprocessors) == ("Fake GPU", (9, 0), 2)
    assert device.dtypes == ("float32", "bfloat16")
    assert module.gpu_count() == 4
    with pytest.raises(BackendError, match=r"GPU 4 cannot be used \(cudaErrorInvalidDevice"):
        module.CupyDevice(4)


def test_a_library_of_cuda_that_is_missing_is_reported_in_one_line(load: Load) -> None:
    module, fake = load()
    fake.nvrtc.missing = True
    message = r"cuBLAS and NVRTC cannot be loaded \(Failure finding \"libnvrtc.so.13\": No such file\); install hpctrain\[gpu13\]"
    with pytest.raises(BackendError, match=message):
        module.CupyDevice()


def test_memory_is_zeroed_aligned_and_kept(load: Load) -> None:
    module, fake = load()
    array = module.CupyDevice().allocate(1000)
    assert array.pointer % 256 == 0
    assert not read(array).any()
    assert fake.names() == ["malloc", "memset", "streamSynchronize"]
    assert fake.calls[-1] == ("streamSynchronize", 0), "no stream that waits for other ranks is waited for"
    assert module.CupyDevice().allocate(0).size == 0


def test_a_lack_of_memory_is_reported(load: Load) -> None:
    module, _ = load(free_bytes=1_000_000)
    message = r"Fake GPU cannot allocate 2 GB: 1 MB of its 1\.07 GB of memory are free; reduce batch"
    with pytest.raises(BackendError, match=message):
        module.CupyDevice().allocate(2_000_000_000)
    assert module.CupyDevice().memory_used() == (1 << 30) - 1_000_000


def test_copies_go_there_and_back_on_the_stream(load: Load) -> None:
    module, fake = load()
    device = module.CupyDevice()
    stream = device.stream("compute")
    source, target = device.pinned(40), device.pinned(40)
    assert source.size == 40
    assert not source.any()
    source[:] = np.arange(40)
    first, second = device.allocate(40), device.allocate(40).view("float32")
    fake.calls.clear()
    device.upload(stream, first, source)
    device.copy(stream, second, first)
    device.download(stream, target, second)
    np.testing.assert_array_equal(target, source)
    assert fake.calls == [("memcpyAsync", 40, kind, stream.raw.ptr) for kind in (1, 3, 2)]
    with pytest.raises(ValueError, match="Cannot copy 40 bytes to 36 bytes"):
        device.upload(stream, second[1:], source)
    with pytest.raises(ValueError, match="C-contiguous"):
        device.upload(stream, first, np.zeros((40, 2), np.uint8)[:, 0])


def test_events(load: Load) -> None:
    module, fake = load()
    device = module.CupyDevice()
    stream, event = device.stream("compute"), device.event()
    assert event.done
    fake.event_status = 600
    assert not event.done
    assert fake.names() == ["eventQuery", "eventQuery"]
    fake.event_status = 0
    fake.calls.clear()
    stream.record(event)
    stream.wait(event)
    event.synchronize()
    stream.synchronize()
    assert fake.calls == [("record", event.raw), ("wait_event", event.raw), ("eventSynchronize",), ("streamSynchronize",)]


def test_the_error_of_a_gpu_ends_the_wait_for_its_events(load: Load) -> None:
    """Not done, and never will be: who asks again and again would wait until a deadline that tells of other ranks."""
    module, fake = load()
    event = module.CupyDevice().event()
    fake.event_status = 700
    with pytest.raises(RuntimeError, match="cudaErrorIllegalAddress"):
        _ = event.done


def test_kernels_get_arguments_of_the_very_types(load: Load, emulated_device: EmulatedDeviceFactory) -> None:
    module, _ = load()
    device = module.CupyDevice()
    stream, x = device.stream("compute"), device.allocate(64).view("float32")
    write(x, np.linspace(-1, 1, 16, dtype=np.float32))
    kernel = device.kernel("elementwise", "relu_forward_f32_w4")
    kernel(stream, (1,), (32,), x, x, np.int64(4))
    np.testing.assert_array_equal(read(x), np.maximum(np.linspace(-1, 1, 16, dtype=np.float32), 0))
    assert device.kernel("elementwise", "relu_forward_f32_w4") is kernel
    with pytest.raises(TypeError, match="Argument 2 of relu_forward_f32_w4 is int; it must be a device array or a NumPy scalar"):
        kernel(stream, (1,), (32,), x, x, 4)


def test_texts_of_one_source_name_are_kernels_of_their_own(load: Load, emulated_device: EmulatedDeviceFactory) -> None:
    module, _ = load()
    for device in (module.CupyDevice(), emulated_device()):
        stream, x = device.stream("compute"), device.allocate(4).view("float32")
        for text in (*ADDING_TEXTS, ADDING_TEXTS[0]):
            device.kernel("sum", "add", text=text)(stream, (1,), (1,), x)
        stream.synchronize()
        assert read(x) == [12.0]


def test_binaries_are_kept_between_processes_by_text_and_architecture(load: Load) -> None:
    _, fake = load()
    bits = [sources.binary(fake.nvrtc, "one", "text", (9, 0)) for _ in range(2)]
    assert bits[0] == bits[1]
    assert fake.nvrtc.compiled == [(*sources.OPTIONS, "-arch=sm_90")]
    sources.binary(fake.nvrtc, "one", "other text", (9, 0))
    sources.binary(fake.nvrtc, "one", "text", (8, 0))
    assert len(fake.nvrtc.compiled) == 3
    kept = list((Path(os.environ["XDG_CACHE_HOME"]) / "hpctrain" / "kernels").iterdir())
    assert len(kept) == 3
    for path in kept:
        path.write_bytes(b"")  # as a machine leaves it that stops while it writes
    assert sources.binary(fake.nvrtc, "one", "text", (9, 0)) == bits[0]
    assert fake.nvrtc.programs == {}


@pytest.mark.parametrize("obstacle", ["a file in its place", "a full disk", "no home"])
def test_without_a_cache_each_process_compiles(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, obstacle: str
) -> None:
    """No partial files are left."""
    _, fake = load()
    if obstacle == "a full disk":
        monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    elif obstacle == "no home":
        monkeypatch.setattr(sources, "user_directory", lambda *_: None)
    else:
        (tmp_path / "cache").write_text("")
    bits = [sources.binary(fake.nvrtc, "one", "text", (9, 0)) for _ in range(2)]
    assert bits[0] == bits[1]
    assert len(fake.nvrtc.compiled) == 2
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "cache"] * (obstacle == "a file in its place")


def test_a_source_that_nvrtc_refuses_is_one_error_with_its_first_lines(load: Load) -> None:
    module, fake = load()
    first = r"^NVRTC cannot compile the source broken\.cu \(NVRTC_ERROR_COMPILATION \(6\)\): broken\.cu\(1\): error: "
    with pytest.raises(BackendError, match=first + r".*\(6\): error: no such thing$"):
        module.CupyDevice().kernel("broken", "any", text="#error")
    assert fake.nvrtc.programs == {}, "a program that fails is destroyed"


@pytest.mark.parametrize(
    ("capability", "architecture"), [((7, 5), "sm_75"), ((8, 6), "compute_80"), ((10, 0), "sm_100"), ((13, 1), "compute_100")]
)
def test_a_gpu_that_nvrtc_does_not_know_gets_ptx_of_the_newest_before_it(
    load: Load, capability: tuple[int, int], architecture: str
) -> None:
    module, fake = load(capability=capability)
    device = module.CupyDevice()
    x = device.allocate(16).view("float32")
    write(x, np.array([-1, 2, -3, 4], np.float32))
    device.kernel("elementwise", "relu_forward_f32_w4")(device.stream("compute"), (1,), (32,), x, x, np.int64(1))
    np.testing.assert_array_equal(read(x), [0, 2, 0, 4])
    assert fake.nvrtc.compiled == [(*sources.OPTIONS, f"-arch={architecture}")]


def test_a_gpu_older_than_nvrtc_is_refused(load: Load) -> None:
    module, fake = load(capability=(7, 0))
    fake.nvrtc.architectures = (75, 80, 90)
    message = r"^NVRTC 0\.0 compiles for compute capability 7\.5 and above, but this GPU has 7\.0; install hpctrain\[gpu12\]"
    with pytest.raises(BackendError, match=message):
        module.CupyDevice().kernel("elementwise", "relu_forward_f32_w4")


class _List(list):
    """A list that weak references can refer to."""


@pytest.mark.parametrize("collects", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_nothing_is_collected_inside_a_capture(load: Load, collects: bool, fails: bool) -> None:
    """Garbage may hold device memory, whose release ends the capture. Before and after it is collected as the program wants."""
    module, _ = load()
    device = module.CupyDevice()
    stream, before = device.stream("compute"), gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        ring = _List()
        for item in (ring, device.allocate(8)):
            ring.append(item)
        garbage_ring = weakref.ref(ring)
        del ring, item
        with suppress(ZeroDivisionError), device.capture(stream):
            garbage = [[] for _ in range(3 * gc.get_threshold()[0])]
            assert garbage_ring() is not None
            if fails:
                raise ZeroDivisionError
        assert len(garbage) > 100
        assert gc.isenabled() == collects
    finally:
        (gc.enable if before else gc.disable)()
    gc.collect()
    assert garbage_ring() is None


def test_capture_records_and_launches_do(load: Load) -> None:
    module, fake = load()
    device = module.CupyDevice()
    stream, a, b = device.stream("compute"), device.allocate(8), device.allocate(8)
    write(a, np.arange(8))
    fake.calls.clear()
    with device.capture(stream) as graph:
        device.copy(stream, b, a)
    assert not read(b).any()
    for _ in range(2):
        write(b, np.zeros(8))
        graph.launch(stream)
        np.testing.assert_array_equal(read(b), np.arange(8))
    assert [call[:2] for call in fake.calls[:1]] == [("begin_capture", 1)]  # thread-local: allocations fail
    assert fake.names()[-3:] == ["end_capture", "graphLaunch", "graphLaunch"]


def test_a_capture_that_fails_ends(load: Load) -> None:
    module, fake = load()
    device = module.CupyDevice()
    stream = device.stream("compute")
    with pytest.raises(RuntimeError, match="StreamCaptureUnsupported"), device.capture(stream):
        device.allocate(8)
    assert not fake.capturing
    assert device.allocate(8).size == 8


def test_gemm_has_a_handle_and_a_workspace_for_each_stream(load: Load) -> None:
    module, fake = load()
    device = module.CupyDevice()
    one, other = device.stream("compute"), device.stream("other")
    a, b, c = (device.allocate(4 * m * n).view("float32").reshape(m, n) for m, n in ((2, 3), (3, 4), (2, 4)))
    left, right = np.arange(6.0).reshape(2, 3), np.arange(12.0).reshape(3, 4)
    write(a, left)
    write(b, right)
    for stream in (one, one, other):
        device.gemm(stream, a, b, c, precision="float32")
    np.testing.assert_array_equal(read(c), left @ right)
    assert fake.cublas.calls.count("create") == 2
    assert fake.cublas.stream == other.raw.ptr


def test_sums_over_nothing_are_zero(load: Load) -> None:
    module, fake = load()
    device = module.CupyDevice()
    stream = device.stream("compute")
    a, b = (device.allocate(0).view("float32").reshape(*shape) for shape in ((0, 3), (0, 2)))
    c = device.allocate(24).view("float32").reshape(3, 2)
    write(c, np.ones((3, 2), np.float32))
    device.gemm(stream, a, b, c, transpose_a=True, accumulate=True, precision="float32")
    assert read(c).all()
    device.gemm(stream, a, b, c, transpose_a=True, precision="float32")
    assert not read(c).any()
    assert "gemmEx" not in fake.cublas.calls


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-5), ("tf32", 1e-5), ("bfloat16", 1e-2)])
def test_a_network_trains_on_a_cupy_device(
    load: Load,
    emulated_device: EmulatedDeviceFactory,
    monkeypatch: pytest.MonkeyPatch,
    precision: Precision,
    tolerance: float,
) -> None:
    """Whole steps, captured from the second one on, are those of the emulated device; then nothing is allocated any more."""
    module, fake = load()
    device = module.CupyDevice()

    def enqueue(stream: object, work: Callable[[], None], text: str, kept: object = ()) -> None:
        fake._enqueue(text, work)

    monkeypatch.setattr(device, "convolution", functools.cache(lambda key: NumpyConvolution(key, enqueue, lambda *_: None)))
    losses = {}
    for name, place in (("cupy", device), ("emulated", emulated_device())):
        runtime = CudaRuntime(place, place.stream("compute"), precision)
        backend = Backend("cuda", runtime.dtype, CudaKernelSet(runtime), name)
        monkeypatch.setattr(engine_step, "make_backend", lambda *_, backend=backend, **__: backend)
        step = engine_step.EngineStep(workload("small", 5, 9, {"channels": [3, 5], "hidden": 6, "dropout": 0.3}), "cuda")
        losses[name] = [step.run() for _ in range(2)]
        fake.calls.clear()
        losses[name] += [step.run() for _ in range(3)]
        if place is device:
            assert {"graphLaunch", "memcpyAsync", "eventSynchronize"} <= set(fake.names())
            assert not {"malloc", "hostAlloc", "begin_capture", "streamSynchronize"} & set(fake.names())
    np.testing.assert_allclose(losses["cupy"], losses["emulated"], rtol=tolerance)


# The real package, where it is installed. None of these needs a GPU.
real = pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")


def _documented(function: Any) -> list[str]:
    """The names of a compiled function's parameters, by the first line of its documentation."""
    inside = function.__doc__.splitlines()[0].partition("(")[2].rpartition(")")[0]
    return [item.partition("=")[0].split()[-1] for item in inside.split(", ") if item and item != "self"]


@real
@pytest.mark.job  # CUDA's search for its libraries starts ldconfig
def test_the_calls_of_the_real_cupy() -> None:
    import cupy

    runtime = cupy.cuda.runtime
    assert _documented(runtime.memcpyAsync) == ["dst", "src", "size", "kind", "stream"]
    assert _documented(runtime.memset) == ["ptr", "value", "size"]
    assert len(_documented(runtime.eventQuery)) == len(_documented(runtime.streamSynchronize)) == 1
    assert _documented(runtime.memsetAsync) == ["ptr", "value", "size", "stream"]
    assert _documented(runtime.getDeviceProperties) == ["device"]
    assert _documented(runtime.memGetInfo) == _documented(runtime.getDeviceCount) == []
    assert _documented(cupy.cuda.Memory) == _documented(cupy.cuda.alloc_pinned_memory) == ["size"]
    assert _documented(cupy.cuda.Graph.launch) == ["stream"]
    assert _documented(cupy.cuda.function.Module.get_function) == ["name"]
    assert cupy.cuda.function.Module.load.__doc__ == "Module.load(self, bytes cubin)"
    assert "non_blocking" in inspect.signature(cupy.cuda.Stream).parameters
    assert "disable_timing" in inspect.signature(cupy.cuda.Event).parameters
    assert _documented(cupy.cuda.get_elapsed_time) == ["start_event", "end_event"]
    assert list(inspect.signature(cupy.cuda.Stream.begin_capture).parameters) == ["self", "mode"]
    for name, parameters in {"record": ["event"], "wait_event": ["event"], "synchronize": [], "end_capture": []}.items():
        assert list(inspect.signature(getattr(cupy.cuda.Stream, name)).parameters) == ["self", *parameters]
    kinds = (runtime.memcpyHostToDevice, runtime.memcpyDeviceToHost, runtime.memcpyDeviceToDevice)
    assert (*kinds, runtime.streamCaptureModeThreadLocal) == (1, 2, 3, 1)
    assert issubclass(runtime.CUDARuntimeError, RuntimeError)
    assert runtime.runtimeGetVersion() // 1000 in (12, 13)


@real
@pytest.mark.job
def test_the_real_cublas_has_the_functions_that_are_called() -> None:
    module = importlib.import_module(IMPORTER)
    try:
        library, _ = module._load_libraries()
    except BackendError as error:
        pytest.skip(str(error))
    finally:
        sys.modules.pop(IMPORTER)
    for name in dir(FakeCublas):
        if name.startswith("cublas"):
            assert getattr(library, name)


@real
def test_the_calls_of_the_real_nvrtc() -> None:
    from cupy_backends.cuda.libs import nvrtc

    for name in (name for name in vars(FakeNvrtc) if not name.startswith("_") and name != "NVRTCError"):
        assert _documented(getattr(nvrtc, name)) == list(inspect.signature(getattr(FakeNvrtc(), name)).parameters)
    assert issubclass(nvrtc.NVRTCError, RuntimeError)
    assert isinstance(nvrtc.createProgram("", "empty.cu", (), ()), int)


@real
def test_the_real_nvrtc_keeps_subnormal_numbers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """CuPy's own compiler flushes them to zero with any options, so a dead channel's momentum would not be the host's."""
    from cupy_backends.cuda.libs import nvrtc

    environ, newer = {"XDG_CACHE_HOME": str(tmp_path)}, (99, 9)
    plain = sources.binary(nvrtc, "descent", sources.text("descent"), newer, environ)
    monkeypatch.setattr(sources, "OPTIONS", (*sources.OPTIONS, "-ftz=true"))
    flushing = sources.binary(nvrtc, "descent", sources.text("descent"), newer, environ)
    assert b"mul.rn.f32" in plain
    assert b".ftz" not in plain
    assert b"mul.rn.ftz.f32" in flushing


@real
def test_the_real_nvrtc_says_what_is_wrong_and_makes_binaries_without_headers(tmp_path: Path) -> None:
    from cupy_backends.cuda.libs import nvrtc

    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    assert sources.binary(nvrtc, "elementwise", sources.text("elementwise"), (9, 0), environ).startswith(b"\x7fELF")
    with pytest.raises(
        BackendError, match=r'^NVRTC cannot compile the source one\.cu \(.*: one\.cu\(2\): error: identifier "y" is undefined'
    ):
        sources.binary(nvrtc, "one", 'extern "C" __global__ void one(float* x) {\n  *x = y;\n}', (9, 0), environ)
    with pytest.raises(BackendError, match=r"compute capability 7\.5 and above, but this GPU has 6\.1"):
        sources.binary(nvrtc, "one", "", (6, 1), environ)


@real
def test_a_function_of_the_real_cupy_takes_a_stream() -> None:
    import cupy

    function = cupy.cuda.function.Function.__new__(cupy.cuda.function.Function)
    with pytest.raises(AttributeError, match="has no attribute 'ptr'"):  # it has come as far as asking the stream
        function((1,), (1,), (), stream=object())


class _Peers:
    """Two ranks, of which the other one says what rank 0 says."""

    size = 2

    def __init__(self, rank: int, said: Any = None) -> None:
        self.rank, self.said = rank, said

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        return value if self.rank == root else self.said

    iallgather = isend = irecv = None


def test_identities_tell_gpus_of_a_node_and_slices_of_a_gpu_apart(load: Load) -> None:
    """A process sees one slice, as its GPU 0; all slices of a GPU have the GPU's PCI bus."""
    module, fake = load(gpus=2)
    assert module.CupyDevice(0).identity != module.CupyDevice(1).identity
    assert module.CupyDevice(1).identity == module.CupyDevice(1).identity
    first = module.CupyDevice(0).identity
    fake.uuids[0] = b"of the other one"
    assert module.CupyDevice(0).identity != first


@pytest.mark.parametrize(("version", "fault"), [(22907, "NCCL 2.29 treats all slices of a GPU (MIG) as one"), (23000, None)])
def test_slices_of_a_gpu_are_joined_by_an_nccl_that_tells_them_apart(load: Load, version: int, fault: str | None) -> None:
    """An older NCCL refuses two ranks with one PCI bus only when it is too late to choose another transport."""
    module, fake = load()
    fake.nccl_version = version
    assert module.CupyDevice().link_fault() is None
    fake.name = "NVIDIA H100 80GB HBM3 MIG 3g.40gb"
    reported = module.CupyDevice().link_fault()
    assert reported == fault if fault is None else reported.startswith(fault)


def test_a_group_of_one_brings_what_it_has(load: Load, emulated_device: EmulatedDeviceFactory) -> None:
    """The whole communicator over the calls of CuPy, each operation in its place."""
    module, fake = load()
    device = module.CupyDevice()
    kernels = kernels_on(device, "float32")
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
    group, broadcast = ["wait_event", "groupStart"], ["broadcast", "nccl"]
    reduction, gather = [*group, "reduce", "nccl", "groupEnd"], [*group, *broadcast, "groupEnd"]
    assert names == ["wait_event", "allReduce", "nccl", *reduction, *gather, "wait_event", *broadcast, *group, "groupEnd"]
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
    links = device.join(_Peers(0), device.stream("between"))
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
        BackendError, match=r"^NCCL cannot connect the GPUs of these 2 ranks \(NCCL_ERROR.*; set transport to staged\.$"
    ):
        device.join(_Peers(0), device.stream("between"))


def test_all_hear_that_the_first_has_no_number(load: Load) -> None:
    module, _ = load()
    device = module.CupyDevice()
    with pytest.raises(BackendError, match=r"ranks \(no network\); set transport"):
        device.join(_Peers(1, (None, "no network")), device.stream("between"))


def test_nccl_that_is_not_there_is_reported(load: Load) -> None:
    module, _ = load(without_nccl=True)
    assert module.CupyDevice().link_fault().startswith("CuPy finds no NCCL, which the package nvidia-nccl-cu12 or")
    module, _ = load()
    assert module.CupyDevice().link_fault() is None


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
    assert module.nccl_fault("Fake GPU") is None
    assert loaded == [str(library)]


@real
@pytest.mark.filterwarnings("ignore:[\\s\\S]*nccl library could not be loaded")
@pytest.mark.job  # CUDA's search for its libraries starts ldconfig
def test_the_calls_of_the_real_nccl() -> None:
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
        call = getattr(nccl.NcclCommunicator, name)
        assert not call.__doc__ or _documented(call) == parameters, name
    assert all(callable(getattr(nccl, name)) for name in ("get_unique_id", "groupStart", "groupEnd"))


def test_nothing_is_a_null_pointer(load: Load) -> None:
    module, _ = load()
    values = [module._by_value("kernel", 0, argument) for argument in (None, DeviceArray(640, (4,), "float32", None))]
    assert [(type(value), int(value)) for value in values] == [(np.uint64, 0), (np.uint64, 640)]
