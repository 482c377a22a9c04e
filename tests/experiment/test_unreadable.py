"""Jobs whose data cannot be read on one rank: ended in a sentence, or going on without those samples."""

import json
import re
from pathlib import Path

import pytest

from tests.support.faults import Fault, prepare, run_fault

pytestmark = [pytest.mark.job, pytest.mark.slow]

#: samples 5 and 6 of the data file, of 72 bytes each, cannot be read
_DISK = """
import errno
from hpctrain.data import block_reader, mapped_reader
preadv = os.preadv
opened = {}
initialise = mapped_reader.MappedReader.__init__
def remember(self, path, images, offset):
    initialise(self, path, images, offset)
    opened["offset"] = offset
mapped_reader.MappedReader.__init__ = remember
block_reader._copy = lambda *arguments: -1
def broken(descriptor, buffers, at):
    if (at - opened.get("offset", at)) // 72 in (5, 6):
        raise OSError(errno.EIO, "Input/output error")
    return preadv(descriptor, buffers, at)
os.preadv = broken
"""


def records(folder: Path, kind: str) -> list[dict]:
    [metrics] = folder.glob("runs/*/metrics.jsonl")
    return [record for line in metrics.read_text().splitlines() if (record := json.loads(line))["kind"] == kind]


@pytest.mark.sample(1)
@pytest.mark.parametrize("cache", ["true", "false"])
def test_the_job_ends_with_one_sentence(tmp_path: Path, cache: str) -> None:
    prepare(tmp_path)
    outcome = run_fault(
        Fault("a disk that fails", _DISK, (), overrides=(f"data.cache={cache}", "deadline_seconds=100")), tmp_path
    )
    assert outcome.code == 2, outcome.output
    said = [line for line in outcome.stderr.splitlines() if line.startswith("hpctrain: ")]
    assert len(said) == 1, outcome.stderr
    assert "of the data file train.h5 cannot be read: Input/output error, in 4 attempts (on rank 1 of 3, " in said[0]
    assert "Traceback" not in outcome.stderr


def test_others_stand_in_and_are_told(tmp_path: Path) -> None:
    prepare(tmp_path)
    overrides = ("data.on_unreadable=skip", "data.max_unreadable=0.08", "deadline_seconds=100")
    outcome = run_fault(Fault("skip", _DISK, (), ranks=(0, 1, 2), overrides=overrides), tmp_path)
    assert outcome.code == 0, outcome.output
    told = records(tmp_path, "unreadable")  # training and test data are the same file, which two loaders read
    assert [(record["file"], record["samples"], record["instead"]) for record in told] == [("train.h5", [5, 6], [7, 7])] * 2
    assert outcome.output.count("2 of 24 samples of train.h5 could not be read; others stood in for them") == 2
    warning = r"warning: sample 5 and 1 more of train.h5 cannot be read on ranks? [012, and-]+; others stand in for them"
    assert len(re.findall(warning, outcome.stdout)) == 2  # on the ranks to which they have come
    own = [line for line in outcome.stderr.splitlines() if "cannot be read" in line]
    assert all("(on rank 0 of 3" in line for line in own)  # other ranks' own words are in their log files
    assert [record["images"] for record in records(tmp_path, "epoch")] == [24, 24]


def test_ranks_that_share_samples_do_not_skip_any(tmp_path: Path) -> None:
    prepare(tmp_path)
    overrides = ("data.on_unreadable=skip", "grid.rows=3", "plan={default: model}", "deadline_seconds=100")
    outcome = run_fault(Fault("rows", "", (), overrides=overrides), tmp_path)
    assert outcome.code == 2, outcome.output
    assert "data.on_unreadable is skip, but grid.rows is 3: ranks that share samples" in outcome.stderr
