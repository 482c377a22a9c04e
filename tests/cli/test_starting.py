"""How jobs start, log, and end where ranks fail, hang or are killed, and what `hpctrain autopsy` finds then."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.cli.main import cli
from hpctrain.core.errors import ConfigError
from hpctrain.core.text import place, spans
from hpctrain.process.start import names_rank
from hpctrain_testing import faults, lab
from hpctrain_testing.run import Outcome, patched_program
from tests.support.job_pairs import Pair, Tally, draw_pairs, run_pairs
from tests.support.tiny_runs import prepare, tiny

Job = Callable[..., Outcome]

CONFIG = tiny("backend: auto, data: {train: FOLDER/train.h5, test: FOLDER/train.h5}, batch: 12, epochs: 1, output: FOLDER/runs")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A configuration and 24 small images: 2 steps per epoch."""
    return prepare(tmp_path, CONFIG, 24, 0)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("command", [["train"], ["train", "--compute-only"], ["eval"]])
def test_a_process_that_is_alone_is_refused_where_more_ranks_are_expected(job: Job, folder: Path, command: list[str]) -> None:
    outcome = job(0, ["-m", "hpctrain", *command, "tiny.yaml"], cwd=folder, env={"HPCTRAIN_EXPECT_RANKS": "2"})
    assert outcome.code == 2, outcome.output
    assert "hpctrain: HPCTRAIN_EXPECT_RANKS is 2, but" in outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert not (folder / "runs").exists()


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("local_rank", [0, 1])
def test_ranks_that_are_alone_say_so_once_a_node(job: Job, folder: Path, local_rank: int) -> None:
    """As under a launcher of another MPI: each of a thousand ranks has a world of its own."""
    names = {"WORLD_SIZE": 4, "WORLD_RANK": 2 + local_rank, "WORLD_LOCAL_SIZE": 2, "WORLD_LOCAL_RANK": local_rank}
    environ = {f"OMPI_COMM_{name}": str(value) for name, value in names.items()}
    outcome = job(0, ["-m", "hpctrain", "train", "tiny.yaml"], cwd=folder, env=environ)
    assert outcome.code == 2, outcome.output
    assert outcome.stderr.count("was asked for 4 ranks, but MPI's world has 1") == (local_rank == 0)


# Tells of every process that Python code of a rank starts, and whether MPI had started then.
_WATCHED = """
import sys

STARTS = {"subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty", "os.system", "os.exec", "os.spawn"}

def tell(event, arguments):
    if event in STARTS:
        mpi = sys.modules.get("mpi4py.MPI")
        when = "before" if mpi is None or not mpi.Is_initialized() else "after"
        sys.stderr.write(f"a process {when} MPI: {event} {arguments[:2]}\\n")

sys.addaudithook(tell)
from hpctrain.__main__ import main
main()
"""


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("more", [["trace=true", "metrics.tensorboard=true"], ["backend=numpy", "progress=thread"]])
def test_no_rank_starts_a_process_once_mpi_runs(job: Job, folder: Path, more: list[str]) -> None:
    """MPI's memory and connections do not survive a fork on every network, and a thousand ranks have one file system."""
    (folder / "watched.py").write_text(textwrap.dedent(_WATCHED))
    outcome = job(2, ["watched.py", "train", "tiny.yaml", *more], cwd=folder)
    assert outcome.code == 0, outcome.output
    started = [line for line in outcome.stderr.splitlines() if line.startswith("a process")]
    assert not [line for line in started if "after" in line]
    assert any("git" in line for line in started)  # the watch works: rank 0 asks for the revision before MPI starts
    assert not [line for line in started if "gcc" in line]
    looks = [line for line in started if "ldconfig" in line]
    assert len(looks) <= 1  # PyTorch's, which tensorboardX loads where it is installed


@pytest.mark.slow
def test_tensorboard_that_is_missing_is_reported_before_the_run_begins(job: Job, folder: Path) -> None:
    """By rank 0, which alone writes its files: the others must not wait for it."""
    (folder / "without.py").write_text(
        "import sys\nsys.modules['tensorboardX'] = None\nfrom hpctrain.__main__ import main\nmain()\n"
    )
    outcome = job(2, ["without.py", "train", "tiny.yaml", "metrics.tensorboard=true"], cwd=folder)
    assert outcome.code != 0, outcome.output
    assert outcome.stderr.count("tensorboardX, which cannot be imported (No module named") == 1
    assert not (folder / "runs").exists()


