"""Processes that watch others: the end of each rank is reported, and a supervised command leaves no process running."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.core.text import place
from hpctrain_testing.run import Outcome, clean_environment, patched_program, run_job, wait_until
from tests.support.signal_storm import prepare

pytestmark = pytest.mark.job
_START = """
import os, signal, sys, threading, time
from hpctrain.launch import supervisor
from hpctrain.launch.supervisor import SupervisedCommand
supervisor.AGAIN_SECONDS = 0.3
supervisor._INTERRUPTED_SECONDS = supervisor._ORPHAN_SECONDS = 1.0
runner = SupervisedCommand(lambda sentence: print(sentence, flush=True))
def later(*requests):
    "Signals to this process: (seconds, number), one after the other."
    def send():
        for seconds, number in requests:
            time.sleep(seconds)
            os.kill(os.getpid(), number)
    threading.Thread(target=send, daemon=True).start()
def run(program):
    return runner.run([sys.executable, "-u", "-c", program])
"""
# Prints the requests that it gets; ends with 85 at the third, or after ten seconds.
_LISTENS = '''"""
import signal, sys, time
def heard(number, frame):
    print("heard", signal.Signals(number).name)
    if number == signal.SIGINT:
        sys.exit(130)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
    signal.signal(number, heard)
print("ready")
end = time.monotonic() + 2.5
while time.monotonic() < end:
    time.sleep(0.05)
sys.exit(85)
"""'''


def _run(program: str) -> Outcome:
    return run_job(0, ["-c", _START + textwrap.dedent(program)])


_NOWHERE = """
from hpctrain.core.errors import LaunchError
try:
    runner.run(["./nowhere"])
except LaunchError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("print(run('import sys; sys.exit(7)'))", "7"),
        ("print(run('import os; os._exit(0)'))", "0"),
        ("print(run('import os; os.kill(os.getpid(), 9)'))", "137"),
        # in no group that a terminal interrupts, and without a mask
        ("run('import os, sys; print(os.getpgrp() == os.getpid(), sys.stdin.read() == str())')", "True True"),
        ("run('import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, []))')", "set()"),
        (_NOWHERE, "Cannot start ./nowhere (No such file or directory); check its path and permissions."),
        (_NOWHERE.replace('["./nowhere"]', '["true", 200_000 * "x"]'), "Cannot start true (Argument list too long)."),
    ],
)
def test_a_command_keeps_its_code_and_runs_as_if_it_were_alone(program: str, said: str) -> None:
    assert _run(program).stdout == f"{said}\n"


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"])
def test_a_request_is_passed_on_once_as_one_that_all_launchers_pass_on(number: str) -> None:
    again = "(0.1, signal.SIGTERM), (0.6, signal.SIGTERM), (0.1, signal.SIGUSR1)"
    outcome = _run(f"later((1.0, signal.{number}), {again}); print(run({_LISTENS}), runner.request.name)")
    heard = [line for line in outcome.stdout.splitlines() if line.startswith("heard")]
    assert heard == ["heard SIGUSR1"], outcome.output
    assert outcome.stdout.endswith(f"85 {number}\n")
    assert f"{number} received: the training saves a checkpoint and ends, and is not restarted" in outcome.stdout


def test_an_interrupt_after_a_request_is_passed_on_too() -> None:
    outcome = _run(f"later((1.0, signal.SIGTERM), (0.6, signal.SIGINT)); print(run({_LISTENS}))")
    assert "heard SIGINT" in outcome.stdout
    assert outcome.stdout.endswith("130\n")


def test_a_command_that_does_not_listen_is_killed_after_an_interrupt() -> None:
    deaf = "'import signal, time; signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32)); time.sleep(60)'"
    outcome = _run(f"later((0.8, signal.SIGTERM), (0.6, signal.SIGINT)); print(run({deaf}))")
    assert outcome.stdout.endswith("137\n")
    assert outcome.seconds < 30


def test_a_request_ends_a_pause() -> None:
    program = "later((0.3, signal.SIGUSR1)); begin = time.monotonic(); runner.pause(60); print(time.monotonic() - begin < 10)"
    assert _run(program).stdout.endswith("True\n")


