"""Print with rich: a console for untrusted texts, such as file names and classes, and tables without lines.

Texts are printed without markup and control characters. Import this module where something is printed: rich loads slowly.
"""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpctrain.core.text import escaped


class PlainConsole(Console):
    """A console that escapes forbidden characters and, by default, takes no text for markup, including texts in tables."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"highlight": False, "markup": False, "emoji": False, **options})

    def render_str(self, text: str, *arguments: Any, **options: Any) -> Text:
        return super().render_str(escaped(text, keep="\n\t"), *arguments, **options)


def output_console(columns: int = 80, **options: Any) -> PlainConsole:
    """Return a console on standard output, as wide as the terminal; `columns` wide without a terminal."""
    return PlainConsole(width=None if sys.stdout.isatty() else columns, **options)


def plain_table(*titles: str, left: int = 1, gap: int = 2, bold: bool = False, widest: int | None = None) -> Table:
    """Return a table without lines. Without titles it has neither a header nor columns; `add_column` adds these.

    Args:
        titles: of the columns. The first `left` columns hold words, which are folded; the others hold numbers, which are
            aligned right and not folded.
        gap: blanks between columns. bold: print titles in bold type. widest: largest width of a column of words.
    """
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, show_header=bool(titles), header_style="bold" if bold else "")
    for number, title in enumerate(titles):
        if number < left:
            table.add_column(title, overflow="fold", max_width=widest)
        else:
            table.add_column(title, justify="right", no_wrap=True)
    return table
