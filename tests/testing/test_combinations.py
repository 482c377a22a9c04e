"""Combinations of options, drawn so that legal pairs meet, against one rank in float64.

Level usual runs those of the day's seed that hold most pairs for their cost, about 88 % of all legal ones; level all runs each.
`make combinations` runs 2,000 of each of three seeds.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from hpctrain.averaging.base import GradientAverager
from hpctrain.averaging.reduce_scatter import OwnerOperations
from hpctrain.averaging.strategies.lazy import LazyAverager
from hpctrain.core.errors import HpctrainError
from hpctrain.data.image_file import ImageFile
from hpctrain.data.loader import Loader
from hpctrain.data.pipeline import BatchThreads, Work
from hpctrain.data.sampler import Reordering
from hpctrain.run.accounts import RunHashes
from hpctrain.training.metrics import RunningSums
from hpctrain.training.snapshot import Position
from tests.support import combinations
from tests.support.combinations import TOLERANCE, Draw, Row, Tally, drawn, predicted_seconds, run
from tests.support.dimensions import VALUES, line, parsed, refusal
from tests.support.interrupted import Course, other_order_from
from tests.support.pairwise import draw, most_pairs, pairs_of, shared_out
from tests.support.sampling import SEED, amount

Patch = Callable[[pytest.MonkeyPatch], None]

BLOCKS = 10
#: processor seconds, predicted: of a combination, and of all
MOST_SECONDS, MOST_SECONDS_TOGETHER = 5.0, 40.0

#: run whatever the seed draws; faults were found where these features meet
ALWAYS = (
    "averager=sharded grid=2x2 plan=model nodes=of-3",
    "averager=sharded grid=1x3 net=residual wire=bfloat16 wire_parameters=bfloat16",
    "averager=sparse sparse=third grid=1x3 nodes=of-1 messages=adversarial",
    "averager=lazy lazy=all-layers end=kill checkpoint=sharded-background",
    "averager=overlap grid=2x2 plan=mixed device=emulated",
    "averager=sharded grid=2x2 plan=mixed net=residual batch=3 wire_parameters=bfloat16 end=kill hashes=every-step",
    "averager=priority slices=tiny grid=1x3 hashes=every-step data=unreadable on_nonfinite=rollback-late checkpoint=single",
)


def _every() -> Draw:
    return drawn(0, os.environ[SEED], MOST_SECONDS)


@cache
def _blocks() -> list[list[Row]]:
    rows = most_pairs(_every().rows, predicted_seconds, amount(1, 200) * MOST_SECONDS_TOGETHER)
    return shared_out([*rows, *(parsed(row.split()) for row in ALWAYS)], predicted_seconds, BLOCKS)


def _require_equal(rows: Sequence[Row]) -> None:
    tally = Tally()
    for row in rows:
        tally.add(row)
    again = "python -m tests.support.combinations "
    assert not tally.failures, "\n".join(["", *(again + failure for failure in tally.failures)])
    assert not tally.refused, "refused only where it ran: such a rule is known before a run"


@pytest.mark.slow
@pytest.mark.usefixtures("emulated_device")
@pytest.mark.parametrize("block", range(BLOCKS))
def test_combinations_equal_one_rank(block: int) -> None:
    _require_equal(_blocks()[block])


@pytest.mark.thorough
@pytest.mark.usefixtures("emulated_device")
@pytest.mark.parametrize("block", range(BLOCKS))
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_combinations_of_other_seeds_equal_one_rank(seed: int, block: int) -> None:
    """`make combinations` sets the number of each seed."""
    _require_equal(drawn(int(os.environ.get("HPCTRAIN_COMBINATIONS", "2000")), seed).rows[block::BLOCKS])


@pytest.mark.slow
def test_every_legal_pair_is_among_them_and_each_refusal_is_a_sentence() -> None:
    every = _every()
    met = set().union(*(pairs_of(row) for row in every.rows))
    every_pair = {pair for a, b in itertools.combinations(VALUES, 2) for pair in itertools.product(_values(a), _values(b))}
    assert met | set(every.refused) == every_pair
    assert not met & set(every.refused)
    assert every.refused
    assert all(sentence.endswith(".") and sentence != "It takes too long." for sentence in every.refused.values())
    assert max(map(predicted_seconds, every.rows)) <= MOST_SECONDS
    run_usually = most_pairs(every.rows, predicted_seconds, MOST_SECONDS_TOGETHER)
    assert len(set().union(*(pairs_of(row) for row in run_usually))) >= 0.85 * len(met)


def _values(name: str) -> list[tuple[str, str]]:
    return [(name, value) for value in VALUES[name]]


def test_a_line_is_a_combination() -> None:
    row = parsed(["net=plain", "grid=3x1", "averager=overlap"])
    assert parsed(line(row).split()) == row
    with pytest.raises(ValueError, match="narrow"):
        parsed(["net=wide"])
    with pytest.raises(ValueError, match="averager"):
        parsed(["colour=blue"])


def test_a_wrong_result_is_a_failure_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    row = parsed(["net=narrow", "batch=3"])
    assert run(row) <= combinations.TOLERANCE
    monkeypatch.setattr(combinations, "TOLERANCE", -1.0)
    tally = Tally()
    tally.add(row)
    (failure,) = tally.failures
    assert failure.startswith(line(row))


def is_well(options: str) -> bool:
    """Whether a combination trains what one rank does."""
    try:
        return run(parsed(["net=narrow", "steps=6", "grid=1x2", *options.split()])) <= TOLERANCE
    except (AssertionError, HpctrainError):
        return False


def _changed_position(**values: Any) -> Patch:
    """Positions of checkpoints forget something."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        original = Position.from_meta

        def from_meta(meta: Mapping[str, Any]) -> Position:
            return replace(original(meta), **values)

        monkeypatch.setattr(Position, "from_meta", from_meta)

    return patch


