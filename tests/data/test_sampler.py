"""The sampler: every sample once an epoch, the same stream for any number of ranks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.data.sampler import Reordering, Sampler, counts, share_of
from hpctrain.errors import ConfigError, DataError

sizes = st.integers(1, 200)


@given(st.integers(0, 1000), st.integers(1, 64))
def test_counts_are_even_and_larger_first(samples, ranks):
    shares = counts(samples, ranks)
    assert len(shares) == ranks
    assert sum(shares) == samples
    assert max(shares) - min(shares) <= 1
    assert sorted(shares, reverse=True) == list(shares)


@given(st.integers(0, 300), st.integers(1, 20), st.integers(1, 5))
def test_shares_make_up_the_whole_in_order(samples, groups, size):
    ids = np.arange(samples) * 3
    shares = [share_of(ids, rank, groups * size, size) for rank in range(groups * size)]
    assert np.array_equal(np.concatenate(shares), ids)
    assert tuple(len(share) for share in shares) == counts(samples, groups * size, size)


@given(st.integers(0, 300), st.integers(1, 20), st.integers(1, 5))
def test_shares_inside_a_split_group_are_even_and_so_are_those_of_the_groups(samples, groups, size):
    shares = counts(samples, groups * size, size)
    by_group = [shares[first : first + size] for first in range(0, len(shares), size)]
    assert tuple(sum(group) for group in by_group) == counts(samples, groups)
    assert all(group == counts(sum(group), size) for group in by_group)


@given(sizes, sizes, st.booleans(), st.integers(0, 2**63), st.integers(0, 5))
def test_an_epoch_has_every_sample_once(samples, batch, shuffle, seed, epoch):
    sampler = Sampler(samples, batch, seed, shuffle)
    steps = [sampler.ids(epoch, step) for step in range(sampler.steps_per_epoch)]
    assert np.array_equal(np.sort(np.concatenate(steps)), np.arange(samples))
    assert [len(ids) for ids in steps] == [sampler.global_count(step) for step in range(len(steps))]
    assert all(len(ids) == batch for ids in steps[:-1])
    assert 1 <= len(steps[-1]) <= batch


@given(sizes, st.lists(st.tuples(sizes, st.integers(0, 5)), max_size=4), sizes, st.integers(0, 5))
def test_an_epoch_that_goes_on_in_other_batches_has_every_sample_once_in_its_order(samples, beginnings, last_batch, epoch):
    seen = np.empty(0, np.int64)
    for batch, steps in (*beginnings, (last_batch, samples)):
        sampler, first = Sampler(samples, batch, 7), len(seen)
        every = [sampler.ids(epoch, step, first) for step in range(sampler.steps(first))]
        assert [len(ids) for ids in every] == [sampler.global_count(step, first) for step in range(len(every))]
        assert all(len(ids) == batch for ids in every[:-1])
        seen = np.concatenate([seen, *every[:steps]])
    assert np.array_equal(seen, Sampler(samples, 1, 7).order(epoch))


def test_order_is_a_pure_function_of_seed_and_epoch():
    sampler = Sampler(1000, 10, 3)
    first = sampler.order(0).copy()
    assert not np.array_equal(first, sampler.order(1))
    assert np.array_equal(first, sampler.order(0))
    assert not np.array_equal(first, Sampler(1000, 10, 4).order(0))
    assert np.array_equal(Sampler(1000, 10, 3, shuffle=False).order(5), np.arange(1000))


def test_samples_are_equally_likely_at_every_place():
    places = np.stack([Sampler(8, 8, seed).order(0) for seed in range(2000)])
    table = np.stack([np.bincount(places[:, place], minlength=8) for place in range(8)])
    chi_square = ((table - 250) ** 2 / 250).sum()
    assert chi_square < 100  # 49 degrees of freedom: exceeded once in 50,000 sets of seeds


def test_the_order_cannot_be_changed_by_its_reader():
    ids = Sampler(9, 4, 0).ids(0, 0)
    with pytest.raises(ValueError, match="read-only"):
        ids[0] = 1


def test_impossible_sizes_are_refused():
    with pytest.raises(DataError, match="0 samples"):
        Sampler(0, 4)
    with pytest.raises(ConfigError, match="batch of 0"):
        Sampler(4, 0)


@given(st.integers(2, 60), st.integers(1, 9), st.integers(0, 2**63), st.data())
def test_reordered_epochs_have_every_sample_once_and_keep_what_was_seen(samples, batch, seed, data):
    sampler, plain = Sampler(samples, batch, seed), Sampler(samples, batch, seed)
    first = data.draw(st.integers(0, samples))
    sampler.reorder([Reordering(1, first, 1)])
    assert np.array_equal(sampler.order(0), plain.order(0))
    assert np.array_equal(sampler.order(1)[:first], plain.order(1)[:first])
    later = data.draw(st.integers(first, samples))
    before = sampler.order(1)
    sampler.reorder([Reordering(1, first, 1), Reordering(1, later, 2), Reordering(3, 0, 3)])
    assert np.array_equal(sampler.order(1)[:later], before[:later])
    for epoch in range(5):
        assert np.array_equal(np.sort(sampler.order(epoch)), np.arange(samples))


def test_a_reordering_is_another_order_of_the_rest_and_of_all_later_epochs():
    def orders(*reorderings):
        sampler = Sampler(50, 8, seed=3)
        sampler.reorder(reorderings)
        return [sampler.order(epoch).tolist() for epoch in range(4)]

    plain, once, twice = orders(), orders(Reordering(1, 20, 1)), orders(Reordering(1, 20, 2))
    assert once[0] == plain[0]
    for epoch in (1, 2, 3):
        assert plain[epoch] != once[epoch] != twice[epoch] != plain[epoch]
    # From an epoch's start the order is that of later epochs; nothing of the one that it replaces is left.
    assert orders(Reordering(0, 0, 1), Reordering(2, 0, 2))[2:] == orders(Reordering(0, 0, 2))[2:]
    assert orders(Reordering(0, 0, 1))[1:] == orders(Reordering(0, 50, 1))[1:]
