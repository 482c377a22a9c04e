"""Places of a node that are written to."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from hpctrain.doctor.check import OwnPlace
from hpctrain.doctor.subjects import scratch
from hpctrain.doctor.subjects.scratch import ScratchFacts
from hpctrain.launch.launcher import Launcher
from tests.support.doctored import configuration, keys, view

ALONE = Launcher("none")
ROOM = ScratchFacts("/tmp", "", 0, 10**10)


@pytest.mark.parametrize(
    ("fact", "key", "mend"),
    [
        (ROOM, "", ""),
        (ScratchFacts("/local", "TMPDIR", errno.ENOENT, 0), "no-scratch", "export TMPDIR="),
        (ScratchFacts("/local", "TMPDIR", errno.EROFS, 0), "no-scratch", "export TMPDIR="),
        (ScratchFacts("/local", "TMPDIR", errno.ENOSPC, 0), "full-scratch", "Make room in /local"),
        (ScratchFacts("/local", "TMPDIR", 0, 10**6), "full-scratch", "Make room in /local"),
        (ScratchFacts("/dev/shm", "", 0, 10**6), "full-shared-memory", "Remove what"),
    ],
)
def test_each_place_is_judged_with_its_node(fact: ScratchFacts, key: str, mend: str) -> None:
    [found] = scratch.judge(view(2, 1), [[ROOM], None, [fact]])
    assert found.key == key
    assert found.mend.startswith(mend)
    assert ("of nid1" in found.sentence) == bool(key)


def test_the_first_variable_that_is_set_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    config = configuration(f"flight={tmp_path}/flights")
    places = scratch.gather(OwnPlace(ALONE, config, Path("runs")))
    assert places is not None
    assert (places[0].path, places[0].variable, places[0].error) == (str(tmp_path), "TMPDIR", 0)
    assert (places[-1].path, places[-1].variable) == (str(tmp_path), "flight")
    assert places[0].free_bytes > 0
    monkeypatch.setenv("SLURM_TMPDIR", str(tmp_path / "nowhere"))
    places = scratch.gather(OwnPlace(ALONE, None, Path("runs")))
    assert places is not None
    assert (places[0].variable, places[0].error) == ("SLURM_TMPDIR", errno.ENOENT)
    assert keys(scratch.judge(view(1), [places]))[0] == "no-scratch"
    assert list(tmp_path.iterdir()) == []
    assert scratch.gather(OwnPlace(Launcher("x", 2, 1, 2, 1), None, Path("runs"))) is None
