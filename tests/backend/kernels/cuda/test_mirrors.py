"""Mirrors of a device's arrays: each wait matters, memory is bounded, and nothing is allocated once it is warm."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.backend.cuda.device_array import DeviceArray
from hpctrain.backend.cuda.emulator.device import EmulatedDevice
from hpctrain.backend.kernels.cuda.kernel_set import CudaKernelSet
from hpctrain.backend.kernels.cuda.mirrors import CudaMirrors
from hpctrain.backend.kernels.cuda.runtime import CudaRuntime
from hpctrain.testing.transfers import empty, put, take
from tests.support.emulated import EmulatedDeviceFactory


def _kernels(device: EmulatedDevice) -> CudaKernelSet:
    return CudaKernelSet(CudaRuntime(device, device.stream("compute"), "float64"))


def _upload(kernels: CudaKernelSet, values: np.ndarray) -> DeviceArray:
    array: DeviceArray = empty(kernels, values.shape, "float64")
    put(kernels, array, values)
    return array


def _program(device: EmulatedDevice) -> np.ndarray:
    """Operations as averaging has them: a slice leaves behind a kernel, the host replaces it, and kernels read what arrives."""
    kernels = _kernels(device)
    arithmetic, mirrors = kernels.arithmetic, kernels.arithmetic.mirrors()
    gradient, others, total = (_upload(kernels, np.full(64, value)) for value in (1.0, 5.0, 0.0))
    for step in range(4):
        arithmetic.add(gradient, others)  # backward, which also reads what arrives below
        leaving, arriving = mirrors.mirror(gradient), mirrors.mirror(others)
        transit = mirrors.leave([(leaving, gradient)])
        while not transit.on_host():
            pass
        arriving[:] = leaving * 2.0 + step
        mirrors.arrive(transit, others, [(0, 64)])
        arithmetic.add(total, others)  # the update
        received = mirrors.mirror(others)  # which is being copied from; nothing leaves, and the work above reads what is replaced
        received[:] = step
        mirrors.arrive(mirrors.leave([]), others, [(0, 30), (30, 64)])
    return take(kernels, total)


@pytest.mark.parametrize("seed", range(20))
def test_copies_come_in_the_order_that_arithmetic_needs(seed: int, emulated_device: EmulatedDeviceFactory) -> None:
    gradient, others, total = 1.0, 5.0, 0.0
    for step in range(4):
        gradient += others
        others = gradient * 2.0 + step
        total, others = total + others, float(step)
    np.testing.assert_array_equal(_program(emulated_device(seed)), np.full(64, total))


def test_every_place_that_waits_matters(emulated_device: EmulatedDeviceFactory) -> None:
    device = emulated_device(0)
    expected = _program(device)
    places: dict[str, list[int]] = {}
    for number, text in enumerate(device.waits):
        if "mirrors" in text:
            places.setdefault(text.partition(" waits for ")[0] + text.rpartition(" at ")[2], []).append(number)
    assert len(places) == 5, f"the three of streams, and the two of the host: {sorted(places)}"
    for place, numbers in places.items():
        trials = ((seed, number) for seed in range(8) for number in numbers)
        wrong = (not np.array_equal(_program(emulated_device(seed, ignored_wait=n)), expected) for seed, n in trials)
        assert any(wrong), place


def test_mirrors_are_used_again(emulated_device: EmulatedDeviceFactory) -> None:
    device = emulated_device(1)
    kernels = _kernels(device)
    mirrors, array = kernels.arithmetic.mirrors(), _upload(kernels, np.arange(10.0))

    def operation() -> None:
        mirror = mirrors.mirror(array)
        transit = mirrors.leave([(mirror, array)])
        while not transit.on_host():
            pass
        mirrors.arrive(transit, array, [(0, 10)])

    operation()
    operation()
    device.seal()
    for _ in range(5):
        operation()
    assert device.counters.late_allocations == []
    assert mirrors.pinned_bytes == 80


#: of the shared buffer: where what leaves ends, and where what arrives does; some ranks only receive
_PARTS = [(20, 40), (0, 60), (5, 64), (0, 40), (0, 60), (50, 60)]


def _covered(device: EmulatedDevice) -> list[np.ndarray]:
    """Operations one after the other on parts of one buffer that overlap, as those of a split group: what each has brought."""
    kernels = _kernels(device)
    arithmetic, mirrors = kernels.arithmetic, kernels.arithmetic.mirrors()
    buffer = _upload(kernels, np.zeros(64))
    mirrors.cover(buffer)
    found = []
    for step, (middle, end) in enumerate(_PARTS):
        sent, received = buffer[:middle], buffer[middle:end]
        arithmetic.fill(sent, float(step + 1))  # packs, behind what the operation before has brought
        leaving, arriving = mirrors.mirror(sent), mirrors.mirror(received)
        transit = mirrors.leave([(leaving, sent)] if middle else [])
        while not transit.on_host():
            pass
        arriving[:] = leaving[0] * 10 if middle else (step + 1) * 10
        mirrors.arrive(transit, received, [(0, received.size)])
        found.append(empty(kernels, (received.size,), "float64"))
        arithmetic.copy(found[-1], received)  # unpacks
    assert mirrors.pinned_bytes == buffer.nbytes
    return [take(kernels, kept) for kept in found]


@pytest.mark.parametrize("seed", range(20))
def test_arrays_inside_of_one_that_is_covered_share_its_mirror(seed: int, emulated_device: EmulatedDeviceFactory) -> None:
    for step, (found, (middle, end)) in enumerate(zip(_covered(emulated_device(seed)), _PARTS, strict=True)):
        np.testing.assert_array_equal(found, np.full(end - middle, 10.0 * (step + 1)))


def test_each_wait_of_a_shared_mirror_matters(emulated_device: EmulatedDeviceFactory) -> None:
    device = emulated_device(0)
    _covered(device)
    places: dict[str, list[int]] = {}
    for number, text in enumerate(device.waits):
        if "mirrors" in text:
            places.setdefault(text.partition(" waits for ")[0] + text.rpartition(" at ")[2], []).append(number)
    assert len(places) == 5, f"three of streams, and two of the host: {sorted(places)}"

    def wrong(seed: int, number: int) -> bool:
        found = _covered(emulated_device(seed, ignored_wait=number))
        return any(not np.array_equal(part, np.full(part.size, 10.0 * (step + 1))) for step, part in enumerate(found))

    for place, numbers in places.items():
        assert any(wrong(seed, number) for seed in range(8) for number in numbers), place


def test_bfloat16_travels_as_its_bits(emulated_device: EmulatedDeviceFactory) -> None:
    mirrors = _kernels(emulated_device()).arithmetic.mirrors()
    assert isinstance(mirrors, CudaMirrors)
    array = empty(_kernels(emulated_device()), (3,), "bfloat16")
    assert mirrors.mirror(array).dtype == np.uint16
