"""Unlike packages and files of nodes, on virtual ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpctrain.doctor.check import OwnPlace
from hpctrain.doctor.subjects import versions
from hpctrain.experiment import same_start
from hpctrain.launch.launcher import Launcher
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual
from tests.support.doctored import view

PLACE = OwnPlace(Launcher("x", 3, 0, 1, 0), None, Path("runs"))


def gathered(ranks: int) -> list[tuple[str, str]]:
    def program(comm: ThreadCommunicator) -> tuple[str, str]:
        place: Any = SimpleNamespace(world=comm, own=PLACE)
        return versions.gather(place)

    return run_virtual(ranks, program)


def test_nodes_that_are_alike_show_their_versions() -> None:
    [found] = versions.judge(view(1, 1, 1), gathered(3))
    assert found.key == ""
    assert found.sentence.startswith("The same on all ranks: python 3.")


@pytest.mark.parametrize(
    ("kind", "mend"),
    [
        ("software_versions", "Give all nodes the same environment."),
        ("package_files", "Install the same version of it on all nodes."),
    ],
)
def test_a_node_that_differs_is_named_with_rank_and_host(monkeypatch: pytest.MonkeyPatch, kind: str, mend: str) -> None:
    calls: list[int] = []

    def facts(*_: object) -> dict[str, int]:
        calls.append(1)
        return {"numpy": 2 if len(calls) == 3 else 1}

    monkeypatch.setattr(same_start, kind, facts)
    [found] = versions.judge(view(1, 1, 1), gathered(3))
    assert (found.key, found.mend) == ("mismatch", mend)
    assert "numpy" in found.sentence
    assert "(rank " in found.sentence
    assert "is on nid" in found.sentence
