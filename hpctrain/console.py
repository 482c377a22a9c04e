"""The console of rich for texts of others, such as file names and classes, which never move a cursor or turn a line around."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from hpctrain.plain_text import escaped


class PlainConsole(Console):
    """A console for which texts, those in tables among them, are no markup, and in which forbidden characters are escaped."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"highlight": False, "markup": False, "emoji": False, **options})

    def render_str(self, text: str, *arguments: Any, **options: Any) -> Text:
        return super().render_str(escaped(text, keep="\n\t"), *arguments, **options)
