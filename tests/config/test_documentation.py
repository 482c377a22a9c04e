"""docs/config.md describes every key as the schema does, docs/options.md every option as its constructor does, and docs/doctor.md
every finding as its check does.
"""

import re
from pathlib import Path

from hpctrain.config.schema import Config
from tests.support.command_reference import commands_page
from tests.support.reference_pages import DOCS, FINDINGS_HEADING, KEYS_HEADING, findings_section, keys_section, options_page

PAGE = DOCS / "config.md"


def test_the_table_of_keys_is_the_schema():
    section = PAGE.read_text(encoding="utf-8").split(KEYS_HEADING)[1]
    assert section == keys_section(), "docs/config.md is out of date: run `make docs`"


def test_the_options_are_those_of_the_constructors():
    assert (DOCS / "options.md").read_text(encoding="utf-8") == options_page(), "docs/options.md is out of date: run `make docs`"


def test_the_commands_are_those_of_the_program():
    assert (DOCS / "commands.md").read_text(encoding="utf-8") == commands_page(), (
        "docs/commands.md is out of date: run `make docs`"
    )


def test_the_findings_are_those_of_the_doctors_checks():
    section = (DOCS / "doctor.md").read_text(encoding="utf-8").split(FINDINGS_HEADING)[1]
    assert section == findings_section(), "docs/doctor.md is out of date: run `make docs`"


def test_every_section_is_in_the_overview():
    text = PAGE.read_text(encoding="utf-8")
    assert [key for key in Config.model_fields if f"`{key}`" not in text] == []


def test_every_variable_of_the_environment_is_described():
    sources = (Path(__file__).parents[2] / "hpctrain").rglob("*.py")
    read = {name for path in sources for name in re.findall(r"\"(HPCTRAIN_[A-Z_]+)\"", path.read_text(encoding="utf-8"))}
    table = PAGE.read_text(encoding="utf-8").split("## The environment\n")[1].split("\n## ")[0]
    assert set(re.findall(r"`(HPCTRAIN_[A-Z_]+)", table)) == read
