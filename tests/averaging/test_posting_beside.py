"""Averagers beside a thread that posts between any two of their lines: replicas stay equal, an event that is early is found."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from hpctrain.averaging.dependencies import EventKind
from hpctrain.averaging.reduce_scatter_averager import ReduceScatterAverager
from hpctrain.errors import DivergedError
from tests.support import combinations
from tests.support.dimensions import parsed
from tests.support.interleaved_thread import InterleavedThread

pytestmark = pytest.mark.slow

EXCHANGE = ("grid=1x3", "fc_exchange=always", "messages=adversarial")


@pytest.fixture(autouse=True)
def _many_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(combinations, "InterleavedThread", partial(InterleavedThread, share=0.3))


@pytest.mark.parametrize("options", [EXCHANGE, ("averager=priority", "grid=1x2", "window=1"), ("grid=1x2", "optimizer=lars")])
def test_replicas_are_those_of_one_rank(options: tuple[str, ...]) -> None:
    assert combinations.run(parsed(["posting=thread", *options])) <= combinations.TOLERANCE


def test_an_event_before_what_it_announces_is_found_by_the_thread_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def announced_early(self: Any, weight: str, dy: Any) -> None:
        exchange = self._operations.exchange_of[weight]
        exchange.pack_errors(np.full_like(dy, np.nan))  # memory that was used before may hold the right numbers
        self._happens(EventKind.GRADIENT, weight)
        exchange.pack_errors(dy)

    monkeypatch.setattr(ReduceScatterAverager, "_take_errors", announced_early)
    assert combinations.run(parsed(["posting=program", *EXCHANGE])) <= combinations.TOLERANCE
    with pytest.raises(DivergedError):
        combinations.run(parsed(["posting=thread", *EXCHANGE]))
