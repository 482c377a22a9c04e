"""Rounds of the benchmarks' ranks, without ranks: variants that leave early, and words about the link."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

from benchmarks.overlap_rounds import Turns, mean_over_ranks, rounds, say_and_wait, screened, take_word
from hpctrain.comm.single import SingleCommunicator


def test_slow_dense_variants_leave_with_what_is_compared_with_them() -> None:
    measured = {
        name: [{"step_seconds": seconds}] * 3
        for name, seconds in {
            "alone": 1.0,
            "a": 5.0,
            "b": 5.2,
            "c": 6.0,
            "a 16": 3.0,
            "c 16": 2.0,
            "s 1": 1.5,
            "s 2": 1.6,
        }.items()
    }
    rule = {"best_of": ["a", "b", "c", "d"], "with": {"a": ["a 16"], "c": ["c 16"]}, "always": ["alone", "s 1"]}
    assert screened(measured, rule) == ["alone", "a", "b", "a 16", "s 1"]


def test_a_word_is_acted_on_before_the_job_goes_on(tmp_path: Path) -> None:
    words, acted = tmp_path / "link", list[str]()
    take_word(words, acted.append)
    job = threading.Thread(target=say_and_wait, args=(words, "unshaped"))
    job.start()
    while job.is_alive():
        take_word(words, acted.append)
    assert acted == ["unshaped"]


def test_every_turn_is_first_once_and_rounds_end_with_their_time() -> None:
    order: list[str] = []

    def turn(name: str) -> dict[str, float]:
        order.append(name)
        return {"step_seconds": 1.0}

    turns: Turns = {name: partial(turn, name) for name in "abc"}
    world = SingleCommunicator()
    measured = rounds(world, turns, 3, seconds=None, screen=None, screen_rounds=0, say=lambda line: None)
    assert "".join(order) == "abcbcacab"
    assert [len(of_name) for of_name in measured.values()] == [3, 3, 3]
    order.clear()
    rounds(world, turns, 9, seconds=-1.0, screen=None, screen_rounds=0, say=lambda line: None)
    assert len(order) == 9  # three rounds whatever the time


def test_from_the_screen_on_only_those_that_stay_have_turns() -> None:
    seconds = {"fast": 1.0, "slow": 2.0}
    turns: Turns = {name: partial(lambda value: {"step_seconds": value}, value) for name, value in seconds.items()}
    rule = {"best_of": list(seconds), "with": {}, "always": []}
    measured = rounds(SingleCommunicator(), turns, 5, seconds=None, screen=rule, screen_rounds=2, say=lambda line: None)
    assert {name: len(of_name) for name, of_name in measured.items()} == {"fast": 5, "slow": 2}


def test_figures_are_means_over_ranks() -> None:
    ranks = [{"a": [{"step_seconds": seconds}]} for seconds in (1.0, 3.0)]
    assert mean_over_ranks(ranks) == {"a": [{"step_seconds": 2.0}]}
