"""Runs side by side."""

from __future__ import annotations

import json
from pathlib import Path

from hpctrain.report.comparison import compared, told
from hpctrain.report.differences import ComparedSetting
from hpctrain.storage.hash_file import HashFile
from hpctrain.storage.run_directory import RunDirectory
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


def write_hashes(run: RunDirectory, *records: tuple[int, str, str]) -> None:
    """Hashes of a weight and of its momentum, each written as one letter, by step."""
    file = HashFile(run.hashes_path)
    for step, weight, momentum in records:
        hashes = {"parameters/a.weight": weight * 16, "statistics/a.mean": "0" * 16, "optimizer/momentum/a.weight": momentum * 16}
        file.append({"step": step, "epoch": 1, "all": weight * 8 + momentum * 8, "hashes": hashes})


def test_the_step_and_the_tensor_are_told_in_which_hashes_part(tmp_path: Path) -> None:
    first, second, third = (write_run(tmp_path) for _ in range(3))
    write_hashes(first, (0, "0", "0"), (4, "1", "1"), (8, "2", "2"), (12, "3", "3"))
    write_hashes(second, (0, "0", "0"), (2, "9", "9"), (4, "1", "1"), (6, "9", "9"), (8, "2", "7"), (12, "8", "8"))
    write_hashes(third, (0, "5", "0"), (4, "6", "6"))
    comparison = compared([run.path for run in (first, second, third)])
    part, at_begin = comparison.bits
    assert (part.step, part.same_step, part.different, part.by) == (8, 4, ("optimizer/momentum/a.weight",), "hashes")
    names = comparison.names
    assert part.sentence(names) == (
        f"{names[1]}: the same bits as {names[0]} up to step 4; first difference by step 8 in momentum of a.weight, the only "
        "tensor that differs"
    )
    assert at_begin.sentence(names) == (
        f"{names[2]}: other bits than {names[0]} at step 0, the first with hashes of both, in a.weight, the only tensor that "
        "differs"
    )


def test_runs_with_other_intervals_are_compared_at_common_steps(tmp_path: Path) -> None:
    first, second, nothing = (write_run(tmp_path) for _ in range(3))
    write_hashes(first, (0, "0", "0"), (3, "1", "1"), (6, "2", "2"), (9, "3", "3"))
    write_hashes(second, (0, "0", "0"), (2, "8", "8"), (4, "9", "9"), (6, "2", "2"))
    write_hashes(nothing, (5, "1", "1"))
    comparison = compared([run.path for run in (first, second, nothing)])
    assert comparison.bits[0].sentence(comparison.names).endswith(f"the same bits as {comparison.names[0]} up to step 6")
    assert "no hashes and no checkpoint" in comparison.bits[1].reason


def test_checkpoints_tell_what_hashes_leave_open(tmp_path: Path) -> None:
    """Between the last hashes that are the same and the first that differ, and behind all of them."""
    first, parts, equal, later = (write_run(tmp_path) for _ in range(4))
    write_hashes(first, (0, "0", "0"), (10, "1", "1"), (20, "2", "2"))
    write_hashes(parts, (0, "0", "0"), (10, "1", "1"), (20, "3", "3"))
    for run in (equal, later):
        write_hashes(run, (0, "0", "0"), (10, "1", "1"), (20, "2", "2"))
    for step in (5, 12, 16, 24, 28):
        write_checkpoint(first, step, a=[1.0])
        write_checkpoint(parts, step, a=[1.0 if step < 16 else 2.0])
        write_checkpoint(equal, step, a=[1.0])
        write_checkpoint(later, step, a=[1.0 if step < 24 else 2.0])
    (narrowed, same, behind) = compared([run.path for run in (first, parts, equal, later)]).bits
    assert (narrowed.step, narrowed.same_step, narrowed.different, narrowed.by) == (16, 12, ("parameters/a",), "checkpoints")
    assert (same.step, same.different) == (28, ())
    assert (behind.step, behind.same_step, behind.by) == (24, 20, "checkpoints")


def test_hashes_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    first, second = write_run(tmp_path), write_run(tmp_path)
    for run in (first, second):
        write_hashes(run, (0, "0", "0"))
    second.hashes_path.write_text("nothing\n")
    (bits,) = compared([first.path, second.path]).bits
    assert "Line 1 of" in bits.sentence(("a", "b"))


def test_keys_are_told_by_their_names() -> None:
    assert told("parameters/layer2.0.conv1.weight") == "layer2.0.conv1.weight"
    assert told("statistics/bn1.running_mean") == "running statistic bn1.running_mean"
    assert told("averaged_statistics/bn1.running_mean") == "averaged statistics bn1.running_mean"
    assert told("optimizer/ema/fc.bias") == "ema of fc.bias"


def test_it_is_plain_values_for_programs(tmp_path: Path) -> None:
    runs = [write_run(tmp_path, config=f"batch: {batch}\n") for batch in (8, 16)]
    comparison = compared([run.path for run in runs])
    assert comparison.configuration == (ComparedSetting("batch", ("8", "16")),)
    content = json.loads(json.dumps(comparison.to_json()))
    assert content["configuration"] == {"batch": ["8", "16"]}
    assert [run["name"] for run in content["runs"]] == list(comparison.names)
    assert content["runs"][0]["best_epoch"] == 2
    assert content["bits"][0]["step"] is None