_COUNTED = """
import atexit, os, sys

opened = []

def count(event, arguments):
    if event == "open" and not str(arguments[0]).startswith(("/proc/", "/sys/")):
        opened.append(arguments[0])

def tell():
    packages = {"PIL", "cv2", "jinja2", "matplotlib", "onnx", "psutil", "pytest", "rich", "tensorboardX", "torch"}
    own = {f"hpctrain.{name}" for name in ("bench", "doctor", "planner", "report", "site", "testing", "virtual")}
    late = sorted((packages | own) & sys.modules.keys())
    entries = [str(path) for path in opened if str(path).endswith("entry_points.txt")]
    sys.stderr.write(f"files {len(opened)} late {late} {len(entries) - len(set(entries))}\\n")

sys.addaudithook(count)
atexit.register(tell)
from hpctrain.__main__ import main
main()
"""


@pytest.mark.slow
def test_a_rank_opens_few_files_and_loads_nothing_that_it_does_not_need(job: Job, folder: Path) -> None:
    """A thousand ranks that start at once open them all from one file system. The steps suffice for an account of steps."""
    (folder / "counted.py").write_text(textwrap.dedent(_COUNTED))
    outcome = job(2, ["counted.py", "train", "tiny.yaml", "epochs=40", "checkpoint.every_epochs=40"], cwd=folder)
    assert outcome.code == 0, outcome.output
    assert "step time " in outcome.stdout
    counts = [line.split(maxsplit=3) for line in outcome.stderr.splitlines() if line.startswith("files ")]
    assert len(counts) == 2, outcome.stderr
    least, most = sorted(int(files) for _, files, _, _ in counts)
    assert least < 800, least
    assert most < 1400, most  # the first rank of a node reads the files of hpctrain once more, to compare them
    assert {late for *_, late in counts} == {"[] 0"}, counts  # 0: each package's entry points are read once


# The program, in which rank RANK does something else in step 1, counted from 0 on.
_FAULTY = """
rank = int(sys.argv.pop(1)); fault = sys.argv.pop(1)
def patch():
    from hpctrain.data.loader import Loader
    from hpctrain.training import replica
    from hpctrain.training.step import TrainingStep
    run, make = TrainingStep.run, Loader._make
    def step(self, batch, global_step, lr):
        if global_step == 1 and rank in (here, -1):
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            if fault == "raise":
                raise ZeroDivisionError("no such luck")
            if fault == "skip":
                return
            if fault == "compute":
                time.sleep(60)
        run(self, batch, global_step, lr)
    def made(self, slot, epoch, number, begin):
        if fault == "load" and number == 1 and rank in (here, -1):
            time.sleep(60)
        return make(self, slot, epoch, number, begin)
    def evaluated(*arguments, **options):
        if fault == "evaluate" and rank in (here, -1):
            time.sleep(60)
        return evaluate(*arguments, **options)
    evaluate = replica.evaluate
    TrainingStep.run, Loader._make, replica.evaluate = step, made, evaluated
"""


def _faulty(job: Job, folder: Path, ranks: int, rank: int, fault: str, *more: str) -> Outcome:
    (folder / "faulty.py").write_text(patched_program(_FAULTY))
    arguments = ["faulty.py", str(rank), fault, "train", "tiny.yaml", "deadline_seconds=3", *more]
    return job(ranks, arguments, cwd=folder)


def _autopsy(folder: Path, *options: str) -> Result:
    (run,) = (folder / "runs").iterdir()
    return CliRunner().invoke(cli, ["autopsy", str(run), *options])


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("load", "was in data loading"),
        ("compute", "was in a training step, step 2"),
        ("evaluate", "was in evaluation, step 2"),
        ("raise", "Rank 1 failed first: ZeroDivisionError: no such luck (a training step, step 2)"),
    ],
)
def test_the_rank_to_blame_is_named(job: Job, folder: Path, fault: str, words: str) -> None:
    outcome = _faulty(job, folder, 2, 1, fault)
    assert outcome.code not in (0, 85), outcome.output
    result = _autopsy(folder, "--json")
    assert result.exit_code == 0, result.output
    values = json.loads(result.output)
    assert values["blamed"] == [1], values["findings"]
    assert words in " ".join(values["findings"])
    if fault in ("load", "compute", "evaluate"):
        assert "autopsy: Rank 1" in outcome.stderr or f"{place(1, 2)}no progress within the deadline of 3 s" in outcome.stderr


