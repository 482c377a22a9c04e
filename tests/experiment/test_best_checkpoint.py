"""The best checkpoint: which it is, what is kept for it, and that disturbed runs end with what undisturbed ones have."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.cli.loading import load_config
from hpctrain.config.schema import CheckpointConfig, Config
from hpctrain.errors import DivergedError
from hpctrain.experiment.best_checkpoint import META, BestCheckpoint, StepEvaluation, best_of, nothing_to_choose, spared
from hpctrain.storage import best_record, checkpoint
from hpctrain.storage.checkpoint import CheckpointContent, checkpoint_path, parameter_key
from hpctrain.storage.run_directory import latest
from hpctrain.train.metrics import Reporter, RunningSums
from hpctrain.train.snapshot import Position
from tests.support.best_cases import MEASURES, Case, Disturbance
from tests.support.run_in_process import STEPS_PER_EPOCH, TEST_SAMPLES, Killed, disturbed, prepare, train


def _evaluations(values: dict[int, float | None]) -> list[StepEvaluation]:
    return [StepEvaluation(step, step, value, value, value) for step, value in values.items()]


_FINITE = st.one_of(st.none(), st.integers(0, 3).map(float))


@given(values=st.dictionaries(st.integers(0, 30), _FINITE), measure=st.sampled_from(MEASURES), data=st.data())
def test_the_best_has_the_best_value_and_comes_first(values: dict[int, float | None], measure: str, data: Any) -> None:
    steps = data.draw(st.sets(st.integers(0, 30)))
    best = best_of(_evaluations(values), measure, steps)
    finite = {step: value for step, value in values.items() if step in steps and value is not None}
    assert best_of(_evaluations(values), "none", steps) is None
    if not finite:
        assert best is None
        return
    assert best is not None
    value = (min if measure == "loss" else max)(finite.values())
    assert best.step == min(step for step, its in finite.items() if its == value)


@given(values=st.lists(_FINITE, max_size=20), keep=st.integers(1, 4), measure=st.sampled_from(MEASURES))
def test_beside_each_of_the_newest_is_the_best_until_then(values: list[float | None], keep: int, measure: str) -> None:
    evaluations = _evaluations(dict(enumerate(values)))
    there: list[int] = []
    for step in range(len(values)):
        there.append(step)
        stay = spared(evaluations[: step + 1], measure, there, keep)
        newest = there[-keep:]
        there = [each for each in there if each in newest or each in stay]
        assert len(there) <= keep + 1
        for each in newest:
            best = best_of(evaluations, measure, range(each + 1))
            assert best is None or best.step in there


@given(values=st.lists(_FINITE, min_size=1, max_size=9), keep=st.integers(1, 4), data=st.data())
def test_the_best_stays_whatever_times_files_have(values: list[float | None], keep: int, data: Any) -> None:
    evaluations = _evaluations(dict(enumerate(values)))
    by_age = data.draw(st.permutations(range(len(values))))
    best = best_of(evaluations, "top1", by_age)
    assert best is None or best.step in spared(evaluations, "top1", by_age, keep)


def test_values_that_are_not_finite_are_no_candidates_and_fit_json() -> None:
    sums = RunningSums(float("nan"), 5, 8, 10)
    evaluation = StepEvaluation.of(Position(epoch=2, global_step=6), sums)
    assert evaluation.to_meta() == {"step": 6, "epoch": 2, "loss": None, "top1": 0.5, "top5": 0.8}
    assert best_of([evaluation], "loss", [6]) is None
    assert best_of([evaluation], "top1", [6]) == evaluation


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    prepare(tmp_path)
    return tmp_path


def _directory(folder: Path) -> Path:
    run = latest(folder / "runs", "tiny")
    assert run is not None
    return run.checkpoints


def _there(folder: Path) -> list[int]:
    return [step for step, _ in checkpoint.checkpoints(_directory(folder))]


def _end_somewhere(folder: Path, case: Case, draw: random.Random, resume: str | None) -> None:
    """A part of a run, which is killed, or ends after so many steps, or diverges once, if it comes so far."""
    step = draw.randrange(case.last)
    error = DivergedError("A test.") if case.goes_back and draw.random() < 0.5 else Killed()
    disturbance = Disturbance(step, error)
    with disturbed(case.evaluation, disturbance):
        try:
            train(folder, *case.overrides, resume=resume)
        except Killed:
            assert disturbance.came
            # A kill would end this process, which owns the run as long as it lives.
            shutil.rmtree(_directory(folder).parent / "owners")


def _source(folder: Path, draw: random.Random) -> str:
    """From where the run goes on: the newest checkpoint, the best one, or any."""
    choice = draw.choice(["auto", "best", "any"])
    there = checkpoint.checkpoints(_directory(folder))
    if choice == "any" and there:
        return str(draw.choice(there)[1])
    return choice if choice == "best" and best_record.read(_directory(folder)) is not None else "auto"


def _assert_nothing_is_lost(folder: Path, case: Case) -> None:
    """The best of those that were written before the newest is there, or a better one; and the record names one that is."""
    there = _there(folder)
    written = list(takewhile(lambda step: step <= max(there), case.written()))
    until = [step for step in written if step < max(there)]
    best = case.best(until)
    assert best is None or best in there or case.best(written) in there
    record = best_record.read(_directory(folder))
    assert record is None or record.step in there


@pytest.mark.slow
@pytest.mark.sample(8)
@pytest.mark.parametrize("seed", range(40))
def test_a_run_disturbed_in_any_way_keeps_what_an_undisturbed_one_keeps(
    folder: Path, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed, rolled back, and gone on with from the newest checkpoint, from the best, and from any, as often as it comes."""
    case, draw = Case.of(seed), random.Random(seed)
    resume: str | None = None
    for _ in range(draw.randint(0, 4)):
        _end_somewhere(folder, case, draw, resume)
        resume = _source(folder, draw)
        if _there(folder):
            _assert_nothing_is_lost(folder, case)
    capsys.readouterr()
    with disturbed(case.evaluation):
        train(folder, *case.overrides, resume=resume)
    output = capsys.readouterr().out
    assert "warning" not in output
    assert _there(folder) == case.kept()
    record, best = best_record.read(_directory(folder)), case.best(case.kept())
    assert best == case.best(case.written()), "the best of all is kept"
    assert (None if record is None else record.step) == best
    last = output.splitlines()[-2]
    assert (last.startswith("best ") and f"/checkpoint-{best:08d}." in last) if best is not None else "best" not in last


