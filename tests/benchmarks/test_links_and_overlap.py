"""Benchmarks of slow links, of overlap and of papers' experiments, without their jobs: cases, predictions, rounds, tables."""

from __future__ import annotations

import json
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks import exact, paper_overlap, paper_overlap_report, slow_links, slow_links_report
from benchmarks.overlap import VARIANTS
from benchmarks.overlap_rounds import Turns, rounds, say_and_wait, screened, take_word
from benchmarks.paper_overlap import EXPERIMENTS, SHARED
from benchmarks.paper_overlap_report import Run
from benchmarks.slow_links_cases import ALONE, CASES, DENSE, TOP_ONE_PERCENT, Case, named, possible
from benchmarks.slow_links_predictions import alone_seconds, machine_of, predicted, rule_crossover
from benchmarks.slow_links_report import CaseFigures
from hpctrain.averaging.averagers import AVERAGERS
from hpctrain.comm.base import SingleCommunicator


def test_every_job_has_a_name_of_its_own_and_all_variants_of_known_averagers_can_be_made() -> None:
    cases = [case for experiment in EXPERIMENTS for case in experiment.cases()]
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        made, refused = possible(case)
        known = {name for name, section in case.variants.items() if section is None or section["name"] in AVERAGERS.names()}
        assert known <= made.keys(), refused
        assert case.screen is None


def test_networks_and_rates_can_be_chosen() -> None:
    chosen = paper_overlap.parse(["order", "--models", "resnet34,vgg13", "--rates", f"4gbit,{SHARED}"])
    assert list(chosen.cases) == [
        "order-resnet34-2x1-4gbit",
        "order-resnet34-shared-memory",
        "order-vgg13-2x1-4gbit",
        "order-vgg13-shared-memory",
    ]


