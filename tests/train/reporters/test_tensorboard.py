"""TensorBoard event files: they hold the scalars, and those of a resumed run take over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpctrain.config.schema import MetricsConfig, ReporterConfig
from hpctrain.train.reporters import make_reporter

Values = dict[tuple[str, str], list[tuple[int, float]]]


def _report(directory: Path, done_steps: int = 0, *, ema: bool = False) -> None:
    """An interval, the end of the epoch, its evaluation and an event, from a step on."""
    reporter = make_reporter(ReporterConfig(name="tensorboard"), directory, done_steps)
    averaged = {"ema_loss": 0.25} if ema else {}
    reporter.record("interval", {"epoch": 1, "step": done_steps + 2, "loss": 0.75, "lr": 0.5, "note": "a text"})
    reporter.record("epoch", {"epoch": 1, "step": done_steps + 3, "loss": 0.5})
    reporter.record("evaluation", {"epoch": 1, "step": done_steps + 3, "loss": 0.375, "top1": 1.0, **averaged})
    reporter.record("skip", {"epoch": 2, "step": done_steps + 4})
    reporter.close()


def _events(directory: Path) -> dict[str, list[Any]]:
    """All events of each directory below `tensorboard`, in order."""
    from tensorboardX.proto.event_pb2 import Event

    events: dict[str, list[Any]] = {}
    for path in sorted(directory.glob("tensorboard/**/events*"), key=lambda path: path.stat().st_mtime_ns):
        content, place = path.read_bytes(), 0
        while place < len(content):  # length (8 bytes), its checksum (4), the event, its checksum (4)
            size = int.from_bytes(content[place : place + 8], "little")
            name = str(path.parent.relative_to(directory / "tensorboard"))
            events.setdefault(name, []).append(Event.FromString(content[place + 12 : place + 12 + size]))
            place += size + 16
    return events


def _values(directory: Path) -> Values:
    """(directory, tag) -> (step, value), in order."""
    values: Values = {}
    for name, events in _events(directory).items():
        for event in events:
            for value in event.summary.value:
                values.setdefault((name, value.tag), []).append((event.step, value.simple_value))
    return values


def _starts(directory: Path) -> dict[str, list[int]]:
    """The steps from which each directory takes over."""
    from tensorboardX.proto.event_pb2 import SessionLog

    return {
        name: [event.step for event in events if event.session_log.status == SessionLog.START]
        for name, events in _events(directory).items()
    }


def _rename(directory: Path, suffix: str) -> None:
    """Make room for further files: names have the second, which a run and its resume do not share but here."""
    for path in directory.glob("tensorboard/*/events*"):
        path.rename(path.with_name(f"{path.name}.{suffix}"))


def test_the_key_tensorboard_is_short_for_the_reporter() -> None:
    def names(**keys: object) -> list[str]:
        return [reporter.name for reporter in MetricsConfig.model_validate(keys).all_reporters]

    assert names() == []
    assert names(tensorboard=True, reporters=["own.py:A"]) == ["tensorboard", "own.py:A"]
    assert names(tensorboard=True, reporters=["own.py:A", "tensorboard"]) == ["own.py:A", "tensorboard"]


def test_training_and_test_have_equal_tags_in_directories_beside_each_other(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    _report(tmp_path, ema=True)
    values = _values(tmp_path)
    assert values["train", "loss"] == [(2, 0.75), (3, 0.5)]
    assert values["test", "loss"] == [(3, 0.375)]
    assert values["test-averaged", "loss"] == [(3, 0.25)]
    assert values["test", "top1"] == [(3, 1.0)]
    assert values["train", "train/lr"] == [(2, 0.5)]
    assert values["train", "skip/epoch"] == [(4, 2.0)]
    assert {name for name, _ in values} == {"train", "test", "test-averaged"}
    assert _starts(tmp_path) == {"train": [], "test": [], "test-averaged": []}


def test_a_resumed_runs_files_take_over_behind_its_checkpoint_in_each_directory(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    _report(tmp_path)
    _rename(tmp_path, "first")
    make_reporter(ReporterConfig(name="tensorboard"), tmp_path, 2).close()  # ends before it records anything
    assert _starts(tmp_path) == {"train": [3], "test": [3]}
    _rename(tmp_path, "second")
    _report(tmp_path, 7)
    assert _starts(tmp_path) == {"train": [3, 8], "test": [3, 8]}
    assert _values(tmp_path)["test", "loss"] == [(3, 0.375), (10, 0.375)]


def test_a_run_of_an_earlier_version_goes_on_in_its_one_directory(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    from tensorboardX.event_file_writer import EventsWriter

    (tmp_path / "tensorboard").mkdir()
    writer = EventsWriter(str(tmp_path / "tensorboard" / "events"), "")
    writer.close()
    _report(tmp_path, 7)
    assert _starts(tmp_path) == {".": [8]}
    values = _values(tmp_path)
    assert values[".", "interval/loss"] == [(9, 0.75)]
    assert values[".", "evaluation/loss"] == [(10, 0.375)]


def test_one_directory_that_refuses_does_not_keep_others_from_their_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard" / "train").write_text("no directory")
    reporter = make_reporter(ReporterConfig(name="tensorboard"), tmp_path, 0)
    with pytest.raises(OSError, match="train"):
        reporter.record("interval", {"epoch": 1, "step": 2, "loss": 0.75})
    with pytest.raises(OSError, match="train"):
        reporter.record("evaluation", {"epoch": 1, "step": 3, "loss": 0.5})
    (tmp_path / "tensorboard" / "train").unlink()
    reporter.close()
    assert _values(tmp_path)["test", "loss"] == [(3, 0.5)]
    assert _values(tmp_path)["train", "loss"] == [(2, 0.75)]
