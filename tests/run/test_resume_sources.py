"""Sources of a resume: checkpoints that ranks verify together, stored runs, and the best checkpoint."""

import logging
import os
import random
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.comm.base import SingleCommunicator
from hpctrain.config.load import parse
from hpctrain.config.resume_rules import Change
from hpctrain.config.schema import CheckpointConfig, Config
from hpctrain.core.errors import CheckpointError, ConfigError, DivergedError
from hpctrain.core.intervals import Box, even_interval, size_of
from hpctrain.flight.recorder import FlightNotes
from hpctrain.job.session import Session
from hpctrain.process.start import load_config
from hpctrain.run.build import TrainingSetup
from hpctrain.run.checkpoints import (
    EVALUATIONS,
    BestCheckpoint,
    RunCheckpoints,
    StepEvaluation,
    best_evaluation,
    spared,
)
from hpctrain.run.resume import Start, find_checkpoint, read_together
from hpctrain.run.stored_run import FRESH, find_run
from hpctrain.runs import directory as best_record
from hpctrain.runs.directory import BestRecord, RunDirectory, latest
from hpctrain.runs.owner import owned
from hpctrain.storage import checkpoint
from hpctrain.storage.atomic_write import partial_path
from hpctrain.storage.checkpoint import CheckpointContent, checkpoint_path, parameter_key, remove, restore, write
from hpctrain.storage.shards import Part, publish, write_shard
from hpctrain.training.metrics import Reporter, RunningSums
from hpctrain.training.snapshot import Position
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.run import run_virtual
from tests.support.crashes import crash_at
from tests.support.run_in_process import (
    MEASURES,
    STEPS_PER_EPOCH,
    TEST_SAMPLES,
    Case,
    Disturbance,
    Killed,
    disturbed,
    prepare,
    train,
)
from tests.support.runs import make_run
from tests.support.tiny_runs import whole_lines

SHAPES = {"parameters/w": (60, 100), "parameters/v": (3, 3, 64, 9), "parameters/b": (100,)}


def content(step: int) -> CheckpointContent:
    random = np.random.default_rng(step)
    return CheckpointContent({key: random.standard_normal(shape, "f4") for key, shape in SHAPES.items()}, {"global_step": step})


def box_of(shape: tuple[int, ...], rank: int, ranks: int, dim: int) -> Box:
    return tuple(even_interval(size, ranks, rank) if at == dim % len(shape) else (0, size) for at, size in enumerate(shape))


def write_sharded(directory: Path, step: int, shards: int) -> Path:
    """Each shard has an even part of every tensor, along its first dim of several elements."""
    path, whole = checkpoint_path(directory, step, sharded=True), content(step)

    def parts(rank: int) -> dict[str, Part]:
        boxes = {key: box_of(shape, rank, shards, 0) for key, shape in SHAPES.items()}
        return {
            key: Part(SHAPES[key], box, np.ascontiguousarray(whole.tensors[key][tuple(slice(*each) for each in box)]))
            for key, box in boxes.items()
            if size_of(box)
        }

    growing = partial_path(path, "t")
    publish(growing, path, [write_shard(growing, rank, parts(rank)) for rank in range(shards)], whole.meta)
    return path


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory.create(tmp_path, "net", config="name: net\n", versions={}, git={})
    write(checkpoint_path(directory.checkpoints, 3), content(3))
    write_sharded(directory.checkpoints, 5, 4)
    write_sharded(directory.checkpoints, 7, 4)
    return directory


def found_on(ranks: int, run: RunDirectory, source: str) -> list[tuple[str, int, bytes]]:
    """On each rank: name and step of what is found, and the elements of one of its tensors."""

    def search(comm: ThreadCommunicator) -> tuple[str, int, bytes]:
        there = find_checkpoint(comm, str(run.path.parent), "net", source)
        step = int(str(there[1].meta["global_step"]))
        return there[0].name, step, there[1].tensors["parameters/w"].tobytes()

    return run_virtual(ranks, search)