@pytest.mark.parametrize("words", [["speed"], ["--models", "vgg17"]])
def test_what_does_not_exist_is_an_error(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        paper_overlap.parse(words)
    assert "there is no " in capsys.readouterr().err


def test_the_list_tells_what_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    out.write_text(json.dumps({"averaging-vgg16-2x1-1gbit": {}}))
    assert paper_overlap.main(["averaging", "--list", "--models", "vgg16", "--out", str(out)]) == 0
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
    assert paper_overlap.main(["--report", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Jayarajan")
    assert "Shi" not in printed


def _run(model: str, rate: str, **seconds: tuple[float, ...]) -> Run:
    rounds: dict[str, Any] = {name: [{"step_seconds": one} for one in column] for name, column in seconds.items()}
    rounds[ALONE] = [{"step_seconds": 1.0}, {"step_seconds": 1.0}]
    facts = {"ranks": 2, "link_bytes_per_second": 125e6}
    return model, rate, {"rounds": rounds, "facts": facts, "machine": {"date": "then"}, "refused": {"new": "No."}}


RUNS = [
    _run("vgg16", "1gbit", slow=(4.0, 8.0), fast=(2.0, 4.0)),
    _run("vgg16", "2gbit", slow=(3.0, 3.0)),
    _run("resnet18", "1gbit", slow=(2.0, 2.0), fast=(1.0, 1.0), gone=()),
]


def test_speed_is_of_steps_of_the_same_round() -> None:
    value = paper_overlap_report.speed(RUNS[0][2], "fast", "slow")
    assert value is not None
    assert (value.median, value.low, value.high) == (2.0, 2.0, 2.0)
    assert paper_overlap_report.speed(RUNS[1][2], "fast", "slow") is None
    assert paper_overlap_report.step(RUNS[1][2], "fast") is None


def test_a_network_has_a_table_with_two_columns_for_each_rate() -> None:
    first, second = paper_overlap_report.markdown("slow", RUNS).split("resnet18 (")
    assert "| variant | 1gbit: step, s | over slow | 2gbit: step, s | over slow |" in first
    assert "| slow | 6.000 [4.000, 8.000] |  | 3.000 [3.000, 3.000] |  |" in first
    assert "| fast | 3.000 [2.000, 4.000] | 2.000 [2.000, 2.000] |  |  |" in first
    assert "| gone |  |  |" in second
    assert first.count("Left out: new (No.)") == 1
    assert "1.000 Gb/s measured" in first


@pytest.mark.slow
def test_a_plot_is_an_image(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    paper_overlap_report.plot("slow", RUNS, tmp_path / "new" / "plot.png")
    assert (tmp_path / "new" / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_the_list_says_what_each_case_takes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert slow_links.main(["--list", "--out", str(tmp_path / "none.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(CASES) + 1
    assert lines[0].startswith(CASES[0].name)
    assert lines[-1].startswith(f"{len(CASES)} cases, about ")


def test_measured_cases_say_what_they_took() -> None:
    cases = named(["200mbit"])[:1]
    first, _ = slow_links.lines_of_cases(cases, 9, {cases[0].name: {"seconds": 90.0}}, {})
    assert first.endswith("measured in 1.5")


def test_more_rounds_and_longer_steps_take_longer() -> None:
    case = CASES[0]
    short, slow = ({case.name: dict.fromkeys(case.variants, seconds)} for seconds in (1.0, 3.0))
    assert (
        slow_links.expected_seconds(case, 3, short)
        < slow_links.expected_seconds(case, 9, short)
        < slow_links.expected_seconds(case, 9, slow)
    )


def test_an_unknown_word_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        slow_links.parse(["17gbit"])
    assert "no case has 17gbit in its name" in capsys.readouterr().err


def test_words_choose_cases() -> None:
    assert named([]) == CASES
    assert all("200mbit" in case.name for case in named(["200mbit"]))
    assert len(named(["slow-vgg16-4x1-200mbit", "shared-memory"])) == 3
    with pytest.raises(ValueError, match="no case has 3gbit in its name"):
        named(["200mbit", "3gbit"])


def test_all_dense_variants_can_be_made_on_the_ranks_of_every_case() -> None:
    for case in CASES:
        made, refused = possible(case)
        assert made.keys() | refused.keys() == case.variants.keys()
        assert not refused.keys() & {ALONE, *DENSE}, refused


def test_a_variant_that_does_not_exist_is_left_out_with_the_reason() -> None:
    case = Case("slow", "vgg16", 4, 1, "1gbit", {ALONE: None, "new": {"name": "sharded", "colour": "red"}})
    made, refused = possible(case)
    assert list(made) == [ALONE]
    assert "colour" in refused["new"]


def test_hosts_share_the_cores_of_one_machine() -> None:
    four, two = (named([name])[0] for name in ("slow-resnet18-4x1-100mbit", "priority-resnet18-2x1-1gbit"))
    assert (machine_of(four).nodes, machine_of(four).cores_per_rank) == (4, 0.5)
    assert (machine_of(two).nodes, machine_of(two).cores_per_rank) == (2, 1.0)


def test_a_link_that_was_not_calibrated_is_a_slower_one() -> None:
    at = {rate: machine_of(Case("slow", "vgg16", 4, 1, rate, {})) for rate in ("100mbit", "500mbit")}
    slow, known = (machine.between.segments[-1].beta_seconds_per_byte for machine in at.values())
    assert slow == pytest.approx(5 * known)
    assert at["100mbit"].within == at["500mbit"].within


@pytest.mark.parametrize(("name", "most"), [("slow-vgg16-4x1-100mbit", 1 / 4), ("slow-resnet18-2x2-500mbit", 1 / 2)])
def test_by_the_rule_sparse_ceases_to_pay_a_little_below_one_over_the_nodes(name: str, most: float) -> None:
    """Without latency and work it would be at 2 b_v / (m (b_v + b_i))."""
    assert 0.85 * most < rule_crossover(named([name])[0]) < most


def test_steps_are_longer_where_messages_are_waited_for_and_a_refusal_is_reported() -> None:
    case = Case("slow", "resnet18", 4, 1, "200mbit", {ALONE: None, "blocking": {"name": "blocking"}, "new": {"name": "new"}})
    result = predicted(case)
    assert result.step_seconds[ALONE] == pytest.approx(2 * alone_seconds("resnet18"), rel=0.05)  # half of a core
    assert result.step_seconds["blocking"] > 2 * result.step_seconds[ALONE]
    # 2 (P - 1) / P of all gradients from each rank: the bytes of an allreduce.
    assert result.exchanged_bytes["blocking"] == pytest.approx(2 * 3 * 4 * 11_689_512, rel=1e-6)
    assert "new" in result.refused


def _turns(*seconds: float) -> list[dict[str, float]]:
    return [{"step_seconds": one, "cpu_seconds": one / 2, "link_bytes": 2e6, "payload_bytes": 1e6} for one in seconds]


def _case_run(case: str, steps: dict[str, tuple[float, ...]]) -> dict[str, Any]:
    facts = {"ranks": 4, "link_bytes_per_second": 25e6, "parameters": 10}
    rounds = {name: _turns(*seconds) for name, seconds in steps.items()}
    return {"case": case, "rounds": rounds, "facts": facts, "machine": {"date": "then"}, "refused": {"new": "There is no new."}}


_STEPS: dict[str, tuple[float, ...]] = {
    ALONE: (1.0, 1.0, 1.0, 1.0),
    "blocking": (9.0, 9.0),
    "sharded": (6.0, 6.0, 5.0, 5.0),
    "sharded, bfloat16": (4.0, 4.0, 2.5, 2.5),
    TOP_ONE_PERCENT: (3.0, 3.0, 2.5, 2.5),
    "sparse 0.1": (4.0, 4.0),
    "sparse 0.3": (8.0, 8.0),
}

_CASE = "slow-vgg16-4x1-200mbit"


def test_ratios_are_of_turns_of_the_same_round() -> None:
    figures = CaseFigures(_case_run(_CASE, _STEPS))
    assert figures.best_dense == "sharded"
    gain = figures.gain(TOP_ONE_PERCENT, "sharded")
    assert gain is not None
    assert (gain.median, gain.low, gain.high) == (2.0, 2.0, 2.0)
    early = figures.gain(TOP_ONE_PERCENT, "blocking")
    assert early is not None
    assert early.median == 3.0  # of the rounds that both were in
    assert figures.gain("priority", "blocking") is None


def test_sparse_and_dense_are_equal_between_the_densities_around_it() -> None:
    largest, at = CaseFigures(_case_run(_CASE, _STEPS)).crossover("sharded")
    assert largest == 0.3
    assert at is not None
    assert at.median == pytest.approx(0.2)  # halfway from 4 s to 8 s
    faster = {name: seconds for name, seconds in _STEPS.items() if name != "sparse 0.3"}
    assert CaseFigures(_case_run(_CASE, faster)).crossover("sharded") == (0.1, None)


@pytest.mark.parametrize(("dense_seconds", "density"), [(1.0, None), (2.5, 0.25), (4.0, 0.7), (6.0, None)])
def test_the_crossing_is_where_a_straight_line_meets_the_dense_step(dense_seconds: float, density: float | None) -> None:
    at = slow_links_report.crossing([0.1, 0.4, 0.7], [2.0, 3.0, 4.0], dense_seconds)
    assert at == (None if density is None else pytest.approx(density))


def test_tables_have_the_bars_and_what_was_predicted() -> None:
    priority = _case_run("priority-vgg16-2x1-1gbit", {"blocking": (2.0,), "sharded": (1.5,), "priority": (1.2,)})
    predicted = {_CASE: {"sharded": 4.5, TOP_ONE_PERCENT: 3.0, "sparse 0.1": 6.0}}
    text = slow_links_report.markdown(
        {_CASE: _case_run(_CASE, _STEPS), "priority-vgg16-2x1-1gbit": priority}, predicted, {_CASE: 0.21}
    )
    assert (
        f"| {_CASE} | sharded | 2.000 [2.000, 2.000] | 1.50 | 0.200 [0.200, 0.200] | 0.055 | 0.200 [0.200, 0.200] | 0.210 |"
        in text
    )
    assert f"| {_CASE} | sharded, bfloat16 | 1.750 [1.500, 2.000] | 2.00 | 2.00 |" in text
    assert "| priority-vgg16-2x1-1gbit | priority | 1.250 [1.250, 1.250] | 1.667 [1.667, 1.667] |" in text
    assert "Left out: new (There is no new.)" in text
    assert "200 Mb/s measured" in text


def test_slow_dense_variants_leave_with_what_is_compared_with_them() -> None:
    measured = {
        name: [{"step_seconds": seconds}] * 3
        for name, seconds in {
            "alone": 1.0,
            "a": 5.0,
            "b": 5.2,
            "c": 6.0,
            "a 16": 3.0,
            "c 16": 2.0,
            "s 1": 1.5,
            "s 2": 1.6,
        }.items()
    }
    rule = {"best_of": ["a", "b", "c", "d"], "with": {"a": ["a 16"], "c": ["c 16"]}, "always": ["alone", "s 1"]}
    assert screened(measured, rule) == ["alone", "a", "b", "a 16", "s 1"]


def test_a_word_is_acted_on_before_the_job_goes_on(tmp_path: Path) -> None:
    words, acted = tmp_path / "link", list[str]()
    take_word(words, acted.append)
    job = threading.Thread(target=say_and_wait, args=(words, "unshaped"))
    job.start()
    while job.is_alive():
        take_word(words, acted.append)
    assert acted == ["unshaped"]


def test_every_turn_is_first_once_and_rounds_end_with_their_time() -> None:
    order: list[str] = []

    def turn(name: str) -> dict[str, float]:
        order.append(name)
        return {"step_seconds": 1.0}

    turns: Turns = {name: partial(turn, name) for name in "abc"}
    world = SingleCommunicator()
    measured = rounds(world, turns, 3, seconds=None, screen=None, screen_rounds=0, say=lambda line: None)
    assert "".join(order) == "abcbcacab"
    assert [len(of_name) for of_name in measured.values()] == [3, 3, 3]
    order.clear()
    rounds(world, turns, 9, seconds=-1.0, screen=None, screen_rounds=0, say=lambda line: None)
    assert len(order) == 9  # three rounds whatever the time


def test_from_the_screen_on_only_those_that_stay_have_turns() -> None:
    seconds = {"fast": 1.0, "slow": 2.0}
    turns: Turns = {name: partial(lambda value: {"step_seconds": value}, value) for name, value in seconds.items()}
    rule = {"best_of": list(seconds), "with": {}, "always": []}
    measured = rounds(SingleCommunicator(), turns, 5, seconds=None, screen=rule, screen_rounds=2, say=lambda line: None)
    assert {name: len(of_name) for name, of_name in measured.items()} == {"fast": 5, "slow": 2}


def _turns_that_send(*seconds: float, sent: float) -> list[dict[str, float]]:
    return [{"step_seconds": one, "payload_bytes": sent} for one in seconds]


def test_a_row_for_each_number_of_shards() -> None:
    rounds = {
        "sharded": _turns_that_send(1.0, 2.0, 4.0, sent=100),
        "micro-2": _turns_that_send(1.1, 2.2, 4.4, sent=100),
        "exact-4": _turns_that_send(1.21, 2.42, 4.84, sent=101),
        "micro-4": _turns_that_send(1.2, 2.4, 4.8, sent=100),
        "exact-8": _turns_that_send(1.2, 2.4, 4.8, sent=150),
    }
    assert set(rounds) <= set(VARIANTS)
    rounds["bare gradients"] = [{"seconds": 0.1}] * 3  # a run times MPI's own calls as well as the steps
    rows = exact.markdown({"rate": "1gbit", "rounds": rounds}).splitlines()
    assert rows[0] == "1gbit, 3 rounds"
    assert rows[-2] == "| 4 | 1.210 [1.210, 1.210] | 1.100 [1.100, 1.100] | 1.100 [1.100, 1.100] | 1.010 |"
    assert rows[-1] == "| 8 | 1.200 [1.200, 1.200] | 1.200 [1.200, 1.200] | 1.000 [1.000, 1.000] | 1.500 |"
