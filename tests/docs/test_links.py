"""Links of the pages lead somewhere, and files and folders that they name exist."""

from __future__ import annotations

import builtins
import re
from pathlib import Path

import pytest

from tests.support import how_tos

ROOT = Path(__file__).parents[2]
FILES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md")), ROOT / "jobs" / "README.md")
PAGES = [str(path.relative_to(ROOT)) for path in FILES]


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", text):
        if "://" in target:
            continue
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), f"{page} links to {target}"
        assert not anchor or anchor in anchors(path), f"{page} links to {target}#{anchor}, and there is no such heading"


_FILES = [
    str(path.relative_to(ROOT))
    for top in ("hpctrain", "tests", "benchmarks", "configs", "jobs")
    for path in (ROOT / top).rglob("*.*")
]


@pytest.mark.parametrize("page", PAGES)
def test_named_files_exist(page: str) -> None:
    """`comm/grid.py`, `library.py`: a file of that name lies in the repository; `nn/layers/`: a folder does."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for name in re.findall(r"`([\w/]+\.py)`", text):
        known = name in how_tos.files(page) or any(f"/{path}".endswith(f"/{name}") for path in _FILES)
        assert known, f"{page} names {name}, which is no file of the repository"
    for name in re.findall(r"`(\w[\w/]*/)`", text):
        there = (ROOT / name).is_dir() or (ROOT / "hpctrain" / name).is_dir() or name == "runs/"  # which a run makes
        assert there, f"{page} names the folder {name}"


def _defined() -> set[str]:
    """The names that are defined anywhere, of classes, functions, members and aliases."""
    names = set(dir(builtins))
    for top in ("hpctrain", "tests", "benchmarks"):
        for path in (ROOT / top).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            names |= set(re.findall(r"^ *(?:class|def) (\w+)", text, re.MULTILINE))
            names |= set(re.findall(r"^(?:    )?(\w+)(?: =|: )", text, re.MULTILINE))
    return names


#: words that begin with a capital and are no classes: an attribute, a setting of Slurm's
_FOREIGN = {"Options", "KillWait"}


def test_named_classes_exist() -> None:
    """`Replica`, `ProgressEngine.wait`: in all pages."""
    defined = _defined()
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        invented = "".join(how_tos.files(page).values()) + "".join(how_tos.blocks(page, "python"))
        for name in re.findall(r"`([A-Z][a-z]+[A-Za-z]*(?:\.[a-z_A-Z]+)?)(?:\([^`]*\))?`", text):
            known = defined.issuperset(name.split(".")) or name in _FOREIGN or f"class {name}" in invented
            assert known, f"{page} names {name}, which is no class of the repository"
