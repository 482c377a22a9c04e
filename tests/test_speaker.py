"""Lines of several ranks in one pipe: each with its place, each whole, and coloured only where that is wanted."""

from __future__ import annotations

import os
import platform
import pty
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.plain_text import escaped
from hpctrain.speaker import beginning_with, colours, place, write_lines


def test_a_place_is_rank_size_and_host() -> None:
    host = platform.node().partition(".")[0]
    assert (place(3, 64), place(3), place(None, 64)) == (f"[3/64@{host}] ", f"[3@{host}] ", "")


@given(st.text(max_size=200))
def test_every_line_gets_the_beginning_and_ends(text: str) -> None:
    lines = beginning_with("[1] ", text)
    assert lines.count("[1] ") >= len(text.splitlines())
    assert lines == "".join(f"[1] {escaped(line, keep=chr(9))}\n" for line in text.splitlines())


def test_lines_of_many_writers_stay_whole() -> None:
    """Texts that are longer than what a pipe takes at once."""
    reading, writing = os.pipe()
    words = [[f"line {number} " + "x" * (37 * rank) for number in range(60)] for rank in range(8)]
    texts = [beginning_with(place(rank, 8), "\n".join(lines)) for rank, lines in enumerate(words)]
    writers = [threading.Thread(target=write_lines, args=(text, writing)) for text in texts]
    received = bytearray()

    def read() -> None:
        while data := os.read(reading, 1 << 16):
            received.extend(data)

    reader = threading.Thread(target=read)
    for thread in (reader, *writers):
        thread.start()
    for writer in writers:
        writer.join()
    os.close(writing)
    reader.join()
    os.close(reading)
    lines = received.decode().splitlines()
    assert sorted(lines) == sorted(line for text in texts for line in text.splitlines())
    for text in texts:  # those of one writer keep their order
        own = set(text.splitlines())
        assert [line for line in lines if line in own] == text.splitlines()


@pytest.mark.parametrize(
    ("environ", "expected"), [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True), ({"TERM": "dumb"}, False)]
)
def test_colours_are_for_terminals_that_want_them(environ: dict[str, str], expected: bool) -> None:
    outer, terminal = pty.openpty()
    reading, writing = os.pipe()
    try:
        assert colours(terminal, environ) is expected
        assert not colours(writing, environ)
    finally:
        for descriptor in (outer, terminal, reading, writing):
            os.close(descriptor)