def expected(step: int, suffix: str) -> tuple[str, int, bytes]:
    return f"checkpoint-{step:08d}{suffix}", step, content(step).tensors["parameters/w"].tobytes()


def flip(path: Path, tensor: np.ndarray) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(np.ascontiguousarray(tensor).tobytes()) + 5] ^= 8
    path.write_bytes(data)


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """Of the search's log, in which only rank 0 writes."""
    texts, handler, logger = list[str](), logging.Handler(), logging.getLogger("hpctrain.run.resume")
    handler.emit = lambda record: texts.append(record.getMessage())
    logger.addHandler(handler)
    yield texts
    logger.removeHandler(handler)


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
@pytest.mark.parametrize("source", ["auto", "run"])
def test_all_ranks_pass_over_a_damaged_one_and_report_one_reason(
    run: RunDirectory, lines: list[str], ranks: int, source: str
) -> None:
    source = str(run.path) if source == "run" else source
    newest, older = (checkpoint_path(run.checkpoints, step, sharded=True) for step in (7, 5))
    assert (found_on(ranks, run, source), lines) == ([expected(7, ".shards")] * ranks, [])
    for number in range(4):  # more than one reason, of which each rank knows some
        flip(newest / f"shard-{number:05d}.h5", content(7).tensors["parameters/w"][15 * number : 15 * number + 15])
    assert found_on(ranks, run, source) == [expected(5, ".shards")] * ranks
    [line] = lines
    assert "Tensor parameters/w in " in line
    assert line.count("use an older checkpoint") == 1
    (older / "shard-00002.h5").unlink()
    assert (found_on(ranks, run, source), len(lines)) == ([expected(3, ".h5")] * ranks, 3)
    assert "shard-00002.h5 is missing" in lines[2]


def raised_on(ranks: int, run: RunDirectory, source: str) -> set[str]:
    def search(comm: ThreadCommunicator) -> str:
        with pytest.raises(CheckpointError) as caught:
            find_checkpoint(comm, str(run.path.parent), "net", source)
        return str(caught.value)

    return set(run_virtual(ranks, search))


def test_where_nothing_is_whole_all_ranks_raise_the_same(run: RunDirectory) -> None:
    paths = [checkpoint_path(run.checkpoints, 7, sharded=True), checkpoint_path(run.checkpoints, 3)]
    (paths[0] / "shard-00003.h5").write_bytes(b"")
    [sentence] = raised_on(3, run, str(paths[0]))
    assert "shard-00003.h5 has 0 bytes instead of" in sentence
    paths[1].write_bytes(b"")
    (checkpoint_path(run.checkpoints, 5, sharded=True) / "manifest.json").write_text("{}")
    [sentence] = raised_on(3, run, "auto")
    assert sentence == f"The run {run.path} has no intact checkpoint; give another run or a checkpoint, or start a new training."
    assert raised_on(3, run, str(run.path)) == {sentence}
    [sentence] = raised_on(3, run, "nowhere")
    assert sentence.startswith(
        f"{Path.cwd()}/nowhere is not a run directory or a checkpoint, as it does not exist; give auto, best or the path"
    )


def test_no_checkpoint_is_found_for_a_name_without_one(tmp_path: Path) -> None:
    def search(comm: ThreadCommunicator) -> Any:
        return find_checkpoint(comm, str(tmp_path), "net", "auto")

    assert run_virtual(3, search) == [None] * 3


def test_a_run_is_looked_through_again_once_it_is_owned(run: RunDirectory) -> None:
    """The previous owner may have written another checkpoint, or deleted the one that the first search found."""

    def search(comm: ThreadCommunicator) -> Any:
        taken = []

        def take(path: Path) -> bool:
            assert path == run.path
            taken.append(path)
            if comm.rank == 0 and len(taken) == 1:
                remove(checkpoint_path(run.checkpoints, 7, sharded=True))
                write(checkpoint_path(run.checkpoints, 8), content(8))
            return len(taken) == 1

        found = find_checkpoint(comm, str(run.path.parent), "net", "auto", take)
        return None if found is None else found[0].name

    assert run_virtual(2, search) == ["checkpoint-00000008.h5"] * 2


