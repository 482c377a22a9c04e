"""Characters that a terminal or a shell would obey are named, escaped or quoted, and long texts are cut."""

from __future__ import annotations

import shlex
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.plain_text import echo, echo_block, escaped, forbidden, sentence, shell_word, shortened

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
