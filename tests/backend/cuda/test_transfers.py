"""Mirrors, marks and stored pixels: the bits of the host, no wait too few, and memory that is bounded and made once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from hpctrain.backend.cuda.device import DeviceArray
from hpctrain.backend.cuda.kernel_set import CudaKernelSet
from hpctrain.backend.cuda.pixel_input import RING
from hpctrain.backend.pixels import WINDOW, PixelBatch, Resampling
from hpctrain.comm.base import SingleCommunicator
from hpctrain.testing.operators import empty, put, take
from hpctrain_testing.emulator.device import EmulatedDevice
from hpctrain_testing.emulator.memory import EmulatedDeviceError
from tests.support.emulated import CudaKernelsFactory, EmulatedDeviceFactory, kernels_on
from tests.support.rounded import rounded


def _upload(kernels: CudaKernelSet, values: np.ndarray) -> DeviceArray:
    array: DeviceArray = empty(kernels, values.shape, "float64")
    put(kernels, array, values)
    return array


def _program(device: EmulatedDevice) -> np.ndarray:
    """Operations as averaging has them: a slice leaves after a kernel, the host replaces it, and kernels read what arrives."""
    kernels = kernels_on(device)
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


def _waits(device: EmulatedDevice) -> dict[str, list[int]]:
    """The numbers of the waits of mirrors at each place of the program."""
    places: dict[str, list[int]] = {}
    for number, text in enumerate(device.waits):
        if "CudaMirrors" in text or "CudaTransit" in text:
            places.setdefault(text.partition(" waits for ")[0] + text.rpartition(" at ")[2], []).append(number)
    assert len(places) == 5, f"three of streams, and two of the host: {sorted(places)}"
    return places


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
    for place, numbers in _waits(device).items():
        trials = ((seed, number) for seed in range(8) for number in numbers)
        wrong = (not np.array_equal(_program(emulated_device(seed, ignored_wait=n)), expected) for seed, n in trials)
        assert any(wrong), place


#: of the shared buffer: where what leaves ends, and where what arrives does; some ranks only receive
_PARTS = [(20, 40), (0, 60), (5, 64), (0, 40), (0, 60), (50, 60)]


def _covered(device: EmulatedDevice) -> list[np.ndarray]:
    """Operations one after the other on parts of one buffer that overlap, as those of a split group: what each has brought."""
    kernels = kernels_on(device)
    arithmetic, mirrors = kernels.arithmetic, kernels.arithmetic.mirrors()
    buffer = _upload(kernels, np.zeros(64))
    mirrors.cover(buffer)
    found = []
    for step, (middle, end) in enumerate(_PARTS):
        sent, received = buffer[:middle], buffer[middle:end]
        arithmetic.fill(sent, float(step + 1))  # packs, after what the operation before has brought
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

    def wrong(seed: int, number: int) -> bool:
        found = _covered(emulated_device(seed, ignored_wait=number))
        return any(not np.array_equal(part, np.full(part.size, 10.0 * (step + 1))) for step, part in enumerate(found))

    for place, numbers in _waits(device).items():
        assert any(wrong(seed, number) for seed in range(8) for number in numbers), place


def test_events_are_used_again_once_they_are_done(emulated_device: EmulatedDeviceFactory) -> None:
    device = emulated_device(0)
    kernels = kernels_on(device)
    messages = kernels.arithmetic.messages()
    first = messages.mark()
    event = first._event
    others = [messages.mark() for _ in range(3)]
    assert len({id(mark._event) for mark in (first, *others)}) == 4, "an event of work that may not be done"
    while not first.done:
        pass
    assert messages.mark()._event is event
    assert kernels.arithmetic.messages() is messages


def test_groups_of_a_process_share_one_stream(emulated_device: EmulatedDeviceFactory) -> None:
    """Of one rank: sums and broadcasts leave what they have."""
    device = emulated_device(1)
    kernels = kernels_on(device)
    messages, array = kernels.arithmetic.messages(), empty(kernels, (5,), "float64")
    put(kernels, array, np.arange(5.0))
    first, second = (messages.join(SingleCommunicator()) for _ in range(2))
    assert first._stream is second._stream
    for links in (first, second):
        messages.wait_for_kernels()
        links.sum_to_all(array)
        links.broadcast(array, 0)
        assert links.fault() is None
        mark = messages.mark_links()
        while not mark.done:
            pass
    np.testing.assert_array_equal(take(kernels, array), np.arange(5.0))
    assert messages.group_fault() is None
    assert messages.identity == device.identity


#: (H, W, C) stored, (H, W) of results
SHAPES = [((5, 6, 3), (5, 6)), ((4, 3, 1), (2, 3)), ((5, 8, 4), (4, 8)), ((3, 40, 5), (3, 40))]

#: (H, W) of results, one after another
GROWING = ((3, 3), (5, 6), (9, 8), (3, 3))


def _interval(random: np.random.Generator, low: int, high: int) -> tuple[int, int]:
    start, stop = sorted(random.integers(low, high + 1, 2).tolist())
    return start, stop


def _batch(seed: int, count: int, stored: tuple[int, int, int], size: tuple[int, int], dtype: str = "float64") -> PixelBatch:
    """Windows at random, all that they show inside of their images."""
    random = np.random.default_rng(seed)
    windows = np.zeros(count, WINDOW)
    for window in windows:
        top, step = int(random.integers(-2, 3)), int(random.choice([-1, 1]))
        left = int(random.integers(-2, 3)) + (stored[1] - 1 if step < 0 else 0)
        window["top"], window["left"], window["step"] = top, left, step
        above, below = max(0, -top), max(0, min(size[0], stored[0] - top))
        inside = [x for x in range(size[1]) if 0 <= left + step * x < stored[1]]
        window["shown"] = (min(above, below), below), (inside[0], inside[-1] + 1) if inside else (0, 0)
        window["filled"] = _interval(random, 0, size[0]), _interval(random, 0, size[1])
    scale, shift = (random.standard_normal(stored[2]).astype(dtype) for _ in range(2))
    return PixelBatch(random.integers(0, 256, (count, *stored), np.uint8), windows, size, scale, shift, float(random.normal()))


def _made(kernels: CudaKernelSet, batch: PixelBatch, dtype: str) -> np.ndarray:
    target = kernels.arithmetic.zeros(int(np.prod(batch.shape)), dtype).reshape(batch.shape)
    kernels.make_input(target, batch)
    return kernels.arithmetic.to_host(target)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("shapes", SHAPES)
def test_the_bits_of_the_host(
    cuda_kernels: CudaKernelsFactory, shapes: tuple[tuple[int, int, int], tuple[int, int]], dtype: str
) -> None:
    for seed in range(3):
        kernels = cuda_kernels(seed=seed)
        for count in (3, 1, 0, 4):
            batch = _batch(seed + count, count, *shapes, "float64" if dtype == "float64" else "float32")
            np.testing.assert_array_equal(_made(kernels, batch, dtype), rounded(np.asarray(batch), dtype))


def _resized_batch(
    seed: int, stored: tuple[int, int, int], size: tuple[int, int], *, interpolates: bool, dtype: str
) -> PixelBatch:
    """Parts at random resized to `size`, whose windows are as in `_batch`."""
    batch, random = _batch(seed, 5, (*size, stored[2]), size, dtype), np.random.default_rng(seed + 100)
    extents = np.stack([random.integers(1, length + 1, 5) for length in stored[:2]], axis=1)
    extents[0] = stored[:2]
    corners = (random.random((5, 2)) * (np.array(stored[:2]) - extents + 1)).astype(np.int64)
    boxes = np.concatenate([corners, extents], axis=1).astype(np.int32)
    pixels = random.integers(0, 256, (5, *stored), np.uint8)
    if seed % 2:
        pixels = np.where(pixels > 127, 255, 0).astype(np.uint8)
    return replace(batch, pixels=pixels, resampling=Resampling(boxes, size, interpolates))


@pytest.mark.parametrize("interpolates", [True, False])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize(
    ("stored", "size"),
    [((9, 7, 3), (6, 6)), ((5, 6, 1), (12, 13)), ((20, 33, 3), (8, 16)), ((1, 2, 4), (3, 3)), ((40, 3, 3), (7, 8))],
)
def test_resized_images_have_the_bits_of_the_host(
    cuda_kernels: CudaKernelsFactory, stored: tuple[int, int, int], size: tuple[int, int], dtype: str, *, interpolates: bool
) -> None:
    """Parts that shrink, grow and do both, in one batch; windows of them mirrored, beyond their edges and filled."""
    for seed in range(3):
        kernels = cuda_kernels(seed=seed)
        host_dtype = "float64" if dtype == "float64" else "float32"
        batch = _resized_batch(seed, stored, size, interpolates=interpolates, dtype=host_dtype)
        for part in (batch, batch[1:3], batch[np.array([4, 0])]):
            np.testing.assert_array_equal(_made(kernels, part, dtype), rounded(np.asarray(part), dtype))


def _alike() -> list[PixelBatch]:
    return [_batch(number, 2, (4, 5, 2), (4, 5)) for number in range(2 * RING + 1)]


def _growing() -> list[PixelBatch]:
    """Resized images whose tables of taps become larger, and smaller again."""
    sizes = enumerate(GROWING)
    return [_resized_batch(seed, (6, 7, 3), size, interpolates=True, dtype="float64") for seed, size in sizes]


def _several(device: EmulatedDevice, batches: list[PixelBatch]) -> list[np.ndarray]:
    """Input of batches that are overwritten at once, made while no wait for any is posted."""
    kernels = kernels_on(device)
    targets = []
    for batch in batches:
        targets.append(kernels.arithmetic.zeros(int(np.prod(batch.shape)), "float64").reshape(batch.shape))
        kernels.make_input(targets[-1], batch)
        batch.pixels[...] = 0
    kernels.wait()
    return [kernels.arithmetic.to_host(target) for target in targets]


@pytest.mark.parametrize("made", [_alike, _growing])
def test_batches_follow_each_other(emulated_device: EmulatedDeviceFactory, made: Callable[[], list[PixelBatch]]) -> None:
    expected = [np.asarray(batch) for batch in made()]
    for seed in range(10):
        device = emulated_device(seed)
        for found, values in zip(_several(device, made()), expected, strict=True):
            np.testing.assert_array_equal(found, values)
        device.finish()


def test_each_wait_of_the_ring_matters(emulated_device: EmulatedDeviceFactory) -> None:
    device = emulated_device()
    expected = _several(device, _alike())
    waits = [number for number, wait in enumerate(device.waits) if "pixel_input" in wait and "_grow" not in wait]
    kinds = {device.waits[number].partition(" for ")[0] + device.waits[number].rpartition(",")[2] for number in waits}
    assert len(kinds) == 3, kinds
    for number in waits:
        assert any(_is_wrong(emulated_device, seed, number, expected) for seed in range(30)), device.waits[number]


def _is_wrong(emulated_device: EmulatedDeviceFactory, seed: int, ignored: int, expected: list[np.ndarray]) -> bool:
    try:
        return not np.array_equal(_several(emulated_device(seed, ignored_wait=ignored), _alike()), expected)
    except EmulatedDeviceError:
        return True


def test_memory_is_made_once_and_for_larger_batches_again(cuda_kernels: CudaKernelsFactory) -> None:
    kernels = cuda_kernels()
    device = kernels.runtime.device
    pinned, make = [], device.pinned
    device.pinned = lambda size_bytes: pinned.append(size_bytes) or make(size_bytes)  # type: ignore[method-assign, func-returns-value]
    for count, made in ((2, RING), (1, RING), (2, RING), (3, 2 * RING), (2, 2 * RING)):
        batch = _batch(count, count, (4, 5, 3), (4, 5))
        np.testing.assert_array_equal(_made(kernels, batch, "float64"), np.asarray(batch))
        assert len(pinned) == made


def test_resized_batches_of_one_size_allocate_once(cuda_kernels: CudaKernelsFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, batch = cuda_kernels(), _resized_batch(0, (9, 7, 3), (6, 6), interpolates=True, dtype="float64")
    target = kernels.arithmetic.zeros(int(np.prod(batch.shape)), "float64").reshape(batch.shape)
    kernels.make_input(target, batch)
    monkeypatch.setattr(kernels.runtime.device, "allocate", None)
    kernels.make_input(target, batch)
