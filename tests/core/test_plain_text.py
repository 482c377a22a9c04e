"""What is printed: texts of others without their control characters, places of ranks, and whole lines in one pipe."""

from __future__ import annotations

import io
import os
import platform
import pty
import shlex
import threading
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table

from hpctrain.core.console import PlainConsole
from hpctrain.core.text import (
    beginning_with,
    colours,
    counted,
    echo,
    echo_block,
    escaped,
    forbidden,
    nearest,
    place,
    ranks_of,
    sentence,
    shell_word,
    shortened,
    size_text,
    spans,
    wrapped,
    write_lines,
)

CATEGORIES = ("Cc", "Cf", "Cs", "Zl", "Zp")

#: a newline, a carriage return, an escape, DEL, a control of C1, separators, bidirectional marks, zero-width characters
NAMED = "\n\r\x1b\x7f\x85\x9b\u2028\u2029\u202a\u202e\u2066\u2069\u200b\u200d\ufeff"


@pytest.mark.parametrize("character", NAMED, ids=[f"{ord(character):04x}" for character in NAMED])
def test_each_such_character_is_named_and_escaped(character: str) -> None:
    assert forbidden(f"é a{character}") == f"U+{ord(character):04X} at position 3"
    assert escaped(f"é{character}日") == f"é{character!r}日".replace("'", "")


@given(st.text(st.characters(codec="utf-16", exclude_categories=()) | st.sampled_from(NAMED), max_size=20))
def test_what_is_escaped_holds_none_and_others_stay(text: str) -> None:
    assert forbidden(escaped(text)) is None
    assert (forbidden(text) is None) == (escaped(text) == text)
    assert not any(unicodedata.category(character) in CATEGORIES for character in escaped(text, keep="\n") if character != "\n")


@given(st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=20))
def test_a_shell_reads_a_word_as_it_was(text: str) -> None:
    assert shlex.split(shell_word(text)) == [text]
    assert not shell_word(text).startswith(("=", "~", "#"))


@pytest.mark.parametrize(("name", "near"), [("resnet21", "resnet20"), ("resnet51", "resnet50"), ("vgg", "vgg11"), ("yolo", None)])
def test_the_nearest_name_begins_like_the_unknown_one(name: str, near: str | None) -> None:
    """The answer to resnet21 is not resnet32, which is as similar by its letters."""
    assert nearest(name, ["resnet56", "resnet32", "resnet18", "resnet50", "resnet20", "vgg13", "vgg11"]) == near


@given(st.lists(st.text("ab,", min_size=1, max_size=9), min_size=1, max_size=12), st.integers(1, 30))
def test_wrapped_lines_have_all_words_and_fit_the_columns(words: list[str], columns: int) -> None:
    """No word is lost or broken, and only a single word makes a line too long."""
    lines = wrapped(" ".join(words), columns).splitlines()
    assert " ".join(line.strip() for line in lines) == " ".join(words)
    assert all(len(line) <= columns or max(map(len, line.split())) + 2 > columns for line in lines)


def test_lines_end_with_a_clause_rather_than_within_a_number_and_its_unit() -> None:
    text = "  epoch 1/6: train loss 0.1568, top1 94.31%; test loss 0.2225, top1 92.06%; 2,060 images/s"
    assert wrapped(text, 81) == text.replace("; 2,060", ";\n    2,060")
    assert wrapped("a, b c d e f", 8) == "a, b c d\n  e f"
    assert wrapped("all samples stay in memory (47.1 MB)", 32) == "all samples stay in memory\n  (47.1 MB)"
    path = "/" + 90 * "x"
    assert wrapped(f"run directory {path}", 80) == f"run directory {path}", "a script reads it on this line"


def test_upper_case_changes_no_nearest_name() -> None:
    """Of equally similar names, the one with the longest common beginning would depend on the case of its letters."""
    names = ["Resnet18", "resnet32", "Vgg11", "vgg13"]
    for name in ("resnet1", "resnet3", "vgg1", "vgg3"):
        assert nearest(name, names) == nearest(name.upper(), names) == nearest(name.title(), names)
    assert nearest("vgg3", ["Vgg13", "vgg23"]) == "Vgg13"


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [(0, "step", "0 steps"), (1, "image", "1 image"), (60_000, "image", "60,000 images"), (3, "class", "3 classes")],
)
def test_counts_have_separators_and_plurals(number: int, noun: str, text: str) -> None:
    """Would find a count that is hard to read, such as 1281167 images."""
    assert counted(number, noun) == text


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        *[(0, "0 bytes"), (1, "1 byte"), (999, "999 bytes"), (999.5, "1 kB"), (28_300, "28.3 kB"), (999_499, "999 kB")],
        *[(999_500, "1 MB"), (47_104_000, "47.1 MB"), (16 * 10**9, "16 GB"), (812_345_678_900, "812 GB"), (1e12, "1 TB")],
    ],
)
def test_a_size_has_the_unit_that_fits_it(n_bytes: float, text: str) -> None:
    assert size_text(n_bytes) == text


@given(st.integers(1, 10**17))
def test_a_size_is_accurate_to_half_a_percent(n_bytes: int) -> None:
    """Units and digits are right over the whole range."""
    number, unit = size_text(n_bytes).split()
    power = {"byte": 0, "bytes": 0, "kB": 1, "MB": 2, "GB": 3, "TB": 4, "PB": 5}[unit]
    assert float(number) * 1000**power == pytest.approx(n_bytes, rel=0.0051)


@pytest.mark.parametrize("value", ["x" * 10**6, ["x"] * 10**5, 10**3000])
def test_long_values_are_cut(value: object) -> None:
    assert len(shortened(value)) < 120


def test_a_sentence_is_one_line_of_bounded_length() -> None:
    assert sentence("a\nb") == r"a\nb"
    assert len(sentence("name " + "x" * 10**6 + ".")) < 5000


def test_what_is_printed_moves_no_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    echo("a\x1b[2J\nb")
    echo_block("a\n\tb\x1b\n", err=True)
    assert capsys.readouterr() == ("a\\x1b[2J\\nb\n", "a\n\tb\\x1b\n")


def test_texts_in_lines_and_cells_are_escaped() -> None:
    text = "[red]a[/]\x1b[2J\u202e"
    table = Table(box=None)
    table.add_column(text)
    table.add_row(text)
    file = io.StringIO()
    console = PlainConsole(file=file, width=80)
    console.print(text)
    console.print(table)
    lines = [line.strip() for line in file.getvalue().split("\n") if line]
    assert lines == [r"[red]a[/]\x1b[2J\u202e"] * 3


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


@pytest.mark.parametrize(
    ("ranks", "text"),
    [((), ""), ((3,), "3"), ((0, 1), "0-1"), ((5, 0, 2, 1), "0-2, 5"), ((0, 2, 4), "0, 2, 4"), (tuple(range(1000)), "0-999")],
)
def test_there_and_back(ranks: tuple[int, ...], text: str) -> None:
    assert spans(ranks) == text
    assert ranks_of(text) == tuple(sorted(ranks))
