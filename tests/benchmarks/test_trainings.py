"""Benchmarks of trainings and of what accompanies them: commands, curves, growth, faults, and tables of what was measured."""

from __future__ import annotations

import json
import math
import re
import subprocess
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import pytest

from benchmarks import (
    accuracy,
    before_after,
    checkpoint,
    checks,
    faults,
    finetune,
    flat,
    flight,
    hashes,
    large_batch,
    lars,
    shards,
)
from benchmarks.accuracy import BASE, VARIANTS
from benchmarks.finetune import OURS, PEER, RANDOM
from benchmarks.large_batch import Curve
from benchmarks.lars_ranks import norm_messages, updates
from hpctrain.averaging.averagers import make_strategy
from hpctrain.averaging.base import PlannedGroup
from hpctrain.backend.onednn.kernel_set import OnednnKernelSet, available
from hpctrain.config.load import load
from hpctrain.models import catalogue
from hpctrain.nn.network import Network
from hpctrain.nn.parameter import FlatGroup, GroupLayout, ParameterSpec
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.run import run_virtual
from tests.support.faults import FAULTS
from tests.support.runs import make_run

TASK = {"file": "a.yaml", "overrides": ["epochs=10"], "ranks": 2}


def test_all_variants_meet_one_seed_before_the_next() -> None:
    assert accuracy.pending(["a", "b"], [1, 2], {}) == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert accuracy.pending(["a", "b"], [1, 2], {"a": {"1": 0.5}, "b": {"2": 0.5}}) == [("b", 1), ("a", 2)]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("resume", [False, True])
def test_a_training_is_a_command_of_the_program(ranks: int, resume: bool) -> None:
    words = accuracy.command("a.yaml", ("epochs=10", *VARIANTS["lazy"]), 3, Path("out"), ranks, resume=resume)
    assert words[words.index("hpctrain") :][:3] == ["hpctrain", "train", "a.yaml"]
    assert {"epochs=10", "averager=lazy", "seed=3", "output=out"} < set(words)
    assert (words[-2:] == ["--resume", "auto"]) == resume
    assert ("mpi4py" in words) == (ranks > 1)


def test_differences_are_of_pairs() -> None:
    """A seed that is good for both shifts neither the mean nor the interval."""
    base, apart = {"1": 0.9, "2": 0.5, "3": 0.7}, {"1": 0.01, "2": -0.02, "3": 0.04}
    found = accuracy.difference({seed: base[seed] + apart[seed] for seed in base}, {**base, "4": 0.1})
    assert found is not None
    assert found.mean == pytest.approx(mean(apart.values()))
    assert found.half_width == pytest.approx(4.303 * stdev(apart.values()) / math.sqrt(3))
    assert found.pairs == 3
    one = accuracy.difference({"1": 0.5}, base)
    assert one is not None
    assert (one.mean, one.half_width) == (pytest.approx(-0.4), math.inf)
    assert accuracy.difference({"7": 0.5}, base) is None


def test_the_table_tells_accuracies_and_differences() -> None:
    done = {BASE: {"1": 0.85, "2": 0.86}, "lazy": {"1": 0.84, "2": 0.86}, "sparse": {}}
    lines = accuracy.markdown({**TASK, "accuracy": done}).splitlines()
    assert lines[0] == "`a.yaml epochs=10`, 2 ranks, test accuracy in %"
    assert lines[2].startswith("| averager | seed 1 | seed 2 | mean |")
    assert lines[4] == "| sharded | 85.00 | 86.00 | 85.50 |  |  |"
    assert lines[5] == "| lazy | 84.00 | 86.00 | 85.00 | -0.50 | [-6.85, +5.85] |"
    assert len(lines) == 6


