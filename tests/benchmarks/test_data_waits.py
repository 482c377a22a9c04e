"""The benchmark of waits for data: which epochs count, what the tables say, and that it runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.data_waits import Case, Waits, main, rates, table, waits_of


def metrics(epochs: int) -> list[str]:
    """Lines of a run's metrics: each epoch of 4 steps takes as many seconds as its number, and waits a quarter of them."""
    lines = ['{"kind": "step", "epoch": 1, "seconds": 9.0}']
    for epoch in range(1, epochs + 1):
        waits = {"steps": 4, "seconds": float(epoch), "waited_seconds": epoch / 4, "most_waited_seconds": epoch / 2}
        lines.append(json.dumps({"kind": "data", "epoch": epoch, **waits}))
        lines.append(json.dumps({"kind": "reads", "epoch": epoch, "file_samples": 100 + 7 * epoch}))
    return lines


def test_epochs_from_the_second_on_count() -> None:
    waits = waits_of(metrics(3))
    assert waits == Waits(steps=8, seconds=5.0, waited_seconds=1.25, most_waited_seconds=2.5, file_samples=14)
    assert (waits.share, waits.most_share) == (0.25, 0.5)
    with pytest.raises(ValueError, match="give --epochs 2 or more"):
        waits_of(metrics(1))


def test_the_table_has_medians_of_rounds() -> None:
    rounds = [Waits(10, 2.0, waited, 2 * waited, file_samples) for waited, file_samples in ((0.02, 0), (0.04, 5), (0.5, 0))]
    *_, line = table({Case("true", 2).name: rounds}).splitlines()
    assert line.startswith("| data.cache=true data.threads=2 | 3 | 0.2000 | 2.000 [1.000, 25.000] | 4.000 [2.000, 50.000] | 5 |")


def test_rates_are_those_of_whole_batches() -> None:
    found = [
        {"stage": stage, "threads": count, "images_per_second": 100.0 * count}
        for count in (1, 2)
        for stage in ("whole batches", "read")
    ]
    assert rates({"stages": found}).splitlines()[2:] == ["| 1 | 100 | 1.00 |", "| 2 | 200 | 2.00 |"]


@pytest.mark.job
@pytest.mark.slow
@pytest.mark.usefixtures("job")
def test_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ["--images", "24", "--batch", "8", "--epochs", "2", "--rounds", "1", "--threads", "1"]
    large = ["--large", "data.synthetic.height=40", "data.synthetic.width=40", "data.synthetic.samples=8", "batch=4"]
    assert main([*tiny, *large, "--out", str(tmp_path / "waits.json")]) == 0
    said = capsys.readouterr().out
    result = json.loads((tmp_path / "waits.json").read_text())
    samples = {name: [one["file_samples"] for one in of] for name, of in result["waits"].items()}
    assert samples == {"data.cache=false data.threads=1": [24], "data.cache=true data.threads=1": [0]}
    assert said.count("| data.cache=") == 2
    assert said.count("| 1 | ") == 3
