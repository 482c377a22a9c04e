"""No rank leaves a run without a word: a parent process sees how it ended, says so, and makes a failure of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.speaker import place
from tests.support.jobs import Outcome, clean_environment, run_job
from tests.support.signal_storm import prepare

Job = Callable[..., Outcome]

_START = """
import os, signal, sys, time
from hpctrain.launch.signals import hold
from hpctrain.launch.keeper import keep
started = os.getpid()
keeper = keep(None, hold(), lambda path, number, end, process: os.write(2, f"{path}: {number}\\n".encode()) > 0)
finished = keeper.finished
"""


def _run(program: str, **env: str) -> Outcome:
    return run_job(0, ["-c", _START + textwrap.dedent(program)], env=env)


@pytest.mark.job
@pytest.mark.parametrize("code", [0, 85])
def test_an_end_without_a_word_is_a_failure(code: int) -> None:
    """85 promises a checkpoint, and jobs are queued again on it."""
    outcome = _run(f"os._exit({code})")
    assert outcome.code == 1
    sentence = f"the process left with exit code {code} before the run was over: something called exit() in it."
    assert outcome.stderr == f"hpctrain: {sentence}\n"


@pytest.mark.job
@pytest.mark.parametrize("code", [0, 3])
@pytest.mark.parametrize("environ", [{"OMPI_MCA_mpi_ft_enable": "1"}, {"MPI_LOCALNRANKS": "1"}])
def test_an_end_without_a_word_is_one_by_a_signal_where_a_launcher_tells_other_ranks_of_those(
    code: int, environ: dict[str, str]
) -> None:
    outcome = _run(f"os._exit({code})", **environ)
    assert outcome.code == -signal.SIGKILL
    assert f"the process left with exit code {code} before the run was over" in outcome.stderr


@pytest.mark.job
@pytest.mark.parametrize("code", [0, 3, 85])
def test_a_finished_process_keeps_its_code(code: int) -> None:
    outcome = _run(f"finished(); sys.exit({code})")
    assert (outcome.code, outcome.stdout, outcome.stderr) == (code, "", "")


@pytest.mark.job
@pytest.mark.parametrize("code", [1, 2, 124, 143])
def test_an_end_that_explains_itself_is_not_explained_again(code: int) -> None:
    outcome = _run(f"os._exit({code})")
    assert (outcome.code, outcome.stderr) == (code, "")


@pytest.mark.job
@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL])
def test_an_end_by_a_signal_stays_one(number: signal.Signals) -> None:
    outcome = _run(f"os.kill(os.getpid(), {number:d})")
    assert outcome.code == -number
    assert f"hpctrain: the process was ended by {number.name}" in outcome.stderr


@pytest.mark.job
def test_the_record_of_a_killed_rank_is_marked() -> None:
    """The latest one that it has told of; and none of a rank that ends by itself."""
    told = "keeper.record(Path('/first')); keeper.record(Path('/latest'))"
    killed = _run(f"from pathlib import Path; {told}; os.kill(os.getpid(), signal.SIGKILL)")
    assert killed.stderr.startswith(f"/latest: {signal.SIGKILL:d}\n")
    assert "/first" not in killed.stderr
    left = _run(f"from pathlib import Path; {told}; finished()")
    assert (left.code, left.stderr) == (0, "")


@pytest.mark.job
def test_a_process_without_a_keeper_has_one_that_hears_nothing() -> None:
    outcome = _run("from pathlib import Path; keeper.record(Path('/x')); finished(); print(keeper.said)", HPCTRAIN_KEEPER="0")
    assert (outcome.code, outcome.stdout, outcome.stderr) == (0, "None\n", "")


@pytest.mark.job
def test_signals_reach_the_child() -> None:
    program = """
    os.kill(started, signal.SIGUSR1)
    print(signal.sigwaitinfo({signal.SIGUSR1}).si_pid == started, os.getppid() == started)
    finished()
    """
    assert _run(program).stdout == "True True\n"


@pytest.mark.job
def test_a_killed_keeper_takes_its_rank_along() -> None:
    program = _START + "print(os.getpid(), flush=True)\ntime.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as keeper:
        assert keeper.stdout is not None
        child = int(keeper.stdout.readline())
        assert child != keeper.pid
        keeper.kill()
        keeper.wait()
        end = time.monotonic() + 20
        while _lives(child) and time.monotonic() < end:
            time.sleep(0.01)
        assert not _lives(child)


def _lives(process: int) -> bool:
    status = Path(f"/proc/{process}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] not in "ZX"


@pytest.mark.job
def test_an_exit_code_that_a_record_does_not_explain_is_marked_and_told() -> None:
    """A library may also call exit(1). Only an error of the program itself leaves its reason in the record."""
    told = "from pathlib import Path; keeper.record(Path('/record'))"
    outcome = _run(f"{told}; os._exit(1)")
    assert outcome.stderr.startswith("/record: 1\nhpctrain: the process left with exit code 1 before the run was over")
    assert _run(f"{told}; os._exit(130)").stderr == "/record: 2\n"


@pytest.mark.job
def test_a_rank_ends_a_keeper_that_stays_stopped() -> None:
    outcome = _run("os.kill(started, signal.SIGSTOP); time.sleep(0.1); finished(); print('never')")
    assert (outcome.code, outcome.stdout) == (-signal.SIGKILL, "")


_LAUNCHER = """
import os, signal, subprocess, sys
rank = subprocess.Popen([sys.executable, "-c", sys.argv[1]], env={**os.environ, "PMI_RANK": "0", "MPI_LOCALNRANKS": "1"})
rank.wait()
"""


@pytest.mark.job
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_whose_launcher_is_gone_or_stopped_is_ended(number: signal.Signals) -> None:
    """A stopped launcher is killed as well, so that its parent learns of the end."""
    program = _START + "keeper.pulse.watch(1.0)\nprint(os.getpid(), flush=True)\nwhile True: keeper.pulse.beat(); time.sleep(0.1)"
    command = [sys.executable, "-c", _LAUNCHER, program]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean_environment()
    ) as launcher:
        assert launcher.stdout is not None
        child = int(launcher.stdout.readline())
        launcher.send_signal(number)
        assert launcher.wait(60) == -signal.SIGKILL
        end = time.monotonic() + 20
        while _lives(child) and time.monotonic() < end:
            time.sleep(0.01)
        assert not _lives(child)
        assert launcher.stderr is not None
        assert f"({launcher.pid}) {'has ended' if number == signal.SIGKILL else 'was stopped'}" in launcher.stderr.read()


@pytest.mark.job
def test_a_suspended_job_goes_on() -> None:
    """All processes are stopped for longer than the deadline, and then resumed; the keeper wakes first."""
    program = _START + "keeper.pulse.watch(3.0)\nprint(os.getpid(), flush=True)\n"
    program += "for _ in range(50): keeper.pulse.beat(); assert not keeper.pulse.look_at_keeper(0.1); time.sleep(0.1)\nfinished()"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as keeper:
        assert keeper.stdout is not None
        child = int(keeper.stdout.readline())
        for process in (child, keeper.pid):
            os.kill(process, signal.SIGSTOP)
        time.sleep(5)
        for process in (keeper.pid, child):
            os.kill(process, signal.SIGCONT)
        assert keeper.wait(60) == 0


@pytest.mark.job
@pytest.mark.parametrize("reason", ["HPCTRAIN_KEEPER is 0", "there is a thread"])
def test_without_a_keeper_the_process_is_the_one_that_was_started(reason: str) -> None:
    program = "import threading, time; threading.Thread(target=time.sleep, args=(1,)).start()\n" if "thread" in reason else ""
    environment = {"HPCTRAIN_KEEPER": "0"} if "KEEPER" in reason else {}
    outcome = run_job(0, ["-c", program + _START + "print(os.getpid() == started); finished()"], env=environment)
    assert (outcome.code, outcome.stdout) == (0, "True\n")


# The program; rank RANK leaves in the middle of step 2 by what is said.
_LEAVES = """
import os, runpy, sys
how, rank = sys.argv.pop(1), int(sys.argv.pop(1))
def patched(*arguments):
    from hpctrain.train.step import TrainingStep
    run = TrainingStep.run
    def leaving(self, batch, global_step, lr):
        here = int(os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)
        if (here, global_step) == (rank, 2):
            exec(how)
        run(self, batch, global_step, lr)
    TrainingStep.run = leaving
    return command(*arguments)
from hpctrain.cli import main
command = main.LazyGroup.get_command
main.LazyGroup.get_command = patched
runpy.run_module("hpctrain", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("ranks", "rank", "how", "words"),
    [
        (0, 0, "os._exit(0)", "hpctrain: the process left with exit code 0 before the run was over"),
        (2, 1, "os._exit(0)", f"hpctrain: {place(1, 2)}the process left with exit code 0 before the run was over"),
        (2, 0, "os._exit(0)", f"hpctrain: {place(0, 2)}the process left with exit code 0 before the run was over"),
        (2, 1, "sys.exit()", f"{place(1, 2)}sys.exit() inside of a run ends the job."),
    ],
)
def test_a_rank_that_leaves_inside_a_step_ends_the_job_in_words(
    job: Job, tmp_path: Path, ranks: int, rank: int, how: str, words: str
) -> None:
    prepare(tmp_path, images=160, epochs=1)
    (tmp_path / "leaves.py").write_text(_LEAVES)
    outcome = job(ranks, ["leaves.py", how, str(rank), "train", "storm.yaml"], cwd=tmp_path)
    assert outcome.code != 0, outcome.output
    assert words in outcome.stderr
    assert outcome.seconds < 60
    assert os.listdir(tmp_path / "runs")
