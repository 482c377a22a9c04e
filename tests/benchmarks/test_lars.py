"""The benchmark of LARS: parts add up to the whole, and the table pairs the turns of a round."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from benchmarks.lars import markdown
from benchmarks.lars_ranks import norm_messages, updates
from hpctrain.nn.parameter import FlatGroup, ParameterSpec
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual


def _group() -> FlatGroup:
    sizes = (2000, 7, 40_000, 3, 90_000, 50_000)
    specs = {f"l{k}": ParameterSpec((size,), lambda random, shape: np.zeros(shape)) for k, size in enumerate(sizes)}
    group = FlatGroup(specs, "float64")
    random = np.random.default_rng(1)
    group.data[...], group.grad[...] = random.standard_normal((2, group.size))
    return group


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_element_is_owned_once_and_each_norm_sent_once(ranks: int) -> None:
    group = _group()
    messages = [norm_messages(group, rank, ranks) for rank in range(ranks)]
    owned = sorted((part.start, part.stop) for of_rank in messages for one in of_rank for part in one.owned)
    assert sum(stop - start for start, stop in owned) == group.size
    assert all(before[1] <= after[0] for before, after in pairwise(owned))
    places = [place for one in messages[0] for place in range(len(group.segments))[one.place]]
    assert sorted(places) == list(range(len(group.segments)))
    assert [one.place for one in messages[0]] == [one.place for one in messages[-1]]


def test_parts_and_the_whole_update_alike() -> None:
    def program(comm: ThreadCommunicator) -> tuple[np.ndarray, np.ndarray, tuple[tuple[int, int], ...]]:
        results = {}
        for where in ("every rank all", "own part"):
            group = _group()
            update = updates(group, comm)[f"lars, {where}"]
            update.step()
            results[where] = group.data.copy()
        owned = tuple((part.start, part.stop) for one in norm_messages(group, comm.rank, comm.size) for part in one.owned)
        return results["every rank all"], results["own part"], owned

    for whole, own, owned in run_virtual(3, program):
        for start, stop in owned:
            np.testing.assert_allclose(own[start:stop], whole[start:stop], rtol=1e-12)


def test_the_table_compares_turns_of_the_same_round() -> None:
    seconds = {"lars, every rank all": (0.4, 0.8), "lars, own part": (0.1, 0.2), "sgd, own part": (0.05, 0.15)}
    rounds = {name: [{"cpu_seconds": one, "step_seconds": one} for one in turns] for name, turns in seconds.items()}
    table = markdown([{"network": "toy", "ranks": 2, "facts": {"parameters": 1234, "messages": 3}, "rounds": rounds}])
    row = table.splitlines()[2]
    assert row.startswith("| toy | 1,234 | 2 | 3 | 600.000")
    assert "| 4.000 [4.000, 4.000] | 50.000 [50.000, 50.000] | 100.000" in row
