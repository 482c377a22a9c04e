"""The run directory: probes that leave nothing behind, and what their outcome means."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpctrain.doctor.check import OwnPlace
from hpctrain.doctor.subjects import directories
from hpctrain.doctor.subjects.directories import DirectoryFacts
from hpctrain.launch.launcher import Launcher
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual
from tests.support.doctored import view

ALONE = Launcher("none")


def test_a_directory_is_tried_where_it_will_be_made(tmp_path: Path) -> None:
    facts = directories.gather(OwnPlace(ALONE, None, tmp_path / "not" / "yet"))
    assert facts is not None
    assert (facts.directory, facts.error, facts.matches) == (str(tmp_path), 0, True)
    assert list(tmp_path.iterdir()) == []
    assert directories.gather(OwnPlace(Launcher("x", 2, 1, 2, 1), None, tmp_path)) is None


def test_a_file_that_reads_otherwise_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directories, "write_bytes", lambda path, content: path.write_bytes(content[:-1]))
    facts = directories.gather(OwnPlace(ALONE, None, tmp_path))
    assert facts is not None
    assert directories.judge(view(1), [facts])[0].key == "read-back"


def test_a_file_in_the_way_is_an_error_of_the_system(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    facts = directories.gather(OwnPlace(ALONE, None, tmp_path / "file"))
    assert facts is not None
    assert facts.error == errno.ENOTDIR


@pytest.mark.parametrize(
    ("facts", "key", "mend"),
    [
        (DirectoryFacts("/d", errno.EROFS), "run-directory", "Train with output=DIR"),
        (DirectoryFacts("/d", errno.EACCES), "run-directory", "Train with output=DIR"),
        (DirectoryFacts("/d", errno.ENOSPC), "run-directory", "Make room"),
        (DirectoryFacts("/d", 0, True, 9.0), "slow-run-directory", "Put `output`"),
        (DirectoryFacts("/d", 0, True, 0.1), "", ""),
    ],
)
def test_outcomes_are_judged(facts: DirectoryFacts, key: str, mend: str) -> None:
    [found] = directories.judge(view(1, 1), [facts, None])
    assert found.key == key
    assert found.mend.startswith(mend)
    if facts.error:
        assert os.strerror(facts.error) in found.sentence


@pytest.mark.parametrize("blind", [(), (1,), (1, 2)])
def test_nodes_that_do_not_see_the_directory_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blind: tuple[int, ...]
) -> None:
    monkeypatch.setattr(directories, "_LOOKS", 1)

    def program(comm: ThreadCommunicator) -> bool | None:
        place = OwnPlace(Launcher("x", 3, comm.rank, 1, 0), None, tmp_path)
        node = SimpleNamespace(rank=0)
        joined: Any = SimpleNamespace(world=comm, node=node, own=place)
        if comm.rank in blind:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(directories, "_sees", lambda path: False)
                return directories.gather_shared(joined)
        return directories.gather_shared(joined)

    if blind:
        facts: list[bool | None] = [rank not in blind for rank in range(3)]
    else:
        facts = run_virtual(3, program)
    [found] = directories.judge_shared(view(1, 1, 1), facts)
    assert found.key == ("not-shared" if blind else "")
    assert all((f"nid{rank}" in found.sentence) == (rank in blind) for rank in (0, 1, 2))
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_said_of_sharing_where_nothing_can_be_written() -> None:
    assert "cannot write" in directories.judge_shared(view(1, 1), [None, None])[0].sentence
