"""The figures of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.report.record import read_runs
from hpctrain.report.summary import UNKNOWN, summary, texts
from tests.support.written_runs import write_run


def test_the_last_and_the_best_evaluation_are_told_apart(tmp_path: Path) -> None:
    """Accuracies are 1/2, 2/3 and 0 after epochs 1, 2 and 3."""
    figures = summary(read_runs([write_run(tmp_path).path])[0])
    assert (figures.epochs, figures.steps, figures.test_loss, figures.top1) == (3, 30, 1.0, 0.0)
    assert (figures.best_top1, figures.best_epoch) == (pytest.approx(2 / 3), 2)
    assert (figures.images_per_second, figures.seconds, figures.end) == (100.0, 30.0, "finished")


def test_a_step_is_told_beside_its_prediction(tmp_path: Path) -> None:
    times = {"measured_step_seconds": 0.05, "measured_exposed_seconds": 0.001, "predicted_step_seconds": 0.04567891}
    run = write_run(tmp_path, events=[{"kind": "steps", "time": 31.0, "step": 30, **times}])
    written = dict(texts([summary(read_runs([run.path])[0])]))
    assert [written[name] for name in ("step", "waited in a step", "step, predicted")] == [["50 ms"], ["1 ms"], ["45.68 ms"]]


@pytest.mark.parametrize(
    ("device", "of_gpus"), [({}, []), ({"device_bytes": 7_400_000_000}, [("memory of a GPU", ["7,400 MB"])])]
)
def test_peak_memory_is_told_and_that_of_gpus_where_there_are_some(
    tmp_path: Path, device: dict[str, int], of_gpus: list[tuple[str, list[str]]]
) -> None:
    run = write_run(tmp_path, events=[{"kind": "memory", "time": 31.0, "step": 30, "peak_bytes": 612_345_678, **device}])
    written = texts([summary(read_runs([run.path])[0])])
    assert dict(written)["peak memory"] == ["612 MB"]
    assert [(name, values) for name, values in written if name == "memory of a GPU"] == of_gpus


def test_waits_for_data_are_those_of_all_epochs(tmp_path: Path) -> None:
    waits = [{"kind": "data", "epoch": 1, "step": 10, "seconds": 9.0, "waited_seconds": 1.0, "most_waited_seconds": 3.0}]
    waits += [{"kind": "data", "epoch": 2, "step": 20, "seconds": 7.0, "waited_seconds": 0.0, "most_waited_seconds": 1.0}]
    figures = summary(read_runs([write_run(tmp_path, events=waits).path])[0])
    assert (figures.data_share, figures.most_data_share) == (1 / 16, 4 / 16)
    assert dict(texts([figures]))["waited for data"] == ["6.2% of the time, at most 25.0% on a rank"]
    without = summary(read_runs([write_run(tmp_path).path])[0])
    assert dict(texts([without]))["waited for data"] == [UNKNOWN]


def test_pauses_between_jobs_are_no_time_of_training(tmp_path: Path) -> None:
    later = {"kind": "resume", "time": 10_000.0, "step": 30}
    last = {"kind": "interval", "time": 10_005.0, "epoch": 4, "step": 31}
    assert summary(read_runs([write_run(tmp_path, events=[later, last]).path])[0]).seconds == 35.0


def test_a_run_that_has_only_begun_has_figures(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    run.metrics_path.write_text("")
    figures = summary(read_runs([run.path])[0])
    assert (figures.epochs, figures.steps, figures.top1, figures.best_top1, figures.seconds) == (0, 0, None, None, 0.0)
    assert dict(texts([figures]))["test top-1"] == [UNKNOWN]


@pytest.mark.parametrize(("hosts", "text"), [((), UNKNOWN), (("a",), "a"), (("a", "b"), "a, b"), (("a", "b", "c"), "3, a first")])
def test_hosts_are_named_or_counted(tmp_path: Path, hosts: tuple[str, ...], text: str) -> None:
    figures = replace(summary(read_runs([write_run(tmp_path).path])[0]), hosts=hosts)
    assert dict(texts([figures]))["hosts"] == [text]


def test_texts_have_a_column_for_each_run(tmp_path: Path) -> None:
    figures = [summary(record) for record in read_runs([write_run(tmp_path).path, write_run(tmp_path, epochs=2).path])]
    written = dict(texts(figures))
    assert written["best test top-1"] == ["66.67% (epoch 2)", "66.67% (epoch 2)"]
    assert written["epochs"] == ["3", "2"]
