"""TensorBoard event files: they hold the scalars, and those of a resumed run take over."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.config.schema import MetricsConfig, ReporterConfig
from hpctrain.train.reporters import make_reporter


def _report(directory: Path, done_steps: int = 0) -> None:
    reporter = make_reporter(ReporterConfig(name="tensorboard"), directory, done_steps)
    reporter.record("epoch", {"epoch": 1, "step": done_steps + 3, "loss": 0.5, "note": "a text"})
    reporter.close()


def test_the_key_tensorboard_is_short_for_the_reporter() -> None:
    def names(**keys: object) -> list[str]:
        return [reporter.name for reporter in MetricsConfig.model_validate(keys).all_reporters]

    assert names() == []
    assert names(tensorboard=True, reporters=["own.py:A"]) == ["tensorboard", "own.py:A"]
    assert names(tensorboard=True, reporters=["own.py:A", "tensorboard"]) == ["own.py:A", "tensorboard"]


def test_tensorboard_files_hold_the_scalars(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    _report(tmp_path)
    events = list((tmp_path / "tensorboard").glob("events.*"))
    assert len(events) == 1
    assert b"epoch/loss" in events[0].read_bytes()


@pytest.mark.parametrize(("done_steps", "starts"), [(0, []), (7, [8])])
def test_a_resumed_runs_tensorboard_files_take_over_behind_its_checkpoint(
    tmp_path: Path, done_steps: int, starts: list[int]
) -> None:
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    _report(tmp_path, done_steps)
    (path,) = (tmp_path / "tensorboard").glob("events.*")
    content, events, place = path.read_bytes(), [], 0
    while place < len(content):  # length (8 bytes), its checksum (4), the event, its checksum (4)
        size = int.from_bytes(content[place : place + 8], "little")
        events.append(Event.FromString(content[place + 12 : place + 12 + size]))
        place += size + 16
    assert [event.step for event in events if event.session_log.status == SessionLog.START] == starts
