"""`hpctrain.train`: results, callbacks, requests to stop, errors, and calls one after another in a process."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hpctrain
from hpctrain.launch.threads import NodeLoad
from hpctrain.runs import directory
from hpctrain.storage import checkpoint
from hpctrain.training.trainer import Trainer
from hpctrain_testing.run import Outcome
from tests.support.tiny_runs import whole_lines

ROOT = Path(__file__).parents[1]
SYNTHETIC = {"samples": 48, "test_samples": 8, "height": 8, "width": 8, "classes": 3}
CONFIG: dict[str, Any] = {
    "name": "called",
    "model": {"name": "small", "hidden": 8, "dropout": 0.3},
    "data": {"train": "synthetic", "test": "synthetic", "synthetic": SYNTHETIC, "augment": ["flip"]},
    "batch": 16,
    "epochs": 3,
    "threads": 1,
    "optimizer": {"name": "adam", "lr": 0.01},
    "schedule": {"name": "one_cycle"},
    "checkpoint": {"keep": 9},
}
#: improves only in the first epoch; the rate is reduced after each later epoch
PLATEAU = {"name": "plateau", "patience": 1, "min_delta": 9.0, "factor": 0.5}
PROGRAM = """
import json, sys
import hpctrain
config, first, second = json.load(open(sys.argv[1])), *sys.argv[2:]
try:
    hpctrain.train(config, batch=-1)
except hpctrain.HpctrainError as error:
    assert "batch is -1" in str(error)
for seed, output in ((1, first), (2, second)):
    result = hpctrain.train(config, output=output, seed=seed, style="none")
"""

STOPPED_PROGRAM = """
import json, os, signal, sys
import hpctrain
config, number = json.load(open(sys.argv[1])), signal.Signals[sys.argv[2]]
for seed in (1, 2):
    hpctrain.train(config, seed=seed, on_epoch=lambda values: values["epoch"] == 1 and os.kill(os.getpid(), number))
