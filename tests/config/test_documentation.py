"""docs/config.md describes every key as the schema does, and docs/options.md every option as its constructor does."""

from hpctrain.config.schema import Config
from tests.support.reference_pages import DOCS, KEYS_HEADING, keys_section, options_page

PAGE = DOCS / "config.md"


def test_the_table_of_keys_is_the_schema():
    section = PAGE.read_text(encoding="utf-8").split(KEYS_HEADING)[1]
    assert section == keys_section(), "docs/config.md is out of date: run `make docs`"


def test_the_options_are_those_of_the_constructors():
    assert (DOCS / "options.md").read_text(encoding="utf-8") == options_page(), "docs/options.md is out of date: run `make docs`"


def test_every_section_is_in_the_overview():
    text = PAGE.read_text(encoding="utf-8")
    assert [key for key in Config.model_fields if f"`{key}`" not in text] == []