def test_processes_without_a_parent_are_waited_for_and_then_ended() -> None:
    """Two grandchildren outlive the command, one for a moment; one of them is in a session of its own."""
    program = (
        "import subprocess, sys; sleep = 'import time; time.sleep({})';"
        "short = subprocess.Popen([sys.executable, '-c', sleep.format(0.4)], start_new_session=True);"
        "long = subprocess.Popen([sys.executable, '-c', sleep.format(100)], start_new_session=True);"
        "print(short.pid, long.pid)"
    )
    outcome = _run(f"print(run({program!r}))")
    short, long, code = outcome.stdout.split()
    assert code == "0"
    assert not Path(f"/proc/{short}").exists()
    assert not Path(f"/proc/{long}").exists()


def test_a_killed_supervisor_ends_its_command_in_good_order() -> None:
    program = _START + f"run({_LISTENS})"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout.readline() == "ready\n"
        os.kill(supervisor.pid, signal.SIGKILL)
        begin = time.monotonic()
        assert supervisor.stdout.readline() == "heard SIGTERM\n"
        assert time.monotonic() - begin < 2


Job = Callable[..., Outcome]
_KEPT = """
import os, signal, sys, time
from hpctrain.launch.signals import hold
from hpctrain.launch.keeper import keep
started = os.getpid()
keeper = keep(None, hold(), lambda path, number, end, process: os.write(2, f"{path}: {number}\\n".encode()) > 0)
finished = keeper.finished
"""


def _kept(program: str, **env: str) -> Outcome:
    return run_job(0, ["-c", _KEPT + textwrap.dedent(program)], env=env)


_RECORDS = "from pathlib import Path; keeper.record(Path('/first')); keeper.record(Path('/latest')); "
_UNSAID = "the process exited with code {} before the run was over"
_SILENT = f"hpctrain: {_UNSAID}: something called exit() in it.\n"
_TELLS = {"MPI_LOCALNRANKS": "1"}


@pytest.mark.parametrize(
    ("program", "environ", "code", "words"),
    [
        *(
            (f"os._exit({code})", {}, 1, f"hpctrain: {_UNSAID.format(code)}: something called exit() in it.\n")
            for code in (0, 85)
        ),
        # Of a launcher that tells other ranks of ends by signals only.
        *((f"os._exit({code})", _TELLS, -9, _UNSAID.format(code)) for code in (0, 3)),
        *((f"finished(); sys.exit({code})", {}, code, "") for code in (0, 3, 85)),
        *((f"os._exit({code})", {}, code, "") for code in (1, 2, 124, 143)),  # which explain themselves
        ("os.kill(os.getpid(), 11)", {}, -11, "hpctrain: the process was ended by SIGSEGV"),
        ("os.kill(os.getpid(), 9)", {}, -9, "hpctrain: the process was ended by SIGKILL"),
        # The latest record of a killed rank is marked; so is an exit code that it does not explain: a library may call exit(1).
        (_RECORDS + "os.kill(os.getpid(), 9)", {}, -9, "/latest: 9\nhpctrain: "),
        (_RECORDS + "os._exit(1)", {}, 1, f"/latest: 1\nhpctrain: {_UNSAID.format(1)}"),
        (_RECORDS + "os._exit(130)", {}, 130, "/latest: 2\n"),
        (_RECORDS + "finished()", {}, 0, ""),
        (_RECORDS + "finished(); sys.exit(keeper.sender)", {"HPCTRAIN_KEEPER": "0"}, 0, ""),
        ("os.kill(started, signal.SIGSTOP); time.sleep(0.1); finished(); print('never')", {}, -9, ""),
    ],
)
def test_how_a_rank_ends_is_the_code_of_its_keeper_and_is_reported(program: str, environ: dict, code: int, words: str) -> None:
    outcome = _kept(program, **environ)
    assert (outcome.code, outcome.stdout) == (code, "")
    assert words in outcome.stderr
    if not words or words.endswith("\n"):
        assert outcome.stderr == words


def test_signals_reach_the_child() -> None:
    program = """
    os.kill(started, signal.SIGUSR1)
    print(signal.sigwaitinfo({signal.SIGUSR1}).si_pid == started, os.getppid() == started)
    finished()
    """
    assert _kept(program).stdout == "True True\n"


