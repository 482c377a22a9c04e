"""The page of symptoms: the program says the sentences that it quotes, and each has its place on the page."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
QUOTED = re.findall(r"^\| `(.+?)` \| \[", PAGE, re.MULTILINE)


@cache
def _strings() -> str:
    """Every string of the package on a line of its own; values that are filled in are one character."""
    texts = []
    for path in sorted((ROOT / "hpctrain").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                texts.append("".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(text.replace("\n", " ") for text in texts)


@pytest.mark.parametrize("sentence", QUOTED)
def test_the_program_says_so(sentence: str) -> None:
    pattern = "[^\n]*\0[^\n]*".join(re.escape(part) for part in re.split(r"\.\.\.", sentence))
    assert re.search(pattern, _strings()), sentence


def test_a_sentence_that_nobody_says_is_found() -> None:
    assert len(QUOTED) > 10
    with pytest.raises(AssertionError):
        test_the_program_says_so("no completion within the time of ... s")
