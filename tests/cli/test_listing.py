"""`hpctrain list`: every name with a sentence, in 80 columns, and everything as JSON."""

import json

import pytest
from click.testing import CliRunner

from hpctrain.cli.listing import KINDS
from hpctrain.cli.main import cli
from hpctrain.experiment import options


def test_every_kind_is_listed() -> None:
    assert set(KINDS) == set(options.KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_names_come_with_a_sentence_each_and_fit_80_columns(kind: str) -> None:
    result = CliRunner().invoke(cli, ["list", kind], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == list(options.names(kind))
    assert max(map(len, lines)) <= 80
    words = result.output.split()
    assert all(word in words for choice in options.choices(kind) for word in choice.sentence.split())


def test_json_has_the_options_with_types_and_defaults() -> None:
    listed = json.loads(CliRunner().invoke(cli, ["list", "schedules", "--json"]).output)
    assert listed["step"]["options"]["gamma"]["default"] == 0.1
    assert listed["step"]["options"]["gamma"]["type"] == "number"
    assert listed["step"]["options"]["milestones_epochs"]["needed"]
