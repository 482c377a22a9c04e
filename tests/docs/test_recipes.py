"""The table of recipes says what the configurations say, and the header of each names its data and what to expect."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpctrain.config.load import load

ROOT = Path(__file__).parents[2]
CONFIGS = {path.stem: path for path in sorted(ROOT.glob("configs/*.yaml"))}
PAGE = ROOT / "docs" / "recipes.md"


def rows() -> dict[str, list[str]]:
    """The cells behind the name of each recipe of the page's table."""
    lines = re.findall(r"^\| `([\w-]+)` \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(lines) == len(dict(lines)), "a recipe has two rows"
    return {name: cells.split(" | ") for name, cells in lines}


def test_every_configuration_has_a_row() -> None:
    assert sorted(rows()) == sorted(CONFIGS), f"give each file of configs/ a row in {PAGE.name}, and each row a file"


@pytest.mark.parametrize("name", CONFIGS)
def test_its_row_says_what_the_file_says(name: str) -> None:
    config, _ = load(CONFIGS[name])
    _, batch, epochs, optimizer, expected, measured = rows()[name]
    assert (batch, epochs) == (str(config.batch), str(config.epochs))
    assert optimizer == f"{config.optimizer.name} {config.optimizer.lr:g}"
    assert expected
    assert measured
    assert config.name == name


@pytest.mark.parametrize("name", CONFIGS)
def test_its_header_names_data_and_what_to_expect(name: str) -> None:
    header = "".join(line for line in CONFIGS[name].read_text(encoding="utf-8").splitlines() if line.startswith("#"))
    assert re.search(r"# Data\b.*: hpctrain data (convert|fetch) ", header)
    assert re.search(r"accuracy|test error", header)
