"""All 2^32 float32 numbers rounded to bfloat16 on a device: by its own instruction and by integers, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np

from benchmarks.gpu.stage_report import StageReport
from hpctrain.backend.cuda import sources
from hpctrain.backend.cuda.device import Device, DeviceArray, DeviceKernel, bfloat16_bits, bfloat16_values

SOURCE = Path(__file__).with_name("roundings.cu")
_NAME, _THREADS = "compare_roundings", 256
#: bit patterns around everything that rounds in its own way: zeros, subnormals, ties, carries, the largest number, infinity, NaN
_CORNERS = (0x0, 0x7FFF, 0x8000, 0x8001, 0x18000, 0x7FFFFF, 0x800000, 0x3F808000, 0x3F818000, 0x7F7F7FFF, 0x7F7F8000, 0x7F800000)
_CORNERS += (0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0x80000000, 0x80008000, 0xFF7FFFFF, 0xFF800000, 0xFFFFFFFF)
_STRETCH = 1 << 12  # patterns around a corner, on the emulated device


def check_roundings(device: Device, emulated: bool, report: StageReport) -> None:
    """Compare all 2^32 patterns in one launch on a GPU, and ranges around corners on the emulated device."""
    if emulated:
        stretches = [(max(0, min(corner - _STRETCH // 2, (1 << 32) - _STRETCH)), _STRETCH) for corner in _CORNERS]
    else:
        stretches = [(0, 1 << 32)]
    kernel, blocks = rounding_kernel(device), 8 * device.multiprocessors
    total, example = 0, -1
    for first, count in stretches:
        different, pattern = count_differences(device, kernel, first, count, blocks)
        total, example = total + different, max(example, pattern)
    checked = sum(count for _, count in stretches)
    text = f"{total} of {checked} differ" + (f", such as {example:#010x}" if total else "")
    report.check("roundings to bfloat16 by instruction and by integers", total == 0, text)
    report.check("roundings by integers and by NumPy", _agrees_with_numpy(), f"{len(_CORNERS)} corners")
    report.note(f"{checked} roundings")


def count_differences(device: Device, kernel: DeviceKernel, first: int, count: int, blocks: int) -> tuple[int, int]:
    """(how many patterns of [first, first + count) differ, one of them or -1)."""
    stream, threads = device.stream("roundings"), blocks * _THREADS
    arrays = [device.allocate(8 * threads).view("int64") for _ in range(2)]
    kernel(stream, (blocks,), (_THREADS,), np.int64(first), np.int64(count), *arrays)
    counts, patterns = (_download(device, stream, array) for array in arrays)
    return int(counts.sum()), int(patterns.max())


def _download(device: Device, stream: Any, array: DeviceArray) -> np.ndarray:
    host = device.pinned(array.nbytes)
    device.download(stream, host, array)
    stream.synchronize()
    return host.view(np.int64)


def rounding_kernel(device: Device) -> DeviceKernel:
    """Return the kernel of this folder's source, built as the package builds its own."""
    return cast(Any, device).kernel(SOURCE.stem, _NAME, text=sources.text(SOURCE.stem, SOURCE.parent))


def _agrees_with_numpy() -> bool:
    """NumPy's rounding, with which tests on this CPU compare, against the definition: the nearest, of two the even one."""
    patterns = np.array([corner for corner in _CORNERS if corner & 0x7FFFFFFF < 0x7F7F8000], np.uint32)
    values = patterns.view(np.float32).astype(np.float64)
    bits = bfloat16_bits(patterns.view(np.float32))
    candidates = np.stack([bits - 1, bits, bits + 1]).astype(np.uint16)
    distances = np.abs(bfloat16_values(candidates).astype(np.float64).reshape(candidates.shape) - values)
    nearest = np.nan_to_num(distances, nan=np.inf).min(axis=0) == distances[1]
    even = (distances[1] < np.minimum(distances[0], distances[2])) | (bits % 2 == 0)
    return bool((nearest & even).all())
