"""Picklable values among ranks: all of them in rank order, of any sizes, through the caller's wait."""

import random
from typing import Any

import pytest

from hpctrain.comm import objects
from hpctrain.comm.base import Handle
from hpctrain.comm.single import SingleCommunicator
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine


class Waits:
    """Waits through an engine, and keeps what each wait was for."""

    def __init__(self, comm: ThreadCommunicator) -> None:
        self._engine = virtual_engine(comm)
        self.purposes: list[str] = []

    def __call__(self, handle: Handle, purpose: str) -> None:
        self.purposes.append(purpose)
        self._engine.wait_handle(handle, purpose)


def value_of(rank: int) -> Any:
    """Values of unlike types and sizes; None on some ranks."""
    chance = random.Random(rank)
    return [None, {"rank": rank}, [chance.random() for _ in range(chance.randint(0, 500))], "ü" * rank][rank % 4]


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("seed", [None, 3])
def test_every_rank_has_all_values_in_rank_order(ranks: int, seed: int | None) -> None:
    def program(comm: ThreadCommunicator) -> list[Any]:
        return objects.allgather_object(comm, value_of(comm.rank), Waits(comm))

    for gathered in run_virtual(ranks, program, seed=seed):
        assert gathered == [value_of(rank) for rank in range(ranks)]


@pytest.mark.parametrize(("ranks", "root"), [(1, 0), (3, 0), (3, 2)])
def test_the_root_s_value_is_everywhere_and_the_root_keeps_its_own_object(ranks: int, root: int) -> None:
    def program(comm: ThreadCommunicator) -> Any:
        value = {"sizes": [1, 2, 3], "from": comm.rank}
        received = objects.broadcast_object(comm, value, root, Waits(comm))
        assert (received is value) == (comm.rank == root)
        return received

    assert run_virtual(ranks, program) == [{"sizes": [1, 2, 3], "from": root}] * ranks


def test_every_wait_says_what_it_is_for() -> None:
    def program(comm: ThreadCommunicator) -> list[str]:
        waits = Waits(comm)
        objects.allgather_object(comm, comm.rank, waits)
        objects.broadcast_object(comm, comm.rank, 0, waits)
        return waits.purposes

    expected = ["sizes of gathered objects", "gathered objects", "size of a broadcast object", "broadcast object"]
    assert run_virtual(2, program) == [expected] * 2


def test_one_process_gets_its_value_back() -> None:
    def wait(handle: Handle, purpose: str) -> None:
        assert handle.test(), purpose

    assert objects.allgather_object(SingleCommunicator(), {"a": 1}, wait) == [{"a": 1}]


def test_gathered_values_are_copies() -> None:
    """A rank may change what it gets without changing another rank's."""

    def program(comm: ThreadCommunicator) -> bool:
        value = [comm.rank]
        gathered = objects.allgather_object(comm, value, Waits(comm))
        gathered[comm.rank].append(9)
        return value == [comm.rank]

    assert all(run_virtual(2, program))