def _whole(folder: Path, *overrides: str, accuracies: tuple[int, ...], resume: str | None = None) -> None:
    """A run, or what is left of it, with these numbers of right answers after its epochs; the loss falls as they rise."""

    def evaluation(step: int) -> RunningSums:
        right = accuracies[step // STEPS_PER_EPOCH - 1]
        return RunningSums(float(TEST_SAMPLES - right), right, TEST_SAMPLES, TEST_SAMPLES)

    with disturbed(evaluation):
        train(folder, f"epochs={len(accuracies)}", "checkpoint.keep=1", *overrides, resume=resume)


def test_the_end_of_a_run_names_the_best(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _whole(folder, accuracies=(3, 9, 4))
    path = checkpoint_path(_directory(folder), 6)
    assert f"\nbest test accuracy 45.00% after epoch 2: {path}\n" in capsys.readouterr().out
    _whole(folder, "checkpoint.best=loss", f"output={folder}/others", "checkpoint.layout=sharded", accuracies=(3, 9, 4))
    assert f"\nbest test loss 0.5500 after epoch 2: {folder}/others/" in capsys.readouterr().out
    _whole(folder, "checkpoint.best=none", accuracies=(3, 9, 4))
    assert "best" not in capsys.readouterr().out
    assert _there(folder) == [9]


def test_a_finished_run_that_is_resumed_keeps_it_and_goes_on_with_it(folder: Path) -> None:
    _whole(folder, accuracies=(3, 9, 4))
    before = {path.name: path.read_bytes() for path in _directory(folder).iterdir()}
    _whole(folder, accuracies=(3, 9, 4), resume="auto")
    assert {path.name: path.read_bytes() for path in _directory(folder).iterdir()} == before
    _whole(folder, accuracies=(3, 9, 4, 5), resume="auto")
    assert _there(folder) == [6, 12]
    _whole(folder, accuracies=(3, 9, 4, 5, 10), resume="auto")
    assert _there(folder) == [15]


def test_an_older_checkpoint_still_has_the_best_until_then(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The best until step 6 stays although there is a better one, which is set aside when the run goes on from there."""
    _whole(folder, "checkpoint.keep=2", accuracies=(5, 3, 9))
    assert _there(folder) == [3, 6, 9]
    _whole(folder, "checkpoint.keep=2", accuracies=(5, 3, 4), resume=str(checkpoint_path(_directory(folder), 6)))
    assert _there(folder) == [3, 6, 9]
    output = capsys.readouterr().out
    assert "warning" not in output
    assert "\nbest test accuracy 25.00% after epoch 1: " in output.split("resumed at")[1]


def test_a_checkpoint_before_its_own_evaluation_does_not_miss_the_best_until_then(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last checkpoint turns out to be the best, so the one before it goes, which it still speaks of."""
    options = ("checkpoint={keep: 1, every_epochs: 0, every_steps: 3}",)
    _whole(folder, *options, accuracies=(5, 9))
    assert _there(folder) == [6]
    _whole(folder, *options, accuracies=(5, 9, 4), resume="auto")
    assert _there(folder) == [6, 9]
    assert "warning" not in capsys.readouterr().out


@pytest.mark.parametrize("harm", ["removed", "damaged"])
def test_a_lost_best_is_told_and_another_takes_its_place(folder: Path, harm: str, capsys: pytest.CaptureFixture[str]) -> None:
    _whole(folder, "checkpoint.keep=2", accuracies=(3, 9, 4, 5))
    assert _there(folder) == [6, 9, 12]
    path = checkpoint_path(_directory(folder), 6)
    if harm == "removed":
        path.unlink()
    else:
        written_ns = path.stat().st_mtime_ns
        path.write_bytes(path.read_bytes()[:-100])
        os.utime(path, ns=(written_ns, written_ns))
    capsys.readouterr()
    _whole(folder, "checkpoint.keep=2", accuracies=(3, 9, 4, 5, 2), resume="auto")
    output = capsys.readouterr().out
    assert "warning: the best checkpoint, of step 6 (test accuracy 45.00% after epoch 2), " in output
    assert ("is not there any more" if harm == "removed" else "cannot be used (") in output
    assert "\nbest test accuracy 25.00% after epoch 4: " in output
    assert _there(folder) == [12, 15]


def test_another_test_set_begins_the_search_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _whole(folder, accuracies=(3, 9, 4))
    shutil.copy(folder / "test.h5", folder / "other.h5")
    capsys.readouterr()
    _whole(folder, f"data.test={folder}/other.h5", accuracies=(3, 9, 4, 5), resume="auto")
    assert "\nthe best checkpoint is sought from here on, as data.test changed\n" in capsys.readouterr().out
    assert _there(folder) == [12]


def test_another_measure_takes_the_best_of_those_that_are_there(folder: Path) -> None:
    _whole(folder, "checkpoint={keep: 3, best: none}", accuracies=(3, 9, 4))
    _whole(folder, "checkpoint={keep: 1, best: loss}", accuracies=(3, 9, 4, 5), resume="auto")
    assert _there(folder) == [6, 12]


def test_a_checkpoint_of_an_earlier_version_begins_the_search(folder: Path) -> None:
    _whole(folder, accuracies=(3, 9))
    path = checkpoint_path(_directory(folder), 6)
    content = checkpoint.read(path)
    assert [entry["step"] for entry in content.meta[META]] == [3, 6]  # type: ignore[attr-defined]
    checkpoint.write(path, CheckpointContent(content.tensors, {key: content.meta[key] for key in content.meta if key != META}))
    _whole(folder, accuracies=(3, 9, 1, 2), resume="auto")
    assert _there(folder) == [12]
    _whole(folder, "epochs=5", accuracies=(3, 9, 1, 2, 1), resume="auto")
    assert _there(folder) == [12, 15]


def _config(folder: Path, *overrides: str) -> Config:
    return load_config(folder / "tiny.yaml", overrides)[0]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("data.test=",), "data.test is not set"),
        (("evaluate.every_epochs=0",), "evaluate.every_epochs is 0"),
        (("checkpoint.every_epochs=0",), "no checkpoints are written"),
        (("evaluate.every_epochs=3", "checkpoint.every_epochs=2"), "no epoch before the last of 5 has both"),
        (("checkpoint.every_epochs=0", "checkpoint.every_steps=7"), "no epoch before the last of 5 has both"),
        (("checkpoint.every_epochs=0", "checkpoint.every_steps=2"), None),
        (("evaluate.every_epochs=2", "checkpoint.every_epochs=2"), None),
        (("epochs=1",), None),
        ((), None),
    ],
)
def test_whoever_asks_for_the_best_is_told_where_it_cannot_be_known(
    folder: Path, overrides: tuple[str, ...], words: str | None
) -> None:
    sentence = nothing_to_choose(_config(folder, "epochs=5", "checkpoint.best=top1", *overrides), 5 if words else 3)
    assert (words in sentence) if words is not None and sentence is not None else sentence is words
    assert nothing_to_choose(_config(folder, "epochs=5", *overrides), 5) is None, "it was not asked for"


