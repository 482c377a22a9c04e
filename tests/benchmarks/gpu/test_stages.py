"""Stages in processes of their own: what they leave when they pass, fail, cannot run, die or take too long."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu.settings import NotBuiltYetError, Settings, SkippedError
from benchmarks.gpu.stage_report import FAILED, NOT_BUILT, PASSED, RUNNING, SKIPPED, StageReport
from benchmarks.gpu.stages import STAGES, Stage, publish, run_all, run_apart, run_here, table
from benchmarks.gpu_check import main
from hpctrain.backend.cuda.choose import DEVICE_VARIABLE


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings("emulated", tmp_path)


def ending(monkeypatch: pytest.MonkeyPatch, settings: Settings, error: Exception | None, *checks: bool) -> dict:
    """The JSON of a stage that checks so and then raises."""

    def stage(_: Settings, report: StageReport) -> None:
        for number, passed in enumerate(checks):
            report.check(f"rule {number}", passed)
        report.note("measured 7")
        if error is not None:
            raise error

    monkeypatch.setattr(Stage, "function", lambda _: stage)
    run_here(Stage("facts", 1), settings)
    return json.loads((settings.out / "facts.json").read_text())


@pytest.mark.parametrize(
    ("error", "checks", "status"),
    [
        (None, (True, True), PASSED),
        (None, (True, False), FAILED),
        (None, (), FAILED),
        (SkippedError("no compiler"), (), SKIPPED),
        (SkippedError("no compiler"), (False,), FAILED),
        (NotBuiltYetError("no loss"), (True,), NOT_BUILT),
    ],
)
def test_the_status_follows_from_checks_and_errors(
    monkeypatch: pytest.MonkeyPatch, settings: Settings, error: Exception | None, checks: tuple[bool, ...], status: str
) -> None:
    content = ending(monkeypatch, settings, error, *checks)
    assert content["status"] == status
    assert content["summary"].endswith("measured 7")
    assert str(error or "") in content["summary"]


def test_an_error_fails_the_stage_and_goes_on_to_the_log(monkeypatch: pytest.MonkeyPatch, settings: Settings) -> None:
    with pytest.raises(ZeroDivisionError):
        ending(monkeypatch, settings, ZeroDivisionError("of nothing"), True)
    content = json.loads((settings.out / "facts.json").read_text())
    assert (content["status"], content["summary"]) == (FAILED, "ZeroDivisionError: of nothing; measured 7")


def test_figures_are_on_disk_as_soon_as_they_are_known(tmp_path: Path) -> None:
    report = StageReport(tmp_path / "speed.json", "speed", "cuda")
    report.add("step_seconds", [0.25])
    content = json.loads((tmp_path / "speed.json").read_text())
    assert (content["step_seconds"], content["status"]) == ([0.25], RUNNING)


def test_the_package_of_a_stage_takes_the_device_of_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEVICE_VARIABLE, "emulated:7")
    assert Settings("emulated", tmp_path).environment()[DEVICE_VARIABLE] == "emulated:2"
    assert DEVICE_VARIABLE not in Settings("cuda", tmp_path).environment()


def test_stages_have_names_of_their_own_and_none_takes_all_the_time() -> None:
    assert len({stage.name for stage in STAGES}) == len(STAGES)
    assert max(stage.limit for stage in STAGES) < 460


def test_tables_fit_a_terminal_and_name_every_stage() -> None:
    row = {"status": NOT_BUILT, "seconds": 123.4, "summary": "word " * 60, "checks": [{"passed": True}] * 1234}
    text = table([{**row, "stage": stage.name} for stage in STAGES])
    assert max(map(len, text.splitlines())) <= 80
    assert all(f"\n{stage.name} " in text for stage in STAGES)


@pytest.mark.job
@pytest.mark.slow
def test_the_command_runs_stages_apart_and_publishes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "results"
    arguments = ["--device", "emulated", "--only", "facts", "--out", str(tmp_path / "out"), "--publish", str(results)]
    assert main(arguments) == 0
    (content,) = json.loads((results / "gpu-check.json").read_text())
    assert (content["stage"], content["status"], content["device"]) == ("facts", PASSED, "emulated")
    assert "facts.log" in (results / "gpu-check.log").read_text()
    assert "facts     passed" in capsys.readouterr().out


@pytest.mark.job
@pytest.mark.slow
def test_a_stage_that_dies_or_takes_too_long_has_failed(settings: Settings) -> None:
    died = run_apart(Stage("no_such_stage", 60), settings, 60)
    assert died["status"] == FAILED
    assert "ended with code 2" in died["summary"]
    late = run_apart(Stage("facts", 60), settings, 0.02)
    assert late["status"] == FAILED
    assert "stopped after its limit" in late["summary"]


@pytest.mark.job
def test_stages_for_which_no_time_is_left_are_skipped(settings: Settings) -> None:
    seen: list[int] = []
    run_all(STAGES[:2], settings, 1.0, lambda contents: seen.append(len(contents)))
    assert seen == [1, 2]
    contents = [json.loads((settings.out / f"{stage.name}.json").read_text()) for stage in STAGES[:2]]
    assert [content["status"] for content in contents] == [SKIPPED] * 2
    publish(settings.out / "results", settings.out, contents)
    assert json.loads((settings.out / "results" / "gpu-check.json").read_text()) == contents