def test_a_job_that_is_queued_again_goes_on_with_its_own_run(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer run of the same name, from another job, is not chosen."""
    monkeypatch.setenv("SLURM_JOB_ID", "41")
    with owned(run.path, "hpctrain train"):
        pass
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    other = RunDirectory.create(run.path.parent, "net", config="name: net\n", versions={}, git={})
    write(checkpoint_path(other.checkpoints, 2), content(2))
    with owned(other.path, "hpctrain train"):
        pass

    def search(comm: ThreadCommunicator) -> Any:
        found = find_checkpoint(comm, str(run.path.parent), "net", "auto")
        return None if found is None else found[0].parent.parent

    chosen = {}
    for job in ("41", "42", "43"):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        [chosen[job]] = run_virtual(1, search)
    assert chosen == {"41": run.path, "42": other.path, "43": other.path}


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Of each thread, by `os.preadv`."""
    read: Counter[int] = Counter()
    original = os.preadv

    def counted(*arguments: Any) -> int:
        count = original(*arguments)
        read[threading.get_ident()] += count
        return count

    monkeypatch.setattr(os, "preadv", counted)
    return read


@pytest.mark.parametrize("shards", [1, 4, 6])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("dim", [0, -1])
def test_a_rank_reads_its_share_of_the_verification_and_the_elements_that_it_needs(
    tmp_path: Path, bytes_read: Counter[int], shards: int, ranks: int, dim: int
) -> None:
    path, whole = write_sharded(tmp_path, 5, shards), content(5)
    sizes = [(path / f"shard-{number:05d}.h5").stat().st_size for number in range(shards)]
    share = -(-shards // ranks) * max(sizes)

    def program(comm: ThreadCommunicator) -> tuple[int, int]:
        there = read_together(comm, path)
        verified = bytes_read[threading.get_ident()]
        for key, shape in SHAPES.items():
            box = box_of(shape, comm.rank, ranks, dim)
            part = restore(there, key, shape, "float32", box)
            assert np.array_equal(part, whole.tensors[key][tuple(slice(*each) for each in box)])
        needed = sum(4 * size_of(box_of(shape, comm.rank, ranks, dim)) for shape in SHAPES.values())
        assert bytes_read[threading.get_ident()] - verified == needed
        return verified, needed

    outcomes = run_virtual(ranks, program)
    all_bytes = sum(values.nbytes for values in whole.tensors.values())
    assert sum(verified for verified, _ in outcomes) == all_bytes, "each element is compared once"
    assert sum(needed for _, needed in outcomes) == all_bytes
    assert max(verified for verified, _ in outcomes) <= share


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the system counts no bytes for a process")
def test_the_system_counts_no_more_bytes(tmp_path: Path) -> None:
    """All of what the process reads, HDF5's structures and the manifest among it."""

    def read_so_far() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    path, slack = write_sharded(tmp_path, 5, 4), 4096  # the count itself is read
    before = read_so_far()
    read = run_virtual(2, lambda comm: read_together(comm, path).tensors)
    verified = read_so_far()
    assert verified - before <= 1.25 * sum(each.stat().st_size for each in path.iterdir()) + slack
    needed = read[0].part("parameters/w", ((0, 30), (0, 100))).nbytes
    assert needed <= read_so_far() - verified <= needed + slack


CONFIG = """
{{name: {name}, model: {model}, data: {{train: train.h5}}, batch: 8, epochs: 1, optimizer: {{name: sgd, lr: 0.1}},
threads: 3, grid: {{rows: 2, cols: 4}}, plan: {{default: model}}, averager: {{name: priority}},
schedule: constant, deadline_seconds: 17}}
"""
OLD, NEW = "first-20260101-120000", "second-20260301-120000"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two runs of unlike names, of which the older one has a best checkpoint, and a newer one without any checkpoint."""
    for name, step in ((OLD, 4), (NEW, 9), ("third-20260401-120000", None)):
        directory = tmp_path / "runs" / name
        text = CONFIG.format(name=name.partition("-")[0], model="small")
        make_run(directory, text)
        if step is not None:
            content = CheckpointContent({"parameters/w": np.ones(2)}, {"config": text.replace("small", "alexnet")})
            checkpoint.write(checkpoint.checkpoint_path(directory / "checkpoints", step), content)
    best_record.write_best(tmp_path / "runs" / OLD / "checkpoints", BestRecord("checkpoint-00000004.h5", 4, 1, "top1", 0.5))
    return tmp_path / "runs"


def test_auto_is_the_newest_run_with_a_checkpoint_whatever_its_name_and_best_of_one_that_has_it(runs: Path) -> None:
    found = find_run("auto", runs)
    assert (found.source, found.parsed(())[0].name) == (str(runs / NEW), "second")
    found = find_run("best", runs)
    assert (found.source, found.parsed(())[0].name) == (str(runs / OLD / "checkpoints" / "checkpoint-00000004.h5"), "first")


def test_a_path_is_a_run_or_a_checkpoint_which_says_what_it_was_written_with(runs: Path, tmp_path: Path) -> None:
    assert find_run(str(runs / OLD), Path("nowhere")).parsed(())[0].model.name == "small"
    alone = tmp_path / "copied.h5"
    (runs / OLD / "checkpoints" / "checkpoint-00000004.h5").rename(alone)
    found = find_run(str(alone), Path("nowhere"))
    assert (found.source, found.parsed(())[0].model.name) == (str(alone), "alexnet")


def test_the_ranks_of_the_training_do_not_count_unless_they_are_asked_for(runs: Path) -> None:
    config, _ = find_run("auto", runs).parsed(())
    plain = Config.model_construct()
    for section in ("grid", "plan", "threads", "micro_batches", "machine"):
        assert getattr(config, section) == getattr(plain, section), section
    assert (config.averager.name, config.deadline_seconds) == ("sharded", 17)
    config, _ = find_run("auto", runs).parsed(("grid.rows=3", "threads=1"))
    assert (config.grid.rows, config.grid.cols, config.threads) == (3, None, 1)


def test_what_begins_afresh_is_the_default_of_every_key() -> None:
    text = CONFIG.format(name="a", model="small")
    kept = "\n".join(line for line in text.splitlines() if not line.startswith(("threads", "grid", "plan", "averager")))
    assert parse(text, "a.yaml", FRESH)[0] == parse(kept, "a.yaml", ("flight=none",))[0]


@pytest.mark.parametrize("model", ["mine.py:Net", "package.module:Net"])
def test_code_that_a_run_alone_names_is_not_imported(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "runs" / NEW
    (tmp_path / "mine.py").write_text("raise SystemExit('imported')")
    make_run(directory, CONFIG.format(name="second", model=f'"{model}"'))
    with pytest.raises(
        ConfigError, match=f'names user code, "{model}", which is imported only if you name it yourself; give --config'
    ):
        find_run(str(directory), tmp_path).parsed(())


def test_a_checkpoint_of_another_program_does_not_say_its_model(tmp_path: Path) -> None:
    checkpoint.write(tmp_path / "own.h5", CheckpointContent({"parameters/w": np.ones(2)}, {"notes": {}}))
    with pytest.raises(CheckpointError, match=r"own\.h5 was written by a Python program with its own training loop"):
        find_run(str(tmp_path / "own.h5"), tmp_path)


def _evaluations(values: dict[int, float | None]) -> list[StepEvaluation]:
    return [StepEvaluation(step, step, value, value, value) for step, value in values.items()]


_FINITE = st.one_of(st.none(), st.integers(0, 3).map(float))


@given(values=st.dictionaries(st.integers(0, 30), _FINITE), measure=st.sampled_from(MEASURES), data=st.data())
def test_the_best_has_the_best_value_and_comes_first(values: dict[int, float | None], measure: str, data: Any) -> None:
    steps = data.draw(st.sets(st.integers(0, 30)))
    best = best_evaluation(_evaluations(values), measure, steps)
    finite = {step: value for step, value in values.items() if step in steps and value is not None}
    assert best_evaluation(_evaluations(values), "none", steps) is None
    if not finite:
        assert best is None
        return
    value = (min if measure == "loss" else max)(finite.values())
    assert best.step == min(step for step, its in finite.items() if its == value)


@given(values=st.lists(_FINITE, max_size=20), keep=st.integers(1, 4), measure=st.sampled_from(MEASURES))
def test_with_each_of_the_newest_is_the_best_until_then(values: list[float | None], keep: int, measure: str) -> None:
    evaluations = _evaluations(dict(enumerate(values)))
    there: list[int] = []
    for step in range(len(values)):
        there.append(step)
        stay = spared(evaluations[: step + 1], measure, there, keep)
        newest = there[-keep:]
        there = [each for each in there if each in newest or each in stay]
        assert len(there) <= keep + 1
        for each in newest:
            best = best_evaluation(evaluations, measure, range(each + 1))
            assert best is None or best.step in there


@given(values=st.lists(_FINITE, min_size=1, max_size=9), keep=st.integers(1, 4), data=st.data())
def test_the_best_stays_whatever_times_files_have(values: list[float | None], keep: int, data: Any) -> None:
    evaluations = _evaluations(dict(enumerate(values)))
    by_age = data.draw(st.permutations(range(len(values))))
    best = best_evaluation(evaluations, "top1", by_age)
    assert best is None or best.step in spared(evaluations, "top1", by_age, keep)


def test_values_that_are_not_finite_are_no_candidates_and_fit_json() -> None:
    sums = RunningSums(float("nan"), 5, 8, 10)
    evaluation = StepEvaluation.of(Position(epoch=2, global_step=6), sums)
    values = {key: value for key, value in evaluation.to_meta().items() if not key.startswith("ema_")}
    assert values == {"step": 6, "epoch": 2, "loss": None, "top1": 0.5, "top5": 0.8}
    assert best_evaluation([evaluation], "loss", [6]) is None
    assert best_evaluation([evaluation], "top1", [6]) == evaluation


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    prepare(tmp_path)
    return tmp_path


def _directory(folder: Path) -> Path:
    run = latest(folder / "runs", "tiny")
    return run.checkpoints


def _there(folder: Path) -> list[int]:
    return [step for step, _ in checkpoint.checkpoints(_directory(folder))]


def _end_somewhere(folder: Path, case: Case, draw: random.Random, resume: str | None) -> None:
    """A part of a run, which is killed, or ends after some steps, or diverges once, if it comes so far."""
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
    return choice if choice == "best" and best_record.read_best(_directory(folder)) is not None else "auto"


def _assert_nothing_is_lost(folder: Path, case: Case) -> None:
    """The best of those that were written before the newest is there, or a better one; and the record names one that is."""
    there = _there(folder)
    written = list(takewhile(lambda step: step <= max(there), case.written()))
    until = [step for step in written if step < max(there)]
    best = case.best(until)
    assert best is None or best in there or case.best(written) in there
    record = best_record.read_best(_directory(folder))
    assert record is None or record.step in there


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(40))
def test_a_run_disturbed_in_any_way_keeps_what_an_undisturbed_one_keeps(folder: Path, seed: int, capsys) -> None:
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
    decided = "top5, which is always 100 %"
    assert not [line for line in whole_lines(output).splitlines() if "warning" in line and decided not in line]
    assert _there(folder) == case.kept()
    record, best = best_record.read_best(_directory(folder)), case.best(case.kept())
    assert best == case.best(case.written()), "the best of all is kept"
    assert (None if record is None else record.step) == best
    last = whole_lines(output).splitlines()[-2]
    assert (last.startswith("best ") and f"/checkpoint-{best:08d}." in last) if best is not None else "best" not in last


def _whole(folder: Path, *overrides: str, accuracies: tuple[int, ...], resume: str | None = None) -> None:
    """A run, or what is left of it, with these numbers of right answers after its epochs; the loss falls as they rise."""

    def evaluation(step: int) -> RunningSums:
        right = accuracies[step // STEPS_PER_EPOCH - 1]
        return RunningSums(float(TEST_SAMPLES - right), right, TEST_SAMPLES, TEST_SAMPLES)

    with disturbed(evaluation):
        train(folder, f"epochs={len(accuracies)}", "checkpoint.keep=1", *overrides, resume=resume)


@pytest.mark.slow
def test_a_finished_run_that_is_resumed_keeps_its_best_checkpoint(folder: Path) -> None:
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
    output = whole_lines(capsys.readouterr().out)
    assert "warning" not in output
    assert "\nbest test accuracy 25.00% after epoch 1: " in output.split("resumed at")[1]


def test_a_checkpoint_before_its_own_evaluation_does_not_miss_the_best_until_then(folder: Path, capsys) -> None:
    """The last checkpoint turns out to be the best, so the one before it goes, which it still speaks of."""
    options = ("checkpoint={keep: 1, every_epochs: 0, every_steps: 3}",)
    _whole(folder, *options, accuracies=(5, 9))
    assert _there(folder) == [6]
    _whole(folder, *options, accuracies=(5, 9, 4), resume="auto")
    assert _there(folder) == [6, 9]
    assert "warning" not in capsys.readouterr().out


@pytest.mark.sample(1)
@pytest.mark.parametrize("harm", ["removed", "damaged"])
def test_a_lost_best_is_reported_and_another_takes_its_place(folder: Path, harm: str, capsys: pytest.CaptureFixture[str]) -> None:
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
    output = whole_lines(capsys.readouterr().out)
    assert "warning: the best checkpoint, of step 6 (test accuracy 45.00% after epoch 2), " in output
    assert ("is not there any more" if harm == "removed" else "cannot be used (") in output
    assert "\nbest test accuracy 25.00% after epoch 4: " in output
    assert _there(folder) == [12, 15]


def test_another_test_set_begins_the_search_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _whole(folder, accuracies=(3, 9, 4))
    shutil.copy(folder / "test.h5", folder / "other.h5")
    capsys.readouterr()
    _whole(folder, f"data.test={folder}/other.h5", accuracies=(3, 9, 4, 5), resume="auto")
    assert "\nthe best checkpoint is chosen among new ones only, as data.test changed\n" in capsys.readouterr().out
    assert _there(folder) == [12]


def test_another_measure_takes_the_best_of_those_that_are_there(folder: Path) -> None:
    _whole(folder, "checkpoint={keep: 3, best: none}", accuracies=(3, 9, 4))
    _whole(folder, "checkpoint={keep: 1, best: loss}", accuracies=(3, 9, 4, 5), resume="auto")
    assert _there(folder) == [6, 12]


def test_a_checkpoint_of_an_earlier_version_begins_the_search(folder: Path) -> None:
    _whole(folder, accuracies=(3, 9))
    path = checkpoint_path(_directory(folder), 6)
    content = checkpoint.read(path)
    assert [entry["step"] for entry in content.meta[EVALUATIONS]] == [3, 6]
    checkpoint.write(
        path, CheckpointContent(content.tensors, {key: content.meta[key] for key in content.meta if key != EVALUATIONS})
    )
    _whole(folder, accuracies=(3, 9, 1, 2), resume="auto")
    assert _there(folder) == [12]
    _whole(folder, "epochs=5", accuracies=(3, 9, 1, 2, 1), resume="auto")
    assert _there(folder) == [12, 15]


def _config(folder: Path, *overrides: str) -> Config:
    return load_config(folder / "tiny.yaml", overrides)[0]


def _save(directory: Path, best: BestCheckpoint, step: int, right: int) -> None:
    """An evaluation and a checkpoint, as a run makes them."""
    position = Position(epoch=step, global_step=step)
    best.evaluated(position, RunningSums(1.0, right, 10, 10))
    content = CheckpointContent({parameter_key("a"): np.ones(3)}, {"global_step": step, **best.to_meta(step)})
    retain = best.retention(step)
    checkpoint.write(checkpoint_path(directory, step), content)
    retain()


def test_an_evaluation_of_other_test_data_does_not_come_back_as_best_after_a_rollback(tmp_path: Path) -> None:
    """A rollback takes up the checkpoint that the run resumed from, whose metadata have evaluations of the former test data."""
    prepare(tmp_path)
    directory = RunDirectory(make_run(tmp_path / "run", ""))
    config = _config(tmp_path, "checkpoint.keep=2", "checkpoint.best=top1")
    before = BestCheckpoint(directory.checkpoints, config.checkpoint, Reporter())
    _save(directory.checkpoints, before, 1, 9)
    _save(directory.checkpoints, before, 2, 4)
    path = checkpoint_path(directory.checkpoints, 2)
    position = Position(epoch=2, global_step=2)
    start = Start(directory, path, checkpoint.read(path), position, (Change("data.test", "old.h5", "new.h5"),), None)
    session = SimpleNamespace(
        config=config,
        world=SingleCommunicator(),
        progress=SimpleNamespace(notes=FlightNotes(None)),
        is_root=True,
    )
    setup = SimpleNamespace(loader=SimpleNamespace(sampler=SimpleNamespace(samples=10)))
    checkpoints = RunCheckpoints(cast(Session, session), cast(TrainingSetup, setup), directory, Reporter())
    for _ in range(2):  # the resume, then the rollback
        checkpoints.take_up(start)
        assert best_record.read_best(directory.checkpoints) is None
    assert checkpoints.best is not None
    _save(directory.checkpoints, checkpoints.best, 3, 5)
    record = best_record.read_best(directory.checkpoints)
    assert record is not None
    assert (record.step, record.value) == (3, 0.5)


@pytest.mark.slow
@pytest.mark.job
@pytest.mark.sample(1)
@pytest.mark.parametrize("right", [2, 9])
def test_a_crash_at_any_call_to_the_system_leaves_the_best_until_then(tmp_path: Path, right: int) -> None:
    """The second checkpoint of three is the best until the third, which is worse or better; one is kept next to it."""
    call, outcomes, done = 0, set(), False
    while not done:
        directory = tmp_path / str(call)
        best = BestCheckpoint(directory, CheckpointConfig(keep=1), Reporter())
        for step, its in ((1, 1), (2, 5), (3, 4)):
            _save(directory, best, step, its)
        done = crash_at(call, lambda: _save(directory, best, 4, right))  # noqa: B023 - it is called at once
        there = [step for step, _ in checkpoint.checkpoints(directory)]
        whole = [int(str(checkpoint.read(path).meta["global_step"])) for _, path in checkpoint.checkpoints(directory)]
        assert there == whole
        assert {2, 3} <= set(there) or (4 in there and (right == 9 or 2 in there)), call
        record = best_record.read_best(directory)
        assert record.step in there
        outcomes.add(tuple(there))
        _save(directory, best, 5, 3)
        assert not list(directory.glob("*.partial"))
        shutil.rmtree(directory)
        call += 1
    assert outcomes >= {(2, 3), (2, 3, 4), (2, 4) if right == 2 else (4,)}