"""


@pytest.fixture(autouse=True)
def _no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "git_state", dict)


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    return {**CONFIG, "output": str(tmp_path / "runs")}


def tensors(run: Path) -> Mapping[str, np.ndarray]:
    return checkpoint.read(checkpoint.checkpoints(run / "checkpoints")[-1][1]).tensors


def assert_same_bits(here: Path, there: Path) -> None:
    ours, theirs = tensors(here), tensors(there)
    assert ours.keys() == theirs.keys()
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)


def process_state() -> dict[str, object]:
    """Return the state of this process that a call must restore."""
    signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    logger = logging.getLogger("hpctrain")
    return {
        "signals": (signals, signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "log": (list(logger.handlers), logger.level, logger.propagate),
        "environment": dict(os.environ),
    }


def open_files() -> Counter[str]:
    """Return the open files of this process by path. An exception holds files until it is collected."""
    gc.collect()
    paths = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            paths.append(os.readlink(link))
    return Counter(paths)


@contextmanager
def leaving_no_trace() -> Iterator[None]:
    """Assert that the block restores the state of this process. It may close files and end threads of earlier tests."""
    files, threads, before = open_files(), {*threading.enumerate()}, process_state()
    yield
    assert process_state() == before
    assert not open_files() - files
    assert not {*threading.enumerate()} - threads


def test_a_call_returns_what_the_run_recorded_and_leaves_no_trace(config: dict[str, Any]) -> None:
    """A call leaks no threads, files, handlers or settings, and its history is that of the run."""
    hpctrain.train(config, epochs=1)  # loads modules, which open files of their own
    values: list[Any] = []
    with leaving_no_trace():
        result = hpctrain.train(config, on_epoch=values.append, **{"optimizer.lr": np.float64(0.02)})
    assert (result.epochs, result.steps, result.stopped) == (3, 9, None)
    assert [dict(entry) for entry in result.history] == values
    assert [entry["epoch"] for entry in values] == [1, 2, 3]
    assert result.metrics == {name: values[-1][name] for name in ("loss", "top1", "top5")}
    assert max(entry["lr"] for entry in values) <= 0.02
    assert result.best is not None
    assert result.best.value == max(entry["top1"] for entry in values)
    assert result.best_checkpoint is not None
    assert result.best_checkpoint.is_file()


@pytest.mark.job
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_second_of_two_calls_has_the_bits_of_a_process_of_its_own(
    job: Callable[..., Outcome], tmp_path: Path, ranks: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "schedule": PLATEAU}))
    (tmp_path / "program.py").write_text(PROGRAM)
    outputs = [tmp_path / name for name in ("first", "second", "command")]
    called = [str(tmp_path / "program.py"), str(tmp_path / "config.json"), *map(str, outputs[:2])]
    if ranks > 1:
        called = ["-m", "hpctrain", "script", *called]
    command = ["-m", "hpctrain", "train", str(tmp_path / "config.json"), f"output={outputs[2]}", "seed=2"]
    for words in (called, command):
        outcome = job(ranks, words, cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
        assert outcome.code == 0, outcome.output
    _, second, own = (next(output.iterdir()) for output in outputs)
    assert_same_bits(second, own)


def test_a_callback_stops_a_run_which_resumes_to_the_bits_of_one_that_was_not_stopped(config: dict[str, Any]) -> None:
    stopped = hpctrain.train(config, on_epoch=lambda values: values["epoch"] == 2)
    assert (stopped.epochs, stopped.stopped, len(stopped.history)) == (2, "on_epoch", 2)
    resumed = hpctrain.train(config, resume=stopped.directory, on_epoch=lambda values: True)
    assert (resumed.epochs, resumed.stopped, resumed.directory) == (3, None, stopped.directory)
    assert len(resumed.history) == 3
    assert_same_bits(resumed.directory, hpctrain.train(config).directory)


def test_a_finished_run_trains_for_more_epochs(config: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    config["schedule"] = {"name": "cosine"}
    done = hpctrain.train(config, epochs=2)
    hpctrain.train(config, epochs=2, resume=done.directory)
    assert "give a larger number of epochs to train further, such as epochs=7\n" in capsys.readouterr().out
    more = hpctrain.train(config, epochs=4, resume=done.directory)
    assert (more.epochs, more.history[1]["lr"]) == (4, done.history[1]["lr"])
    constant = {"schedule": "constant", "optimizer.lr": 0.001}
    last = hpctrain.train(config, epochs=5, resume=more.directory, **constant)
    assert last.history[-1]["lr"] == 0.001


def test_without_progress_nothing_is_printed_but_warnings(
    config: dict[str, Any], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [0]
    monkeypatch.setattr(
        "hpctrain.launch.threads.node_load", lambda launcher, threads: NodeLoad(others[-1], launcher.local_size or 1, threads, 1)
    )
    config["schedule"] = PLATEAU
    stopped = hpctrain.train(config, style="none", steps=2)
    result = hpctrain.train(config, style="none", resume=stopped.directory)
    assert capfd.readouterr() == ("", "")
    assert result.epochs == 3
    skipping = {"optimizer.lr": 1e38, "on_nonfinite": "skip", "model.dropout": 0.0}
    hpctrain.train(config, style="none", steps=4, **skipping)
    assert all("skipped" in line for line in whole_lines(capfd.readouterr().out).splitlines())
    others.append(3)
    hpctrain.train(config, style="none", steps=1)
    assert whole_lines(capfd.readouterr().out).startswith(
        "busy machine: 3 threads of other programs run here, next to 1 of this job"
    )


def test_a_rate_that_no_step_uses_is_not_announced(config: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    config["schedule"] = PLATEAU
    hpctrain.train(config, style="lines")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("learning rate")]
    assert lines == ["learning rate 0.01 -> 0.005 after epoch 2"]


def test_a_reduced_rate_goes_on_after_a_resume(config: dict[str, Any]) -> None:
    config["schedule"] = PLATEAU
    stopped = hpctrain.train(config, on_epoch=lambda values: values["epoch"] == 2)
    resumed = hpctrain.train(config, resume=stopped.directory)
    assert [entry["lr"] for entry in resumed.history] == pytest.approx([0.01, 0.01, 0.005])
    assert_same_bits(resumed.directory, hpctrain.train(config).directory)


def test_an_exception_of_the_callback_is_raised_once_its_epoch_has_a_checkpoint(config: dict[str, Any], tmp_path: Path) -> None:
    class PrunedError(Exception):
        pass

    def prune(values: Mapping[str, Any]) -> None:
        raise PrunedError("too bad")

    with pytest.raises(PrunedError, match="too bad"):
        hpctrain.train(config, on_epoch=prune)
    (run,) = (tmp_path / "runs").iterdir()
    assert [step for step, _ in checkpoint.checkpoints(run / "checkpoints")] == [3]


def test_a_request_to_stop_is_delivered_again_after_a_checkpoint(config: dict[str, Any], tmp_path: Path) -> None:
    """Ctrl-C ends a sweep, not only the training of one trial."""
    config |= {"epochs": 500, "checkpoint": {"every_epochs": 0}, "evaluate": {"every_epochs": 0}}
    with pytest.raises(KeyboardInterrupt):
        hpctrain.train(config, on_epoch=lambda values: values["epoch"] == 1 and os.kill(os.getpid(), signal.SIGINT))
    (run,) = (tmp_path / "runs").iterdir()
    ((step, _),) = checkpoint.checkpoints(run / "checkpoints")
    assert 3 < step < 1500
    received: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: received.append(number))
    try:
        result = hpctrain.train(config, on_epoch=lambda values: values["epoch"] == 1 and os.kill(os.getpid(), signal.SIGUSR1))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (received, result.stopped) == ([signal.SIGUSR1], "SIGUSR1")


@pytest.mark.job
@pytest.mark.parametrize(("ranks", "name", "code"), [(0, "SIGTERM", 85), (2, "SIGUSR1", 85), (2, "SIGINT", 130)])
def test_a_request_to_stop_ends_a_script(
    job: Callable[..., Outcome], config: dict[str, Any], tmp_path: Path, ranks: int, name: str, code: int
) -> None:
    config |= {"epochs": 500, "evaluate": {"every_epochs": 0}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "program.py").write_text(STOPPED_PROGRAM)
    words = ["-m", "hpctrain", "script", *(str(tmp_path / each) for each in ("program.py", "config.json")), name]
    outcome = job(ranks, words, cwd=ROOT, env={"PYTHONPATH": str(ROOT)})
    assert outcome.code == code, outcome.output
    (run,) = (tmp_path / "runs").iterdir()
    assert f"stopped by {name}" in outcome.output
    assert len(checkpoint.checkpoints(run / "checkpoints")) >= 1


def test_a_run_that_a_bug_ended_is_resumed_in_the_same_process(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """After an exception that is not an HpctrainError, the process neither owns nor writes to the run."""
    hpctrain.train(config, epochs=1)

    def evaluate(trainer: Trainer, position: object) -> None:
        raise ZeroDivisionError

    with leaving_no_trace(), monkeypatch.context() as patch:
        patch.setattr(Trainer, "evaluate", evaluate)
        with pytest.raises(ZeroDivisionError):
            hpctrain.train(config, name="bug", checkpoint={"every_steps": 1})
    assert hpctrain.train(config, name="bug", resume="auto").epochs == 3


def test_the_time_of_a_run_counts_from_its_call(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A notebook may run for longer than `max_time` before its next training begins."""
    monkeypatch.setattr("hpctrain.run.training.age_seconds", lambda: 1e6)
    assert hpctrain.train(config, max_time="1h").stopped is None
    assert "max_time, 3600 s: the run ends with a checkpoint before" in " ".join(capsys.readouterr().out.split())


def test_a_path_with_overrides_and_a_number_of_steps(
    config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    result = hpctrain.train(tmp_path / "config.yaml", steps=2, name="other", checkpoint={"every_epochs": 0})
    assert (result.steps, result.stopped, result.metrics, result.history) == (2, "steps", {}, ())
    assert result.directory.name.startswith("other-")
    assert "as requested by steps\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "words"), [({"optimizer.lr": -1}, "optimizer.lr is -1"), ({"threads": 1000}, "threads is 1000")]
)
def test_a_fault_is_an_exception_with_the_sentence_of_the_command(
    config: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    with leaving_no_trace():
        with pytest.raises(hpctrain.HpctrainError) as caught:
            hpctrain.train(config, **changes)
        assert words in str(caught.value)