def test_variants_are_chosen_by_name_and_added() -> None:
    assert list(accuracy.variants_of([], [])) == list(VARIANTS)
    assert list(accuracy.variants_of(["lazy"], [])) == [BASE, "lazy"]
    added = accuracy.variants_of([], ["rarer=averager={name: lazy, layers: 4}", "slow=averager=blocking optimizer.lr=0.1"])
    assert added["rarer"] == ("averager={name: lazy, layers: 4}",)
    assert added["slow"] == ("averager=blocking", "optimizer.lr=0.1")
    with pytest.raises(ValueError, match="no variant rare; there are"):
        accuracy.variants_of(["rare"], [])
    with pytest.raises(ValueError, match="is no variant"):
        accuracy.variants_of([], ["rarer"])


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_an_averager_of_the_program(name: str) -> None:
    config, _ = load(Path(__file__).parents[2] / "configs" / "cifar10-resnet20-short.yaml", VARIANTS[name])
    make_strategy(config.averager.name, config.averager.options, PlannedGroup(GroupLayout({}), 2, nodes=(0, 0)))


def test_results_of_another_task_are_not_mixed(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    assert accuracy.read(out, TASK) == {**TASK, "accuracy": {}}
    out.write_text(json.dumps({**TASK, "accuracy": {"lazy": {"1": 0.5}}}))
    assert accuracy.read(out, TASK)["accuracy"] == {"lazy": {"1": 0.5}}
    with pytest.raises(ValueError, match=r"has results of ranks 2, and 4 is asked for"):
        accuracy.read(out, {**TASK, "ranks": 4})


def test_nothing_is_run_for_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results.json"
    assert accuracy.main(["--report", "--out", str(out)]) == 1
    out.write_text(json.dumps({**TASK, "accuracy": {BASE: {"1": 0.5}}}))
    assert accuracy.main(["--report", "--out", str(out)]) == 0
    assert "| sharded | 50.00 | 50.00 |" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        accuracy.parse([])


def test_a_curve_is_read_from_metrics(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: large\nbatch: 2048\n")
    records = [
        {"kind": "interval", "epoch": 1, "loss": 9.0},
        {"kind": "epoch", "epoch": 1, "loss": 2.5},
        {"kind": "evaluation", "epoch": 1, "top1": 0.25},
        {"kind": "epoch", "epoch": 2, "loss": 2.0},
        {"kind": "evaluation", "epoch": 2, "top1": 0.1},
        {"kind": "evaluation", "epoch": 2, "top1": 0.5},  # again, after a resume
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert large_batch.read(tmp_path) == Curve("large", {1: 2.5, 2: 2.0}, {1: 0.25, 2: 0.5})


def test_the_table_says_when_accuracies_were_reached() -> None:
    fast = Curve("fast", {1: 2.0, 2: 1.0, 3: 0.5}, {1: 0.45, 2: 0.75, 3: 0.8})
    slow = Curve("slow", {1: 2.2, 2: 2.0, 3: 1.5}, {1: 0.1, 2: 0.5, 3: 0.45})
    head, _, first, second = large_batch.markdown([fast, slow]).splitlines()
    assert head.endswith("| epochs to 40.0% | to 72.0% |")
    assert first == "| fast | 3 | 0.500 | 80.00% | 80.00% | 1 | 2 |"
    assert second == "| slow | 3 | 1.500 | 45.00% | 50.00% | 2 | never |"


def test_a_run_without_a_test_is_refused() -> None:
    with pytest.raises(SystemExit, match="has tested no epoch"):
        large_batch.markdown([Curve("new", {}, {})])


def write(directory: Path, accuracies: list[float]) -> None:
    make_run(directory, "name: some\n")
    records = [{"kind": "evaluation", "epoch": epoch + 1, "top1": value} for epoch, value in enumerate(accuracies)]
    (directory / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))


def test_only_trainings_that_are_through_are_collected_and_pairs_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "work" / f"{OURS}-1" / "some-20260101-000000", [0.5, 0.75])
    write(tmp_path / "work" / f"{OURS}-2" / "some-20260101-000000", [0.5, 0.8])
    write(tmp_path / "work" / f"{PEER}-1", [0.25, 0.5])
    write(tmp_path / "work" / f"{PEER}-2", [0.25])
    write(tmp_path / "work" / f"{RANDOM}-1" / "some-20260101-000000", [0.125, 0.25])
    out = tmp_path / "finetune.json"
    assert finetune.main(["--work", str(tmp_path / "work"), "--out", str(out), "--note", "a test"]) == 0
    stored = json.loads(out.read_text())
    assert stored["conditions"] == "a test"
    assert stored["test_accuracy_by_epoch"] == {
        OURS: {"1": [0.5, 0.75], "2": [0.5, 0.8]},
        PEER: {"1": [0.25, 0.5]},
        RANDOM: {"1": [0.125, 0.25]},
    }
    assert finetune.differences(stored["test_accuracy_by_epoch"]) == [0.25]
    assert "in 1 pair, mean: +25.00 points" in capsys.readouterr().out


@pytest.mark.parametrize("who", [OURS, PEER, RANDOM])
def test_all_trainers_get_the_same_configuration(who: str) -> None:
    words = finetune.command(who, "file.yaml", ["batch=8"], 3, Path("there"))
    assert {"file.yaml", "batch=8", "seed=3"} <= set(words)
    assert ("init={}" in words) == (who == RANDOM)


def _group() -> FlatGroup:
    sizes = (2000, 7, 40_000, 3, 90_000, 50_000)
    specs = {f"l{k}": ParameterSpec((size,), lambda random, shape: np.zeros(shape)) for k, size in enumerate(sizes)}
    group = FlatGroup(specs, "float64")
    random = np.random.default_rng(1)
    group.data[...], group.grad[...] = random.standard_normal((2, group.size))
    return group


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_element_is_owned_once_and_each_norm_sent_once(ranks: int) -> None:
    group = _group()
    messages = [norm_messages(group, rank, ranks) for rank in range(ranks)]
    owned = sorted((part.start, part.stop) for of_rank in messages for one in of_rank for part in one.owned)
    assert sum(stop - start for start, stop in owned) == group.size
    assert all(before[1] <= after[0] for before, after in pairwise(owned))
    places = [place for one in messages[0] for place in range(len(group.segments))[one.place]]
    assert sorted(places) == list(range(len(group.segments)))
    assert [one.place for one in messages[0]] == [one.place for one in messages[-1]]


def test_parts_and_the_whole_update_alike() -> None:
    def program(comm: ThreadCommunicator) -> tuple[np.ndarray, np.ndarray, tuple[tuple[int, int], ...]]:
        results = {}
        for where in ("every rank all", "own part"):
            group = _group()
            update = updates(group, comm)[f"lars, {where}"]
            update.step()
            results[where] = group.data.copy()
        owned = tuple((part.start, part.stop) for one in norm_messages(group, comm.rank, comm.size) for part in one.owned)
        return results["every rank all"], results["own part"], owned

    for whole, own, owned in run_virtual(3, program):
        for start, stop in owned:
            np.testing.assert_allclose(own[start:stop], whole[start:stop], rtol=1e-12)


def test_the_table_compares_turns_of_the_same_round() -> None:
    seconds = {"lars, every rank all": (0.4, 0.8), "lars, own part": (0.1, 0.2), "sgd, own part": (0.05, 0.15)}
    rounds = {name: [{"cpu_seconds": one, "step_seconds": one} for one in turns] for name, turns in seconds.items()}
    table = lars.markdown([{"network": "toy", "ranks": 2, "facts": {"parameters": 1234, "messages": 3}, "rounds": rounds}])
    row = table.splitlines()[2]
    assert row.startswith("| toy | 1,234 | 2 | 3 | 600.000")
    assert "| 4.000 [4.000, 4.000] | 50.000 [50.000, 50.000] | 100.000" in row


@pytest.mark.parametrize("together", [False, True])
def test_shards_add_up_to_the_gradient_of_the_same_samples(together: bool) -> None:
    network = Network(catalogue.build("small", {"classes": 200, "channels_in": 3}), (64, 64, 3), OnednnKernelSet())
    gradient = network.groups["all"].grad
    step, _ = shards.stepping(network, 2, 1, together=True)
    step()
    whole = gradient.copy()
    step, adding = shards.stepping(network, 4, 2, together=together)  # twice the same two samples
    step()
    assert np.abs(gradient - whole).max() <= 1e-5 * np.abs(whole).max()
    assert adding.seconds > 0


def test_a_row_for_each_way() -> None:
    run: dict[str, Any] = {"samples": 8, "ways": {"all at once": {"step": [1.0, 2.0], "additions": [0.0, 0.0]}}}
    run["ways"]["4 shards side by side"] = {"step": [1.1, 2.2], "additions": [0.01, 0.02]}
    assert shards.markdown(run).splitlines()[2:] == [
        "| all at once | 1500 | 1.000 [1.000, 1.000] | 0 |",
        "| 4 shards side by side | 1650 | 1.100 [1.100, 1.100] | 15 |",
    ]


_LOOK = {"resident_bytes": 9, "own_bytes": 5_000_000, "descriptors": 20, "threads": 4, "outstanding": 3}


@pytest.mark.parametrize(
    ("changes", "right"),
    [
        ({}, True),
        ({"own_bytes": 5_900_000}, True),
        ({"own_bytes": 6_100_000}, False),
        ({"descriptors": 21}, False),
        ({"threads": 5}, False),
        ({"outstanding": 9}, True),
        ({"descriptors": 19, "own_bytes": 4_000_000}, True),
    ],
)
def test_growth_is_the_most_since_the_first_look(changes: dict[str, int], right: bool) -> None:
    looks = {"0": {**_LOOK, "descriptors": 1}, "500": _LOOK, "750": {**_LOOK, **changes}, "1000": _LOOK}
    assert flat.is_flat(flat.growth(looks)) is right


def test_operations_that_never_end_are_in_every_look() -> None:
    looks = {str(step): {**_LOOK, "outstanding": 3 + step // 400} for step in (500, 750, 1000)}
    looks["500"] = {**_LOOK, "outstanding": 0}
    assert flat.growth(looks)["outstanding"] == 4
    assert not flat.is_flat(flat.growth(looks))


def test_the_report_has_the_first_look_and_the_last() -> None:
    text = flat.markdown({"ranks": {"1": {"500": _LOOK, "750": _LOOK, "1000": {**_LOOK, "descriptors": 77}}}})
    assert text.splitlines()[2:] == ["| 1 | 500 | 5.00 | 20 | 4 | 3 |", "| 1 | 1000 | 5.00 | 77 | 4 | 3 |"]


@pytest.mark.job
@pytest.mark.slow
@pytest.mark.thorough
def test_a_short_run_is_looked_at_on_every_rank(tmp_path: Path) -> None:
    looks = flat.measure(tmp_path, 60)
    assert json.dumps(looks)
    for of_rank in looks.values():
        assert list(of_rank) == ["0", "59"]
        assert flat.growth(of_rank, 0)["descriptors"] < 20
        assert of_rank["59"]["threads"] >= 2


TIMES = {"begins": [0, 9, 12, 13, 14, 15, 25, 26], "saves": [4.0, 8.0, 99.0], "step_of_save": [5, 6, 8]}


def test_first_steps_and_the_last_save_do_not_count() -> None:
    found = checkpoint.facts(TIMES)
    assert found["median_step"] == 1
    assert found["longest_step"] == 10
    assert found["mean_step"] == pytest.approx(13 / 4)
    assert found["longest_save"] == 8
    assert checkpoint.facts({**TIMES, "saves": [99.0]})["longest_save"] == 0


def test_the_report_has_a_line_for_each_mode() -> None:
    lines = checkpoint.markdown({"job": "a job", "times": dict.fromkeys(checkpoint.MODES, TIMES)}).splitlines()
    assert lines[0] == "a job"
    assert [line.split(" ")[1] for line in lines[-3:]] == ["none", "synchronous", "asynchronous"]
    assert "| asynchronous | 1.000 | 3.250 | 10.000 | 8.000 |" in lines


def test_events_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight, "_EVENTS", 20)
    turns = flight.costs(tmp_path)
    assert all(len(of_event) == 9 and min(of_event) > 0 for of_event in turns.values())


def test_the_report_has_the_share() -> None:
    results = {
        "event_seconds": {"operation": [2e-6, 1e-6, 3e-6]},
        "job": "a job",
        "step": {"operations": 50.0, "seconds": 0.1},
        "seconds_of_a_step": 1e-4,
        "share": 1e-3,
    }
    text = flight.markdown(results)
    assert "| operation | 2.00 [1.00, 3.00] |" in text
    assert "a job: 50 operations in a step of 100.0 ms: at most 100 microseconds, 0.100% of it." in text


@pytest.mark.slow
@pytest.mark.skipif(available() is not None, reason="needs oneDNN")
def test_records_of_a_model_are_timed() -> None:
    values = hashes.measure(["resnet20"])["models"]["resnet20"]
    assert values["tensors"] == 2 * 59 + 2 * 19  # each parameter with its momentum, and 19 batch norms
    assert values["elements"] > 2 * 269_000
    assert min(values["record"]) > 0
    assert len(values["record"]) == len(values["sha256"])


def test_the_report_has_the_medians() -> None:
    of_model = {"elements": 1234, "tensors": 7, "record": [1e-3, 2e-3, 9e-3], "sha256": [3e-3]}
    assert "| a model | 1,234 | 7 | 2.0 | 3.0 |" in hashes.markdown({"models": {"a model": of_model}})


@pytest.mark.slow
@pytest.mark.skipif(available() is not None, reason="needs oneDNN")
def test_checks_and_guards_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(checks.MODELS, "resnet20", ((32, 32, 3), 2, 10))
    values = checks.measure(["resnet20"])["models"]["resnet20"]
    assert len(values["step_seconds"]) == 3
    assert min(values["check"]["look"]) > 0
    assert 0 < values["share_of_checks"] < 1
    assert 0 < values["share_of_reads"] < 1
    assert values["check"]["checks"] == 2  # 2.2 MB of parameters and momentum, by the MiB


def test_the_report_has_the_shares() -> None:
    of_model = {
        "samples": 8,
        "step_seconds": [1.0, 2.0, 3.0],
        "check": {"look": [1e-3], "message": [1e-4], "checks": 4},
        "read_seconds": [4e-3],
        "guard_seconds": [2e-3],
        "share_of_reads": 2e-3,
        "share_of_checks": 5e-5,
        "share_of_guards": 1e-3,
    }
    text = checks.markdown({"every_steps": 10, "models": {"a model": of_model}})
    assert "| a model, 8 | 2000 | 4.00 | 1.10 | 40 steps | 2.00 | 0.200% | 0.005% | 0.100% |" in text


def _values(*, named: bool, seconds: float | None = 4.0) -> dict[str, object]:
    return {
        "ends": seconds is not None,
        "seconds": seconds,
        "code": None if seconds is None else 9,
        "named": named,
        "said": "words",
    }


def test_the_report_counts_what_ended_and_what_was_named() -> None:
    values = {"a": _values(named=True), "b": _values(named=False), "c": _values(named=False, seconds=None)}
    text = faults.markdown({"faults": values})
    assert "| a | 4.0 | 9 | yes | words |" in text
    assert "| c | never |  | no | words |" in text
    assert "2 of 3 ended within 13 s of their start, 1 were named rightly." in text


@pytest.mark.job
@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["SIGKILL", "a wrong dtype", "a rank that is too slow", "a flipped bit of a parameter"])
def test_a_fault_is_named(name: str) -> None:
    fault = next(fault for fault in FAULTS if fault.name == name)
    values = faults.measure(fault)
    assert values["named"], values
    assert values["code"] not in (0, None)


@pytest.mark.job
@pytest.mark.slow
@pytest.mark.thorough
def test_without_a_fault_no_rank_is_blamed() -> None:
    fault = next(fault for fault in FAULTS if fault.name == "SIGKILL")
    sound = type(fault)("none", "pass", fault.words)
    values = faults.measure(sound)
    assert not values["named"], values
    assert values["code"] == 0


@pytest.mark.job
def test_a_commit_and_the_working_tree_run_each_their_own_files(capsys: pytest.CaptureFixture[str]) -> None:
    """Else a change would be compared with itself."""
    if subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, check=False).returncode:
        pytest.skip("These files are in no clone.")
    with before_after.checked_out("HEAD") as base:
        assert before_after.environment_of(base, 1)["PYTHONPATH"] == str(base)
        with pytest.raises(RuntimeError, match="instead of hpctrain in"):
            before_after.environment_of(base / "docs", 1)
    assert not base.exists()
    assert before_after.main(["--base", "HEAD", "--only", "small-28", "--threads", "1", "--rounds", "1"]) == 0
    assert re.search(r"^small-28 +1 +\d+\.\d\d  \d+\.\d{3} \[", capsys.readouterr().out, re.MULTILINE)
