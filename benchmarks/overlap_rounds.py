"""Rounds of turns on all ranks of a job: in a rotating order, within a given time, without variants that are far slower.

A job also has words for the process that started it (`say_and_wait`, `take_word`): its links are to be shaped, or not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.comm.base import Communicator

#: by name, what measures one turn of it
Turns = dict[str, Callable[[], dict[str, float]]]
#: by name, the figures of each of its turns
Measured = dict[str, list[dict[str, float]]]

_WORD_SECONDS = 60.0
_LEAST_ROUNDS = 3
_NEARLY_AS_GOOD = 1.05


def rounds(
    world: Communicator,
    turns: Turns,
    count: int,
    *,
    seconds: float | None,
    screen: Mapping[str, Any] | None,
    screen_rounds: int,
    say: Callable[[str], None],
) -> Measured:
    """The measurements of all rounds; those of turns that leave early are the first ones. Collective.

    The order within a round moves on by one each time, so that no variant always comes after the same one.

    Args:
        seconds: no round begins later than so long after the first one, but three are run; None: all are.
        screen: the rule by which turns leave after `screen_rounds` (see `screened`); None: all stay.
    """
    begin = time.perf_counter()
    measured: Measured = {name: [] for name in turns}
    names = list(turns)
    for number in range(count):
        if screen is not None and number == screen_rounds:
            names = world.broadcast_object(screened(measured, screen))
            say(f"from here on {', '.join(names)}")
        late = seconds is not None and time.perf_counter() - begin > seconds
        if number >= _LEAST_ROUNDS and world.broadcast_object(late):
            say("no time is left")
            break
        at = number % len(names)
        say(f"round {number + 1} of {count}")
        for name in names[at:] + names[:at]:
            measured[name].append(turns[name]())
    return measured


def screened(measured: Mapping[str, list[dict[str, float]]], rule: Mapping[str, Any]) -> list[str]:
    """The variants that stay: those named "always", the best of "best_of" with all that are nearly as good, and what goes
    "with" each of these."""
    seconds = {
        name: float(np.median([turn["step_seconds"] for turn in measured[name]])) for name in rule["best_of"] if name in measured
    }
    best = [name for name, value in seconds.items() if value <= _NEARLY_AS_GOOD * min(seconds.values())]
    stay = {*rule["always"], *best, *(name for base in best for name in rule["with"].get(base, ()))}
    return [name for name in measured if name in stay]


def mean_over_ranks(all_ranks: list[Mapping[str, list[dict[str, float]]]]) -> dict[str, list[dict[str, float]]]:
    """The ranks' measurements of the same turn, averaged: one that starts its timed steps late ends them early."""
    return {
        name: [
            {key: float(np.mean([of_rank[name][number][key] for of_rank in all_ranks])) for key in turn}
            for number, turn in enumerate(turns)
        ]
        for name, turns in all_ranks[0].items()
    }


def say_and_wait(words: Path, word: str) -> None:
    """Write a word, and wait until it has been taken: `take_word` does that."""
    partial = words.with_suffix(".partial")
    partial.write_text(word)
    partial.rename(words)
    give_up = time.monotonic() + _WORD_SECONDS
    while words.exists():
        if time.monotonic() > give_up:
            raise TimeoutError(f"no process has taken the word {word}")
        time.sleep(0.01)


def take_word(words: Path, act: Callable[[str], None]) -> None:
    """Act on the word that a job has written, if there is one; the job goes on once that has been done."""
    if words.exists():
        act(words.read_text())
        words.unlink()
