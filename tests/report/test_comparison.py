"""Runs side by side."""

from __future__ import annotations

import json
from pathlib import Path

from hpctrain.report.comparison import compared
from hpctrain.report.differences import ComparedSetting
from tests.support.written_runs import write_checkpoint, write_run


def test_bits_are_compared_at_the_latest_step_that_both_have(tmp_path: Path) -> None:
    first, same, other, apart = (write_run(tmp_path) for _ in range(4))
    for step in (10, 20):
        write_checkpoint(first, step, a=[1.0, 2.0], b=[3.0])
        write_checkpoint(same, step, a=[1.0, 2.0], b=[3.0])
    write_checkpoint(other, 10, a=[1.0, 2.0], b=[3.0 + 1e-15], c=[0.0])
    write_checkpoint(apart, 30, a=[1.0, 2.0])
    comparison = compared([run.path for run in (first, same, other, apart)])
    names = comparison.names
    assert [bits.step for bits in comparison.bits] == [20, 10, None]
    assert [bits.different for bits in comparison.bits] == [(), ("parameters/b", "parameters/c"), ()]
    sentences = [bits.sentence(names) for bits in comparison.bits]
    assert sentences[0] == f"{names[1]}: the same bits as {names[0]} at step 20"
    assert sentences[1] == f"{names[2]}: other bits than {names[0]} at step 10 in 2 tensors, parameters/b first"
    assert "no checkpoint of a step" in sentences[2]


def test_the_step_is_told_at_which_bits_part(tmp_path: Path) -> None:
    first, second = write_run(tmp_path), write_run(tmp_path)
    for step, value in ((5, 1.0), (10, 1.5), (15, 2.0)):
        write_checkpoint(first, step, a=[1.0], b=[0.0])
        write_checkpoint(second, step, a=[value], b=[0.0] if step < 15 else [1.0])
    comparison = compared([first.path, second.path])
    (bits,) = comparison.bits
    assert (bits.step, bits.same_step, bits.different) == (10, 5, ("parameters/a",))
    assert bits.sentence(comparison.names).endswith("at step 10 in 1 tensor, parameters/a first, and the same at step 5")


def test_zeros_of_other_signs_and_other_shapes_are_other_bits(tmp_path: Path) -> None:
    first, second = write_run(tmp_path), write_run(tmp_path)
    write_checkpoint(first, 1, a=[0.0], b=[1.0])
    write_checkpoint(second, 1, a=[-0.0], b=[1.0, 1.0])
    (bits,) = compared([first.path, second.path]).bits
    assert bits.different == ("parameters/a", "parameters/b")


def test_a_damaged_checkpoint_is_told(tmp_path: Path) -> None:
    first, second = write_run(tmp_path), write_run(tmp_path)
    write_checkpoint(first, 1, a=[0.0])
    write_checkpoint(second, 1, a=[0.0]).write_bytes(b"no checkpoint")
    (bits,) = compared([first.path, second.path]).bits
    assert bits.reason
    assert bits.sentence(("a", "b")).startswith("b: ")


def test_it_is_plain_values_for_programs(tmp_path: Path) -> None:
    runs = [write_run(tmp_path, config=f"batch: {batch}\n") for batch in (8, 16)]
    comparison = compared([run.path for run in runs])
    assert comparison.configuration == (ComparedSetting("batch", ("8", "16")),)
    content = json.loads(json.dumps(comparison.to_json()))
    assert content["configuration"] == {"batch": ["8", "16"]}
    assert [run["name"] for run in content["runs"]] == list(comparison.names)
    assert content["runs"][0]["best_epoch"] == 2
    assert content["bits"][0]["step"] is None
