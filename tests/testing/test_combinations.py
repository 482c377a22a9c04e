"""The net under all features: combinations of options, drawn so that every legal pair meets, against one rank in float64.

HPCTRAIN_COMBINATIONS says how many; `make combinations` runs 2,000 of each of three seeds.
"""

import itertools
import os

import pytest

from hpctrain.averaging.owner_operations import OwnerOperations
from hpctrain.data.batch_threads import BatchThreads, Work
from hpctrain.data.loader import Loader
from hpctrain.experiment.run_hashes import RunHashes
from tests.support import combinations
from tests.support.combinations import Tally, drawn, run
from tests.support.dimensions import VALUES, line, parsed
from tests.support.pairwise import pairs_of

COUNT = int(os.environ.get("HPCTRAIN_COMBINATIONS", "100"))
BLOCKS = 10


@pytest.mark.slow
@pytest.mark.usefixtures("emulated_device")
@pytest.mark.parametrize("block", range(BLOCKS))
def test_combinations_equal_one_rank(block: int) -> None:
    tally = Tally()
    for row in drawn(COUNT, 0).rows[block::BLOCKS]:
        tally.add(row)
    again = "python -m tests.support.combinations "
    assert not tally.failures, "\n".join(["", *(again + failure for failure in tally.failures)])
    assert not tally.refused, "refused only where it ran: such a rule is known before a run"


def test_every_legal_pair_is_among_them() -> None:
    every = drawn(COUNT, 0)
    assert len(every.rows) >= COUNT
    met = set().union(*(pairs_of(row) for row in every.rows))
    every_pair = {pair for a, b in itertools.combinations(VALUES, 2) for pair in itertools.product(_values(a), _values(b))}
    assert met | set(every.refused) == every_pair
    assert not met & set(every.refused)


def _values(name: str) -> list[tuple[str, str]]:
    return [(name, value) for value in VALUES[name]]


def test_refusals_are_sentences() -> None:
    refused = drawn(COUNT, 0).refused
    assert refused
    for pair, sentence in refused.items():
        assert sentence.endswith("."), (pair, sentence)


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


def test_a_run_without_the_hashes_that_it_was_asked_for_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    row = parsed(["net=narrow", "hashes=every-step", "end=kill", "checkpoint=single", "steps=6"])
    assert run(row) <= combinations.TOLERANCE
    monkeypatch.setattr(RunHashes, "keep", lambda self, position: None)
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
    assert run(row) > combinations.TOLERANCE
