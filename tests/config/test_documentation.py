"""docs/config.md describes every key as the schema does."""

from pathlib import Path

from pydantic_core import PydanticUndefined

from hpctrain.config.faults import known_paths, section_at, show
from hpctrain.config.schema import AugmentConfig, Config
from hpctrain.config.source import dotted

PAGE = Path(__file__).parents[2] / "docs" / "config.md"


def row(path):
    """One line of the page's table."""
    field = section_at(path[:-1]).model_fields[path[-1]]
    default = "needed" if field.default is PydanticUndefined else f"`{show(field.default)}`"
    return f"| `{dotted(path)}` | {default} | {field.description} |"


def rows():
    return [row(path).replace("`()`", "`[]`") for path in known_paths() if section_at(path) is None]


def test_the_table_of_keys_is_the_schema():
    table = [line for line in PAGE.read_text(encoding="utf-8").split("## Every key")[1].splitlines() if line.startswith("| `")]
    expected = rows()
    assert table == expected, "The table should be:\n" + "\n".join(expected)


def test_the_page_names_every_augmentation_of_the_schema():
    described = AugmentConfig.model_fields["name"].description
    text = PAGE.read_text(encoding="utf-8")
    for name in ("pad_crop", "random_resized_crop", "center_crop", "flip"):
        assert name in described
        assert f"`{name}`" in text


def test_every_section_is_in_the_overview():
    text = PAGE.read_text(encoding="utf-8")
    assert [key for key in Config.model_fields if f"`{key}`" not in text] == []
