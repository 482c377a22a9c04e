"""The time and the files of a start."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.doctor.start_facts import OpenedFiles, load_training, queued_seconds


def test_modules_are_loaded_and_their_files_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_module_of_a_test.py").write_text("import time\ntime.sleep(0.2)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    facts = load_training(1.0, OpenedFiles(), ["slow_module_of_a_test"])
    assert facts.seconds >= 1.2
    assert facts.files >= 1
    assert facts.cpu_seconds > 0


def test_waits_for_a_core_are_read_from_the_system(tmp_path: Path) -> None:
    statistics = tmp_path / "schedstat"
    statistics.write_text("5 2500000000 7\n")
    assert queued_seconds(statistics) == 2.5
    for text in ("", "5", "5 x 7"):
        statistics.write_text(text)
        assert queued_seconds(statistics) == 0
    assert queued_seconds(tmp_path / "nowhere") == 0
