"""Printing with rich: a console for untrusted texts, such as names of files and classes, and tables without lines.

Texts are printed without markup and control characters. Import this module only to print, as rich loads slowly.
"""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpctrain.core.text import escaped, pipe_columns


class PlainConsole(Console):
    """Console that escapes forbidden characters and by default reads no text as markup, also in tables."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"highlight": False, "markup": False, "emoji": False, **options})

    def render_str(self, text: str, *arguments: Any, **options: Any) -> Text:
        return super().render_str(escaped(text, keep="\n\t"), *arguments, **options)


def output_console(columns: int = 80, **options: Any) -> PlainConsole:
    """Return a console on standard output, as wide as the terminal, or as `pipe_columns(columns)` without a terminal."""
    return PlainConsole(width=None if sys.stdout.isatty() else pipe_columns(columns), **options)


def plain_table(*titles: str, left: int = 1, gap: int = 2, bold: bool = False, widest: int | None = None) -> Table:
    """Return a table without lines. Without titles it has neither a header nor columns; add these with `add_column`.

    Args:
        left: number of leading columns of words, which are folded; the other columns hold numbers, aligned right and not folded.
        gap: number of blanks between columns.
        bold: whether titles are bold.
        widest: maximum width of a column of words.
    """
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, show_header=bool(titles), header_style="bold" if bold else "")
    for number, title in enumerate(titles):
        if number < left:
            table.add_column(title, overflow="fold", max_width=widest)
        else:
            table.add_column(title, justify="right", no_wrap=True)
    return table
