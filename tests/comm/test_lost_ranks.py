"""An MPI's word of lost ranks, and what follows from it: a scripted MPI in place of a real one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.comm.lost_ranks import LostRanks, named
from hpctrain.errors import RankLostError

FAILED, PENDING, REVOKED, OTHER = 75, 76, 77, 17


class MpiError(Exception):
    """As mpi4py's."""

    def __init__(self, kind: int) -> None:
        super().__init__(kind)
        self._kind = kind

    def Get_error_class(self) -> int:
        return self._kind


class Mpi:
    """The names that are used of the module."""

    Exception = MpiError
    ERR_PROC_FAILED, ERR_PROC_FAILED_PENDING, ERR_REVOKED = FAILED, PENDING, REVOKED


class Group:
    """Some ranks of a world, whose numbers are its own."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks, self.size = ranks, len(ranks)

    def Translate_ranks(self, places: list[int], other: Group) -> list[int]:
        return [other.ranks.index(self.ranks[place]) for place in places]

    def Free(self) -> None:
        pass


class Communicator:
    """A communicator that can be revoked; some of its ranks are dead."""

    def __init__(self, size: int = 4, dead: tuple[int, ...] = ()) -> None:
        self.size, self.dead, self.revocations = size, dead, 0
        self.probes, self.known_after = 0, -1

    def Get_failed(self) -> Group:
        return Group(self.dead)

    def Get_group(self) -> Group:
        return Group(tuple(range(self.size)))

    def Get_size(self) -> int:
        return self.size

    def Iprobe(self) -> bool:
        self.probes += 1
        if self.probes == self.known_after:
            self.dead = (3,)
            raise MpiError(PENDING)
        return False

    def Is_revoked(self) -> bool:
        return self.revocations > 0

    def Revoke(self) -> None:
        self.revocations += 1


class Operation:
    """An operation in flight, which ends at a test with or without an error, as a handle does."""

    def __init__(self, lost: LostRanks, tests: int, kind: int | None) -> None:
        self.tests, self.kind, self.ended, self._lost = tests, kind, False, lost
        lost.begun(self)

    def test(self) -> bool:
        assert not self.ended, "tested after its end"
        self.tests -= 1
        if self.tests > 0:
            self._lost.polled()
            return False
        self.ended = True
        self._lost.ended(self)
        if self.kind is not None:
            self._lost.check(MpiError(self.kind))
        return True


@pytest.mark.parametrize("kind", [FAILED, PENDING, REVOKED])
def test_an_error_of_a_lost_rank_revokes_every_communicator_once(kind: int) -> None:
    world, parts = Communicator(dead=(2,)), [Communicator(2), Communicator(2)]
    lost = LostRanks(Mpi, world)
    for part in parts:
        lost.made(part)
    for _ in range(2):
        with pytest.raises(RankLostError, match=r"Rank 2 of 4 was lost.*--resume.*on_lost_rank to shrink"):
            lost.check(MpiError(kind))
    assert [comm.revocations for comm in (world, *parts)] == [1, 1, 1]


def test_another_error_is_not_of_a_lost_rank() -> None:
    world = Communicator()
    LostRanks(Mpi, world).check(MpiError(OTHER), sleep=lambda seconds: None)
    assert not world.revocations


@pytest.mark.parametrize("probes", [1, 40])
def test_any_error_is_of_a_lost_rank_once_one_is_known(probes: int) -> None:
    """A message to a process that has just died fails before MPI hears of its death."""
    world = Communicator()
    world.known_after = probes
    with pytest.raises(RankLostError, match="Rank 3 of 4 was lost"):
        LostRanks(Mpi, world).check(MpiError(OTHER), sleep=lambda seconds: None)
    assert world.revocations == 1


def test_a_rank_that_waits_elsewhere_sees_the_world_revoked() -> None:
    """It shares no other communicator with those that know."""
    world, part = Communicator(), Communicator(2)
    lost = LostRanks(Mpi, world)
    lost.made(part)

    def poll() -> None:
        for _ in range(10_000):
            lost.polled()

    poll()
    world.Revoke()
    with pytest.raises(RankLostError, match="A rank of 4 was lost"):
        poll()
    assert part.revocations == 1


@given(st.lists(st.tuples(st.integers(1, 600), st.sampled_from([None, FAILED, REVOKED])), max_size=8))
def test_all_that_is_in_flight_is_tested_until_it_has_ended(operations: list[tuple[int, int | None]]) -> None:
    lost = LostRanks(Mpi, Communicator(dead=(1,)))
    lost.revoke()
    handles = [Operation(lost, tests, kind) for tests, kind in operations]
    assert lost.settle(60.0, sleep=lambda seconds: None)
    assert all(handle.ended for handle in handles)
    assert not lost.unsettled()


def test_what_does_not_end_is_kept_and_told() -> None:
    lost = LostRanks(Mpi, Communicator(dead=(1,)))
    lost.revoke()
    stuck = Operation(lost, 10**9, None)
    assert not lost.settle(0.01)
    assert lost.unsettled() == (stuck,)


def test_ranks_are_named() -> None:
    assert [named(ranks) for ranks in ((), (3,), (1, 2, 5))] == ["A rank", "Rank 3", "Ranks 1-2, 5"]
