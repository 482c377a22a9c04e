"""Turns: whatever is ready first, and whatever is tested first, operations begin in the order of their places."""

from __future__ import annotations

import random
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from hpctrain.comm.base import Handle
from hpctrain.comm.single import Complete
from hpctrain.comm.turns import Turns


@given(st.integers(1, 12), st.randoms(use_true_random=False))
def test_operations_begin_in_the_order_of_their_places(count: int, source: random.Random) -> None:
    begun: list[int] = []

    def start(number: int) -> Handle:
        begun.append(number)
        return Complete()

    turns = Turns()
    places = [turns.take() for _ in range(count)]
    for number in source.sample(range(count), count):
        places[number].when_ready(partial(start, number))
        assert begun == list(range(len(begun)))
        source.choice(places).test()
    assert begun == list(range(count))
    assert all(place.test() for place in places)


def test_texts() -> None:
    turns = Turns()
    first, second = turns.take(), turns.take()
    second.when_ready(Complete)
    assert not second.test()
    assert str(second) == "waiting for its turn behind operations within the node"
    first.when_ready(Complete)
    assert second.test()
    assert str(second) == "of one process"
