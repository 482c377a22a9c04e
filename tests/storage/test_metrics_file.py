"""Metrics at a resume: cut back to a position, whatever has been appended since, and whatever happens meanwhile."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpctrain.errors import CheckpointError
from hpctrain.storage.metrics_file import cut_back, unreadable_path

Record = dict[str, Any]
STEPS_PER_EPOCH = 5


def written(epochs: int, first: int = 1) -> list[Record]:
    """What a run of 5 steps per epoch records: its start, each step, each epoch's end and its evaluation.

    first: number of the first epoch; runs of earlier versions counted from 0, and recorded no images.
    """
    images: Record = {"images": 7} if first else {}
    found: list[Record] = [{"kind": "progress", "mode": "test"}]
    for epoch in range(epochs):
        if first:
            found.append({"kind": "image_size", "epoch": epoch + 1, "step": epoch * STEPS_PER_EPOCH, "size": 24})
        for step in range(epoch * STEPS_PER_EPOCH + 1, (epoch + 1) * STEPS_PER_EPOCH + 1):
            found.append({"kind": "interval", "epoch": epoch + first, "step": step, **images})
        found.append({"kind": "epoch", "epoch": epoch + first, "step": step, **images})
        found.append({"kind": "evaluation", "epoch": epoch + 1, "step": step})
    return found


def lines(*records: Record) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


@pytest.fixture
def warnings() -> Iterator[list[logging.LogRecord]]:
    """What the module logs, wherever the package's log goes."""
    found: list[logging.LogRecord] = []
    logger, handler = logging.getLogger("hpctrain.storage.metrics_file"), logging.Handler()
    handler.emit = found.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


@pytest.mark.parametrize("first", [1, 0])
@pytest.mark.parametrize("step", range(16))
def test_a_cut_and_the_same_steps_again_give_the_whole_file(path: Path, step: int, first: int) -> None:
    """The position is where a checkpoint is taken: at an epoch's end it is behind its evaluation."""
    records = written(3, first)
    epoch, boundary = step // STEPS_PER_EPOCH, step > 0 and step % STEPS_PER_EPOCH == 0
    here = [index for index, record in enumerate(records) if record.get("step") == step and record["kind"] != "image_size"]
    behind = here[-1 if boundary else 0] + 1 if here else 1
    for end in range(behind, len(records) + 1):
        path.write_bytes(lines(*records[:end]))
        cut_back(path, epoch, step)
        assert path.read_bytes() == lines(*records[:behind])
        with open(path, "ab") as file:
            file.write(lines(*records[behind:]))
        assert path.read_bytes() == lines(*records)


@pytest.mark.parametrize("first", [1, 0])
def test_a_checkpoint_inside_the_epochs_last_step_is_before_its_end(path: Path, first: int) -> None:
    """The epoch's end and its evaluation come again."""
    path.write_bytes(lines(*written(2, first)))
    cut_back(path, 0, 5)
    assert path.read_bytes() == lines(*written(1, first)[:-2])


def test_an_evaluation_that_comes_again_goes(path: Path) -> None:
    path.write_bytes(lines(*written(2)))
    cut_back(path, 2, 10)
    assert path.read_bytes() == lines(*written(2))
    cut_back(path, 2, 10, evaluates=True)
    assert path.read_bytes() == lines(*written(2)[:-1])


def test_starts_stay(path: Path) -> None:
    start = {"kind": "progress", "mode": "none"}
    path.write_bytes(lines(*written(1), start, {"kind": "interval", "epoch": 1, "step": 6}, start))
    cut_back(path, 1, 5)
    assert path.read_bytes() == lines(*written(1), start, start)


def test_no_file_and_nothing_to_cut(path: Path) -> None:
    cut_back(path, 1, 5)
    assert not path.exists()
    path.write_bytes(lines(*written(1)))
    before = path.stat()
    cut_back(path, 1, 5)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_torn_last_line_is_nothing_to_warn_of(path: Path, warnings: list[logging.LogRecord]) -> None:
    whole = lines(*written(1))
    for length in range(1, len(whole.splitlines(True)[-1])):
        path.write_bytes(whole[:-length])
        cut_back(path, 1, 5)
        assert path.read_bytes() == lines(*written(1)[:-1])
    assert warnings == []
    assert not unreadable_path(path).exists()


def test_unreadable_lines_move_out_of_the_way_with_a_warning(path: Path, warnings: list[logging.LogRecord]) -> None:
    bad = [b'{"kind": "interval", "st', b"[3]", b"\0\0\xff", b""]
    path.write_bytes(lines(*written(1)) + b"\n".join(bad) + b"\n" + lines({"kind": "interval", "epoch": 1, "step": 6}) + b"torn")
    cut_back(path, 1, 5)
    assert path.read_bytes() == lines(*written(1))
    assert unreadable_path(path).read_bytes() == b"\n".join(bad) + b"\n"
    (warning,) = warnings
    assert warning.levelno == logging.WARNING
    assert "4 lines" in warning.getMessage()
    assert str(unreadable_path(path)) in warning.getMessage()
    path.write_bytes(path.read_bytes() + b"more\n")
    cut_back(path, 1, 5)
    assert unreadable_path(path).read_bytes() == b"\n".join([*bad, b"more"]) + b"\n"


class Killed(BaseException):
    """Nothing runs after it."""


@pytest.mark.parametrize("error", [Killed(), OSError(28, "No space left on device")], ids=["killed", "full"])
@pytest.mark.parametrize("call", range(4))
def test_an_interruption_leaves_the_old_file_or_the_new_one(
    path: Path, monkeypatch: pytest.MonkeyPatch, call: int, error: BaseException
) -> None:
    """At the synchronisation of what is unreadable, that of the new file, its renaming, and the directory's synchronisation."""
    old = lines(*written(1)) + b"bad\n" + lines({"kind": "interval", "epoch": 1, "step": 6})
    path.write_bytes(old)
    calls = []

    def interrupted(work: Any) -> Any:
        def run(*arguments: Any) -> None:
            calls.append(work)
            if len(calls) == call + 1:
                raise error
            work(*arguments)

        return run

    with monkeypatch.context() as patch:
        for name in ("fsync", "replace"):
            patch.setattr(os, name, interrupted(getattr(os, name)))
        expected = CheckpointError if isinstance(error, OSError) else Killed
        with pytest.raises(expected) as caught:
            cut_back(path, 1, 5)
    if expected is CheckpointError:
        assert str(path) in str(caught.value)
        assert "No space left" in str(caught.value)
    assert len(calls) == call + 1
    assert path.read_bytes() == (lines(*written(1)) if call == 3 else old)
    cut_back(path, 1, 5)
    assert path.read_bytes() == lines(*written(1))
    assert b"bad\n" in unreadable_path(path).read_bytes()
    assert {each.name for each in path.parent.iterdir()} == {path.name, unreadable_path(path).name}


def test_a_rollback_to_here_is_told_again_by_a_resume_and_stays_where_the_run_itself_goes_back(path: Path) -> None:
    back, skip = {"kind": "rollback", "epoch": 2, "step": 5, "from_step": 7}, {"kind": "skip", "epoch": 2, "step": 6}
    path.write_bytes(lines(*written(1), back, skip))
    cut_back(path, 1, 5, goes_back=True)
    assert path.read_bytes() == lines(*written(1), back)
    cut_back(path, 1, 5)
    assert path.read_bytes() == lines(*written(1))
    path.write_bytes(lines(*written(1), back, skip))
    cut_back(path, 1, 6)
    assert path.read_bytes() == lines(*written(1), back, skip)