@pytest.mark.slow
def test_a_rank_that_skips_a_step_has_not_posted_it(job: Job, folder: Path) -> None:
    """It goes on to the next message, so that both may wait for each other. A rank that stops leaves its words in its log."""
    outcome = _faulty(job, folder, 2, 1, "skip", "--log-ranks", "all")
    assert outcome.code not in (0, 85)
    (logs,) = (folder / "runs").glob("*/logs")
    logged = "".join(path.read_text() for path in sorted(logs.iterdir()))
    assert " no completion within the deadline of 3 s: " in logged
    assert "in _give_up" in logged  # of the stacks
    assert f"logs of ranks 0-1: {logs}\n" in _autopsy(folder).output
    values = json.loads(_autopsy(folder, "--json").output)
    assert 1 in values["blamed"], values["findings"]
    assert "rank 1 has not posted" in values["findings"][0] or "Rank 1 never posted" in values["findings"][0]


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.parametrize("fault", ["load", "compute", "evaluate"])
def test_where_all_hang_alike_the_job_ends(job: Job, folder: Path, ranks: int, fault: str) -> None:
    outcome = _faulty(job, folder, ranks, -1, fault)
    assert outcome.code == 124 if ranks == 0 else outcome.code not in (0, 85), outcome.output
    place = {"load": "data loading", "compute": "a training step, step 2", "evaluate": "evaluation, step 2"}[fault]
    assert f"no progress within the deadline of 3 s, in {place}" in outcome.stderr
    assert place.split(",")[0] in _autopsy(folder).output


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("rank", [1, -1])
def test_ranks_that_are_stopped_end_the_job(job: Job, folder: Path, rank: int) -> None:
    """One of two, or all: then only their parents are left to notice."""
    outcome = _faulty(job, folder, 2, rank, "stop")
    assert outcome.code not in (0, 85), outcome.output
    if rank == -1:
        assert "the process is stopped, or hangs without releasing Python's lock" in outcome.stderr
    else:
        assert json.loads(_autopsy(folder, "--json").output)["blamed"] == [1]


@pytest.mark.slow
def test_a_killed_rank_was_silent_and_a_finished_job_finished(job: Job, folder: Path) -> None:
    assert _faulty(job, folder, 2, 1, "kill").code != 0
    text = _autopsy(folder).output
    assert "a training step" in text
    outcome = _faulty(job, folder, 2, 1, "none", f"output={folder}/well")
    assert outcome.code == 0, outcome.output
    (run,) = (folder / "well").iterdir()
    result = CliRunner().invoke(cli, ["autopsy", str(run)])
    assert result.output.startswith("The job finished: ranks 0-1 ended normally.\n"), result.output
    assert max(map(len, result.output.splitlines())) <= 80


@given(st.sets(st.integers(0, 63), min_size=1))
def test_lists_name_what_they_are_written_from(ranks: set[int]) -> None:
    for text in (spans(sorted(ranks)), ",".join(map(str, ranks))):
        assert {rank for rank in range(64) if names_rank(text, 64, rank)} == ranks


def test_words_name_all_and_none() -> None:
    assert all(names_rank("all", 5, rank) for rank in range(5))
    assert not any(names_rank("none", 5, rank) for rank in range(5))


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("al", "or ranks such as 0,3,8-15; the nearest is all."),
        ("nono", "the nearest is none."),
        ("0;3", "the nearest is all."),
        ("", "the nearest is all."),
        ("-1", "the nearest is all."),
        ("3-1", "but the first rank of a range must not exceed the last; use 1-3."),
        ("0,4", "names rank 4, but the job has 4 ranks; the largest number is 3."),
        ("0-99", "names rank 99, but the job has 4 ranks; the largest number is 3."),
    ],
)
def test_what_names_no_ranks_is_refused_alike(text: str, end: str) -> None:
    sentences = set()
    for rank in range(4):
        with pytest.raises(ConfigError) as error:
            names_rank(text, 4, rank)
        sentences.add(str(error.value))
    [sentence] = sentences
    assert sentence.startswith("--log-ranks ")
    assert sentence.endswith(end)


