"""`hpctrain trace`: the time table of a run from its file, on one screen or whole."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hpctrain.cli.main import cli
from hpctrain.trace.time_table import Late, Row, TimeTable, from_json
from hpctrain.trace.time_table_text import lines

ROWS = tuple(Row(f"layer{k}", "layer", compute_seconds=1e-3 * (k + 1), late=Late(1, 0.5, 2e-3)) for k in range(150))
WHOLE = sum(row.compute_seconds for row in ROWS)
TABLE = TimeTable(ROWS, Row("total", "total", compute_seconds=WHOLE), 0.0, WHOLE, WHOLE, 5, 10.0)


def _trace(run: Path, *words: str) -> Result:
    return CliRunner().invoke(cli, ["trace", str(run), *words])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    content = {"ranks": 2, "clock_error_seconds": 1e-6, "table": asdict(TABLE)}
    (tmp_path / "time_table.json").write_text(json.dumps(content))
    return tmp_path


def test_a_table_is_the_same_after_it_was_a_file() -> None:
    assert from_json(json.loads(json.dumps(asdict(TABLE)))) == TABLE


def test_it_prints_a_screen_or_all(run: Path) -> None:
    assert _trace(run).output.splitlines() == lines(TABLE, 1e-6, 2)
    assert "and 1" in _trace(run).output
    whole = _trace(run, "--all").output.splitlines()
    assert whole == lines(TABLE, 1e-6, 2, most=None)
    assert sum(line.startswith("layer") for line in whole) == 151


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"table": {"rows": [{"name": 1}]}, "ranks": 1, "clock_error_seconds": 0}'])
def test_a_file_that_is_no_table_is_a_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "time_table.json").write_text(text)
    result = _trace(tmp_path)
    assert (result.exit_code, "is no time table of this version" in result.stderr) == (2, True)
