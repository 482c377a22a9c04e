"""Combinations of options, drawn so that legal pairs meet, against one rank in float64.

Level usual runs those of the day's seed that hold most pairs for their cost, about 88 % of all legal ones; level all runs each.
`make combinations` runs 2,000 of each of three seeds.
"""

import itertools
import os
from functools import cache

import pytest

from hpctrain.averaging.reduce_scatter import OwnerOperations
from hpctrain.data.loader import Loader
from hpctrain.data.pipeline import BatchThreads, Work
from hpctrain.run.accounts import RunHashes
from tests.support import combinations
from tests.support.combinations import Draw, Row, Tally, drawn, predicted_seconds, run
from tests.support.dimensions import VALUES, line, parsed
from tests.support.pairwise import most_pairs, pairs_of, shared_out
from tests.support.sampling import SEED, amount

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
    "averager=sharded grid=2x2 plan=mixed net=residual batch=3 wire_parameters=float16 end=kill hashes=every-step",
    "averager=priority slices=tiny grid=1x3 hashes=every-step data=unreadable on_nonfinite=rollback-late checkpoint=single",
)


def _every() -> Draw:
    return drawn(0, os.environ[SEED], MOST_SECONDS)


@cache
def _blocks() -> list[list[Row]]:
    rows = most_pairs(_every().rows, predicted_seconds, amount(1, 200) * MOST_SECONDS_TOGETHER)
    return shared_out([*rows, *(parsed(row.split()) for row in ALWAYS)], predicted_seconds, BLOCKS)


@pytest.mark.slow
@pytest.mark.usefixtures("emulated_device")
@pytest.mark.parametrize("block", range(BLOCKS))
def test_combinations_equal_one_rank(block: int) -> None:
    tally = Tally()
    for row in _blocks()[block]:
        tally.add(row)
    again = "python -m tests.support.combinations "
    assert not tally.failures, "\n".join(["", *(again + failure for failure in tally.failures)])
    assert not tally.refused, "refused only where it ran: such a rule is known before a run"


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


def test_images_that_keep_the_first_epochs_size_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    row = parsed(["net=narrow", "data=file", "image_sizes=smaller-first", "steps=6"])
    assert run(row) <= combinations.TOLERANCE
    monkeypatch.setattr(Loader, "_take_size", lambda self, epoch: None)
    assert run(row) > combinations.TOLERANCE


def test_hashes_that_leave_elements_out_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    row = parsed(["net=narrow", "hashes=every-step"])
    assert run(row) <= combinations.TOLERANCE
    counted = OwnerOperations.counted
    monkeypatch.setattr(OwnerOperations, "counted", lambda self: counted(self)[1:])
    assert run(parsed(["net=narrow"])) <= combinations.TOLERANCE
    with pytest.raises(AssertionError, match="are not those of the state"):
        run(row)


@pytest.mark.slow
def test_a_run_without_the_hashes_that_it_was_asked_for_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    row = parsed(["net=narrow", "hashes=every-step", "end=kill", "checkpoint=single", "steps=6"])
    assert run(row) <= combinations.TOLERANCE
    monkeypatch.setattr(RunHashes, "read_state", lambda self, position: None)
    with pytest.raises(AssertionError, match="are not the steps with hashes"):
        run(row)


def test_a_sample_that_several_threads_leave_out_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    row = parsed(["net=narrow", "data=file", "data_threads=3"])
    assert run(row) <= combinations.TOLERANCE
    whole = BatchThreads.run

    def without_the_last(self: BatchThreads, samples: int, sample_bytes: int, work: Work) -> None:
        whole(self, samples - (self.count > 1), sample_bytes, work)

    monkeypatch.setattr(BatchThreads, "run", without_the_last)
    assert run(parsed(["net=narrow", "data=file"])) <= combinations.TOLERANCE
    tally = Tally()
    tally.add(row)  # memory that no thread has filled may hold what is not finite
    assert tally.failures
