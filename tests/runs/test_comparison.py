"""Comparisons of runs in a report: records, figures and curves, differences and bits side by side, judgements, colours."""

from __future__ import annotations

import base64
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from hpctrain.cli.result_tables import comparison_lines
from hpctrain.core.errors import CheckpointError, ConfigError, DataError
from hpctrain.report import page
from hpctrain.report.page import Cell, result_of
from hpctrain.run.evaluation import JudgedImage, Judgement
from hpctrain.runs import directory
from hpctrain.runs.comparison import ABSENT, ComparedSetting, compared, key_text, side_by_side
from hpctrain.runs.directory import BestRecord, RunDirectory
from hpctrain.runs.records import HashFile
from hpctrain.runs.results import (
    MOST_POINTS,
    TEST,
    TRAINING,
    UNKNOWN,
    panels,
    read_runs,
    summary,
    summary_texts,
    thinned,
)
from tests.support.runs import confusion_of, write_checkpoint, write_run, write_trace


def test_all_that_a_run_has_is_read(tmp_path: Path) -> None:
    run = write_run(tmp_path, config="batch: 8\ndata: {augment: [{name: flip}], sizes: [1, 2]}\ntest: null\n")
    write_checkpoint(run, 10, w=[1.0])
    best = write_checkpoint(run, 20, w=[2.0])
    directory.write_best(run.checkpoints, BestRecord(best.name, 20, 2, "top1", 0.5))
    write_trace(run, ranks=3)
    (record,) = read_runs([run.path])
    assert record.name == run.path.name
    assert record.settings == {"batch": "8", "data.augment.0.name": "flip", "data.sizes": "[1, 2]", "test": "null"}
    assert record.versions == {"numpy": "2.4", "mpi": "MPICH", "revision": "abc"}
    assert [stored.step for stored in record.checkpoints] == [10, 20]
    assert record.best[0] == best.name
    assert record.checkpoints[0].n_bytes > 0
    assert len(record.tables) == 4
    assert record.trace == run.path / "trace.json"


