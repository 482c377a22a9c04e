"""Kernels of the emulated device: how they are built, what they are passed, and planted mistakes that are found."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import pytest

from hpctrain.backend.cuda.device import Argument, DeviceArray, Extent
from hpctrain.backend.specs import item_bytes
from hpctrain_testing.emulator.device import EmulatedDevice
from hpctrain_testing.emulator.kernels import CpuKernel, pack_arguments
from hpctrain_testing.emulator.memory import EmulatedDeviceError, Heap, on_host
from tests.support.emulated import PLANTED_TEXTS, EmulatedDeviceFactory

SEEDS = range(20)


class Bench:
    """Runs the planted kernels."""

    def __init__(self, device: EmulatedDevice, text: str) -> None:
        self.device, self._text = device, text
        self.stream = device.stream("compute")

    def array(self, size: int, dtype: str = "float32") -> DeviceArray:
        return self.device.allocate(size * item_bytes(dtype)).view(dtype)

    def kernel(self, name: str) -> CpuKernel:
        return self.device.kernel("planted", name, text=self._text)

    def run(self, kernel: str, *arguments: Argument, grid: Extent = (1,), block: Extent = (256,)) -> None:
        self.kernel(kernel)(self.stream, grid, block, *arguments)
        self.stream.synchronize()

    def mapped(self, kernel: str, values: np.ndarray, grid: Extent = (1,)) -> np.ndarray:
        x, y = self.array(values.size), self.array(values.size)
        on_host(x)[:] = values
        self.run(kernel, x, y, grid=grid)
        return on_host(y).copy()


@pytest.fixture(params=sorted(PLANTED_TEXTS))
def bench(emulated_device: EmulatedDeviceFactory, request: pytest.FixtureRequest) -> Callable[[int], Bench]:
    """A bench for a seed."""
    emulated_device()  # where there is one
    return lambda seed: Bench(EmulatedDevice(seed), PLANTED_TEXTS[request.param])


@pytest.mark.parametrize(("right", "wrong"), [("sums", "sums_without_barrier"), ("reversed_twice", "reversed_without_barrier")])
def test_a_missing_barrier_is_found_in_every_order(bench: Callable[[int], Bench], right: str, wrong: str) -> None:
    values = np.arange(512, dtype=np.float32)
    blocks = values.reshape(2, 256)
    wanted = {"sums": np.repeat(blocks.sum(1), 256), "reversed_twice": values}[right]
    for seed in SEEDS:
        np.testing.assert_array_equal(bench(seed).mapped(right, values, (2,)), wanted)
        assert not np.array_equal(bench(seed).mapped(wrong, values, (2,)), wanted), f"seed {seed}"


def test_a_warp_that_overtakes_others_is_found(bench: Callable[[int], Bench]) -> None:
    """In the blocks in which warps go ahead, which are half of all: of two blocks at least one in three seeds of four."""
    values = np.arange(512, dtype=np.float32)
    once = values.reshape(2, 256).sum(1, keepdims=True) + np.arange(256)
    wanted = (once.sum(1, keepdims=True) + np.arange(256)).reshape(-1).astype(np.float32)
    missed = 0
    for seed in SEEDS:
        np.testing.assert_array_equal(bench(seed).mapped("summed_twice", values, (2,)), wanted)
        missed += np.array_equal(bench(seed).mapped("summed_twice_without_barrier", values, (2,)), wanted)
    assert missed < len(SEEDS) / 2


def test_a_race_without_barriers_is_found(bench: Callable[[int], Bench]) -> None:
    for seed in SEEDS:
        run = bench(seed)
        x = run.array(256)
        on_host(x)[:] = np.arange(256)
        run.run("shifted_in_place", x, np.int32(256))
        assert not np.array_equal(on_host(x)[:-1], np.arange(1, 256)), f"seed {seed}"


@pytest.mark.parametrize("kernel", ["filled", "filled_by_fibres"])
@pytest.mark.parametrize(
    ("size", "first", "end", "message"),
    [
        (1024, 0, 1025, r"it is 0 bytes past the end of an array of 4096 bytes"),
        (64, -1500, -1499, r"in front of an array of 256 bytes"),
    ],
)
def test_what_is_out_of_reach_is_an_error(
    bench: Callable[[int], Bench], kernel: str, size: int, first: int, end: int, message: str
) -> None:
    run = bench(3)
    x = run.array(size)
    start = rf"Kernel {kernel}, block \(\d+, 0, 0\), thread \(\d+, 0, 0\): touches memory"
    with pytest.raises(EmulatedDeviceError, match=f"{start}.*{message}"):
        run.run(kernel, x, np.int64(first), np.int64(end), grid=(5,))
    run.run(kernel, x, np.int64(0), np.int64(size), grid=(5,))  # the machine goes on after it
    np.testing.assert_array_equal(on_host(x), np.ones(size))


@pytest.mark.parametrize(("first", "end", "place"), [(99, 101, "after"), (-1, 1, "in front of"), (-64, -63, "in front of")])
def test_what_is_written_outside_an_array_is_found_by_the_next_wait(
    bench: Callable[[int], Bench], first: int, end: int, place: str
) -> None:
    run = bench(3)
    with pytest.raises(EmulatedDeviceError, match=f"bytes {place} an array of 400 bytes were written, by one of: filled"):
        run.run("filled", run.array(100), np.int64(first), np.int64(end))


def test_of_many_arrays_what_is_written_outside_one_is_found_by_a_later_wait_or_at_the_end(bench: Callable[[int], Bench]) -> None:
    def damaged() -> tuple[Bench, list[DeviceArray]]:
        run = bench(3)
        arrays = [run.array(100) for _ in range(50)]
        run.run("filled", arrays[0], np.int64(99), np.int64(101))
        return run, arrays

    message = "bytes after an array of 400 bytes were written, by one of: filled"
    run, arrays = damaged()
    with pytest.raises(EmulatedDeviceError, match=message):
        run.device.finish()
    run, arrays = damaged()
    with pytest.raises(EmulatedDeviceError, match=message):
        deque(run.run("filled", array, np.int64(0), np.int64(100)) for array in arrays[1:])


@pytest.mark.parametrize(("kernel", "dtype"), [("aligned_loads", "float32"), ("aligned_loads_of_halves", "bfloat16")])
def test_loads_of_packs_are_aligned(bench: Callable[[int], Bench], kernel: str, dtype: str) -> None:
    run = bench(0)
    x, y = run.array(64, dtype), run.array(4)
    run.run(kernel, x[8:], y, block=(1,))
    for first in (1, 2, 9):
        with pytest.raises(EmulatedDeviceError, match=r"loads or stores 16 bytes at once at 0x\w+, no multiple of it"):
            run.run(kernel, x[first:], y, block=(1,))


@pytest.mark.parametrize(
    ("kernel", "arguments", "message"),
    [
        ("shared_overrun", (10,), "or another of its block writes after the end of an array in shared memory"),
        ("shared_overrun", (12,), "touches memory"),
        ("shared_overrun", (-1,), "or another of its block writes in front of an array in shared memory"),
        ("shared_overrun", (-20000,), "touches memory"),
        ("shared_too_large", (), "asks for 49200 bytes of shared memory; a block has 49152"),
        ("barrier_of_some", (), r"has ended, and thread \(\d+, 0, 0\) waits for it in __syncthreads of planted.cu:\d+\."),
        ("barriers_apart", (), r"waits in __syncthreads of .*:\d+, and thread \(\d+, 0, 0\) in __syncthreads of .*:\d+"),
        ("barrier_against_shuffle", (), "waits in __shfl_xor_sync of .* for lane 3, which waits in __syncthreads"),
        ("shuffle_after_return", (), "waits in __shfl_xor_sync of .* for lane 3, which has ended"),
        ("shuffle_from_outside", (), "asks in __shfl_sync of .* for the value of lane 20, which takes no part"),
        ("shuffle_without_itself", (), "is not in the mask 0xffff of __shfl_sync"),
        ("waits_though_independent", (), "waits in __syncthreads of .* though it is exported as a kernel whose threads do not"),
        ("shuffles_though_independent", (), "waits in __shfl_xor_sync of .* though"),
        ("shares_though_independent", (), "SHARED of .* though"),
    ],
)
def test_mistakes_inside_a_block_are_named(
    bench: Callable[[int], Bench], kernel: str, arguments: tuple[int, ...], message: str
) -> None:
    for seed in range(4):
        run = bench(seed)
        with pytest.raises(EmulatedDeviceError, match=rf"Kernel {kernel}, block \(.*\), thread \(.*\): .*(?:{message})"):
            run.run(kernel, run.array(256), *map(np.int32, arguments), block=(64,))


def test_a_partial_warp_has_no_lanes_beyond_its_end(bench: Callable[[int], Bench]) -> None:
    run = bench(0)
    with pytest.raises(EmulatedDeviceError, match=r"for lane \d+, which its warp does not have"):
        run.run("exchanges", run.array(8 * 48, "int32"), block=(48,))


def test_unwritten_shared_memory_is_no_number(bench: Callable[[int], Bench]) -> None:
    run = bench(0)
    y = run.array(10)
    for _ in range(2):
        run.run("shared_unwritten", y, block=(10,))
        assert np.isnan(on_host(y)).all()
        on_host(y)[:] = 0


PARAMETERS = ("pointer float32", "pointer void", "int32", "float64", "bytes 16")

PLACE = Heap().allocate(16)

STRUCTURE = np.zeros((), "f4,f4,f8")[()]


def _arguments(**changed: Argument) -> list[Argument]:
    """Arguments that fit, but those of these places."""
    fitting = [PLACE.view("float32"), PLACE, np.int32(-1), np.float64(1), STRUCTURE]
    return [changed.get(f"at{i}", argument) for i, argument in enumerate(fitting)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (_arguments()[:4], "k takes 5 arguments, not 4"),
        ([*_arguments(), None], "k takes 5 arguments, not 6"),
        (_arguments(at2=np.int64(3)), "Argument 2 of k is int64; the kernel takes int32"),
        (_arguments(at2=np.float32(3)), "Argument 2 of k is float32; the kernel takes int32"),
        (_arguments(at2=np.uint32(3)), "Argument 2 of k is uint32; the kernel takes int32"),
        (_arguments(at3=np.float32(3)), "Argument 3 of k is float32; the kernel takes float64"),
        (_arguments(at2=3), "Argument 2 of k is int; kernels take device arrays and NumPy scalars"),
        (_arguments(at0=np.zeros(4, np.float32)), "Argument 0 of k is ndarray"),
        (_arguments(at0=np.int64(3)), "Argument 0 of k is int64; the kernel takes pointer float32"),
        (_arguments(at2=None), "Argument 2 of k is a place in memory; the kernel takes int32"),
        (_arguments(at0=PLACE.view("bfloat16")), "Argument 0 of k is .*bfloat16.*; the kernel takes elements of float32"),
        (_arguments(at0=PLACE[2:6].view("float32")), "Argument 0 of k is .* not aligned to its elements"),
        (_arguments(at4=np.zeros((), "f4,f4")[()]), "Argument 4 of k is bytes 8; the kernel takes bytes 16"),
    ],
)
def test_arguments_of_other_types_are_refused(arguments: list[Argument], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        pack_arguments("k", PARAMETERS, arguments)


@pytest.mark.parametrize(
    ("grid", "block"),
    [
        ((1,), (2048,)),
        ((1,), (32, 33)),
        ((1,), (1, 1, 65)),
        ((0,), (32,)),
        ((1,), (0,)),
        ((1, 65536), (32,)),
        ((1, 1, 65536), (32,)),
        ((1 << 31,), (32,)),
        ((1, 1, 1, 1), (32,)),
        ((), (32,)),
    ],
)
def test_impossible_launches_are_refused(emulated_device: EmulatedDeviceFactory, grid: Extent, block: Extent) -> None:
    device = emulated_device(0)
    kernel = device.kernel("elementwise", "relu_forward_f32_w1")
    x = device.allocate(4).view("float32")
    with pytest.raises(ValueError, match="cannot be launched"):
        kernel(device.stream("compute"), grid, block, x, x, np.int64(1))
