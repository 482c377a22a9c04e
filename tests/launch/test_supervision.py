"""Processes that watch others: keepers of ranks, their pulse, supervised commands, and the rules of starting again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from signal import Signals

import pytest

from hpctrain.launch.pulse import Pulse
from hpctrain.launch.supervisor import Attempt, Rules, Supervisor, Traces, summary
from hpctrain.launch.train_command import TrainCommand
from hpctrain.speaker import place
from tests.support.jobs import Outcome, clean_environment, run_job
from tests.support.signal_storm import prepare

_WORDS = ["srun", "-n", "2", "python", "-m", "mpi4py", "-m", "hpctrain", "train", "a.yaml"]

_NOTHING = Traces()


def _wrote(step: int, node: str = "") -> Traces:
    run = Path("runs/a-1")
    return Traces(run, run / f"checkpoint-{step:08d}.h5", step + 2, "Rank 1 was ended by SIGKILL.", node)


class _Runner:
    """Ends each attempt with the next code; a code may be a signal: then somebody has asked for the end with it, code 85."""

    def __init__(self, codes: Sequence[int | Signals], asked_in_pause: int = 0) -> None:
        self.request: Signals | None = None
        self.ran: list[tuple[str, ...]] = []
        self.pauses: list[float] = []
        self._codes, self._asked_in_pause = iter(codes), asked_in_pause

    def run(self, words: Sequence[str]) -> int:
        self.ran.append(tuple(words))
        code = next(self._codes)
        if isinstance(code, Signals):
            self.request, code = code, 85
        return code

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        if len(self.pauses) == self._asked_in_pause:
            self.request = Signals.SIGTERM


def _run(runner: _Runner, traces: Sequence[Traces], restarts: int = 3, **options: bool) -> tuple[int, list[Attempt], list[str]]:
    left, kept, said = iter(traces), [], []
    rules = Rules(restarts, 5.0, **options)
    command = TrainCommand.find(_WORDS)
    supervisor = Supervisor(command, rules, runner, look=lambda: next(left), keep=kept.append, say=said.append)
    code = supervisor.run()
    assert supervisor.attempts == kept
    return code, kept, said


@pytest.mark.parametrize(("code", "words"), [(0, "done"), (85, "stopped with a checkpoint"), (2, "would fail alike")])
def test_what_ends_well_or_would_fail_alike_is_not_started_again(code: int, words: str) -> None:
    ended, attempts, said = _run(_Runner([code]), [_wrote(4)])
    assert (ended, len(attempts)) == (code, 1)
    assert words in said[0]


def test_failures_in_a_row_are_counted_and_pauses_grow() -> None:
    runner = _Runner([9] * 9)
    code, attempts, said = _run(runner, [_NOTHING] * 9, restarts=8)
    assert (code, len(attempts)) == (9, 9)
    assert runner.pauses == [5, 10, 20, 40, 80, 160, 300, 300]
    assert "given up after 9 failures without a new checkpoint" in said[-1]
    assert set(runner.ran) == {tuple(_WORDS)}, "without a checkpoint the command is repeated as it was given"


def test_without_restarts_a_failure_is_the_end() -> None:
    runner = _Runner([1])
    assert (_run(runner, [_wrote(3)], restarts=0)[0], runner.pauses) == (1, [])


def test_a_new_checkpoint_lets_the_count_begin_anew() -> None:
    runner = _Runner([9, 9, 139, 9, 0])
    code, attempts, _ = _run(runner, [_NOTHING, _NOTHING, _wrote(4), _NOTHING, _wrote(9)], restarts=2)
    assert (code, len(attempts)) == (0, 5)
    assert runner.pauses == [5, 10, 5, 10]
    resumed = TrainCommand.find(_WORDS).resumed(Path("runs/a-1")).words
    assert runner.ran == [tuple(_WORDS)] * 3 + [resumed] * 2


def test_with_requeue_a_time_limit_is_no_end() -> None:
    runner = _Runner([85, 85, 0])
    assert (_run(runner, [_wrote(4), _wrote(8), _wrote(9)], restarts=0, requeue=True)[0], runner.pauses) == (0, [0, 0])


def test_a_stop_without_progress_counts_as_a_failure() -> None:
    """Else it would be started again for ever."""
    assert len(_run(_Runner([85] * 3), [_NOTHING] * 3, restarts=2, requeue=True)[1]) == 3


def test_who_asks_for_the_end_gets_it() -> None:
    code, attempts, said = _run(_Runner([Signals.SIGINT]), [_wrote(4)], requeue=True)
    assert (code, len(attempts)) == (85, 1)
    assert "stopped by SIGINT" in said[0]


@pytest.mark.parametrize(("traces", "code"), [(_wrote(4), 85), (_NOTHING, 143)])
def test_a_request_in_a_pause_ends_it(traces: Traces, code: int) -> None:
    """With a checkpoint there is something to go on from, as 85 promises."""
    runner = _Runner([9], asked_in_pause=1)
    assert _run(runner, [traces])[0] == code


def test_a_node_that_failed_twice_is_left_out() -> None:
    runner = _Runner([9, 9, 9, 0])
    traces = [_wrote(4, "n3"), _wrote(6, "n5"), _wrote(8, "n3"), _wrote(9)]
    _, attempts, said = _run(runner, traces, excludes=True)
    assert [attempt.excluded for attempt in attempts] == [(), (), (), ("n3",)]
    assert [words[1] for words in runner.ran] == ["-n", "-n", "-n", "--exclude=n3"]
    assert "starts again in 5 s without n3 from the newest checkpoint of runs/a-1" in said[2]


def test_nodes_stay_where_they_cannot_be_left_out() -> None:
    runner = _Runner([9, 9, 0])
    _run(runner, [_wrote(4, "n3"), _wrote(6, "n3"), _wrote(9)])
    assert [words[1] for words in runner.ran] == ["-n", "-n", "-n"]


def test_all_attempts_are_told() -> None:
    _, attempts, _ = _run(_Runner([9, 0]), [_wrote(4, "n3"), _NOTHING])
    first, second = summary(attempts)
    assert first.startswith("attempt 1: 2")
    assert first.endswith("exit code 9, reached step 6; Rank 1 was ended by SIGKILL.")
    assert second.endswith("exit code 0, reached no step")
    record = json.loads(json.dumps(attempts[0].as_json()))
    assert (record["attempt"], record["code"], record["step"], record["node"]) == (1, 9, 6, "n3")
    assert record["checkpoint"] == "runs/a-1/checkpoint-00000004.h5"


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


def _supervised_command_run(program: str) -> Outcome:
    return run_job(0, ["-c", _START + textwrap.dedent(program)])


@pytest.mark.job
@pytest.mark.parametrize(("end", "code"), [("sys.exit(7)", 7), ("os._exit(0)", 0), ("os.kill(os.getpid(), 9)", 137)])
def test_the_code_of_the_command_is_kept(end: str, code: int) -> None:
    assert _supervised_command_run(f"print(run('import os, sys; {end}'))").stdout == f"{code}\n"


@pytest.mark.job
@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"])
def test_a_request_is_passed_on_once_as_one_that_all_launchers_pass_on(number: str) -> None:
    again = "(0.1, signal.SIGTERM), (0.6, signal.SIGTERM), (0.1, signal.SIGUSR1)"
    outcome = _supervised_command_run(f"later((1.0, signal.{number}), {again}); print(run({_LISTENS}), runner.request.name)")
    heard = [line for line in outcome.stdout.splitlines() if line.startswith("heard")]
    assert heard == ["heard SIGUSR1"], outcome.output
    assert outcome.stdout.endswith(f"85 {number}\n")
    assert f"{number} received: the training saves and ends, and is not started again" in outcome.stdout


@pytest.mark.job
def test_an_interrupt_behind_a_request_is_passed_on_too() -> None:
    outcome = _supervised_command_run(f"later((1.0, signal.SIGTERM), (0.6, signal.SIGINT)); print(run({_LISTENS}))")
    assert "heard SIGINT" in outcome.stdout
    assert outcome.stdout.endswith("130\n")


@pytest.mark.job
def test_a_command_that_does_not_listen_is_killed_after_an_interrupt() -> None:
    deaf = "'import signal, time; signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32)); time.sleep(60)'"
    outcome = _supervised_command_run(f"later((0.8, signal.SIGTERM), (0.6, signal.SIGINT)); print(run({deaf}))")
    assert outcome.stdout.endswith("137\n")
    assert outcome.seconds < 30


@pytest.mark.job
def test_a_request_ends_a_pause() -> None:
    program = "later((0.3, signal.SIGUSR1)); begin = time.monotonic(); runner.pause(60); print(time.monotonic() - begin < 10)"
    assert _supervised_command_run(program).stdout.endswith("True\n")


@pytest.mark.job
def test_the_command_is_in_no_group_that_a_terminal_interrupts() -> None:
    program = "import os, sys; print(os.getpgrp() == os.getpid(), sys.stdin.read() == '')"
    assert _supervised_command_run(f"run({program!r})").stdout == "True True\n"


@pytest.mark.job
def test_the_command_gets_no_mask() -> None:
    program = "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    assert _supervised_command_run(f"run({program!r})").stdout == "set()\n"


@pytest.mark.job
def test_processes_without_a_parent_are_waited_for_and_then_ended() -> None:
    """Two grandchildren outlive the command, one for a moment; one of them is in a session of its own."""
    program = (
        "import subprocess, sys; sleep = 'import time; time.sleep({})';"
        "short = subprocess.Popen([sys.executable, '-c', sleep.format(0.4)], start_new_session=True);"
        "long = subprocess.Popen([sys.executable, '-c', sleep.format(100)], start_new_session=True);"
        "print(short.pid, long.pid)"
    )
    outcome = _supervised_command_run(f"print(run({program!r}))")
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
    assert _supervised_command_run(program).stdout == "./nowhere cannot be started: No such file or directory.\n"


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


Job = Callable[..., Outcome]

_keeper_START = """
import os, signal, sys, time
from hpctrain.launch.signals import hold
from hpctrain.launch.keeper import keep
started = os.getpid()
keeper = keep(None, hold(), lambda path, number, end, process: os.write(2, f"{path}: {number}\\n".encode()) > 0)
finished = keeper.finished
"""


def _keeper_run(program: str, **env: str) -> Outcome:
    return run_job(0, ["-c", _keeper_START + textwrap.dedent(program)], env=env)


@pytest.mark.job
@pytest.mark.parametrize("code", [0, 85])
def test_an_end_without_a_word_is_a_failure(code: int) -> None:
    """85 promises a checkpoint, and jobs are queued again on it."""
    outcome = _keeper_run(f"os._exit({code})")
    assert outcome.code == 1
    sentence = f"the process left with exit code {code} before the run was over: something called exit() in it."
    assert outcome.stderr == f"hpctrain: {sentence}\n"


@pytest.mark.job
@pytest.mark.parametrize("code", [0, 3])
@pytest.mark.parametrize("environ", [{"OMPI_MCA_mpi_ft_enable": "1"}, {"MPI_LOCALNRANKS": "1"}])
def test_an_end_without_a_word_is_one_by_a_signal_where_a_launcher_tells_other_ranks_of_those(
    code: int, environ: dict[str, str]
) -> None:
    outcome = _keeper_run(f"os._exit({code})", **environ)
    assert outcome.code == -signal.SIGKILL
    assert f"the process left with exit code {code} before the run was over" in outcome.stderr


@pytest.mark.job
@pytest.mark.parametrize("code", [0, 3, 85])
def test_a_finished_process_keeps_its_code(code: int) -> None:
    outcome = _keeper_run(f"finished(); sys.exit({code})")
    assert (outcome.code, outcome.stdout, outcome.stderr) == (code, "", "")


@pytest.mark.job
@pytest.mark.parametrize("code", [1, 2, 124, 143])
def test_an_end_that_explains_itself_is_not_explained_again(code: int) -> None:
    outcome = _keeper_run(f"os._exit({code})")
    assert (outcome.code, outcome.stderr) == (code, "")


@pytest.mark.job
@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL])
def test_an_end_by_a_signal_stays_one(number: signal.Signals) -> None:
    outcome = _keeper_run(f"os.kill(os.getpid(), {number:d})")
    assert outcome.code == -number
    assert f"hpctrain: the process was ended by {number.name}" in outcome.stderr


@pytest.mark.job
def test_the_record_of_a_killed_rank_is_marked() -> None:
    """The latest one that it has told of; and none of a rank that ends by itself."""
    told = "keeper.record(Path('/first')); keeper.record(Path('/latest'))"
    killed = _keeper_run(f"from pathlib import Path; {told}; os.kill(os.getpid(), signal.SIGKILL)")
    assert killed.stderr.startswith(f"/latest: {signal.SIGKILL:d}\n")
    assert "/first" not in killed.stderr
    left = _keeper_run(f"from pathlib import Path; {told}; finished()")
    assert (left.code, left.stderr) == (0, "")


@pytest.mark.job
def test_a_process_without_a_keeper_has_one_that_hears_nothing() -> None:
    outcome = _keeper_run(
        "from pathlib import Path; keeper.record(Path('/x')); finished(); print(keeper.said)", HPCTRAIN_KEEPER="0"
    )
    assert (outcome.code, outcome.stdout, outcome.stderr) == (0, "None\n", "")


@pytest.mark.job
def test_signals_reach_the_child() -> None:
    program = """
    os.kill(started, signal.SIGUSR1)
    print(signal.sigwaitinfo({signal.SIGUSR1}).si_pid == started, os.getppid() == started)
    finished()
    """
    assert _keeper_run(program).stdout == "True True\n"


@pytest.mark.job
def test_a_killed_keeper_takes_its_rank_along() -> None:
    program = _keeper_START + "print(os.getpid(), flush=True)\ntime.sleep(60)"
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
    outcome = _keeper_run(f"{told}; os._exit(1)")
    assert outcome.stderr.startswith("/record: 1\nhpctrain: the process left with exit code 1 before the run was over")
    assert _keeper_run(f"{told}; os._exit(130)").stderr == "/record: 2\n"


@pytest.mark.job
def test_a_rank_ends_a_keeper_that_stays_stopped() -> None:
    outcome = _keeper_run("os.kill(started, signal.SIGSTOP); time.sleep(0.1); finished(); print('never')")
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
    program = (
        _keeper_START
        + "keeper.pulse.watch(1.0)\nprint(os.getpid(), flush=True)\nwhile True: keeper.pulse.beat(); time.sleep(0.1)"
    )
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
    program = _keeper_START + "keeper.pulse.watch(3.0)\nprint(os.getpid(), flush=True)\n"
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
    outcome = run_job(0, ["-c", program + _keeper_START + "print(os.getpid() == started); finished()"], env=environment)
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
def test_a_rank_that_leaves_inside_a_step_ends_the_job_in_words(job, ranks: int, rank: int, how: str, words: str) -> None:
    prepare(tmp_path, images=160, epochs=1)
    (tmp_path / "leaves.py").write_text(_LEAVES)
    outcome = job(ranks, ["leaves.py", how, str(rank), "train", "storm.yaml"], cwd=tmp_path)
    assert outcome.code != 0, outcome.output
    assert words in outcome.stderr
    assert outcome.seconds < 60
    assert os.listdir(tmp_path / "runs")


def _looks(pulse: Pulse, count: int) -> list[bool]:
    return [pulse.look(1.0) for _ in range(count)]


def test_one_that_nobody_watches_may_stand_still() -> None:
    pulse = Pulse()
    assert not any(_looks(pulse, 100))
    pulse.watch(3.0)
    pulse.rest()
    assert not any(_looks(pulse, 100))


def test_one_that_beats_lives() -> None:
    pulse = Pulse()
    pulse.watch(3.0)
    for _ in range(20):
        assert not any(_looks(pulse, 3))
        pulse.beat()


def test_one_that_stands_still_for_the_deadline_does_not() -> None:
    pulse = Pulse()
    pulse.watch(3.0)
    assert _looks(pulse, 5) == [False, False, False, True, True]  # the first look sees that it is watched


def test_a_keeper_that_stands_still_for_the_deadline_does_not() -> None:
    pulse = Pulse()
    pulse.watch(3.0)
    assert not any(pulse.look_at_keeper(1.0) for _ in range(100))  # there is none
    pulse.keep()
    assert [pulse.look_at_keeper(1.0) for _ in range(5)] == [False, False, False, True, True]
    pulse.keep()
    assert not pulse.look_at_keeper(1.0)
