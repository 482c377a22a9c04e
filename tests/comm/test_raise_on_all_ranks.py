"""Errors that every rank raises alike: the law over virtual outcomes; real ranks are in tests/mpi."""

from __future__ import annotations

import pytest

from hpctrain.comm.raise_on_all_ranks import raise_on_all_ranks
from hpctrain.comm.single import SingleCommunicator
from hpctrain.errors import CommunicationTimeoutError, DataError, HpctrainError, RankLostError, ShapeError


class Scripted(SingleCommunicator):
    """Rank `rank` among ranks whose outcomes are known beforehand."""

    def __init__(self, rank: int, outcomes: list) -> None:
        super().__init__()
        self.rank, self.size, self._outcomes = rank, len(outcomes), outcomes
        self.world_ranks = tuple(10 + each for each in range(len(outcomes)))

    def allgather_object(self, value: object) -> list:
        assert value == self._outcomes[self.rank]
        return self._outcomes


def _work(outcome: tuple | None) -> str:
    if outcome is not None:
        raise outcome[0](outcome[1], ranks=outcome[2])
    return "result"


@pytest.mark.parametrize(
    ("outcomes", "kind", "message"),
    [
        ([(DataError, "a", ()), (DataError, "a", ())], DataError, "a"),
        ([None, (DataError, "bad", ()), None], DataError, "bad (on rank 1 of 3)"),
        ([None, (ShapeError, "s", ()), (DataError, "d", ())], ShapeError, "s (on ranks 1 and 2 of 3)"),
        ([(DataError, "x", ())] * 3 + [None], DataError, "x (on ranks 0, 1 and 2 of 4)"),
        ([(DataError, "x", ())] * 12 + [None], DataError, "x (on 12 of 13 ranks, the first is 0)"),
    ],
)
def test_every_rank_raises_the_lowest_ranks_error(outcomes: list, kind: type, message: str) -> None:
    for rank, outcome in enumerate(outcomes):
        with pytest.raises(kind) as caught:
            raise_on_all_ranks(Scripted(rank, outcomes), lambda outcome=outcome: _work(outcome))
        assert type(caught.value) is kind
        assert str(caught.value) == message


@pytest.mark.parametrize(
    ("outcomes", "ranks"),
    [
        ([(DataError, "a", ())] * 2, ()),
        ([None, (DataError, "bad", ()), (DataError, "bad", ())], (11, 12)),
        ([None, (DataError, "bad", (3, 4))], (3, 4)),
        ([(DataError, "bad", (3,))] * 2, (3,)),
    ],
)
def test_the_error_knows_the_ranks_of_the_world(outcomes: list, ranks: tuple[int, ...]) -> None:
    for rank, outcome in enumerate(outcomes):
        with pytest.raises(DataError) as caught:
            raise_on_all_ranks(Scripted(rank, outcomes), lambda outcome=outcome: _work(outcome))
        assert tuple(caught.value.ranks) == ranks
        assert caught.value.said_by == 10  # the first of these ranks, which all know to have the error


def _kinds(kind: type[HpctrainError]) -> list[type[HpctrainError]]:
    return [kind, *(below for child in kind.__subclasses__() for below in _kinds(child))]


@pytest.mark.parametrize("kind", _kinds(HpctrainError))
def test_every_kind_of_error_is_made_from_its_sentence_and_its_ranks(kind: type[HpctrainError]) -> None:
    """Other ranks raise it from these."""
    error = kind("a sentence", ranks=[2])
    assert (str(error), error.ranks) == ("a sentence", (2,))


def test_without_errors_everyone_has_its_result() -> None:
    assert raise_on_all_ranks(Scripted(1, [None, None]), lambda: "result") == "result"
    assert raise_on_all_ranks(SingleCommunicator(), lambda: 3) == 3


def test_one_process_raises_its_own_error() -> None:
    error = DataError("mine")

    def work() -> None:
        raise error

    with pytest.raises(DataError) as caught:
        raise_on_all_ranks(SingleCommunicator(), work)
    assert caught.value is error


@pytest.mark.parametrize("kind", [ZeroDivisionError, CommunicationTimeoutError, RankLostError])
def test_bugs_and_lost_ranks_are_not_agreed_on(kind: type[Exception]) -> None:
    def work() -> None:
        raise kind("at once")

    comm = Scripted(0, [None, None])
    comm.allgather_object = lambda value: pytest.fail("must not communicate")  # type: ignore[method-assign]
    with pytest.raises(kind, match="at once"):
        raise_on_all_ranks(comm, work)
