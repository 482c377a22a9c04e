"""The course of one rank: who speaks, and with which exit code. Whole jobs are in tests/cli/test_doctor.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpctrain.doctor import run
from hpctrain.doctor.job import STARTS, Progression
from hpctrain.doctor.run import DoctorRank
from hpctrain.doctor.watch import RankEnd
from hpctrain.errors import ConfigError
from hpctrain.launch.launcher import Launcher
from hpctrain.speaker import place


@pytest.fixture
def rank_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., DoctorRank]:
    """A rank of four on two nodes, which waits for nobody."""
    monkeypatch.setattr(run, "LATER_SECONDS", 0.0)

    def make(rank: int, read: Any = None) -> DoctorRank:
        launcher = Launcher("MPICH hydra mpiexec", 4, rank, 2, rank % 2, "PMI_RANK")
        return DoctorRank(launcher, read, None, False, False, 5.0, 0.0)

    return make


@pytest.mark.parametrize(("rank", "spoken"), [(0, 0), (1, 0), (2, 1), (3, 0)])
def test_the_first_rank_of_each_other_node_says_how_it_ended(
    rank_of: Callable[..., DoctorRank], capsys: pytest.CaptureFixture[str], rank: int, spoken: int
) -> None:
    assert rank_of(rank).explain(RankEnd(-11, "", Progression(STARTS, {}))) == 2
    printed = capsys.readouterr()
    assert printed.err.count("was ended by SIGSEGV while it was starting MPI") == spoken
    assert printed.out.count("A training would not run well here: 1 fault") == (rank == 0)


def test_an_end_after_the_report_leaves_the_report_alone(
    rank_of: Callable[..., DoctorRank], capsys: pytest.CaptureFixture[str]
) -> None:
    assert rank_of(0).explain(RankEnd(None, "", Progression("ending MPI", {}, concluded=True))) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == f"hpctrain: {place(0)}After its report, the doctor did not end while it was ending MPI.\n"


def test_a_fault_of_the_configuration_is_kept_until_all_ranks_can_say_it(rank_of: Callable[..., DoctorRank]) -> None:
    def read() -> None:
        raise ConfigError("x.yaml: It is wrong; mend it.")

    rank = rank_of(0, read)
    assert isinstance(rank._configuration(), ConfigError)
    with pytest.raises(ConfigError, match="It is wrong"):
        run._refuse(rank._configuration())
    run._refuse(None)


def test_a_rank_is_the_launchers_until_there_is_a_world(rank_of: Callable[..., DoctorRank]) -> None:
    assert rank_of(3).rank() == 3
    rank_of(3).abort(2)  # there is nobody to end
    assert Path("runs") == run._DEFAULT_DIRECTORY
