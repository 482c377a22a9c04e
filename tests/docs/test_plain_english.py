"""The pages are in plain English: none of the words and beginnings that make a reader stop."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md")), ROOT / "jobs" / "README.md")
PAGES = [str(path.relative_to(ROOT)) for path in FILES]

#: pattern -> what to write instead
RULES = {
    r"\banew\b": "again",
    r"\blikewise\b": "the thing itself, once more",
    r"\bfor ever\b": "without end",
    r"\b[Ww]hoever\b": "a noun: the rank that, the caller",
    r"(?:^|[.:] |\| |- )What\b(?![^.|]*\?)": "a noun phrase: the bytes that, a tensor that",
    r"(?:^|[.:] |\| |- )That (?:is|are) \w+ed\b": "a noun phrase",
    r"\d (?:s|ms|us|MB|n|words|events|bytes) an? (?:step|rank|event|second|byte|element)\b": "per step, per rank, ...",
}


def prose(page: str) -> str:
    """The text of a page without fenced blocks and what stands in backticks; sentences that go on stand in one line."""
    text = re.sub(r"^ *```.*?^ *```$", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"(?<!\n)\n(?![\n|#*-])", " ", re.sub(r"`[^`]*`", "`x`", text))


@pytest.mark.parametrize("page", PAGES)
def test_words(page: str) -> None:
    text = prose(page)
    for pattern, instead in RULES.items():
        match = re.search(pattern, text, re.MULTILINE)
        assert match is None, f"{page}: {text[max(0, match.start() - 40) : match.end() + 40]!r}; write {instead}"


#: a docstring begins with the thing or the deed, not with a pronoun
_PRONOUNS = re.compile(r"(What|Who|Whoever|Of|That|Which)\b")

#: files that stand for any
EXAMPLES = ("program.py", "file.py", "path/to/file.py")

SOURCES = [path for top in ("hpctrain", "benchmarks") for path in sorted((ROOT / top).rglob("*.py"))]
NAMES = [f"/{path.relative_to(ROOT)}" for top in ("hpctrain", "benchmarks", "tests") for path in (ROOT / top).rglob("*.py")]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_modules_name_exist(path: Path) -> None:
    """In docstrings and comments: `interleaved.py`, comm/clock.py."""
    for name in re.findall(r"(?<![\w/.\"'{}-])([a-z_][\w/]*\.py)\b", path.read_text(encoding="utf-8")):
        assert name in EXAMPLES or any(known.endswith(f"/{name}") for known in NAMES), f"{path} names {name}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_begin_with_the_thing(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            assert not _PRONOUNS.match(text), f"{path}, line {getattr(node, 'lineno', 1)}: {text.splitlines()[0]}"
