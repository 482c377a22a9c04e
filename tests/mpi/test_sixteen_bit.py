"""Sums in 16-bit messages on real ranks: what virtual ranks get, to the bit, with whatever MPI carries them."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest

from hpctrain.averaging.rounding import caster
from hpctrain.averaging.strategies.blocking import Blocking
from hpctrain.averaging.strategies.bucketed import Bucketed
from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.averaging.strategy import Strategy
from hpctrain.comm.base import Communicator
from hpctrain.comm.progress import ProgressEngine
from hpctrain.comm.sixteen_bit import Wire, sums_over
from hpctrain.comm.two_level import in_levels, levels
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine
from tests.support.averaging import OPTIMIZERS, Watched, averaged, make_group, run_steps
from tests.support.bfloat16 import rounded

STRATEGIES: dict[str, tuple[type[Strategy], dict[str, Any]]] = {
    "blocking": (Blocking, {}),
    "bucketed": (Bucketed, {"bucket_bytes": 100}),
    "sharded": (Sharded, {"bucket_bytes": 100, "nominal_batch": 9, "replan": False, "wire_parameters": "float16"}),
}


def _values(rank: int, size: int) -> np.ndarray:
    return (np.random.default_rng(rank).standard_normal(size) * 3).astype(np.float32)


@pytest.mark.parametrize("counts", [[5, 0, 3, 4], [0, 0, 0, 0], [0, 1, 0, 0], [70_000, 70_001, 69_999, 70_000]])
@pytest.mark.parallel([2, 3, 4])
def test_sums_are_those_of_rounded_parts(world: Communicator, progress: ProgressEngine, counts: list[int]) -> None:
    """Parts without elements included, whose messages have neither bytes nor an address of their own."""
    counts = counts[: world.size]
    size = sum(counts)
    total = rounded(_values(0, size))
    for rank in range(1, world.size):
        total = total + rounded(_values(rank, size))
    start, stop = list(pairwise(accumulate(counts, initial=0)))[world.rank]
    sums = sums_over(world, caster("bfloat16"), allreduces=True)
    for _ in range(3):  # with the same buffers
        received, whole = np.full(stop - start, np.nan, np.float32), _values(world.rank, size)
        handles = [sums.ireduce_scatter(whole, received, counts), sums.iallreduce(whole)]
        norms = np.array([1.0 + 2.0**-40])
        handles.append(world.iallreduce(norms))
        for handle in handles:
            progress.wait_handle(handle, "sums")
        assert received.tobytes() == total[start:stop].tobytes()
        assert whole.tobytes() == rounded(total).tobytes()
        assert norms[0] == world.size * (1.0 + 2.0**-40)


@pytest.mark.parallel(4)
def test_in_two_levels(world: Communicator, progress: ProgressEngine) -> None:
    nodes, size = (0, 0, 1, 1), 24
    made = in_levels(world, levels(nodes), "gradients")
    sums = sums_over(made, caster("bfloat16"), allreduces=True)
    of_nodes = [_values(first, size) + _values(first + 1, size) for first in (0, 2)]
    expected = rounded(of_nodes[0]) + rounded(of_nodes[1])
    for _ in range(3):  # with the same buffers
        received, whole = np.empty(size // 4, np.float32), _values(world.rank, size)
        handles = sums.ireduce_scatter(_values(world.rank, size), received, [size // 4] * 4), sums.iallreduce(whole)
        for handle in handles:
            progress.wait_handle(handle, "sums")
        assert whole.tobytes() == rounded(expected).tobytes()
    assert received.tobytes() == expected[made.rank * received.size :][: received.size].tobytes()


@pytest.mark.parametrize("threaded", [False, True], ids=["alone", "progress thread"])
@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parallel([2, 3, 4])
def test_strategies_end_with_the_bits_of_virtual_ranks(
    world: Communicator, progress: ProgressEngine, name: str, wire: Wire, threaded: bool
) -> None:
    kind, options = STRATEGIES[name]
    nodes = (0, 0, 1, 1) if name != "blocking" and world.size == 4 else None

    def trained(comm: Communicator, engine: ProgressEngine) -> np.ndarray:
        averager = averaged(kind, make_group(), OPTIMIZERS["momentum"](), comm, engine, nodes=nodes, wire=wire, **options)
        return run_steps(Watched(averager), 6)

    def program(comm: ThreadCommunicator) -> np.ndarray:
        return trained(comm, virtual_engine(comm))

    expected = run_virtual(world.size, program)[0]
    if threaded:
        progress.start_thread()
    try:
        found = trained(world, progress)
    finally:
        progress.stop_thread()
    assert found.tobytes() == expected.tobytes()  # two ranks of a node add two numbers, in any order
    texts = world.allgather_object(found.tobytes())
    assert len(set(texts)) == 1
