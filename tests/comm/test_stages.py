"""Operations in two stages: second stages in posting order, whatever completes first, and what follows an operation, once."""

from __future__ import annotations

from itertools import permutations

import pytest

from hpctrain.comm.stages import Finished, Staged, Stages


class _Step:
    """A handle that is complete when told so."""

    def __init__(self, name: str) -> None:
        self.name, self.complete, self.tests = name, False, 0

    def test(self) -> bool:
        self.tests += 1
        return self.complete

    def __str__(self) -> str:
        return self.name


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_second_stages_begin_in_posting_order(order: tuple[int, ...]) -> None:
    stages, begun, finished = Stages(), [], []
    firsts, seconds = [_Step(f"first {i}") for i in range(3)], [_Step(f"second {i}") for i in range(3)]

    def staged(i: int) -> Staged:
        def begin() -> _Step:
            begun.append(i)
            return seconds[i]

        return stages.add(firsts[i], begin, lambda: finished.append(i))

    handles = [staged(i) for i in range(3)]
    for position in order:
        firsts[position].complete = True
        assert not handles[position].test()
        missing = [i for i in range(3) if not firsts[i].complete]
        assert begun == list(range(min(missing, default=3)))
    for second in reversed(seconds):
        second.complete = True
    assert all(handle.test() and handle.test() for handle in reversed(handles))
    assert finished == [2, 1, 0]


def test_what_follows_an_operation_is_done_once_and_in_the_test_that_finds_it_complete() -> None:
    calls: list[int] = []
    operation = _Step("all-to-all of 3 elements")
    handle = Finished(operation, lambda: calls.append(operation.tests))
    assert str(handle) == "all-to-all of 3 elements"
    assert not handle.test()
    assert calls == []
    operation.complete = True
    assert handle.test()
    assert handle.test()
    assert calls == [2]
    assert operation.tests == 2


def test_an_operation_says_at_which_stage_it_is() -> None:
    stages = Stages()
    firsts, second = [_Step("all-to-all"), _Step("all-to-all")], _Step("allgather")
    before, after = (stages.add(first, lambda: second) for first in firsts)
    assert str(after) == "all-to-all, the first of two stages"
    firsts[1].complete = True
    assert not after.test()
    assert str(after) == "first of two stages complete"
    firsts[0].complete = True
    assert not before.test()
    assert str(after) == "allgather, the second of two stages"
