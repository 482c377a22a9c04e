"""Whole trainings with a local copy of their samples, in which something goes wrong at a moment that a test chooses.

A fault is a few lines that replace a function in one rank before the training. The job is the program itself, on real processes.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hpctrain.runs.directory import latest
from hpctrain_testing.run import Outcome, patched_program
from tests.support.signal_storm import prepare

#: of training and of evaluation, which read files of their own; in a step each of two ranks reads 16
IMAGES, TEST_IMAGES, BATCH = 160, 64, 32
#: no batch is made ahead of the step under way, so that a moment is the same in every run
_OVERRIDES = ("data.prefetch=0", "data.cache.memory=0", "checkpoint.every_steps=1", "checkpoint.asynchronous=false")

_PROGRAM = """
def mapped():
    "The files in shared memory that this process has mapped."
    lines = [line for line in open("/proc/self/maps") if "/dev/shm/" in line and "(deleted)" not in line]
    return sorted({line.split(maxsplit=5)[5].strip() for line in lines})
def killed():
    Path("mapped").write_text("\\n".join(mapped()))
    os.kill(os.getpid(), signal.SIGKILL)
def fill():
    "Up to the last byte of a disk of some megabytes."
    try:
        with open("copies/filler", "wb", buffering=0) as file:
            for _ in range(2000):
                file.write(bytes(4096))
    except OSError as error:
        assert error.errno == errno.ENOSPC
    else:
        raise AssertionError("the disk is larger than it should be")
def patch():
    if here != @RANK@:
        return
    from hpctrain.data import local_copy
    from hpctrain.training.step import TrainingStep
    write, run, calls = local_copy.write_at, TrainingStep.run, []
@FAULT@
"""

_OF_WRITES = """
def patched_write(descriptor, data, at):
    calls.append(at)
    if len(calls) {when}:
        {fault}
    write(descriptor, data, at)
local_copy.write_at = patched_write
"""
_OF_STEPS = """
def step(self, batch, number, lr):
    if number == {number}:
        {fault}
    return run(self, batch, number, lr)
TrainingStep.run = step
"""
#: in the fifth step half of a sample is written, and the rank is no more
KILLED_COPYING = _OF_WRITES.format(when="== 70", fault="write(descriptor, data[: len(data) // 2], at); killed()")
#: in the second epoch, when every sample is in the copy
KILLED_IN_AN_EPOCH = _OF_STEPS.format(number=7, fault="killed()")
#: from the third step on
NO_SPACE = _OF_WRITES.format(when="> 40", fault='raise OSError(errno.ENOSPC, "No space left on device")')
#: somebody else fills the disk of the copy
FILLED_DISK = _OF_WRITES.format(when="== 3", fault="fill()")
#: of all ranks: samples are read ten at once, and rank 1 is asked to stop in the first round
ASKED_WHILE_FILLING = """
import time
from hpctrain.run import data_cache
data_cache._CHUNK_BYTES = 10 * 14 * 14 * 3
fill_round = data_cache._round
def signalled(*arguments):
    if here == 1 and arguments[3] == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)  # the thread that waits for signals takes it now
    fill_round(*arguments)
data_cache._round = signalled
"""


@dataclass(frozen=True)
class Trainings:
    """Trainings of one configuration in a folder.

    Attributes:
        job: runs jobs (see the fixture of that name). folder: with data, local copies, and an output directory for each name.
    """

    job: Callable[..., Outcome]
    folder: Path

    @property
    def copies(self) -> Path:
        """The directory of local copies."""
        return self.folder / "copies"

    def prepare(self) -> Trainings:
        """Data, configuration, and the directory of local copies: 2 epochs of 5 steps."""
        prepare(self.folder, IMAGES, epochs=2)
        self.copies.mkdir()
        return self

    def words(self, output: str, *more: str, local: bool = True) -> list[str]:
        """Arguments of the program."""
        copies = (f"data.cache.local={self.copies}",) if local else ()
        return ["train", "storm.yaml", f"output={output}", "backend=numpy", *_OVERRIDES, *copies, *more]

    def run(self, output: str, *more: str, ranks: int = 2, local: bool = True) -> Outcome:
        """A training without a fault."""
        return self.job(ranks, ["-m", "hpctrain", *self.words(output, *more, local=local)], cwd=self.folder, timeout_seconds=180)

    def program(self, fault: str, rank: int | None) -> Path:
        """The program with a fault in one rank; None: in all."""
        path = self.folder / "faulty.py"
        lines = textwrap.indent(textwrap.dedent(fault), "    ")
        program = _PROGRAM.replace("@FAULT@", lines).replace("@RANK@", "here" if rank is None else str(rank))
        path.write_text(patched_program(program))
        return path

    def run_faulty(self, fault: str, output: str, *more: str, rank: int | None = 1, local: bool = True) -> Outcome:
        """A training of two ranks with a fault in one rank; None: in all."""
        words = [self.program(fault, rank).name, *self.words(output, *more, local=local)]
        return self.job(2, words, cwd=self.folder, timeout_seconds=180)

    def reads(self, output: str) -> dict[str, int]:
        """The counts of a run's last epoch."""
        run = latest(self.folder / output, "storm")
        assert run is not None
        records = map(json.loads, (run.path / "metrics.jsonl").read_text().splitlines())
        return [record for record in records if record["kind"] == "reads"][-1]

    def shared_memory(self) -> list[str]:
        """The files in shared memory that a killed rank had mapped, and that are still there."""
        return [name for name in (self.folder / "mapped").read_text().splitlines() if Path(name).exists()]
