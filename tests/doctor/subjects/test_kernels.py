"""Kernel sets of nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.doctor.check import OwnPlace
from hpctrain.doctor.subjects import kernels
from hpctrain.doctor.subjects.kernels import KernelFacts
from hpctrain.launch.launcher import Launcher
from tests.support.doctored import configuration, view

FAST = KernelFacts("onednn")
SLOW = KernelFacts("numpy", "The oneDNN library cannot be loaded (no file); install onednn-cpu-gomp or set X.")


@pytest.mark.parametrize(
    ("facts", "overrides", "key"),
    [
        ([FAST, None, FAST, None], [], ""),
        ([SLOW, None, SLOW, None], [], "slow-kernels"),
        ([FAST, None, SLOW, None], [], "unlike-kernels"),
        ([FAST, None, SLOW, None], ["backend=onednn"], "no-onednn"),
    ],
)
def test_nodes_without_onednn_are_named(facts: list[KernelFacts | None], overrides: list[str], key: str) -> None:
    [found] = kernels.judge(view(2, 2, config=configuration(*overrides)), facts)
    assert found.key == key
    if key:
        assert found.mend == "Install onednn-cpu-gomp or set X."
        assert ("(nid1)" in found.sentence) == (facts[0] is FAST)


@pytest.mark.parametrize(
    ("overrides", "facts"),
    [
        (["backend=numpy"], KernelFacts("numpy")),
        (["backend=cuda"], KernelFacts("cuda")),
        (["dtype=float64"], KernelFacts("numpy")),
    ],
)
def test_the_configuration_decides(overrides: list[str], facts: KernelFacts) -> None:
    assert kernels.gather(OwnPlace(Launcher("none"), configuration(*overrides), Path("runs"))) == facts


def test_the_library_is_asked_once_per_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "available", lambda: "There is none.")
    assert kernels.gather(OwnPlace(Launcher("none"), None, Path("runs"))) == KernelFacts("numpy", "There is none.")
    assert kernels.gather(OwnPlace(Launcher("x", 2, 1, 2, 1), None, Path("runs"))) is None
