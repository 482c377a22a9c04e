"""Whether ranks share cores: times measured then say nothing about scaling."""

from __future__ import annotations

import os

from hpctrain.comm.base import Communicator
from hpctrain.launch.threads import usable_cores


def oversubscribed(node: Communicator, world: Communicator, threads: int) -> bool:
    """True where on any node the threads of all ranks outnumber the cores that they may run on. Collective over `world`.

    Args:
        node: the ranks of this rank's node. threads: of this rank.
    """
    of_node = node.allgather_object((frozenset(os.sched_getaffinity(0)), threads))
    cores = usable_cores(frozenset().union(*(mask for mask, _ in of_node)))
    return any(world.allgather_object(sum(count for _, count in of_node) > cores))
