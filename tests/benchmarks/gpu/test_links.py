"""The stage of NCCL with one rank, on the emulated device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import links
from benchmarks.gpu.settings import Settings, SkippedError
from benchmarks.gpu.stage_report import StageReport
from hpctrain.backend.kernels.cuda.messages import CudaMessages
from hpctrain.comm import device_probe
from hpctrain.comm.progress import ProgressEngine
from hpctrain.comm.single import Complete
from tests.support.emulated import CudaKernelsFactory


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StageReport:
    monkeypatch.setattr(device_probe, "trial", lambda: "unaware: no driver")
    return StageReport(tmp_path / "stage.json", "links", "emulated")


@pytest.mark.usefixtures("emulated_device")
def test_all_operations_are_checked(report: StageReport, tmp_path: Path) -> None:
    links.run(Settings("emulated", tmp_path), report)
    names = [check["name"] for check in report.content["checks"]]
    kinds = ("allreduce", "reduce-scatter", "allgather", "allgather in place", "broadcast", "all-to-all")
    assert names == ["this rank has a GPU of its own", *(f"NCCL with one rank: {kind}" for kind in kinds)]
    assert all(check["passed"] for check in report.content["checks"])
    assert report.content["mpi"] == "unaware: no driver"


def test_an_operation_that_brings_nothing_fails(report: StageReport, cuda_kernels: CudaKernelsFactory) -> None:
    def abort(code: int) -> None:
        raise SystemExit(code)

    engine = ProgressEngine(rank=0, deadline_seconds=20.0, abort=abort)
    links.check("nothing", lambda send, recv: Complete(), cuda_kernels("float32"), engine, report)
    (check,) = report.content["checks"]
    assert (check["passed"], check["text"]) == (False, "0.0 to 0.0 of 10.0")


@pytest.mark.usefixtures("emulated_device")
def test_a_machine_without_nccl_says_so(report: StageReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(messages: Any) -> str:
        return "CuPy finds no NCCL"

    monkeypatch.setattr(CudaMessages, "group_fault", missing)
    with pytest.raises(SkippedError, match="CuPy finds no NCCL"):
        links.run(Settings("emulated", tmp_path), report)
