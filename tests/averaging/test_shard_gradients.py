"""Gradients of a rank's shards: the sums of the tree, in as few buffers as a binary counter has digits."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.averaging.shard_gradients import ShardGradients
from hpctrain.summation_tree import ShardsOfRank
from tests.support.averaging import make_group


def _terms(shares: np.ndarray, share: ShardsOfRank) -> list[np.ndarray]:
    own = shares.copy()
    for step in share.additions:
        own[step.left] += own[step.right]
    return [own[place] for place in share.sums]


@pytest.mark.parametrize(
    ("shards", "ranks"), [(1, 1), (8, 1), (8, 2), (8, 8), (6, 1), (6, 2), (6, 3), (12, 2), (24, 8), (24, 1), (7, 1)]
)
@pytest.mark.parametrize("homes", [False, True])
def test_a_step_leaves_the_terms_of_the_tree(shards: int, ranks: int, homes: bool) -> None:
    for rank in range(ranks):
        share = ShardsOfRank(rank, ranks, shards)
        group = make_group()
        gradients = ShardGradients(group, share, homes=homes)
        random = np.random.default_rng(rank)
        for _ in range(2):  # buffers serve again
            own = (random.standard_normal((share.count, group.size)) * 10.0 ** random.integers(-5, 6)).astype(group.dtype)
            for place, shard in enumerate(own):
                for parameter in group.parameters.values():
                    home = gradients.home(parameter, place)
                    segment = group.segment(parameter.name)
                    home[...] = shard[segment.start : segment.stop].reshape(home.shape)
                    gradients.add(parameter, place) if place < share.count - 1 else gradients.complete(parameter)
            found = gradients.terms(1, group.size)
            for term, expected in zip(found if isinstance(found, tuple) else (found,), _terms(own, share), strict=True):
                assert term.tobytes() == expected[1:].tobytes()


@pytest.mark.parametrize(("shards", "most"), [(1, 0), (2, 1), (8, 3), (16, 4), (64, 6), (6, 2), (7, 2)])
def test_there_are_few_buffers(shards: int, most: int) -> None:
    assert len(ShardGradients(make_group(), ShardsOfRank(0, 1, shards))._buffers) == most


def test_homes_are_the_groups_own_where_nothing_waits() -> None:
    group = make_group()
    parameter = next(iter(group.parameters.values()))
    for homes, own in ((False, [True] * 4), (True, [False, True, False, True])):
        gradients = ShardGradients(group, ShardsOfRank(0, 1, 4), homes=homes)
        assert [gradients.home(parameter, place) is parameter.grad for place in range(4)] == own


def test_a_missing_shard_is_a_bug() -> None:
    group = make_group()
    gradients = ShardGradients(group, ShardsOfRank(0, 1, 3))
    parameter = next(iter(group.parameters.values()))
    gradients.add(parameter, 0)
    with pytest.raises(AssertionError, match="a shard is missing"):
        gradients.add(parameter, 2)
    with pytest.raises(AssertionError, match="a shard is missing"):
        gradients.complete(parameter)


def test_parameters_need_not_keep_step_with_each_other() -> None:
    """Side by side, shards bring the gradients of one layer before those of the next."""
    group = make_group()
    gradients = ShardGradients(group, ShardsOfRank(0, 1, 4))
    for parameter in reversed(group.parameters.values()):
        for place in range(4):
            parameter.grad[...] = 10.0**place
            gradients.add(parameter, place) if place < 3 else gradients.complete(parameter)
    assert {value for parameter in group.parameters.values() for value in parameter.grad.ravel().tolist()} == {1111.0}


def test_terms_may_be_asked_for_until_the_next_step_adds_a_shard() -> None:
    """Messages are posted when their turn comes, which may be under the first forward of the next step."""
    group = make_group()
    gradients = ShardGradients(group, ShardsOfRank(0, 2, 6))
    for shard in range(3):
        group.grad[...] = shard + 1.0
        for parameter in group.parameters.values() if shard < 2 else ():
            gradients.add(parameter, shard)
    for parameter in reversed(group.parameters.values()):
        gradients.complete(parameter)
    gradients.start()
    found = gradients.terms(0, group.size)
    assert isinstance(found, tuple)
    assert [set(term.tolist()) for term in found] == [{3.0}, {3.0}]
