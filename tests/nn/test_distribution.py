"""The seam between a network and its distribution: shards put together are the whole; one rank alone computes everything."""

import numpy as np
import pytest

from hpctrain.backend.kernels.graph import Graph, GraphBuilder
from hpctrain.backend.kernels.specs import ReluSpec, TensorSpec
from hpctrain.boxes import even_intervals
from hpctrain.nn.distribution import Shard, Undistributed


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("ranks", [1, 2, 5, 9])
def test_shards_put_together_are_the_whole(dim: int, ranks: int) -> None:
    whole = np.arange(4 * 7).reshape(4, 7) if dim == 1 else np.arange(7 * 3 * 2).reshape(7, 3, 2)
    shards = [Shard(dim, interval) for interval in even_intervals(7, ranks)]
    parts = [whole[shard.index] for shard in shards]
    assert all(np.shares_memory(part, whole) for part in parts if part.size)
    assert np.array_equal(np.concatenate(parts, axis=dim), whole)


def test_the_last_dim_of_a_vector_is_its_only_one() -> None:
    assert np.arange(7)[Shard(0, (2, 5)).index].tolist() == [2, 3, 4]


def test_a_rank_alone_computes_everything() -> None:
    builder = GraphBuilder(TensorSpec((2, 3), "float32"))
    graph: Graph = builder.build(builder.emit("relu", ReluSpec(), (0,)))
    alone = Undistributed()
    alone.prepare(graph)
    assert alone.local(graph, (2,)) is graph
    assert alone.shard("fc.weight") is None
    assert alone.contributes("bn.running_mean") == (True, False)
    assert (alone.ranks, alone.message_bytes([])) == (1, 0)