def test_a_killed_keeper_takes_its_rank_along() -> None:
    program = _KEPT + "print(os.getpid(), flush=True)\ntime.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as keeper:
        child = int(keeper.stdout.readline())
        assert child != keeper.pid
        keeper.kill()
        keeper.wait()
        wait_until(lambda: not _lives(child), 120)


def _lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):  # the process may end while its file is read
        return False


_LAUNCHER = """
import os, signal, subprocess, sys
rank = subprocess.Popen([sys.executable, "-c", sys.argv[1]], env={**os.environ, "PMI_RANK": "0", "MPI_LOCALNRANKS": "1"})
rank.wait()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_whose_launcher_is_gone_or_stopped_is_ended(number: signal.Signals) -> None:
    """A stopped launcher is killed as well, so that its parent learns of the end."""
    program = _KEPT + "keeper.pulse.watch(1.0)\nprint(os.getpid(), flush=True)\nwhile True: keeper.pulse.beat(); time.sleep(0.1)"
    command = [sys.executable, "-c", _LAUNCHER, program]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean_environment()
    ) as launcher:
        child = int(launcher.stdout.readline())
        launcher.send_signal(number)
        assert launcher.wait(60) == -signal.SIGKILL
        wait_until(lambda: not _lives(child), 120)
        assert f"({launcher.pid}) {'has ended' if number == signal.SIGKILL else 'was stopped'}" in launcher.stderr.read()


def test_a_suspended_job_goes_on() -> None:
    """All processes are stopped for longer than the deadline, and then resumed; the keeper wakes first."""
    program = _KEPT + "keeper.pulse.watch(3.0)\nprint(os.getpid(), flush=True)\n"
    program += "for _ in range(50): keeper.pulse.beat(); assert not keeper.pulse.look_at_keeper(0.1); time.sleep(0.1)\nfinished()"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as keeper:
        child = int(keeper.stdout.readline())
        for process in (child, keeper.pid):
            os.kill(process, signal.SIGSTOP)
        time.sleep(5)
        for process in (keeper.pid, child):
            os.kill(process, signal.SIGCONT)
        assert keeper.wait(60) == 0


@pytest.mark.parametrize("reason", ["HPCTRAIN_KEEPER is 0", "there is a thread"])
def test_without_a_keeper_the_process_is_the_one_that_was_started(reason: str) -> None:
    program = "import threading, time; threading.Thread(target=time.sleep, args=(1,)).start()\n" if "thread" in reason else ""
    environment = {"HPCTRAIN_KEEPER": "0"} if "KEEPER" in reason else {}
    outcome = run_job(0, ["-c", program + _KEPT + "print(os.getpid() == started); finished()"], env=environment)
    assert (outcome.code, outcome.stdout) == (0, "True\n")


# The program; rank RANK leaves in the middle of step 2 by what is said.
_LEAVES = """
how, rank = sys.argv.pop(1), int(sys.argv.pop(1))
def patch():
    from hpctrain.training.step import TrainingStep
    run = TrainingStep.run
    def leaving(self, batch, global_step, lr):
        if (here, global_step) == (rank, 2):
            exec(how)
        run(self, batch, global_step, lr)
    TrainingStep.run = leaving
"""


@pytest.mark.parametrize(
    ("ranks", "rank", "how", "words"),
    [
        (0, 0, "os._exit(0)", "hpctrain: the process exited with code 0 before the run was over"),
        (2, 1, "os._exit(0)", f"hpctrain: {place(1, 2)}the process exited with code 0 before the run was over"),
        (2, 0, "os._exit(0)", f"hpctrain: {place(0, 2)}the process exited with code 0 before the run was over"),
        (2, 1, "sys.exit()", f"{place(1, 2)}sys.exit() during a run ends the job."),
    ],
)
def test_a_rank_that_leaves_inside_a_step_ends_the_job_in_words(
    job, tmp_path: Path, ranks: int, rank: int, how: str, words: str
) -> None:
    prepare(tmp_path, images=160, epochs=1)
    (tmp_path / "leaves.py").write_text(patched_program(_LEAVES))
    outcome = job(ranks, ["leaves.py", how, str(rank), "train", "storm.yaml"], cwd=tmp_path)
    assert outcome.code != 0, outcome.output
    assert words in outcome.stderr
    assert outcome.seconds < 60
    assert os.listdir(tmp_path / "runs")
