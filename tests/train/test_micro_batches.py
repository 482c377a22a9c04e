"""Micro-batches: each sample once, as even as they go, the same ones on every rank of a split group."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.data.loader import Share
from hpctrain.train.micro_batches import micro_batches_of


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(1, 5))
def test_micro_batches_part_a_share(counts: list[int], number: int) -> None:
    first = [sum(counts[:rank]) for rank in range(len(counts))]
    by_rank = [list(micro_batches_of(Share(tuple(counts), rank), number)) for rank in range(len(counts))]
    samples = np.arange(sum(counts))
    for passes in zip(*by_rank, strict=True):
        assert len({micro_batch.counts for micro_batch in passes}) == 1
        own = [samples[start:][micro_batch.own] for start, micro_batch in zip(first, passes, strict=True)]
        assert [len(ids) for ids in own] == list(passes[0].counts)
        for micro_batch in passes:
            assert np.array_equal(samples[micro_batch.shared], np.concatenate(own))
    for rank, passes in enumerate(by_rank):
        sizes = [micro_batch.counts[rank] for micro_batch in passes]
        assert sum(sizes) == counts[rank]
        assert max(sizes) - min(sizes) <= 1
