"""GPUs of nodes and MPI's messages from them, from made-up facts: there is none on the machine of the tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.doctor.check import OwnPlace
from hpctrain.doctor.findings import Severity
from hpctrain.doctor.subjects import gpu
from hpctrain.doctor.subjects.gpu import AWARE, UNAWARE, GpuFacts
from hpctrain.launch.launcher import Launcher
from tests.support.doctored import configuration, keys, view

CRAY = "MPICH ERROR [Rank 0]: MPIDI_CRAY_init: GPU_SUPPORT_ENABLED is requested, but GTL library is not linked"


def test_nodes_without_gpus_are_well() -> None:
    assert gpu.judge(view(2), [GpuFacts()] * 2)[0].sentence == "No node shows a GPU."


def test_gpus_are_counted_by_node() -> None:
    facts = [GpuFacts(("0", "1"), probe=AWARE), GpuFacts(("0", "1")), GpuFacts(("0",))]
    [found] = gpu.judge(view(2, 1), facts)
    assert (found.key, found.sentence) == ("", "GPUs per node: 1 to 2; MPI takes messages from their memory (transport mpi).")


def test_crays_missing_library_is_named_with_its_cure() -> None:
    [found] = gpu.judge(view(2), [GpuFacts(("0",), probe=CRAY), GpuFacts(("0",))])
    assert (found.key, found.severity) == ("no-gtl", Severity.FAULT)
    assert "export MPICH_GPU_SUPPORT_ENABLED=0" in found.mend
    assert gpu.from_start("all is well") is None


@pytest.mark.parametrize(
    ("facts", "key"),
    [
        ([GpuFacts(("0", "1"))] * 3, "too-few-gpus"),
        ([GpuFacts()] * 3, "too-few-gpus"),
        ([GpuFacts(("0",), True), GpuFacts(("1",), True), GpuFacts(("0",), True)], "too-few-gpus"),
        ([GpuFacts(tuple("0123"))] * 3, ""),
        ([GpuFacts((name,), True) for name in "012"], ""),
        ([GpuFacts(("0",), True)] * 3, ""),  # each may be shown its own by that number
        ([GpuFacts(("0",))], ""),
    ],
)
def test_backend_cuda_needs_a_gpu_for_each_rank(facts: list[GpuFacts], key: str) -> None:
    [found] = gpu.judge(view(len(facts), config=configuration("backend=cuda")), facts)
    assert found.key == key
    assert keys(gpu.judge(view(len(facts), config=configuration("backend=numpy")), facts)) == [""]


def test_an_mpi_that_takes_no_gpu_memory_is_a_remark_with_the_reason() -> None:
    [found] = gpu.judge(view(1), [GpuFacts(("0",), probe=f"{UNAWARE}: Segmentation fault")])
    assert (found.key, found.severity) == ("not-gpu-aware", Severity.REMARK)
    assert "on nid0: Segmentation fault." in found.sentence


@pytest.mark.parametrize(("visible", "names"), [("0,1", ("0", "1")), ("", ()), ("GPU-12ab, 3", ("GPU-12ab", "3"))])
def test_the_environment_names_the_gpus(visible: str, names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.delenv("MPICH_GPU_SUPPORT_ENABLED", raising=False)
    follower = OwnPlace(Launcher("x", 2, 1, 2, 1), None, Path("runs"))  # who starts no process
    assert gpu.gather(follower) == GpuFacts(names, True)
