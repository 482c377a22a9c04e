"""Draws combinations of options so that every two values of different options meet in one of them, wherever that is legal.

Greedy, one combination after the other (Cohen, Dalal, Fredman and Patton, "The AETG system", IEEE Transactions on Software
Engineering 1997): it starts from a pair that has not been met, and sets each further option to the value of most new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from random import Random

Values = Mapping[str, Sequence[str]]
Row = dict[str, str]
#: ((option, value), (another option, its value)), options in the order of the table
Pair = tuple[tuple[str, str], tuple[str, str]]
#: the sentence by which a combination, of which some options may not be chosen yet, is refused; None: it is not
Refusal = Callable[[Mapping[str, str]], str | None]

# Choices of one attempt at a combination, and attempts. Most refusals depend on few options, so a legal combination is near or
# there is none. A limit of time depends on many: the first choices can lose an attempt, so another one draws others.
_MOST_CHOICES, _MOST_ATTEMPTS = 1000, 50


@dataclass(frozen=True)
class Draw:
    """rows: combinations, each with all options in the table's order. refused: pairs that no legal one has, with a sentence."""

    rows: tuple[Row, ...]
    refused: Mapping[Pair, str]


def draw(values: Values, refusal: Refusal, *, seed: int | str, count: int = 0) -> Draw:
    """Combinations that hold every legal pair, and further ones by chance until there are `count`. The same for the same seed.

    Args:
        values: of each option. Options whose values decide what others may be come first: fewer choices are taken back.
    """
    search = _Search(values, refusal, Random(seed))
    rows: list[Row] = []
    refused: dict[Pair, str] = {}
    for pair in search.shuffled_pairs():
        if pair not in search.missing:
            continue
        row = search.complete(dict(pair))
        if row is None:
            refused[pair] = search.last_refusal
            search.missing.discard(pair)
        else:
            rows.append(row)
            search.missing.difference_update(pairs_of(row))
    while len(rows) < count:
        row = search.complete({})
        assert row is not None, f"no combination is legal: {search.last_refusal}"
        rows.append(row)
    return Draw(tuple(rows), refused)


def pairs_of(row: Mapping[str, str]) -> set[Pair]:
    """All pairs of a combination whose options are in the table's order."""
    return set(combinations(row.items(), 2))


def most_pairs(rows: Sequence[Row], cost: Callable[[Row], float], most: float) -> list[Row]:
    """Those of some rows that hold many pairs and cost at most `most` together, the best first: pairs for their cost."""
    left, met, chosen, spent = list(rows), set[Pair](), list[Row](), 0.0
    while left:
        best = max(left, key=lambda row: len(pairs_of(row) - met) / cost(row))
        left.remove(best)
        if spent + cost(best) <= most:
            chosen.append(best)
            spent += cost(best)
            met |= pairs_of(best)
    return chosen


def shared_out(rows: Sequence[Row], cost: Callable[[Row], float], blocks: int) -> list[list[Row]]:
    """Rows in blocks of similar cost: each of them, the most costly first, joins the cheapest block."""
    shares: list[list[Row]] = [[] for _ in range(blocks)]
    costs = [0.0] * blocks
    for row in sorted(rows, key=cost, reverse=True):
        least = costs.index(min(costs))
        shares[least].append(row)
        costs[least] += cost(row)
    return shares


class _Search:
    """Completes combinations; `missing`: pairs that have not been met. last_refusal: why the last choice was none."""

    def __init__(self, values: Values, refusal: Refusal, random: Random) -> None:
        self._values, self._refusal, self._random = values, refusal, random
        self._position = {name: position for position, name in enumerate(values)}
        every = [[(name, value) for value in options] for name, options in values.items()]
        self._pairs: list[Pair] = [(a, b) for first, second in combinations(every, 2) for a in first for b in second]
        self.missing = set(self._pairs)
        self.last_refusal = ""
        self._choices, self._by_chance = 0, False

    def shuffled_pairs(self) -> list[Pair]:
        pairs = list(self._pairs)
        self._random.shuffle(pairs)
        return pairs

    def complete(self, chosen: Row) -> Row | None:
        """A legal combination with these values; None where there is none."""
        if self._is_refused(chosen):
            return None
        left = [name for name in self._values if name not in chosen]
        for attempt in range(_MOST_ATTEMPTS):
            self._choices, self._by_chance = 0, attempt > 0
            row = self._extended(chosen, left)
            if row is not None:
                return {name: row[name] for name in self._values}
            if self._choices <= _MOST_CHOICES:
                return None
        raise AssertionError(f"{chosen} is neither completed nor refused in {_MOST_ATTEMPTS} attempts")

    def _extended(self, chosen: Row, left: Sequence[str]) -> Row | None:
        if not left:
            return chosen
        name, *rest = left
        for value in self._by_gain(chosen, name):
            self._choices += 1
            if self._choices > _MOST_CHOICES:
                return None
            longer = {**chosen, name: value}
            if not self._is_refused(longer):
                row = self._extended(longer, rest)
                if row is not None:
                    return row
        return None

    def _is_refused(self, chosen: Row) -> bool:
        sentence = self._refusal(chosen)
        if sentence is not None:
            self.last_refusal = sentence
        return sentence is not None

    def _by_gain(self, chosen: Row, name: str) -> list[str]:
        values = list(self._values[name])
        self._random.shuffle(values)
        if self._by_chance:
            return values
        return sorted(values, key=lambda value: -sum(self._pair(name, value, *other) in self.missing for other in chosen.items()))

    def _pair(self, name: str, value: str, other: str, its_value: str) -> Pair:
        before = self._position[name] < self._position[other]
        return ((name, value), (other, its_value)) if before else ((other, its_value), (name, value))
