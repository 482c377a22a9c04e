"""The package's log, and a rank's log file: complete and in order, whatever its disk does, and never in the way of the run."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpctrain.core import log as rank_log
from hpctrain.core.log import configure
from hpctrain.core.text import place
from hpctrain_testing.run import wait_until

_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} (DEBUG|INFO|WARNING|ERROR) +(.*)")


@pytest.fixture(autouse=True)
def _unchanged() -> Iterator[None]:
    root = logging.getLogger("hpctrain")
    state = root.handlers[:], root.level, root.propagate
    yield
    rank_log.end_rank_log()
    root.handlers[:], root.propagate = state[0], state[2]
    root.setLevel(state[1])


def _entries(path: Path) -> list[tuple[str, str]]:
    matches = [_LINE.fullmatch(line) for line in path.read_text().splitlines()]
    return [(match[1], match[2]) for match in matches if match is not None]


def test_lines_wait_for_the_file_and_go_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "logs" / "rank-0003.log"
    for start in range(2):  # a resume appends
        log = rank_log.begin_rank_log()
        configure(3, 8)
        logging.getLogger("hpctrain.some.module").debug(f"start {start}")
        logging.getLogger("hpctrain.some.module").info("before there is a directory")
        log.keep_in(path)
        logging.getLogger("hpctrain.some.module").warning("a worry")
        rank_log.tee("Traceback\n  of several lines\n")
        rank_log.end_rank_log()
    text = path.read_text()
    expected = ["DEBUG", "INFO", "WARNING", "ERROR"]
    assert [level for level, _ in _entries(path)] == expected * 2
    assert "start 0" in text
    assert "start 1" in text
    assert text.count("\n  of several lines\n") == 2
    assert capsys.readouterr().err.count("a worry") == 2  # details are for the file alone
    assert rank_log.current_rank_log() is None


def test_nothing_is_kept_unless_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = set(threading.enumerate())  # threads of other tests may wait for a disk that hangs
    configure(1, 2)
    rank_log.tee("an error that was printed", last=True)
    logging.getLogger("hpctrain").info("a detail")
    assert capsys.readouterr().err == ""
    assert set(threading.enumerate()) <= before


def test_a_disk_that_refuses_is_reported_once_and_tried_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").write_text("a file where a directory should be")
    log = rank_log.begin_rank_log()
    configure(2, 4)
    log.keep_in(tmp_path / "logs" / "rank-0002.log")
    for number in range(5):
        logging.getLogger("hpctrain").info(f"line {number}")
    said: list[str] = []
    wait_until(lambda: said.append(capsys.readouterr().err) or "cannot be written" in "".join(said))  # type: ignore[func-returns-value]
    (tmp_path / "logs").unlink()
    logging.getLogger("hpctrain").info("the last one")
    wait_until(lambda: (tmp_path / "logs" / "rank-0002.log").is_file() and not log._waiting)
    texts = [text for _, text in _entries(tmp_path / "logs" / "rank-0002.log")]
    assert [text for text in texts if text.startswith("line")] == [f"line {number}" for number in range(5)]
    assert "the last one" in texts
    said.append(capsys.readouterr().err)
    assert "".join(said).count("cannot be written") == 1


def test_what_a_broken_disk_has_lost_is_said_at_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").write_text("")
    log = rank_log.begin_rank_log()
    configure(0, 1)
    log.keep_in(tmp_path / "logs" / "rank-0000.log")
    logging.getLogger("hpctrain").debug("lost")
    wait_until(lambda: log._refused)
    begin = time.monotonic()
    rank_log.end_rank_log()
    assert time.monotonic() - begin < 60
    assert re.search(r"2 lines of \S*rank-0000.log could not be written and are lost", capsys.readouterr().err)


def test_a_disk_that_hangs_holds_up_no_caller(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the disk answers after the end, the thread ends without a message."""
    answers, opened = threading.Event(), rank_log.open_regular
    monkeypatch.setattr(rank_log, "open_regular", lambda *arguments: answers.wait() and opened(*arguments))
    log = rank_log.begin_rank_log()
    configure(0, 1)
    log.keep_in(tmp_path / "rank-0000.log")
    begin = time.monotonic()
    for number in range(rank_log.MOST_WAITING + 100):
        log.add(f"line {number}")
    assert time.monotonic() - begin < 60
    rank_log.tee("the last words", last=True)  # waits a second
    assert time.monotonic() - begin < 60
    assert len(log._waiting) == rank_log.MOST_WAITING
    thread = log._thread
    assert thread is not None
    rank_log.end_rank_log()
    answers.set()
    thread.join(60)
    assert not thread.is_alive()
    assert "cannot be written" not in capsys.readouterr().err


@pytest.mark.parametrize("rank", [0, 3])
def test_rank_0_says_all_and_others_what_matters(rank: int, capsys: pytest.CaptureFixture[str]) -> None:
    configure(rank)
    configure(rank)  # again: still one line per event
    log = logging.getLogger("hpctrain.some.module")
    log.info("a detail")
    log.warning("a worry")
    lines = capsys.readouterr().err.splitlines()
    assert [line.rpartition(" a ")[2] for line in lines] == (["detail", "worry"] if rank == 0 else ["worry"])
    assert all(line.startswith(place(3)) == (rank == 3) for line in lines)
