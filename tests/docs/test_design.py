"""docs/design.md, docs/notation.md: files and names to which they send their readers exist, and the picture shows the layers."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
NOTATION = (ROOT / "docs" / "notation.md").read_text(encoding="utf-8")


def rows(heading: str, text: str = TEXT) -> list[list[str]]:
    """The cells of the table under a heading, without its head."""
    section = text.split(f" {heading}\n")[1].split("\n#")[0]
    table = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in cells] for cells in table[2:]]


FILES = [cells[0].strip("`") for cells in rows("Eight files to read first")]
QUESTIONS = rows("Where is it?")
GLOSSARY = [cells for heading in re.findall(r"^### (.*)$", NOTATION, re.MULTILINE) for cells in rows(heading, NOTATION)]


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


def test_eight_files_exist_and_are_short() -> None:
    assert len(FILES) == 8
    for name in FILES:
        assert len((ROOT / "hpctrain" / name).read_text(encoding="utf-8").splitlines()) <= 350, name


def test_every_question_has_an_answer_and_a_place() -> None:
    assert len(QUESTIONS) >= 10
    for question, answer, where in QUESTIONS:
        assert question.endswith("?")
        assert answer.endswith(".")
        assert "`" in where, question


def test_every_term_has_one_meaning() -> None:
    terms = [cells[0] for cells in GLOSSARY]
    assert len(terms) == len(set(terms)) >= 40
    assert all(meaning.endswith(".") for _, meaning, _ in GLOSSARY)


@pytest.mark.parametrize("cells", [*QUESTIONS, *GLOSSARY], ids=lambda cells: cells[0])
def test_places_exist(cells: list[str]) -> None:
    where = cells[2]
    places = re.findall(r"`([\w/]+\.py)`(?: \(([^)]*)\))?", where)
    assert places, where
    for file, listed in places:
        path = ROOT / "hpctrain" / file
        assert path.is_file(), f"{file} is no module"
        for name in re.findall(r"`([\w.]+)`", listed):
            assert name in names_in(path), f"{file} has no {name}"


def test_the_picture_is_the_contract_of_imports() -> None:
    picture = TEXT.split("## Structure")[1].split("```")[1]
    shown = [re.split(r" {2,}", line.strip())[0].split(" | ") for line in picture.splitlines()[1:] if line.strip()]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    layers = [layer.split(" | ") for layer in contracts[0]["layers"]]
    for_tests = [["virtual"], ["testing"]]
    assert [sorted(names) for names in shown[:-2]] == [
        sorted(layer) for layer in layers if layer not in for_tests and layer != ["__main__", "testing"]
    ]
    assert shown[-2:] == for_tests


def test_every_decision_is_listed() -> None:
    listed = re.findall(r"\[(\d+)\]\(adr/(\d{4})-[\w-]+\.md\)", TEXT.split("\n## Decisions\n")[1].split("\n## ")[0])
    numbers = [int(path.name[:4]) for path in sorted((ROOT / "docs" / "adr").glob("*.md"))]
    assert numbers == list(range(1, len(numbers) + 1))
    assert sorted(int(file) for _, file in listed) == numbers
    assert all(int(shown) == int(file) for shown, file in listed)
