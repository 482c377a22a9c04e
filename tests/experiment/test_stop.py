"""What a run says of the signal that ended it: alike on every rank, with the ranks that had it."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest

from hpctrain.experiment.stop import StopReason, stop_reason
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual


@pytest.mark.parametrize(
    ("ranks", "signals", "sentence"),
    [
        (3, {}, None),
        (3, {0: signal.SIGTERM, 1: signal.SIGTERM, 2: signal.SIGTERM}, "SIGTERM"),
        (3, {1: signal.SIGINT}, "SIGINT on rank 1"),
        (
            8,
            {0: signal.SIGTERM, 1: signal.SIGTERM, 2: signal.SIGTERM, 5: signal.SIGTERM, 6: signal.SIGINT},
            "SIGTERM on ranks 0-2, 5",
        ),
    ],
)
def test_the_lowest_rank_names_the_signal(ranks: int, signals: dict[int, signal.Signals], sentence: str | None) -> None:
    def reason(comm: ThreadCommunicator) -> StopReason | None:
        return stop_reason(comm, SimpleNamespace(request=signals.get(comm.rank)))  # type: ignore[arg-type]

    assert {None if said is None else str(said) for said in run_virtual(ranks, reason)} == {sentence}