def test_the_run_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _whole(folder, "data.test=", "checkpoint.best=top5", accuracies=(1,))
    assert "\ncheckpoint.best is top5, but data.test is not set, so that nothing is evaluated: " in capsys.readouterr().out


_CALLS = ("pwrite", "fsync", "replace", "open", "unlink", "rmdir")


def _crash_at(call: int, work: Callable[[], object]) -> bool:
    """Run `work` in a child process that ends before its call number `call` to the system; whether it did all."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    made = []
    try:
        for name in _CALLS:
            original = getattr(os, name)

            def counted(*arguments: object, original: Callable[..., object] = original, **options: object) -> object:
                made.append(1)
                if len(made) > call:
                    os._exit(1)
                return original(*arguments, **options)

            setattr(os, name, counted)
        work()
        os._exit(0)
    finally:
        os._exit(3)


def _save(directory: Path, best: BestCheckpoint, step: int, right: int) -> None:
    """An evaluation and a checkpoint, as a run makes them."""
    position = Position(epoch=step, global_step=step)
    best.evaluated(position, RunningSums(1.0, right, 10, 10))
    content = CheckpointContent({parameter_key("a"): np.ones(3)}, {"global_step": step, **best.to_meta(step)})
    retain = best.retention(step)
    checkpoint.write(checkpoint_path(directory, step), content)
    retain()


@pytest.mark.slow
@pytest.mark.job
@pytest.mark.parametrize("right", [2, 9])
def test_a_crash_at_any_call_to_the_system_leaves_the_best_until_then(tmp_path: Path, right: int) -> None:
    """The second checkpoint of three is the best until the third, which is worse or better; one is kept beside it."""
    call, outcomes, done = 0, set(), False
    while not done:
        directory = tmp_path / str(call)
        best = BestCheckpoint(directory, CheckpointConfig(keep=1), Reporter())
        for step, its in ((1, 1), (2, 5), (3, 4)):
            _save(directory, best, step, its)
        done = _crash_at(call, lambda: _save(directory, best, 4, right))  # noqa: B023 - it is called at once
        there = [step for step, _ in checkpoint.checkpoints(directory)]
        whole = [int(str(checkpoint.read(path).meta["global_step"])) for _, path in checkpoint.checkpoints(directory)]
        assert there == whole
        assert {2, 3} <= set(there) or (4 in there and (right == 9 or 2 in there)), call
        record = best_record.read(directory)
        assert record is not None
        assert record.step in there
        outcomes.add(tuple(there))
        _save(directory, best, 5, 3)
        assert not list(directory.glob("*.partial"))
        shutil.rmtree(directory)
        call += 1
    assert outcomes >= {(2, 3), (2, 3, 4), (2, 4) if right == 2 else (4,)}
