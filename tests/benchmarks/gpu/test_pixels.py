"""The stage of stored pixels, on the emulated device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.gpu import pixels
from benchmarks.gpu.kernels import kernel_set
from benchmarks.gpu.pixels import Sizes, add_rate, check_bits, pixel_batch
from benchmarks.gpu.stage_report import StageReport
from hpctrain.backend.cuda.device import Precision
from hpctrain.backend.pixel_batch import PixelBatch
from tests.support.emulated import EmulatedDeviceFactory

SIZES = Sizes(9, 7, 4, 2)


@pytest.fixture
def report(tmp_path: Path) -> StageReport:
    return StageReport(tmp_path / "stage.json", "pixels", "emulated")


@pytest.mark.parametrize("precision", ["float64", "float32", "bfloat16"])
def test_bits_are_compared_and_a_rate_is_told(
    emulated_device: EmulatedDeviceFactory, report: StageReport, precision: Precision
) -> None:
    kernels = kernel_set(emulated_device(2), precision)
    check_bits(kernels, SIZES, report)
    add_rate(kernels, SIZES, report)
    assert [check["passed"] for check in report.content["checks"]] == [True] * 6
    for left in ("windows", "resized windows"):
        assert report.content[f"images per second of {left} {precision}"] > 0


def test_one_wrong_element_is_seen(
    emulated_device: EmulatedDeviceFactory, report: StageReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = PixelBatch.__array__

    def wrong(batch: PixelBatch, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        images = made(batch, dtype, copy)
        images[0, 0, 0, 0] += 1
        return images

    monkeypatch.setattr(PixelBatch, "__array__", wrong)
    check_bits(kernel_set(emulated_device(2), "float32"), SIZES, report)
    assert [check["text"] for check in report.content["checks"]] == [f"1 of {4 * 7 * 7 * 3} elements differ"] * 6


def test_windows_show_what_they_should() -> None:
    """Every second image is mirrored, and no window leaves its image."""
    batch = pixel_batch(pixels._SMALL_SIZES, 3, "float64")
    plain = np.asarray(PixelBatch(batch.pixels, batch.windows, batch.size, np.ones(3), np.zeros(3), 0.5))
    for number, (image, window) in enumerate(zip(batch.pixels, batch.windows, strict=True)):
        top, left = int(window["top"]), int(window["left"]) - (0 if number % 2 else batch.size[1] - 1)
        shown = image[top : top + batch.size[0], left : left + batch.size[1]].astype(float)
        shown = shown if number % 2 else shown[:, ::-1]
        (above, below), (before, behind) = window["filled"].tolist()
        shown[above:below, before:behind] = 0.5
        np.testing.assert_array_equal(plain[number], shown)
