"""`hpctrain report` as users call it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra export)")

from click.testing import CliRunner

from hpctrain.cli.runs import report
from hpctrain.core.text import size_text
from tests.support.here import run_here
from tests.support.runs import CLASSES, train, write_run, write_trace


@pytest.mark.slow
def test_a_page_lies_in_the_run_unless_said_otherwise(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    write_trace(run)
    done = CliRunner().invoke(report, [str(run.path)])
    assert done.exit_code == 0, done.output
    page = run.path / "report.html"
    assert done.output == f"{page}: {size_text(page.stat().st_size)}\n"
    assert page.read_text().count("data:image/svg+xml") == 7


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, 2])
def test_the_test_set_is_judged_by_any_number_of_ranks(tmp_path: Path, ranks: int) -> None:
    trained = train(tmp_path, dtype="float32")
    words = ["-m", "hpctrain", "report", str(trained.run.path), "--test", "--out", "page.html"]
    done = run_here(ranks, words, cwd=tmp_path)
    assert done.code == 0, done.output
    page = (tmp_path / "page.html").read_text()
    assert "Most confident mistakes" in page
    assert "data:image/png;base64," in page
    assert all(name in page for name in CLASSES)
    assert done.stdout.count("page.html: ") == 1
