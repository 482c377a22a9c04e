"""The benchmark of accuracies, without its trainings: what it would run, and what it makes of accuracies."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import mean, stdev

import pytest

from benchmarks.accuracy import (
    BASE,
    VARIANTS,
    command,
    difference,
    final_accuracy,
    main,
    markdown,
    parse,
    pending,
    read,
    variants_of,
)
from hpctrain.averaging.strategy import PlannedGroup
from hpctrain.config.load import load
from hpctrain.experiment.averager import make_strategy
from hpctrain.nn.parameter import GroupLayout

TASK = {"file": "a.yaml", "overrides": ["epochs=10"], "ranks": 2}


def test_all_variants_meet_one_seed_before_the_next() -> None:
    assert pending(["a", "b"], [1, 2], {}) == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert pending(["a", "b"], [1, 2], {"a": {"1": 0.5}, "b": {"2": 0.5}}) == [("b", 1), ("a", 2)]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("resume", [False, True])
def test_a_training_is_a_command_of_the_program(ranks: int, resume: bool) -> None:
    words = command("a.yaml", ("epochs=10", *VARIANTS["lazy"]), 3, Path("out"), ranks, resume=resume)
    assert words[words.index("hpctrain") :][:3] == ["hpctrain", "train", "a.yaml"]
    assert {"epochs=10", "averager=lazy", "seed=3", "output=out"} < set(words)
    assert (words[-2:] == ["--resume", "auto"]) == resume
    assert ("mpi4py" in words) == (ranks > 1)


def test_an_accuracy_is_that_of_the_last_evaluation() -> None:
    assert final_accuracy([]) is None
    records = [{"kind": "evaluation", "top1": 0.25}, {"kind": "epoch", "top1": 0.9}, {"kind": "evaluation", "top1": 0.5}]
    assert final_accuracy(records) == 0.5
    assert final_accuracy(records[1:2]) is None


def test_differences_are_of_pairs() -> None:
    """A seed that is good for both shifts neither the mean nor the interval."""
    base, apart = {"1": 0.9, "2": 0.5, "3": 0.7}, {"1": 0.01, "2": -0.02, "3": 0.04}
    found = difference({seed: base[seed] + apart[seed] for seed in base}, {**base, "4": 0.1})
    assert found is not None
    assert found.mean == pytest.approx(mean(apart.values()))
    assert found.half_width == pytest.approx(4.303 * stdev(apart.values()) / math.sqrt(3))
    assert found.pairs == 3
    one = difference({"1": 0.5}, base)
    assert one is not None
    assert (one.mean, one.half_width) == (pytest.approx(-0.4), math.inf)
    assert difference({"7": 0.5}, base) is None


def test_the_table_tells_accuracies_and_differences() -> None:
    done = {BASE: {"1": 0.85, "2": 0.86}, "lazy": {"1": 0.84, "2": 0.86}, "sparse": {}}
    lines = markdown({**TASK, "accuracy": done}).splitlines()
    assert lines[0] == "`a.yaml epochs=10`, 2 ranks, test accuracy in %"
    assert lines[2].startswith("| averager | seed 1 | seed 2 | mean |")
    assert lines[4] == "| sharded | 85.00 | 86.00 | 85.50 |  |  |"
    assert lines[5] == "| lazy | 84.00 | 86.00 | 85.00 | -0.50 | [-6.85, +5.85] |"
    assert len(lines) == 6


def test_variants_are_chosen_by_name_and_added() -> None:
    assert list(variants_of([], [])) == list(VARIANTS)
    assert list(variants_of(["lazy"], [])) == [BASE, "lazy"]
    added = variants_of([], ["rarer=averager={name: lazy, layers: 4}", "slow=averager=blocking optimizer.lr=0.1"])
    assert added["rarer"] == ("averager={name: lazy, layers: 4}",)
    assert added["slow"] == ("averager=blocking", "optimizer.lr=0.1")
    with pytest.raises(ValueError, match="no variant rare; there are"):
        variants_of(["rare"], [])
    with pytest.raises(ValueError, match="is no variant"):
        variants_of([], ["rarer"])


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_is_an_averager_of_the_program(name: str) -> None:
    config, _ = load(Path(__file__).parents[2] / "configs" / "cifar10-resnet20-short.yaml", VARIANTS[name])
    make_strategy(config.averager.name, config.averager.options, PlannedGroup(GroupLayout({}), 2, nodes=(0, 0)))


def test_results_of_another_task_are_not_mixed(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    assert read(out, TASK) == {**TASK, "accuracy": {}}
    out.write_text(json.dumps({**TASK, "accuracy": {"lazy": {"1": 0.5}}}))
    assert read(out, TASK)["accuracy"] == {"lazy": {"1": 0.5}}
    with pytest.raises(ValueError, match=r"has results of ranks 2, and 4 is asked for"):
        read(out, {**TASK, "ranks": 4})


def test_nothing_is_run_for_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results.json"
    assert main(["--report", "--out", str(out)]) == 1
    out.write_text(json.dumps({**TASK, "accuracy": {BASE: {"1": 0.5}}}))
    assert main(["--report", "--out", str(out)]) == 0
    assert "| sharded | 50.00 | 50.00 |" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        parse([])
