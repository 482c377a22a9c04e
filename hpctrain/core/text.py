"""Makes untrusted text safe for terminals, scripts and file names: forbidden characters, escapes, quotes, shortening."""

from __future__ import annotations

import re
import sys
import unicodedata

# Control characters (C0, DEL, C1), format characters (bidirectional, zero-width), lone surrogates, and line separators.
_FORBIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
# Words with a comma, which some shell tools take for a list, or with an = in front, taken for a comparison, are quoted.
_PLAIN_WORD = re.compile(r"(?!=)[\w@%+=:./-]+", re.ASCII)
_SHOWN_CHARACTERS = 80
_MOST_OF_A_SENTENCE = 4000


def forbidden(text: str) -> str | None:
    """Return the first character that may end a line, move a cursor or reverse text, such as "U+202E at position 3".

    None if the text has no such character. Positions count from 0.
    """
    if text.isprintable():
        return None
    found = ((place, character) for place, character in enumerate(text) if unicodedata.category(character) in _FORBIDDEN)
    return next((f"U+{ord(character):04X} at position {place}" for place, character in found), None)


def escaped(text: object, keep: str = "") -> str:
    r"""Return the text with every forbidden character in Python's notation, such as \n and \u202e.

    Args:
        keep: forbidden characters that are not escaped.
    """
    text = str(text)
    if text.isprintable():
        return text
    return "".join(
        repr(character)[1:-1] if unicodedata.category(character) in _FORBIDDEN and character not in keep else character
        for character in text
    )


def shortened(value: object, most: int = _SHOWN_CHARACTERS) -> str:
    """Return the repr of a value for a message, cut after `most` characters."""
    if isinstance(value, str) and len(value) > most:
        return f"{value[:most]!r}... ({len(value)} characters)"
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."


def sentence(text: str) -> str:
    """Return a message as one line for a terminal: escape forbidden characters, and cut the middle out of a very long one."""
    if len(text) > _MOST_OF_A_SENTENCE:
        half = _MOST_OF_A_SENTENCE // 2
        text = f"{text[:half]} ... ({len(text) - 2 * half} characters left out) ... {text[-half:]}"
    return escaped(text)


def echo(line: object = "", *, err: bool = False) -> None:
    """Print one line to stdout, or to stderr. Escape all forbidden characters, including newlines."""
    print(escaped(line), file=sys.stderr if err else sys.stdout, flush=True)


def echo_block(text: str, *, err: bool = False) -> None:
    """Print several lines, with or without a final newline. Escape forbidden characters other than newlines and tabs."""
    print(escaped(text.removesuffix("\n"), keep="\n\t"), file=sys.stderr if err else sys.stdout, flush=True)


def shell_word(text: str) -> str:
    """Return a text quoted as one word of a shell, without expansions."""
    if not text:
        return '""'
    return text if _PLAIN_WORD.fullmatch(text) else "'" + text.replace("'", "'\"'\"'") + "'"
