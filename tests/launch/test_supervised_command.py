"""A supervised command gets each request once, keeps its exit code, and leaves no process, whatever becomes of its children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.support.jobs import Outcome, run_job

_START = """
import os, signal, sys, threading, time
from hpctrain.launch import supervised_command
from hpctrain.launch.supervised_command import SupervisedCommand
supervised_command.AGAIN_SECONDS = 0.3
supervised_command._INTERRUPTED_SECONDS = supervised_command._ORPHAN_SECONDS = 1.0
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


@pytest.mark.job
@pytest.mark.parametrize(("end", "code"), [("sys.exit(7)", 7), ("os._exit(0)", 0), ("os.kill(os.getpid(), 9)", 137)])
def test_the_code_of_the_command_is_kept(end: str, code: int) -> None:
    assert _run(f"print(run('import os, sys; {end}'))").stdout == f"{code}\n"


@pytest.mark.job
@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"])
def test_a_request_is_passed_on_once_as_one_that_all_launchers_pass_on(number: str) -> None:
    again = "(0.1, signal.SIGTERM), (0.6, signal.SIGTERM), (0.1, signal.SIGUSR1)"
    outcome = _run(f"later((1.0, signal.{number}), {again}); print(run({_LISTENS}), runner.request.name)")
    heard = [line for line in outcome.stdout.splitlines() if line.startswith("heard")]
    assert heard == ["heard SIGUSR1"], outcome.output
    assert outcome.stdout.endswith(f"85 {number}\n")
    assert f"{number} received: the training saves and ends, and is not started again" in outcome.stdout


@pytest.mark.job
def test_an_interrupt_behind_a_request_is_passed_on_too() -> None:
    outcome = _run(f"later((1.0, signal.SIGTERM), (0.6, signal.SIGINT)); print(run({_LISTENS}))")
    assert "heard SIGINT" in outcome.stdout
    assert outcome.stdout.endswith("130\n")


@pytest.mark.job
def test_a_command_that_does_not_listen_is_killed_after_an_interrupt() -> None:
    deaf = "'import signal, time; signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32)); time.sleep(60)'"
    outcome = _run(f"later((0.8, signal.SIGTERM), (0.6, signal.SIGINT)); print(run({deaf}))")
    assert outcome.stdout.endswith("137\n")
    assert outcome.seconds < 30


@pytest.mark.job
def test_a_request_ends_a_pause() -> None:
    program = "later((0.3, signal.SIGUSR1)); begin = time.monotonic(); runner.pause(60); print(time.monotonic() - begin < 10)"
    assert _run(program).stdout.endswith("True\n")


@pytest.mark.job
def test_the_command_is_in_no_group_that_a_terminal_interrupts() -> None:
    program = "import os, sys; print(os.getpgrp() == os.getpid(), sys.stdin.read() == '')"
    assert _run(f"run({program!r})").stdout == "True True\n"


@pytest.mark.job
def test_the_command_gets_no_mask() -> None:
    program = "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    assert _run(f"run({program!r})").stdout == "set()\n"


@pytest.mark.job
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


@pytest.mark.job
def test_a_command_that_is_not_there_is_refused() -> None:
    program = """
    from hpctrain.errors import LaunchError
    try:
        runner.run(["./nowhere"])
    except LaunchError as error:
        print(error)
    """
    assert _run(program).stdout == "./nowhere cannot be started: No such file or directory.\n"


@pytest.mark.job
def test_a_killed_supervisor_ends_its_command_in_good_order() -> None:
    program = _START + f"run({_LISTENS})"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        assert supervisor.stdout.readline() == "ready\n"
        os.kill(supervisor.pid, signal.SIGKILL)
        begin = time.monotonic()
        assert supervisor.stdout.readline() == "heard SIGTERM\n"
        assert time.monotonic() - begin < 2
