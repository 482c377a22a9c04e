"""Each element of a group and of its optimiser's state comes once over the ranks, whatever parts these own."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from hpctrain.averaging.each_once import each_once
from hpctrain.averaging.strategies.blocking import BlockingAverager
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual
from tests.train.test_checksums import STRATEGIES, made, task_on


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "corrected"])
@pytest.mark.parametrize(("ranks", "per_node"), [(1, 1), (3, 1), (4, 2)])
def test_each_element_comes_once(strategy: str, ranks: int, per_node: int) -> None:
    def taken(comm: ThreadCommunicator) -> tuple[Counter[int], dict[str, Counter[int]], int]:
        (averager,) = made(comm, task_on(1, ranks, "plain"), strategy).averagers.values()
        elements, states = Counter[int](), dict[str, Counter[int]]()
        for segment, views in each_once(averager):
            elements.update(range(segment.start, segment.stop))
            for name, values in views.items():
                assert values.shape == (segment.size,)
                states.setdefault(name, Counter()).update(range(segment.start, segment.stop))
        return elements, states, averager.group.size

    by_rank = run_virtual(ranks, taken, ranks_per_node=per_node)
    size = by_rank[0][2]
    once = Counter(range(size))
    assert sum((elements for elements, _, _ in by_rank), Counter()) == once
    for state in ("momentum", "ema"):
        assert sum((states.get(state, Counter()) for _, states, _ in by_rank), Counter()) == once
    assert max(sum(elements.values()) for elements, _, _ in by_rank) <= size


def test_states_are_views_of_those_that_the_optimiser_keeps() -> None:
    def written(comm: ThreadCommunicator) -> float:
        (averager,) = made(comm, task_on(1, 2, "plain"), "blocking").averagers.values()
        for _, views in each_once(averager):
            views["momentum"][...] = 1.0
        return float(sum(np.sum(averager.optimizer.state(segment)["momentum"]) for segment in averager.group.segments))

    assert sum(run_virtual(2, written)) == run_virtual(1, written)[0] > 0


def test_an_averager_that_owns_parts_says_which_of_them_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockingAverager, "owned", lambda self: self.group.segments, raising=False)

    def taken(comm: ThreadCommunicator) -> None:
        (averager,) = made(comm, task_on(1, 2, "plain"), "blocking").averagers.values()
        with pytest.raises(AssertionError, match="which of them count"):
            list(each_once(averager))

    run_virtual(2, taken)
