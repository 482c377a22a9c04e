"""Whole trainings whose local copy is disturbed: they say so, lose nothing, and end with the bits of a run without one."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import local_copies
from tests.support.jobs import Outcome, clean_environment, run_job
from tests.support.local_copies import IMAGES, TEST_IMAGES, Trainings
from tests.support.signal_storm import final_tensors, same_bits

pytestmark = [pytest.mark.job, pytest.mark.slow]

Job = Callable[..., Outcome]
KEEP = "data.cache.keep=true"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """By ranks, the last tensors of a training without any level."""
    trainings = Trainings(run_job, tmp_path_factory.mktemp("undisturbed")).prepare()
    for ranks in (0, 2):
        outcome = trainings.run(f"ranks-{ranks}", ranks=ranks, local=False)
        assert outcome.code == 0, outcome.output
    return {ranks: final_tensors(trainings.folder, f"ranks-{ranks}") for ranks in (0, 2)}


@pytest.fixture
def trainings(job: Job, tmp_path: Path) -> Trainings:
    return Trainings(job, tmp_path).prepare()


def files(trainings: Trainings, suffix: str) -> list[Path]:
    """Those of kept local copies, the larger ones first."""
    return sorted(trainings.copies.glob(f"*{suffix}"), key=lambda path: -path.stat().st_size)


@pytest.mark.sample(1)
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("fault", ["KILLED_COPYING", "KILLED_IN_AN_EPOCH"])
def test_a_killed_rank_leaves_nothing_that_a_later_run_takes_for_whole(
    trainings: Trainings, undisturbed: dict[int, Any], fault: str, keep: bool
) -> None:
    more = (KEEP,) if keep else ()
    outcome = trainings.run_faulty(getattr(local_copies, fault), "runs", *more)
    assert outcome.code not in (0, 85), outcome.output
    assert "was ended by SIGKILL" in outcome.stderr
    assert files(trainings, ".index") == []
    assert len(list(trainings.copies.iterdir())) == 2 * keep  # the files of the copies of both data files
    outcome = trainings.run("runs", "--resume", "auto", *more)
    assert outcome.code == 0, outcome.output
    assert "resumed at" in outcome.output
    assert trainings.shared_memory() == []  # MPI's own segments are removed by the next job
    assert "local copy of samples" not in outcome.output  # nothing of the old copy was trusted and found wrong
    assert same_bits(final_tensors(trainings.folder, "runs"), undisturbed[2])
    assert trainings.reads("runs")["file_samples"] > 0
    assert len(list(trainings.copies.iterdir())) == 4 * keep


def test_a_copy_that_is_changed_between_two_trainings_is_read_again(trainings: Trainings, undisturbed: dict[int, Any]) -> None:
    def run(output: str) -> tuple[list[str], int]:
        """What was said of local copies that are not to be trusted, and the samples that were read from the data files."""
        outcome = trainings.run(output, KEEP)
        assert outcome.code == 0, outcome.output
        assert same_bits(final_tensors(trainings.folder, output), undisturbed[2])
        told = [line for line in outcome.output.splitlines() if "cannot be trusted" in line]
        return told, trainings.reads(output)["file_samples"]

    assert run("first") == ([], IMAGES + TEST_IMAGES)
    train, _ = files(trainings, ".samples")
    size = train.stat().st_size
    image_bytes = size // IMAGES
    with train.open("r+b") as file:
        file.truncate(size // 4)
    told, read = run("cut")
    # A place behind the end that another rank writes behind has zeros. Each rank says once what it has met.
    reasons = [re.search(r"cannot be trusted \((.*)\); these samples are read from the data file again", line) for line in told]
    assert {reason and reason[1] for reason in reasons} in ({"it is cut short"}, {"it is cut short", "bytes of it have changed"})
    assert len({(line.split()[0], reason and reason[1]) for line, reason in zip(told, reasons, strict=True)}) == len(told)
    assert read == IMAGES - IMAGES // 4
    with train.open("r+b") as file:
        file.seek(7 * image_bytes + 5)
        byte = file.read(1)[0]
        file.seek(7 * image_bytes + 5)
        file.write(bytes([byte ^ 16]))
    told, read = run("changed")
    assert len(told) == 1
    assert "(bytes of it have changed)" in told[0]
    assert read == 1
    assert run("mended") == ([], 0)


def test_a_copy_without_room_grows_no_further(trainings: Trainings, undisturbed: dict[int, Any]) -> None:
    outcome = trainings.run_faulty(local_copies.NO_SPACE, "runs", KEEP)
    assert outcome.code == 0, outcome.output
    told = [line for line in outcome.output.splitlines() if "gets no larger" in line]
    assert len(told) == 2  # of rank 1, for each data file once
    assert all("(No space left on device); others are read from the data file" in line for line in told)
    assert same_bits(final_tensors(trainings.folder, "runs"), undisturbed[2])
    # Rank 1 has kept 40 of the 80 samples of its first epoch, and no more of any later one.
    assert trainings.reads("runs")["file_samples"] > IMAGES + TEST_IMAGES
    outcome = trainings.run("again", KEEP)  # finds what there is
    assert outcome.code == 0, outcome.output
    assert 0 < trainings.reads("again")["file_samples"] < IMAGES
    assert same_bits(final_tensors(trainings.folder, "again"), undisturbed[2])


def in_a_namespace(trainings: Trainings, size: str, command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command that sees a disk of some size in the place of the directory of local copies; skips where none may be had."""
    mount = f"mount -t tmpfs -o size={size} none {trainings.copies}"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("file systems cannot be mounted here")
    return subprocess.run(
        ["unshare", "-rm", "sh", "-c", f'{mount} && exec "$@"', "sh", *command],
        cwd=trainings.folder,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize(("fault", "size"), [("FILLED_DISK", "1m"), ("pass", "64k")])
def test_a_small_disk_takes_what_fits(trainings: Trainings, undisturbed: dict[int, Any], fault: str, size: str) -> None:
    program = trainings.program(getattr(local_copies, fault, fault), rank=0)
    done = in_a_namespace(trainings, size, [sys.executable, str(program), *trainings.words("runs")])
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    if fault == "pass":
        assert f"{trainings.copies} has room for 5.9e-05 GB" in " ".join(said.split())
    else:
        assert said.count("gets no larger (No space left on device); others are read from the data file") == 2  # of both files
    assert same_bits(final_tensors(trainings.folder, "runs"), undisturbed[0])
    read = trainings.reads("runs")
    assert read["local_samples"] > 0
    assert read["file_samples"] > IMAGES + TEST_IMAGES
