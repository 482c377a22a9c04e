"""The console prints texts of others, in lines and in tables, neither as markup nor as control characters."""

from __future__ import annotations

import io

from rich.table import Table

from hpctrain.console import PlainConsole


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
