from __future__ import annotations

from pathlib import Path

from rich.console import Console

from hpctrain.report.comparison import compared
from hpctrain.report.comparison_text import lines
from tests.support.written_runs import write_run


def _printed(comparison_of: list[Path], width: int) -> list[str]:
    console = Console(width=width, highlight=False, markup=False, emoji=False, force_terminal=False)
    with console.capture() as captured:
        for renderable in lines(compared(comparison_of)):
            console.print(renderable)
    return captured.get().splitlines()


def test_results_and_differences_fit_80_columns(tmp_path: Path) -> None:
    configs = ["batch: 8\n", f"batch: 16\ndata: {{train: {'directory/' * 12}train.h5}}\n"]
    printed = _printed([write_run(tmp_path, config=config).path for config in configs], 80)
    assert max(map(len, printed)) <= 80
    text = "\n".join(printed)
    assert "best test top-1   66.67% (epoch 2)  66.67% (epoch 2)" in text
    assert "Differences of configuration:" in text
    assert "No differences of versions." in text
    assert "no bits are" in text