@pytest.mark.slow
def test_named_ranks_have_files_with_all_that_they_log(job: Job, tmp_path: Path) -> None:
    faults.prepare(tmp_path)
    command = ["-m", "hpctrain", "train", "faulty.yaml", "--log-ranks", "0,2", "--steps", "2"]
    outcome = job(3, command, cwd=tmp_path)
    assert outcome.code == 0, outcome.output
    [run] = (tmp_path / "runs").iterdir()
    assert sorted(path.name for path in (run / "logs").iterdir()) == ["rank-0000.log", "rank-0002.log"]
    text = (run / "logs" / "rank-0002.log").read_text()
    assert re.search(r"DEBUG +process \d+ on \S+, hpctrain \S+, launcher .*: train faulty.yaml --log-ranks 0,2 --steps 2\n", text)
    assert re.search(r"DEBUG +epoch 1, step 1: loss \S+; in 1 step this rank waited \S+ s for other ranks\n", text)
    assert "Backend" in text  # other ranks than 0 say that only there
    said = [line for line in outcome.stdout.splitlines() if line.startswith("epoch ")]
    assert said
    assert all(line in (run / "logs" / "rank-0000.log").read_text() for line in said)
    assert "@" not in outcome.stdout + outcome.stderr  # rank 0 alone speaks, and needs no place
    resumed = job(3, [*command, "--resume", str(run), "epochs=3"], cwd=tmp_path)
    assert resumed.code == 0, resumed.output
    assert (run / "logs" / "rank-0002.log").read_text().startswith(text)
    evaluated = job(2, ["-m", "hpctrain", "eval", "faulty.yaml", "--checkpoint", str(run), "--log-ranks", "all"], cwd=tmp_path)
    assert evaluated.code == 0, evaluated.output
    assert (run / "logs" / "rank-0001.log").is_file()


# Only of errors in Python mpi4py's runner knows; what the keeper sees is the same, whatever has started the rank.
_ENDS = [
    *((name, False) for name in ("an exception", "sys.exit", "os._exit(0)", "SIGKILL", "SIGABRT", "no memory")),
    *((name, True) for name in ("an exception", "sys.exit", "no memory")),
]

_LONGEST_SECONDS = 100.0  # below the deadline, with its start, on a loaded machine

_DEADLINE_SECONDS = 120


@pytest.mark.job
@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "through_mpi4py"), _ENDS)
def test_the_job_ends_and_says_why_once(tmp_path: Path, name: str, through_mpi4py: bool) -> None:
    [fault] = [fault for fault in faults.FAULTS if fault.name == name]
    fault = dataclasses.replace(fault, overrides=(f"deadline_seconds={_DEADLINE_SECONDS}",))
    faults.prepare(tmp_path)
    outcome = faults.run_fault(fault, tmp_path, timeout_seconds=180, through_mpi4py=through_mpi4py)
    assert outcome.code not in (0, 85, 124), outcome.output
    assert outcome.seconds < _LONGEST_SECONDS
    assert faults.is_named(fault, outcome, faults.findings(tmp_path)), outcome.output
    errors = outcome.stderr
    assert errors.count("Traceback (most recent call last)") == (name in ("an exception", "sys.exit")), errors
    said = [line for line in errors.splitlines() if line.startswith("hpctrain: ")]
    assert len(said) == (name in ("os._exit(0)", "SIGKILL", "SIGABRT", "no memory")), errors
    assert "[0/" not in errors
    assert "[2/" not in errors

    if name == "no memory":
        for words in ("Memory ran out on rank 1 (", "allocate 4.00 EiB", " for a pass over 4 samples"):
            assert words in said[0]


@pytest.mark.job
@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["an import error at the start", "SIGKILL of the launcher's process"])
def test_an_end_before_the_run_and_one_without_a_launcher_are_named(tmp_path: Path, name: str) -> None:
    [fault] = [fault for fault in faults.FAULTS if fault.name == name]
    faults.prepare(tmp_path)
    outcome = faults.run_fault(fault, tmp_path, timeout_seconds=180)
    assert outcome.code not in (0, 85), outcome.output
    assert faults.is_named(fault, outcome, faults.findings(tmp_path)), outcome.output


@pytest.mark.job
@pytest.mark.slow
def test_two_jobs_that_write_to_one_run_crash_neither_and_lose_no_checkpoint(tmp_path: Path) -> None:
    pairs: list[Pair] = [("step", False, 1), ("write", True, 2)]
    tally = Tally()
    run_pairs(tmp_path, pairs, None, tally)
    assert not any(tally.faults.values()), tally.faults
    assert tally.pairs.total() == len(pairs)


@pytest.mark.job
@pytest.mark.thorough
@pytest.mark.parametrize("hosts", [1, 2])
def test_jobs_that_meet_in_one_run_crash_neither_and_lose_no_checkpoint(tmp_path: Path, hosts: int) -> None:
    """On two hosts neither recognises the other's processes. `make faults` sets the number of pairs."""
    if hosts == 2 and (reason := lab.missing()) is not None:
        pytest.skip(reason)
    tally = Tally()
    with lab.Lab(2, None) if hosts == 2 else contextlib.nullcontext() as both:
        run_pairs(tmp_path, [*draw_pairs(int(os.environ.get("HPCTRAIN_PAIRS", "6")), seed=0)], both, tally)
    print(vars(tally))
    assert not any(tally.faults.values()), tally.faults