def test_a_run_that_has_only_begun_is_one(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    for name in ("metrics.jsonl", "versions.json", "git.json"):
        (run.path / name).unlink()
    (run.path / "time_table.json").write_text('{"table": ')
    (record,) = read_runs([run.path])
    assert (record.state.records, record.versions, record.checkpoints, record.tables, record.trace) == ((), {}, (), (), None)
    figures = summary(record)
    assert (figures.epochs, figures.steps, figures.top1, figures.best_top1, figures.seconds) == (0, 0, {}, None, 0.0)
    assert dict(summary_texts([figures]))["test top-1"] == [UNKNOWN]


def test_changes_of_the_source_are_reported(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    (run.path / "git.json").write_text('{"revision": "abc", "dirty": true}')
    assert read_runs([run.path])[0].versions["revision"] == "abc with changes"


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a run directory"):
        read_runs([tmp_path])
    run = write_run(tmp_path)
    with pytest.raises(DataError, match="is given twice"):
        read_runs([run.path, run.path / ".." / run.path.name])
    (run.path / "config.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match=r"config\.yaml:1: This is not valid YAML"):
        read_runs([run.path])


def test_the_last_and_the_best_evaluation_are_distinguished(tmp_path: Path) -> None:
    """Accuracies are 1/2, 2/3 and 0 after epochs 1, 2 and 3."""
    figures = summary(read_runs([write_run(tmp_path).path])[0])
    assert (figures.epochs, figures.steps, figures.loss, figures.top1) == (3, 30, {"test": 1.0}, {"test": 0.0})
    assert (figures.best_top1, figures.best_epoch) == (pytest.approx(2 / 3), 2)
    assert (figures.images_per_second, figures.seconds, figures.end) == (100.0, 30.0, "finished")


def test_speeds_are_those_of_the_latest_start_that_trained(tmp_path: Path) -> None:
    """Images/s and the time of a step are those of the same start."""
    run = write_run(tmp_path)
    trained = {"kind": "epoch", "time": 41.0, "epoch": 4, "step": 40, "images": 100, "loss": 1.0, "images_per_second": 7.0}
    starts = [{"kind": "start", "time": time, "epochs": 4, "samples": 100} for time in (31.0, 40.0, 50.0)]
    steps = [{"kind": "steps", "time": time, "step": 40, "measured_step_seconds": time / 1000} for time in (30.0, 41.0)]
    for entry in (steps[0], *starts[:2], trained, steps[1], starts[2]):
        run.append_metrics(entry)
    figures = summary(read_runs([run.path])[0])
    assert (figures.images_per_second, figures.step_seconds) == (7.0, 0.041)


def test_figures_begin_with_what_was_trained(tmp_path: Path) -> None:
    config = "model: {name: small}\ndata: {train: a.h5}\nbatch: 8\noptimizer: {name: sgd, lr: 0.1}\nschedule: {name: cosine}\n"
    written = summary_texts([summary(read_runs([write_run(tmp_path, config=config).path])[0])])
    assert written[:4] == [("model", ["small"]), ("data", ["a.h5"]), ("batch", ["8"]), ("optimiser", ["sgd, lr 0.1, cosine"])]


def test_a_step_is_reported_with_its_prediction(tmp_path: Path) -> None:
    times = {"measured_step_seconds": 0.05, "measured_exposed_seconds": 0.001, "predicted_step_seconds": 0.04567891}
    run = write_run(tmp_path, events=[{"kind": "steps", "time": 31.0, "step": 30, **times}])
    written = dict(summary_texts([summary(read_runs([run.path])[0])]))
    assert [written[name] for name in ("step", "communication not hidden", "predicted step")] == [
        ["50 ms"],
        ["1 ms"],
        ["45.68 ms"],
    ]


@pytest.mark.parametrize(("device", "of_gpus"), [({}, []), ({"device_bytes": 7_400_000_000}, [("GPU memory", ["7.4 GB"])])])
def test_peak_memory_is_reported_and_that_of_gpus_where_there_are_some(
    tmp_path: Path, device: dict[str, int], of_gpus: list[tuple[str, list[str]]]
) -> None:
    run = write_run(tmp_path, events=[{"kind": "memory", "time": 31.0, "step": 30, "peak_bytes": 612_345_678, **device}])
    written = summary_texts([summary(read_runs([run.path])[0])])
    assert dict(written)["peak memory"] == ["612 MB"]
    assert [(name, values) for name, values in written if name == "GPU memory"] == of_gpus


def test_waits_for_data_are_those_of_all_epochs(tmp_path: Path) -> None:
    waits = [{"kind": "data", "epoch": 1, "step": 10, "seconds": 9.0, "waited_seconds": 1.0, "most_waited_seconds": 3.0}]
    waits += [{"kind": "data", "epoch": 2, "step": 20, "seconds": 7.0, "waited_seconds": 0.0, "most_waited_seconds": 1.0}]
    figures = summary(read_runs([write_run(tmp_path, events=waits).path])[0])
    assert (figures.data_share, figures.most_data_share) == (1 / 16, 4 / 16)
    assert dict(summary_texts([figures]))["waited for data (most on a rank)"] == ["6.2% (25.0%)"]
    without = summary(read_runs([write_run(tmp_path).path])[0])
    assert "waited for data (most on a rank)" not in dict(summary_texts([without]))
    assert dict(summary_texts([without, figures]))["waited for data (most on a rank)"][0] == UNKNOWN


def test_pauses_between_jobs_are_no_time_of_training(tmp_path: Path) -> None:
    later = {"kind": "resume", "time": 10_000.0, "step": 30}
    last = {"kind": "interval", "time": 10_005.0, "epoch": 4, "step": 31}
    assert summary(read_runs([write_run(tmp_path, events=[later, last]).path])[0]).seconds == 35.0


@pytest.mark.parametrize(("hosts", "text"), [((), UNKNOWN), (("a",), "a"), (("a", "b"), "a, b"), (("a", "b", "c"), "3, a first")])
def test_hosts_are_named_or_counted(tmp_path: Path, hosts: tuple[str, ...], text: str) -> None:
    figures = replace(summary(read_runs([write_run(tmp_path).path])[0]), hosts=hosts)
    assert dict(summary_texts([figures]))["hosts"] == [text]


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
    assert sentences[1] == f"{names[2]}: other bits than {names[0]} at step 10 in 2 tensors, b first"
    assert "no step has hashes or checkpoints" in sentences[2]


def test_the_step_at_which_bits_part_is_reported(tmp_path: Path) -> None:
    first, second = write_run(tmp_path), write_run(tmp_path)
    for step, value in ((5, 1.0), (10, 1.5), (15, 2.0)):
        write_checkpoint(first, step, a=[1.0], b=[0.0])
        write_checkpoint(second, step, a=[value], b=[0.0] if step < 15 else [1.0])
    comparison = compared([first.path, second.path])
    (bits,) = comparison.bits
    assert (bits.step, bits.same_step, bits.different) == (10, 5, ("parameters/a",))
    assert bits.sentence(comparison.names).endswith("at step 10 in 1 tensor, a first, and the same at step 5")


def test_zeros_of_other_signs_and_other_shapes_are_other_bits(tmp_path: Path) -> None:
    first, second = write_run(tmp_path), write_run(tmp_path)
    write_checkpoint(first, 1, a=[0.0], b=[1.0])
    write_checkpoint(second, 1, a=[-0.0], b=[1.0, 1.0])
    (bits,) = compared([first.path, second.path]).bits
    assert bits.different == ("parameters/a", "parameters/b")


def test_a_damaged_checkpoint_is_reported(tmp_path: Path) -> None:
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


def test_the_step_and_the_tensor_in_which_hashes_part_are_reported(tmp_path: Path) -> None:
    first, second, third = (write_run(tmp_path) for _ in range(3))
    write_hashes(first, (0, "0", "0"), (4, "1", "1"), (8, "2", "2"), (12, "3", "3"))
    write_hashes(second, (0, "0", "0"), (2, "9", "9"), (4, "1", "1"), (6, "9", "9"), (8, "2", "7"), (12, "8", "8"))
    write_hashes(third, (0, "5", "0"), (4, "6", "6"))
    comparison = compared([run.path for run in (first, second, third)])
    part, at_begin = comparison.bits
    assert (part.step, part.same_step, part.different, part.by) == (8, 4, ("optimizer/momentum/a.weight",), "hashes")
    names = comparison.names
    assert part.sentence(names) == (
        f"{names[1]}: other bits than {names[0]} at step 8 in 1 tensor, momentum of a.weight first, and the same up to step 4"
    )
    assert at_begin.sentence(names) == f"{names[2]}: other bits than {names[0]} at step 0 in 1 tensor, a.weight first"


def test_runs_with_other_intervals_are_compared_at_common_steps(tmp_path: Path) -> None:
    first, second, nothing = (write_run(tmp_path) for _ in range(3))
    write_hashes(first, (0, "0", "0"), (3, "1", "1"), (6, "2", "2"), (9, "3", "3"))
    write_hashes(second, (0, "0", "0"), (2, "8", "8"), (4, "9", "9"), (6, "2", "2"))
    write_hashes(nothing, (5, "1", "1"))
    comparison = compared([run.path for run in (first, second, nothing)])
    assert comparison.bits[0].sentence(comparison.names).endswith(f"the same bits as {comparison.names[0]} up to step 6")
    assert "no step has hashes or checkpoints" in comparison.bits[1].reason


def test_hashes_that_cannot_be_read_are_reported(tmp_path: Path) -> None:
    first, second = write_run(tmp_path), write_run(tmp_path)
    for run in (first, second):
        write_hashes(run, (0, "0", "0"))
    second.hashes_path.write_text("nothing\n")
    (bits,) = compared([first.path, second.path]).bits
    assert "Line 1 of" in bits.sentence(("a", "b"))


def test_all_keys_are_side_by_side_in_the_order_of_their_appearance() -> None:
    settings = side_by_side([{"a": "1", "b": "2"}, {"b": "3", "c": "4"}])
    assert settings == (
        ComparedSetting("a", ("1", ABSENT)),
        ComparedSetting("b", ("2", "3")),
        ComparedSetting("c", (ABSENT, "4")),
    )


def test_keys_are_reported_by_their_names() -> None:
    assert key_text("parameters/layer2.0.conv1.weight") == "layer2.0.conv1.weight"
    assert key_text("statistics/bn1.running_mean") == "running statistic bn1.running_mean"
    assert key_text("averaged_statistics/bn1.running_mean") == "averaged statistics bn1.running_mean"
    assert key_text("optimizer/ema/fc.bias") == "ema of fc.bias"


def test_it_is_plain_values_for_programs(tmp_path: Path) -> None:
    runs = [write_run(tmp_path, config=f"batch: {batch}\n") for batch in (8, 16)]
    comparison = compared([run.path for run in runs])
    assert comparison.configuration == (ComparedSetting("batch", ("8", "16")),)
    content = json.loads(json.dumps(comparison.to_json()))
    assert content["configuration"] == {"batch": ["8", "16"]}
    assert [run["name"] for run in content["runs"]] == list(comparison.names)
    assert content["runs"][0]["best_epoch"] == 2
    assert content["bits"][0]["step"] is None


def _printed(comparison_of: list[Path], width: int) -> list[str]:
    console = Console(width=width, highlight=False, markup=False, emoji=False, force_terminal=False)
    with console.capture() as captured:
        for renderable in comparison_lines(compared(comparison_of)):
            console.print(renderable, soft_wrap=isinstance(renderable, str))
    return captured.get().splitlines()


def test_results_and_differences_fit_80_columns(tmp_path: Path) -> None:
    configs = ["batch: 8\n", f"batch: 16\ndata: {{train: {'directory/' * 12}train.h5}}\n"]
    printed = _printed([write_run(tmp_path, config=config).path for config in configs], 80)
    assert all(len(line) <= 80 or "directory/" * 12 in line for line in printed), "only a path is longer"
    text = "\n".join(printed)
    assert re.search(r"^best test top-1 +66.67% \(2\)  66.67% \(2\)$", text, re.MULTILINE)
    assert "Differences in configuration:" in text
    assert "\n  batch  1: 8; 2: 16\n" in text
    assert "No differences in versions." in text
    assert "no bits" in text


def test_many_runs_are_in_several_tables_of_80_columns(tmp_path: Path) -> None:
    printed = _printed([write_run(tmp_path, config=f"batch: {8 + number % 2}\n").path for number in range(10)], 80)
    assert max(map(len, printed)) <= 80
    heads = [line.split() for line in printed if line.replace(" ", "").isdecimal()]
    assert heads == [["1", "2", "3", "4"], ["5", "6", "7", "8"], ["9", "10"]]
    assert [line.count("66.67% (2)") for line in printed if line.startswith("best test top-1")] == [4, 4, 2]
    assert "  batch  1, 3, 5, 7, 9: 8; 2, 4, 6, 8, 10: 9" in [line.rstrip() for line in printed]
    assert not any("…" in line for line in printed)


def test_training_is_the_mean_of_each_stretch_alone(tmp_path: Path) -> None:
    """Records have the mean over the epoch so far; here that of each stretch is 2 / its end."""
    loss = panels(read_runs([write_run(tmp_path, epochs=2, intervals=5).path]))[0]
    training = next(curve for curve in loss.curves if curve.part == TRAINING)
    assert training.xs == pytest.approx([0.2 * k for k in range(1, 11)])
    assert training.ys == pytest.approx([2 / x for x in training.xs])
    test = next(curve for curve in loss.curves if curve.part == TEST)
    assert (test.xs, test.ys) == ((1.0, 2.0), (3.0, 1.5))


def test_runs_share_panels(tmp_path: Path) -> None:
    runs = read_runs([write_run(tmp_path, epochs=epochs).path for epochs in (2, 3)])
    drawn = {panel.key: panel for panel in panels(runs)}
    assert list(drawn) == ["loss", "top1", "top5", "lr", "images_per_second"]
    assert {curve.run for curve in drawn["lr"].curves} == {0, 1}
    assert drawn["top1"].percent
    assert max(drawn["lr"].curves[1].xs) == 3.0


def test_epochs_shorter_than_an_interval_are_points_of_the_rate(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    epochs = [
        {"kind": "epoch", "time": 1.0, "epoch": k, "step": k, "images": 100, "loss": 1.0, "lr": 1 / k, "images_per_second": 9.0}
        for k in range(1, 6)
    ]
    run.metrics_path.write_text("".join(json.dumps(record) + "\n" for record in epochs))
    drawn = {panel.key: panel.curves[0] for panel in panels(read_runs([run.path]))}
    assert (drawn["lr"].xs, drawn["lr"].ys) == ((1.0, 2.0, 3.0, 4.0, 5.0), (1.0, 1 / 2, 1 / 3, 1 / 4, 1 / 5))
    assert drawn["images_per_second"].xs == drawn["lr"].xs


def test_averaged_weights_are_a_curve_of_their_own(tmp_path: Path) -> None:
    evaluation = {"kind": "evaluation", "time": 1.0, "epoch": 4, "step": 40, "loss": 1.0, "ema_loss": 0.5}
    loss = panels(read_runs([write_run(tmp_path, events=[evaluation]).path]))[0]
    assert [(curve.xs, curve.ys) for curve in loss.curves if curve.part == "test, averaged weights"] == [((4.0,), (0.5,))]


def test_values_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    interval = {"kind": "interval", "time": 1.0, "epoch": 4, "step": 31, "images": 100, "loss": None, "lr": 0.5}
    loss, *_, lr, _ = panels(read_runs([write_run(tmp_path, events=[interval]).path]))
    assert max(loss.curves[0].xs) == 3.0
    assert (max(lr.curves[0].xs), lr.curves[0].ys[-1]) == (3.1, 0.5)


def test_steps_that_are_there_twice_count_once(tmp_path: Path) -> None:
    """The later record is that of the run that went on; a number that is none, from another program, is left out."""
    twice = {"kind": "evaluation", "time": 1.0, "epoch": 2, "step": 20, "loss": 0.25, "top1": float("nan")}
    loss, top1, *_ = panels(read_runs([write_run(tmp_path, events=[twice]).path]))
    curves = {curve.part: curve for curve in loss.curves}
    assert (curves[TEST].xs, curves[TEST].ys) == ((1.0, 2.0, 3.0), (3.0, 0.25, 1.0))
    assert next(curve for curve in top1.curves if curve.part == TEST).ys[1] == pytest.approx(2 / 3)


def test_metrics_of_older_runs_without_a_start_do(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    lines = run.metrics_path.read_text().splitlines(keepends=True)
    run.metrics_path.write_text("".join(lines[1:]))
    assert max(panels(read_runs([run.path]))[0].curves[0].xs) == 3.0


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3000), st.integers(10, 500))
def test_thinned_curves_keep_their_ends_and_extremes(ys: list[float], most: int) -> None:
    xs = list(range(len(ys)))
    kept_xs, kept_ys = thinned(xs, ys, most)
    assert len(kept_xs) <= max(most, 2)
    assert list(kept_xs) == sorted(set(kept_xs))
    assert (kept_xs[0], kept_xs[-1]) == (0, len(ys) - 1)
    assert (min(kept_ys), max(kept_ys)) == (min(ys), max(ys))
    assert all(ys[int(x)] == y for x, y in zip(kept_xs, kept_ys, strict=True))
    assert MOST_POINTS >= 100


def _judgement(matrix: list[list[int]], undecided: int = 0, *images: JudgedImage) -> Judgement:
    """The undecided samples are of the first class."""
    names = tuple(f"class {k}" for k in range(len(matrix)))
    return Judgement(Path("checkpoint-00000007.h5"), "test", names, confusion_of(matrix, undecided), (), images)


def test_cells_are_coloured_by_their_share_of_the_class() -> None:
    result = result_of("run", _judgement([[9, 1], [0, 0]]))
    assert result.confusion[0][1] == (Cell(9, 63, True), Cell(1, 7, False))
    assert result.confusion[1][1] == (Cell(0, 0, False), Cell(0, 0, True))
    assert result.words == "checkpoint-00000007.h5: 10 test images, top-1 90.00%."


def test_many_classes_are_reported_by_their_largest_confusions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "MOST_CLASSES", 2)
    result = result_of("run", _judgement([[5, 2, 0], [0, 5, 0], [3, 0, 5]], 5))
    assert result.confusion == ()
    assert "top-1 60.00%. The outputs for 5 images are not finite." in result.words
    assert result.words.endswith(
        "Most frequent mistakes: class 0 for no class 5 times; class 2 for class 0 3 times; class 0 for class 1 2 times."
    )


def test_classes_are_reported_with_their_rivals_the_worst_first() -> None:
    result = result_of("run", _judgement([[9, 1, 0], [3, 1, 2], [0, 0, 0]]))
    assert list(result.classes) == [
        ("class 1", "6", "16.67%", "class 0, 3 times"),
        ("class 0", "10", "90.00%", "class 1, 1 times"),
        ("class 2", "0", "-", "-"),
    ]


@pytest.mark.parametrize(("side", "form", "limit"), [(32, "png", 2_000), (64, "png", 8_000), (232, "jpeg", 12_000)])
def test_photographs_are_small_files(side: int, form: str, limit: int) -> None:
    """Waves with noise, which do not become smaller by luck."""
    waves = 128 + 100 * np.sin(np.arange(side * side).reshape(side, side, 1) / 97 + np.arange(3))
    pixels = (waves + np.random.default_rng(0).normal(0, 4, (side, side, 3))).clip(0, 255).astype(np.uint8)
    groups = result_of("run", _judgement([[0, 1], [0, 0]], 0, JudgedImage(4, pixels, 0, 1, 0.5))).groups
    data = groups[0][1][0].data
    assert data.startswith(f"data:image/{form};base64,")
    assert len(data) < limit * 2


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB")])
def test_pictures_are_whole_and_small(channels: int, mode: str) -> None:
    from PIL import Image

    pixels = np.full((400, 200, channels), 77, np.uint8)
    groups = result_of("run", _judgement([[0, 1], [0, 0]], 0, JudgedImage(4, pixels, 0, 1, 0.987))).groups
    (_, (picture,)), _ = groups
    assert (picture.number, picture.label, picture.words) == (4, "class 0", "98.7% class 1")
    with Image.open(io.BytesIO(base64.b64decode(picture.data.partition(",")[2]))) as image:
        assert (image.size, image.mode) == ((80, 160), mode)
        assert image.getextrema() == ((77, 77) if channels == 1 else ((77, 77),) * 3)
