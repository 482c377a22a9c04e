"""Ranks that give up say so in whole lines, in turn, with stacks."""

from __future__ import annotations

import io

import pytest

from hpctrain import rank_log
from hpctrain.launch import last_words
from hpctrain.speaker import place


@pytest.mark.parametrize("ranks", [2, 64, 4096])
def test_few_ranks_speak_at_a_time(ranks: int) -> None:
    turns = [last_words.turn_seconds(rank, 300.0) for rank in range(ranks)]
    assert turns == sorted(turns)
    assert turns[:4] == [0.0, 1.0, 2.0, 2.0][:ranks]
    assert turns[-1] <= 13
    assert max(last_words.turn_seconds(rank, 2.0) for rank in range(ranks)) <= 0.5


def test_every_line_has_the_place_and_the_file_has_them_too(capfd: pytest.CaptureFixture[str], tmp_path: object) -> None:
    log = rank_log.begin()
    try:
        last_words.say(3, ["nothing has moved;", "stacks of all threads:"])
        assert "nothing has moved" in log._waiting[-1]
        assert "in test_every_line_has_the_place" in log._waiting[-1]
    finally:
        rank_log.end()
    lines = capfd.readouterr().err.splitlines()
    assert lines[:2] == [f"{place(3)}nothing has moved;", f"{place(3)}stacks of all threads:"]
    assert all(line.startswith(place(3)) for line in lines)
    assert any("in test_every_line_has_the_place" in line for line in lines)


def test_a_stream_takes_their_place(capfd: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    last_words.say(0, ["one", "two"], stream, stacks=False)
    assert stream.getvalue() == f"{place(0)}one\n{place(0)}two\n"
    assert capfd.readouterr().err == ""
