"""The job that calibrates, in one process: a file that planners read, and a table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.comm.single import SingleCommunicator
from hpctrain.experiment import calibration_job
from hpctrain.planner import machine_file, rate_measurement
from hpctrain.planner.machine import OperatorClass, OperatorRate


pytestmark = pytest.mark.usefixtures("known_rates")


@pytest.fixture
def known_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {kind: OperatorRate(1e10, 2e9, 3e-6) for kind in OperatorClass}
    monkeypatch.setattr(rate_measurement, "measure", lambda kernels, threads, before: rates)


def test_one_process_writes_a_machine_and_says_what_it_could_not_measure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration_job, "_COLUMNS", 200)  # so that no cell is folded
    out = tmp_path / "laptop.yaml"
    machine = calibration_job.run_calibration(SingleCommunicator(), 1, 5.0, out, 60.0)
    assert machine_file.read(out) == machine
    assert machine.name == "laptop"
    assert machine.rates[OperatorClass.CONVOLUTION].flops_per_second == 1e10
    printed = capsys.readouterr().out
    words = " ".join(printed.split())
    assert "not measured: one node" in words
    assert "10.0 Gflop/s, 2.0 GB/s, 3 us a call" in words
    assert f"{out}: calibrated in" in words.replace(" .yaml", ".yaml")


def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration_job, "calibrate", lambda *words, **names: pytest.fail("measured"))
    with pytest.raises(OSError, match="nowhere"):
        calibration_job.run_calibration(SingleCommunicator(), 1, 5.0, tmp_path / "nowhere" / "machine.yaml", 60.0)
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_text("as it was")
    for path in (old, new):
        with pytest.raises(pytest.fail.Exception, match="measured"):  # which comes behind the check
            calibration_job.run_calibration(SingleCommunicator(), 1, 5.0, path, 60.0)
    assert old.read_text() == "as it was"
    assert not new.exists()


def test_this_process_has_cores_and_memory() -> None:
    facts = calibration_job.facts_here()
    assert facts.cores
    assert facts.memory_bytes > 1 << 28
    assert facts.processor


def test_every_number_is_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    machine = machine_file.read("xc40")
    calibration_job.print_machine(replace(machine, sources=dict.fromkeys(machine.sources, "here")))
    printed = capsys.readouterr().out
    for key in {".".join(key.split(".")[:2]) for key in machine.sources}:
        assert key in printed
    assert printed.count("here") == 1


def test_the_table_is_folded_to_80_columns_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    calibration_job.print_machine(machine_file.read("development"))
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert "…" not in printed
