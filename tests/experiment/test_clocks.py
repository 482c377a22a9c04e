"""Clocks and time zones decide neither which run and checkpoint a resume chooses nor which checkpoints are kept."""

from __future__ import annotations

import contextlib
import json
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hpctrain.data import format as data_format
from hpctrain.storage import checkpoint
from hpctrain.storage.run_directory import runs
from hpctrain.storage.run_marker import MARKER
from tests.experiment.test_checkpoints import CONFIG
from tests.support.virtual_runs import train_virtual

ZONES = ("UTC", "Europe/Berlin", "America/New_York", "Pacific/Kiritimati", "Asia/Kolkata", "America/St_Johns")
KEEP = 2
#: around the hour that comes twice in Berlin when summer time ends
DOUBLE_HOUR = 1761438600.0
YEAR = 365 * 86400.0


@contextlib.contextmanager
def clock(seconds: float, zone: str) -> Iterator[None]:
    """Hold the wall clock at this time in this time zone."""
    real = {name: getattr(time, name) for name in ("time", "time_ns", "gmtime", "localtime", "strftime")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", zone)
        time.tzset()
        patch.setattr(time, "time", lambda: seconds)
        patch.setattr(time, "time_ns", lambda: int(seconds * 1e9))
        for name in ("gmtime", "localtime"):
            patch.setattr(time, name, lambda at=None, of=real[name]: of(seconds if at is None else at))
        patch.setattr(time, "strftime", lambda form, at=None: real["strftime"](form, time.localtime() if at is None else at))
        yield
    time.tzset()


class History:
    """Starts and resumes of one configuration, each with its own clock and time zone, and the runs that must result.

    Attributes:
        written: steps of the checkpoints that the newest run has written and that were not set aside, in this order.
    """

    def __init__(self, folder: Path, draw: random.Random) -> None:
        self.folder, self.draw = folder, draw
        self.written: list[int] = []
        self.begun: list[Path] = []

    def train(self, source: str | None, steps: int) -> None:
        offset = self.draw.choice((0.0, 1800.0, 3600.0, -3600.0, self.draw.uniform(-YEAR, YEAR)))
        with clock(DOUBLE_HOUR + offset, self.draw.choice(ZONES)):
            train_virtual(1, self.folder / "tiny.yaml", f"output={self.folder / 'runs'}", resume=source, steps=steps)

    def start(self) -> None:
        there = self._directories()
        steps = self.draw.randint(1, 3)
        self.train(None, steps)
        (new,) = self._directories() - there
        self.begun.append(new)
        self.written = list(range(1, steps + 1))

    def resume(self, earlier: bool) -> None:
        """Resume the newest run: from its last checkpoint by `auto`, or from the checkpoint before it by its path."""
        run = self.begun[-1]
        if earlier and len(self.written) > 1:
            del self.written[-1]
            source = str(checkpoint.checkpoint_path(run / "checkpoints", self.written[-1]))
        else:
            source = "auto"
        last, steps, there = self.written[-1], self.draw.randint(1, 3), self._directories()
        self.train(source, steps)
        assert self._directories() == there, "a resume begins no new run"
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        resumed = [record["step"] for record in records if record["kind"] == "resume"]
        assert resumed[-1:] == [last], "the run goes on from what was written last"
        self.written += range(last + 1, last + steps + 1)

    def touch(self) -> None:
        """Set random file times, as copies, nodes with other clocks and people do."""
        for path in (self.folder / "runs").rglob("*"):
            seconds = self.draw.uniform(1e9, 2e9)
            os.utime(path, (seconds, seconds))

    def age(self) -> None:
        """Make the runs those of an earlier version: without markers and sequence numbers, named in local time."""
        for number, run in enumerate(self.begun):
            (run / MARKER).unlink(missing_ok=True)
            for _, path in checkpoint.checkpoints(run / "checkpoints"):
                content = checkpoint.read(path)
                meta = {key: value for key, value in content.meta.items() if key not in (checkpoint.SEQUENCE, "run")}
                checkpoint.write(path, checkpoint.CheckpointContent(content.tensors, meta))
            lines = (run / "metrics.jsonl").read_text().splitlines()
            first = {**json.loads(lines[0]), "time": 1e9 + number}  # all that is left of the order
            (run / "metrics.jsonl").write_text("".join(f"{line}\n" for line in (json.dumps(first), *lines[1:])))

    def check(self) -> None:
        """Assert that the newest run is the one that began last, and that its newest checkpoints are those written last."""
        assert [run.path for run in runs(self.folder / "runs", "tiny")] == self.begun[::-1]
        there = checkpoint.by_age(self.begun[-1] / "checkpoints")
        assert [step for step, _ in there] == self.written[-KEEP:]

    def _directories(self) -> set[Path]:
        return {path.parent for path in (self.folder / "runs").glob("*/config.yaml")}


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(20))
def test_the_order_is_that_of_the_history(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    images = np.random.default_rng(0).integers(0, 256, (75, 7, 6, 1), dtype=np.uint8)
    data_format.write(tmp_path / "train.h5", 75, (7, 6, 1), ["a", "b", "c"], [(images, np.arange(75) % 3)])
    text = CONFIG.replace("every_steps: 2", f"every_steps: 1, keep: {KEEP}").replace("epochs: 2", "epochs: 90")
    (tmp_path / "tiny.yaml").write_text(text.replace("train.h5", str(tmp_path / "train.h5")))
    history = History(tmp_path, draw)
    history.start()
    for _ in range(6):
        history.check()
        if draw.random() < 0.5:
            history.touch()
        if draw.random() < 0.2:
            history.age()
        history.check()
        act = draw.choice(("start", "resume", "resume", "rewind"))
        history.start() if act == "start" else history.resume(earlier=act == "rewind")
    history.check()