def _does_nothing(of: type, name: str) -> Patch:
    return lambda monkeypatch: monkeypatch.setattr(of, name, lambda *arguments: None)


def _labels_as_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    def take_labels(self: ImageFile, samples: np.ndarray, out: np.ndarray) -> None:
        out[...] = self.labels[samples]

    monkeypatch.setattr(ImageFile, "take_labels", take_labels)


def _hashes_without_an_element(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = OwnerOperations.counted
    monkeypatch.setattr(OwnerOperations, "counted", lambda self: counted(self)[1:])


def _without_the_last_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = BatchThreads.run

    def run_threads(self: BatchThreads, samples: int, sample_bytes: int, work: Work) -> None:
        whole(self, samples - (self.count > 1), sample_bytes, work)

    monkeypatch.setattr(BatchThreads, "run", run_threads)


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("fault", "options"),
    [
        (_changed_position(sums=RunningSums()), "end=steps hashes=every-step"),  # which ends inside of an epoch
        (_changed_position(skipped=0), "end=steps on_nonfinite=skip-one checkpoint=single"),
        (_changed_position(reorderings=()), "end=steps on_nonfinite=rollback checkpoint=sharded"),
        (_does_nothing(GradientAverager, "load_state"), "end=steps checkpoint=sharded"),
        (_does_nothing(GradientAverager, "load_state"), "end=steps averager=blocking"),
        (_does_nothing(LazyAverager, "load_counters"), "end=request averager=lazy lazy=all-layers"),
        (_does_nothing(GradientAverager, "load_state"), "on_nonfinite=rollback-late checkpoint=single"),
        (_labels_as_stored, "data=unreadable"),
        (_does_nothing(Loader, "_take_size"), "data=file image_sizes=smaller-first"),
        (_does_nothing(RunHashes, "read_state"), "hashes=every-step end=kill checkpoint=single"),
        (_hashes_without_an_element, "hashes=every-step"),
        (_without_the_last_sample, "data=file data_threads=3"),
    ],
)
def test_a_fault_of_the_program_is_seen(monkeypatch: pytest.MonkeyPatch, fault: Patch, options: str) -> None:
    assert is_well(options)
    fault(monkeypatch)
    assert not is_well(options)


def test_a_run_goes_back_to_its_newest_checkpoint() -> None:
    course = Course("own", 5, 0, every_steps=2)
    stopped, reordered = Position(global_step=3), Position(global_step=3, reorderings=(Reordering(0, 0, 1),))

    def back_to(step: int, *stops: Position, saves: bool = True) -> int:
        return other_order_from(course, step, 7, stops, saves=saves)

    assert [back_to(step) for step in range(9)] == [0, 0, 2, 2, 4, 4, 6, 7, 8]
    assert [back_to(step, stopped, saves=False) for step in range(5)] == [0, 0, 0, 3, 3]
    assert back_to(3, reordered) == 2


def test_what_cannot_go_on_is_refused() -> None:
    row = parsed(["end=kill", "resume=2x1", "data=unreadable", "grid=1x3"])
    assert "grid.rows is 2, and ranks that share samples cannot replace one" in str(refusal(row))
    assert refusal({**row, "end": "own"}) is None
    assert refusal({**row, "resume": "1x1"}) is None


_TABLE = {"a": ("0", "1", "2"), "b": ("0", "1", "2", "3"), "c": ("0", "1"), "d": ("0", "1", "2"), "e": ("0", "1")}


def _refusal(row: Mapping[str, str]) -> str | None:
    if row.get("a") == "1" and row.get("b", "0") != "0":
        return "b needs an a that is not 1."
    if {"c", "d", "e"} <= row.keys() and row["c"] == row["e"] == "1" and row["d"] == "2":
        return "c, d and e do not go together."
    return None


@pytest.mark.parametrize("seed", range(5))
def test_only_what_no_legal_combination_has_is_left_out(seed: int) -> None:
    found = draw(_TABLE, _refusal, seed=seed, count=60)
    assert len(found.rows) == 60
    assert not any(map(_refusal, found.rows))
    assert found.refused == {(("a", "1"), ("b", value)): "b needs an a that is not 1." for value in "123"}
    met = set().union(*(pairs_of(row) for row in found.rows))
    assert len(met | set(found.refused)) == sum(len(_TABLE[a]) * len(_TABLE[b]) for a, b in itertools.combinations(_TABLE, 2))
