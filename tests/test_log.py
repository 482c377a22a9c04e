"""The package's log: all of rank 0's, and what matters of the others with their rank."""

from __future__ import annotations

import logging

import pytest

from hpctrain.log import configure, get_logger
from hpctrain.speaker import place


@pytest.fixture(autouse=True)
def _unchanged() -> object:
    root = logging.getLogger("hpctrain")
    state = root.handlers[:], root.level, root.propagate
    yield
    root.handlers[:], root.propagate = state[0], state[2]
    root.setLevel(state[1])


@pytest.mark.parametrize("rank", [0, 3])
def test_rank_0_says_all_and_others_what_matters(rank: int, capsys: pytest.CaptureFixture[str]) -> None:
    configure(rank)
    configure(rank)  # again: still one line per event
    log = get_logger("hpctrain.some.module")
    log.info("a detail")
    log.warning("a worry")
    lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition(" a ")[2] for line in lines] == (["detail", "worry"] if rank == 0 else ["worry"])
    assert all(line.startswith(place(3)) == (rank == 3) for line in lines)
