"""Figures of GPUs that predictions are computed from: what their data sheets say, and what was measured on one of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: shares of the data sheet's figures that an H100's copy and large product reach; assumed for the A100, which was not measured
_COPY_SHARE, _PRODUCT_SHARE = 3.0 / 3.35, 798.0 / 989.4


@dataclass(frozen=True)
class DeviceFigures:
    """One kind of GPU.

    sheet_bandwidth: bytes per second. sheet_flops: FLOP per second without sparsity, by precision.
    copy_bandwidth: bytes read and written per second by a copy within the device. product_share: of `sheet_flops` that a large
    matrix product reaches. sources: of these figures.
    """

    name: str
    sheet_bandwidth: float
    sheet_flops: dict[str, float]
    copy_bandwidth: float
    product_share: float
    sources: tuple[str, ...]

    def product_flops(self, precision: str) -> float:
        """FLOP per second of a large matrix product."""
        return self.sheet_flops[precision] * self.product_share

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "name": self.name,
            "sheet_bandwidth": self.sheet_bandwidth,
            "sheet_flops": self.sheet_flops,
            "copy_bandwidth": self.copy_bandwidth,
            "product_share": self.product_share,
            "sources": list(self.sources),
        }


_MEASURED = "measured with PyTorch 2.11: copy of 4 GB counting bytes read and written, bfloat16 product of 8192 x 8192 x 8192"

DEVICES = {
    "h100": DeviceFigures(
        "H100 SXM 80 GB",
        3.35e12,
        {"bfloat16": 989.4e12, "tf32": 494.7e12, "float32": 66.9e12},
        3.0e12,
        _PRODUCT_SHARE,
        ("NVIDIA H100 Tensor Core GPU data sheet (SXM5)", f"3.0 TB/s and 798 TFLOP/s {_MEASURED}"),
    ),
    "h200": DeviceFigures(
        "H200 SXM 141 GB",
        4.8e12,
        {"bfloat16": 989.4e12, "tf32": 494.7e12, "float32": 66.9e12},
        4.3e12,
        790.0 / 989.4,
        ("NVIDIA H200 Tensor Core GPU data sheet (SXM)", f"4.3 TB/s and 790 TFLOP/s {_MEASURED}"),
    ),
    "a100": DeviceFigures(
        "A100 SXM 80 GB",
        2.039e12,
        {"bfloat16": 312e12, "tf32": 156e12, "float32": 19.5e12},
        2.039e12 * _COPY_SHARE,
        _PRODUCT_SHARE,
        (
            "NVIDIA A100 Tensor Core GPU data sheet (SXM, 80 GB)",
            "copy and product: the H100's shares of its data sheet, not measured",
        ),
    ),
}


@dataclass(frozen=True)
class Assumptions:
    """What a prediction assumes.

    The first three are fitted to steps of ResNet-50 (8, 32 and 256 images) and ResNet-18 (128 images) on an H100. A kernel takes
    the longer of loading and computing, as if the two overlapped wholly.

    copy_share: share of a copy's bandwidth that kernels reach. product_share: share of a large product's rate that convolutions
    reach. device_launch_seconds: cost of a kernel on the device in addition to its work, in a CUDA graph or not.
    host_launch_seconds: time to enqueue one kernel from Python. graph_launch_seconds: time to launch a graph.
    """

    copy_share: float = 0.95
    product_share: float = 0.6
    device_launch_seconds: float = 3.5e-6
    host_launch_seconds: float = 18e-6
    graph_launch_seconds: float = 2e-6
