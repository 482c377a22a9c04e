"""Statements in the text of pages: links, files, classes, places in the code, recipes and quoted sentences exist."""

from __future__ import annotations

import ast
import builtins
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

from hpctrain.config.load import load
from tests.support import how_tos

ROOT = Path(__file__).parents[2]
FILES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md")), ROOT / "jobs" / "README.md")
PAGES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in FILES}
CONFIGS = {path.stem: path for path in sorted(ROOT.glob("configs/*.yaml"))}
DESIGN, NOTATION = PAGES["docs/design.md"], PAGES["docs/notation.md"]


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", PAGES[page]):
        if "://" in target:
            continue
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), f"{page} links to {target}"
        assert not anchor or anchor in anchors(path), f"{page} links to {target}#{anchor}, and there is no such heading"


@cache
def _files() -> str:
    tops = ("hpctrain", "hpctrain_testing", "tests", "benchmarks", "configs", "jobs")
    return "\n".join(f"/{path.relative_to(ROOT)}" for top in tops for path in (ROOT / top).rglob("*.*")) + "\n"


@pytest.mark.parametrize("page", PAGES)
def test_named_files_exist(page: str) -> None:
    """`comm/groups.py`, `library.py`: a file of that name lies in the repository; `nn/compile/`: a folder does."""
    for name in re.findall(r"`([\w/]+\.py)`", PAGES[page]):
        known = name in how_tos.files(page) or f"/{name}\n" in _files()
        assert known, f"{page} names {name}, which is no file of the repository"
    for name in re.findall(r"`(\w[\w/]*/)`", PAGES[page]):
        there = (ROOT / name).is_dir() or (ROOT / "hpctrain" / name).is_dir() or name == "runs/"  # which a run makes
        assert there, f"{page} names the folder {name}"


#: words that begin with a capital and are no classes: an attribute, a setting of Slurm's
_FOREIGN = {"Options", "KillWait"}


def test_named_classes_exist() -> None:
    """`Replica`, `ProgressEngine.wait`: in all pages."""
    defined = set(dir(builtins))
    for top in ("hpctrain", "hpctrain_testing", "tests", "benchmarks"):
        for path in (ROOT / top).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            defined |= set(re.findall(r"^ *(?:class|def) (\w+)", text, re.MULTILINE))
            defined |= set(re.findall(r"^(?:    )?(\w+)(?: =|: )", text, re.MULTILINE))
    for page, text in PAGES.items():
        invented = "".join(how_tos.files(page).values()) + "".join(how_tos.blocks(page, "python"))
        for name in re.findall(r"`([A-Z][a-z]+[A-Za-z]*(?:\.[a-z_A-Z]+)?)(?:\([^`]*\))?`", text):
            known = defined.issuperset(name.split(".")) or name in _FOREIGN or f"class {name}" in invented
            assert known, f"{page} names {name}, which is no class of the repository"


# -- docs/design.md and docs/notation.md ---------------------------------------------------------------------------------------


def rows(heading: str, text: str = DESIGN) -> list[list[str]]:
    """The cells of the table under a heading, without its head."""
    section = text.split(f" {heading}\n")[1].split("\n#")[0]
    table = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in cells] for cells in table[2:]]


QUESTIONS = rows("Where is it?")
GLOSSARY = [cells for heading in re.findall(r"^### (.*)$", NOTATION, re.MULTILINE) for cells in rows(heading, NOTATION)]


@cache
def names_in(path: Path) -> set[str]:
    """What a module defines at its top, and the methods of its classes as Class.method."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def test_every_question_has_an_answer_and_every_term_one_meaning() -> None:
    assert len(QUESTIONS) >= 10
    for question, answer, where in QUESTIONS:
        assert (question[-1], answer[-1], "`" in where) == ("?", ".", True), question
    terms = [cells[0] for cells in GLOSSARY]
    assert len(terms) == len(set(terms)) >= 40
    assert all(meaning.endswith(".") for _, meaning, _ in GLOSSARY)


def test_places_exist() -> None:
    for word, _, where in (*QUESTIONS, *GLOSSARY):
        places = re.findall(r"`([\w/]+\.py)`(?: \(([^)]*)\))?", where)
        assert places, word
        for file, listed in places:
            path = ROOT / file if file.startswith("hpctrain_testing/") else ROOT / "hpctrain" / file
            assert path.is_file(), f"{word}: {file} is no module"
            assert set(re.findall(r"`([\w.]+)`", listed)) <= names_in(path), f"{word}: {file} lacks one of {listed}"


def test_the_picture_is_the_contract_of_imports() -> None:
    picture = DESIGN.split("## Structure")[1].split("```")[1]
    shown = [re.split(r" {2,}", line.strip())[0].split(" | ") for line in picture.splitlines()[1:] if line.strip()]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    layers = [layer.split(" | ") for layer in contracts[0]["layers"]]
    ends = [["__main__", "testing"], ["version"]]
    assert [sorted(names) for names in shown[:-2]] == [sorted(layer) for layer in layers if layer not in ends]
    assert shown[-2:] == [["testing"], ["hpctrain_testing"]]


def test_every_decision_is_listed() -> None:
    listed = re.findall(r"\[(\d+)\]\(adr/(\d{4})-[\w-]+\.md\)", DESIGN.split("\n## Decisions\n")[1].split("\n## ")[0])
    numbers = [int(path.name[:4]) for path in sorted((ROOT / "docs" / "adr").glob("*.md"))]
    assert sorted(int(file) for _, file in listed) == numbers
    assert all(int(shown) == int(file) for shown, file in listed)


# -- docs/recipes.md -----------------------------------------------------------------------------------------------------------


def test_recipes_say_what_the_configurations_say() -> None:
    lines = re.findall(r"^\| `([\w-]+)` \| (.*) \|$", PAGES["docs/recipes.md"], re.MULTILINE)
    assert sorted(name for name, _ in lines) == sorted(CONFIGS), (
        "give each file of configs/ a row in recipes.md, and each row a file"
    )
    for name, cells in lines:
        config, _ = load(CONFIGS[name])
        _, batch, epochs, optimizer, expected, measured = cells.split(" | ")
        assert (batch, epochs) == (str(config.batch), str(config.epochs)), name
        assert optimizer == f"{config.optimizer.name} {config.optimizer.lr:g}", name
        assert expected, name
        assert measured, name
        assert config.name == name
        header = "".join(line for line in CONFIGS[name].read_text(encoding="utf-8").splitlines() if line.startswith("#"))
        assert re.search(r"# Data\b.*: hpctrain data (convert|fetch) ", header), name
        assert re.search(r"accuracy|test error", header), name


# -- docs/troubleshooting.md ---------------------------------------------------------------------------------------------------


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


def _is_said(sentence: str) -> bool:
    pattern = "[^\n]*\0[^\n]*".join(re.escape(part) for part in re.split(r"\.\.\.", sentence))
    return re.search(pattern, _strings()) is not None


@pytest.mark.slow
def test_the_program_says_the_sentences_that_the_page_of_symptoms_quotes() -> None:
    quoted = re.findall(r"^\| `(.+?)` \| \[", PAGES["docs/troubleshooting.md"], re.MULTILINE)
    assert len(quoted) > 10
    assert [sentence for sentence in quoted if not _is_said(sentence)] == []
    assert not _is_said("no completion within the time of ... s")
