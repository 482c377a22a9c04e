"""Signals of a process that computes: blocked in every thread, taken by one, never in the way of a child or a deadline."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from signal import Signals

import pytest

from hpctrain.launch.signals import HELD, STOPS, SignalWatch
from hpctrain.speaker import place
from tests.support.jobs import Outcome, run_job

_START = """
import os, signal, sys, time
from hpctrain.launch import signals
signals.AGAIN_SECONDS = 0.3
held = signals.hold()
watch = signals.SignalWatch(held, rank=0, at_once={at_once}).start()
def send(number, seconds=10):
    os.kill(os.getpid(), number)
"""


def _run(program: str, *, at_once: bool = False) -> Outcome:
    return run_job(0, ["-c", _START.format(at_once=at_once) + textwrap.dedent(program)])


@pytest.mark.job
@pytest.mark.parametrize("number", STOPS)
def test_a_stop_is_remembered_and_said_once(number: Signals) -> None:
    outcome = _run(
        f"""
        for _ in range(50):
            send({number:d})
            time.sleep(1e-3)
        while not watch.asked():
            time.sleep(0.01)
        print(watch.request.name)
        """
    )
    assert (outcome.code, outcome.stdout) == (0, f"{number.name}\n"), outcome.output
    assert outcome.stderr.count(f"hpctrain: {number.name} received: the run ends after this step with a checkpoint") == 1


@pytest.mark.job
@pytest.mark.parametrize("number", [Signals.SIGALRM, Signals.SIGPROF, Signals.SIGCHLD])
def test_signals_without_a_meaning_do_nothing(number: Signals) -> None:
    outcome = _run(f"for _ in range(50): send({number:d}); time.sleep(1e-3)\nprint(watch.asked())")
    assert (outcome.code, outcome.stdout, outcome.stderr) == (0, "False\n", "")


@pytest.mark.job
def test_usr2_prints_all_stacks_and_the_program_goes_on() -> None:
    outcome = _run(
        """
        def the_place():
            send(signal.SIGUSR2)
            time.sleep(0.5)
        the_place()
        print(watch.asked())
        """
    )
    assert (outcome.code, outcome.stdout) == (0, "False\n")
    assert f"{place(0)}SIGUSR2 received, the run goes on; stacks of all threads:" in outcome.stderr
    assert "in the_place" in outcome.stderr


@pytest.mark.job
@pytest.mark.parametrize("first", [Signals.SIGINT, Signals.SIGTERM, Signals.SIGUSR1])
def test_an_interrupt_after_a_request_ends_a_process_that_hangs(first: Signals) -> None:
    # The interpreter lock is free in a kernel or in a wait for others, so the thread that waits for signals can speak.
    kept = "watch.keeps(lambda: '; two are kept')"
    outcome = _run(f"{kept}; send({first:d}); time.sleep(0.5); send({Signals.SIGINT:d}); time.sleep(60)")
    assert outcome.code == 128 + Signals.SIGINT
    assert "SIGINT received again: this process ends at once and writes no checkpoint; two are kept." in outcome.stderr
    assert outcome.seconds < 30


@pytest.mark.job
@pytest.mark.parametrize("again", [Signals.SIGTERM, Signals.SIGUSR1, Signals.SIGHUP])
def test_what_schedulers_send_again_loses_nothing(again: Signals) -> None:
    """They send it as often as they like; a person is told once that it takes its time."""
    more = f"time.sleep(0.5); send({again:d}); time.sleep(0.1); " * 2
    outcome = _run(f"send({Signals.SIGTERM:d}); {more}print('alive')")
    assert (outcome.code, outcome.stdout) == (0, "alive\n")
    assert outcome.stderr.count(f"{again.name} received again: the checkpoint is still to come") == 1


@pytest.mark.job
def test_where_nothing_can_be_saved_a_request_ends_the_process() -> None:
    outcome = _run("send(signal.SIGTERM); time.sleep(60)", at_once=True)
    assert outcome.code == 128 + signal.SIGTERM
    assert "SIGTERM received: this process ends at once and writes no checkpoint." in outcome.stderr


@pytest.mark.job
def test_a_request_from_before_ends_the_process_once_nothing_can_be_saved() -> None:
    outcome = _run("send(signal.SIGHUP); time.sleep(0.3); watch.end_at_once(); print('alive')")
    assert (outcome.code, outcome.stdout) == (128 + signal.SIGHUP, "")


@pytest.mark.job
def test_after_the_close_signals_stay_pending() -> None:
    outcome = _run("watch.close(); send(signal.SIGTERM); time.sleep(0.2); print(signal.sigpending(), watch.asked())")
    assert outcome.code == 0
    assert "SIGTERM" in outcome.stdout
    assert "False" in outcome.stdout


@pytest.mark.job
def test_what_the_starter_ignores_stays_ignored() -> None:
    """As under `nohup`, and for the background jobs of scripts."""
    program = _START.format(at_once=True) + "send(signal.SIGHUP); time.sleep(0.3); print(len(held))"
    command = ["sh", "-c", 'trap "" HUP; exec "$0" -c "$1"', sys.executable, program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{len(HELD) - 1}\n", "")


@pytest.mark.job
def test_children_get_no_mask() -> None:
    outcome = _run(
        """
        import subprocess
        show = [sys.executable, "-c", "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, []))"]
        subprocess.run(show, check=True, preexec_fn=signals.release)
        """
    )
    assert outcome.stdout == "set()\n"


def test_without_a_thread_nothing_is_asked() -> None:
    watch = SignalWatch()
    watch.close()
    assert not watch.asked()


@pytest.mark.job
def test_a_process_with_a_new_rank_speaks_as_that() -> None:
    """Rank 0 alone says what concerns all; where it is lost, another one is rank 0."""
    program = "watch.renumber({}); send(signal.SIGTERM)\nwhile not watch.asked(): time.sleep(0.01)\ntime.sleep(0.1)"
    assert _run(program.format(2)).stderr == ""
    assert "hpctrain: SIGTERM received" in _run(program.format(0)).stderr
