"""The definition of the container's image, as far as it can be checked without building it."""

from __future__ import annotations

import re
import tomllib

import pytest

from tests.support.job_scripts import JOBS, require_sound

TOP = JOBS.parent
DEFINITION = JOBS / "hpctrain.def"
# https://apptainer.org/docs/user/latest/definition_files.html
SECTIONS = {"files", "post", "environment", "test", "runscript", "labels", "help"}
SHELL = ("post", "environment", "test", "runscript")


def _parts() -> tuple[dict[str, str], dict[str, list[str]]]:
    """Keywords of the header, and the lines of each section."""
    header: dict[str, str] = {}
    sections: dict[str, list[str]] = {}
    lines: list[str] | None = None
    for line in DEFINITION.read_text().splitlines():
        if line.startswith("%"):
            name = line[1:].strip()
            assert name not in sections, f"%{name} is there twice"
            lines = sections.setdefault(name, [])
        elif lines is not None:
            lines.append(line)
        elif line.strip() and not line.startswith("#"):
            key, _, value = line.partition(":")
            header[key.strip().lower()] = value.strip()
    return header, sections


HEADER, PARTS = _parts()


def _code(section: str) -> list[str]:
    return [line.strip() for line in PARTS[section] if line.strip() and not line.strip().startswith("#")]


def test_its_sections_are_those_that_there_are() -> None:
    assert set(PARTS) == SECTIONS
    assert set(HEADER) == {"bootstrap", "from"}
    assert HEADER["bootstrap"] == "docker"
    assert re.fullmatch(r"debian:[a-z]+-slim", HEADER["from"])
    for name, lines in PARTS.items():
        assert any(line.strip() for line in lines), f"%{name} is empty"
        assert all(line == "" or line.startswith("    ") for line in lines), f"%{name} is indented"


def test_the_files_that_it_copies_are_there_and_are_all_that_the_package_is_made_of() -> None:
    copied = dict(line.split() for line in _code("files"))
    for source, target in copied.items():
        assert (TOP / source).exists(), source
        assert target == f"/opt/source/{source}"
    project = tomllib.loads((TOP / "pyproject.toml").read_text())
    needed = {"hpctrain", "pyproject.toml", "setup.py", "LICENSE", "requirements.txt", project["project"]["readme"]}
    # Links of the package to folders at the top hold in the image, too.
    links = {path.resolve().relative_to(TOP).parts[0] for path in (TOP / "hpctrain").rglob("*") if path.is_symlink()}
    assert set(copied) == needed | links


@pytest.mark.job
@pytest.mark.parametrize("section", SHELL)
def test_its_scripts_are_sound(section: str) -> None:
    # Pip with its options is one variable, as sh has no arrays.
    require_sound("\n".join(["#!/bin/sh", *PARTS[section], ""]), "--exclude=SC2086")
