"""The experiments of the papers: variants that exist, jobs with names of their own, and what is printed without any job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.paper_overlap import EXPERIMENTS, SHARED, main, parse
from benchmarks.slow_links_cases import ALONE, possible
from hpctrain.experiment.averager import AVERAGERS


def test_every_job_has_a_name_of_its_own_and_all_variants_of_known_averagers_can_be_made() -> None:
    cases = [case for experiment in EXPERIMENTS for case in experiment.cases()]
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        made, refused = possible(case)
        known = {name for name, section in case.variants.items() if section is None or section["name"] in AVERAGERS.names()}
        assert known <= made.keys(), refused
        assert case.screen is None


def test_the_base_is_a_variant_and_nothing_is_compared_with_compute_alone() -> None:
    for experiment in EXPERIMENTS:
        assert experiment.base in experiment.variants
        assert ALONE not in experiment.variants


def test_networks_and_rates_can_be_chosen() -> None:
    chosen = parse(["order", "--models", "resnet34,vgg13", "--rates", f"4gbit,{SHARED}"])
    assert list(chosen.cases) == [
        "order-resnet34-2x1-4gbit",
        "order-resnet34-shared-memory",
        "order-vgg13-2x1-4gbit",
        "order-vgg13-shared-memory",
    ]


@pytest.mark.parametrize("words", [["speed"], ["--models", "vgg17"]])
def test_what_does_not_exist_is_an_error(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(words)
    assert "there is no " in capsys.readouterr().err


def test_the_list_tells_what_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    out.write_text(json.dumps({"averaging-vgg16-2x1-1gbit": {}}))
    assert main(["averaging", "--list", "--models", "vgg16", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "averaging-vgg16-2x1-1gbit: measured" in printed
    assert "averaging-vgg16-2x1-2gbit: not measured" in printed
    assert "order" not in printed.split("\n")[0]


def test_a_report_has_the_measured_experiments_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    turns = [{"step_seconds": 1.0}]
    run: dict[str, Any] = {
        "case": "order-vgg16-2x1-1gbit",
        "rounds": {ALONE: turns, "neither": turns},
        "facts": {"ranks": 2, "link_bytes_per_second": 1e8},
        "machine": {"date": "then"},
        "refused": {},
    }
    out.write_text(json.dumps({run["case"]: run}))
    assert main(["--report", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Jayarajan")
    assert "Shi" not in printed
