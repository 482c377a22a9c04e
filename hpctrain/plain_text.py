"""Text of others on its way to a terminal, a script or a file name: which characters have no place there, quoted, shortened."""

from __future__ import annotations

import re
import sys
import unicodedata

# Controls (C0, DEL, C1), formats (bidirectional marks, zero-width characters), lone surrogates, and separators of lines.
_FORBIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
# Commas make some shell readers think of lists, and an = in front of comparisons, so that a word with one is quoted.
_PLAIN_WORD = re.compile(r"(?!=)[\w@%+=:./-]+", re.ASCII)
_SHOWN_CHARACTERS = 80
_MOST_OF_A_SENTENCE = 4000


def forbidden(text: str) -> str | None:
    """Return the first character that may end a line, move a cursor or turn a text's direction, such as "U+202E at position 3".

    None where the text has no such character. Positions count from 0.
    """
    if text.isprintable():
        return None
    found = ((place, character) for place, character in enumerate(text) if unicodedata.category(character) in _FORBIDDEN)
    return next((f"U+{ord(character):04X} at position {place}" for place, character in found), None)


def escaped(text: object, keep: str = "") -> str:
    r"""Return the text with every forbidden character in Python's notation, such as \n and \u202e.

    Args:
        keep: forbidden characters that stay as they are.
    """
    text = str(text)
    if text.isprintable():
        return text
    return "".join(
        repr(character)[1:-1] if unicodedata.category(character) in _FORBIDDEN and character not in keep else character
        for character in text
    )


def shortened(value: object, most: int = _SHOWN_CHARACTERS) -> str:
    """Return the notation of a value for a sentence, the beginning of it where it has more than `most` characters."""
    if isinstance(value, str) and len(value) > most:
        return f"{value[:most]!r}... ({len(value)} characters)"
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."


def sentence(text: str) -> str:
    """Return a sentence as one line of a terminal: forbidden characters escaped, the middle of a very long one left out."""
    if len(text) > _MOST_OF_A_SENTENCE:
        half = _MOST_OF_A_SENTENCE // 2
        text = f"{text[:half]} ... ({len(text) - 2 * half} characters left out) ... {text[-half:]}"
    return escaped(text)


def echo(line: object = "", *, err: bool = False) -> None:
    """Print one line to stdout, or to stderr; a newline in it is escaped as all forbidden characters are."""
    print(escaped(line), file=sys.stderr if err else sys.stdout, flush=True)


def echo_block(text: str, *, err: bool = False) -> None:
    """Print several lines, the last of which need not end; forbidden characters other than newlines and tabs are escaped."""
    print(escaped(text.removesuffix("\n"), keep="\n\t"), file=sys.stderr if err else sys.stdout, flush=True)


def shell_word(text: str) -> str:
    """Return a text as one word of the shell, which expands nothing in it."""
    if not text:
        return '""'
    return text if _PLAIN_WORD.fullmatch(text) else "'" + text.replace("'", "'\"'\"'") + "'"
