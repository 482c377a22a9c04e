"""A rich console that prints untrusted texts, such as file names and classes, without markup or control characters."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from hpctrain.core.text import escaped


class PlainConsole(Console):
    """A console that escapes forbidden characters and, by default, takes no text for markup, including texts in tables."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"highlight": False, "markup": False, "emoji": False, **options})

    def render_str(self, text: str, *arguments: Any, **options: Any) -> Text:
        return super().render_str(escaped(text, keep="\n\t"), *arguments, **options)
