"""Signals, standard streams, last words, and shared memory that dead ranks have left."""

import contextlib
import errno
import io
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from signal import Signals

import pytest

from hpctrain.core import log as rank_log
from hpctrain.core.text import place
from hpctrain.launch import process_end, process_start
from hpctrain.launch.process_end import flush_to_reader
from hpctrain.launch.process_start import HELD, STANDARD_OUTPUT, STOPS, ForgivingFile
from hpctrain.launch.shared_segments import Removed, _folder, forget, hint, limit_ucx, remember, remove_stale
from hpctrain.launch.signals import SignalWatch
from hpctrain.launch.supervisor import _is_broken
from hpctrain_testing.run import Outcome, clean_environment, run_job
from tests.cli.test_starting import folder as folder
from tests.support.sampling import amount
from tests.support.signal_storm import prepare

pytestmark = pytest.mark.job
_LEAVING = """
import os, signal, types
from hpctrain.launch import keeper
from hpctrain.launch.process_start import HELD
keeper._say = keeper._await_launcher = lambda *arguments: None
child = types.SimpleNamespace(rank=None, memory=types.SimpleNamespace(hint=str), place=str)
for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGALRM):
    process = os.fork()
    if not process:
        signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
        for pending in set(HELD) - {number}:
            os.kill(os.getpid(), pending)
        keeper._leave_by(number, child, None)
    print(number.name, os.WTERMSIG(os.waitpid(process, 0)[1]) == number)
"""


def test_the_keeper_ends_by_the_signal_of_its_child_whatever_other_signals_are_pending() -> None:
    """The timer of the keeper's looks may expire while it waits to end. Its signal would become the exit code of the job."""
    done = subprocess.run([sys.executable, "-c", _LEAVING], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["SIGKILL", "True", "SIGTERM", "True", "SIGSEGV", "True", "SIGALRM", "True"], done.stderr


_WITHOUT_MEANING = (Signals.SIGALRM, Signals.SIGPROF, Signals.SIGCHLD)
_START = """
import os, signal, sys, time
from hpctrain.launch import process_start, signals
signals.AGAIN_SECONDS = 0.3
held = process_start.hold()
watch = signals.SignalWatch(held, rank=0, at_once={at_once}).start()
def send(number, seconds=10):
    os.kill(os.getpid(), number)
"""


def _run(program: str, *, at_once: bool = False) -> Outcome:
    return run_job(0, ["-c", _START.format(at_once=at_once) + textwrap.dedent(program)])


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
    assert (
        outcome.stderr.count(f"hpctrain: {number.name} received: the run ends with a checkpoint as soon as a step is complete")
        == 1
    )


_PLACE = "def the_place(): send(signal.SIGUSR2); time.sleep(0.5)\nthe_place()\n"


@pytest.mark.parametrize(
    ("program", "at_once", "code", "said", "words"),
    [
        *((f"for _ in range(50): send({number:d}); time.sleep(1e-3)\n", False, 0, "False", ()) for number in _WITHOUT_MEANING),
        (_PLACE, False, 0, "False", ("SIGUSR2 received, the run continues; stacks of all threads:", "in the_place")),
        ("send(15); time.sleep(60)", True, 143, "", ("SIGTERM received: this process ends at once and writes no checkpoint.",)),
        ("send(1); time.sleep(0.3); watch.end_at_once()", False, 129, "", ("SIGHUP received",)),
        # After the close signals stay pending.
        ("watch.close(); send(15); time.sleep(0.2); assert signal.SIGTERM in signal.sigpending()", False, 0, "False", ()),
    ],
)
def test_what_a_signal_does(program: str, at_once: bool, code: int, said: str, words: tuple[str, ...]) -> None:
    outcome = _run(f"{program}\nprint(watch.asked())", at_once=at_once)
    assert (outcome.code, outcome.stdout.strip()) == (code, said), outcome.output
    assert all(each in outcome.stderr for each in words)
    assert words or not outcome.stderr


@pytest.mark.parametrize("first", [Signals.SIGINT, Signals.SIGTERM, Signals.SIGUSR1])
def test_an_interrupt_after_a_request_ends_a_process_that_hangs(first: Signals) -> None:
    # The interpreter lock is free in a kernel or in a wait for others, so the thread that waits for signals can speak.
    kept = "watch.keeps(lambda: '; two are kept')"
    outcome = _run(f"{kept}; send({first:d}); time.sleep(0.5); send({Signals.SIGINT:d}); time.sleep(60)")
    assert outcome.code == 128 + Signals.SIGINT
    assert "SIGINT received again: this process ends at once and writes no checkpoint; two are kept." in outcome.stderr
    assert outcome.seconds < 30


@pytest.mark.parametrize("again", [Signals.SIGTERM, Signals.SIGUSR1, Signals.SIGHUP])
def test_what_schedulers_send_again_loses_nothing(again: Signals) -> None:
    """They send it as often as they like; a person reads once that it takes its time."""
    more = f"time.sleep(0.5); send({again:d}); time.sleep(0.1); " * 2
    outcome = _run(f"send({Signals.SIGTERM:d}); {more}print('alive')")
    assert (outcome.code, outcome.stdout) == (0, "alive\n")
    assert outcome.stderr.count(f"{again.name} received again: the checkpoint is not written yet") == 1


def test_what_the_starter_ignores_stays_ignored() -> None:
    """As under `nohup`, and for the background jobs of scripts."""
    program = _START.format(at_once=True) + "send(signal.SIGHUP); time.sleep(0.3); print(len(held))"
    command = ["sh", "-c", 'trap "" HUP; exec "$0" -c "$1"', sys.executable, program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{len(HELD) - 1}\n", "")


def test_children_get_no_mask() -> None:
    outcome = _run(
        """
        import subprocess
        from hpctrain.launch import process_start
        show = [sys.executable, "-c", "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, []))"]
        subprocess.run(show, check=True, preexec_fn=process_start.release)
        """
    )
    assert outcome.stdout == "set()\n"


def test_without_a_thread_nothing_is_asked() -> None:
    watch = SignalWatch()
    watch.close()
    assert not watch.asked()


# The program; names what is loaded when the signals are blocked for the first time.
_LOADED = """
import signal, sys
def blocked(how, numbers, mask=signal.pthread_sigmask):
    if how == signal.SIG_BLOCK:
        print(len(numbers), *sorted(set(sys.modules) - before), flush=True)
        signal.pthread_sigmask = mask
    return mask(how, numbers)
signal.pthread_sigmask = blocked
before = set(sys.modules)
import runpy
sys.argv = ["hpctrain", "train", "nowhere.yaml"]
runpy.run_module("hpctrain", run_name="__main__", alter_sys=True)
"""


def test_the_mask_comes_before_all_else() -> None:
    outcome = run_job(0, ["-c", _LOADED])
    held, *loaded = outcome.stdout.splitlines()[0].split()
    assert int(held) == len(process_start.HELD)
    # Of the interpreter's own: what it takes to run a module.
    theirs = {"runpy", "pkgutil", "importlib.util", "importlib._abc", "importlib.machinery", "importlib", "types", "zipimport"}
    ours = {name for name in loaded if name.startswith("hpctrain")}
    assert ours == {
        "hpctrain",
        "hpctrain.version",
        "hpctrain.process",
        "hpctrain.process.start",
        "hpctrain.launch",
        "hpctrain.launch.process_start",
    }
    assert not {"typing", "threading", "ctypes", "dataclasses", "numpy", "click"} & (set(loaded) - theirs)


@pytest.mark.parametrize("closed", ["1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_a_run_with_closed_streams_trains_and_writes_into_no_file_of_its_own(tmp_path: Path, closed: str) -> None:
    prepare(tmp_path, images=64, epochs=1)
    command = f"exec {sys.executable} -m hpctrain train storm.yaml {closed}"
    done = subprocess.run(command, shell=True, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert "Traceback" not in done.stderr
    assert list((run / "checkpoints").glob("*.h5"))


@pytest.mark.parametrize("stream", [0, 1, 2])
def test_a_closed_descriptor_is_no_files(tmp_path: Path, stream: int) -> None:
    program = f"""
import os, sys
from hpctrain.launch.process_start import open_closed_streams
open_closed_streams()
open_closed_streams()
with open({str(tmp_path / "file")!r}, "wb") as file:
    print("words", file=(sys.stderr, sys.stdout, sys.stderr)[{stream}])
    os.write(2, b"more")
    file.write(b"%d" % (file.fileno() > 2))
    sys.stdin.read()
"""
    way = "<&-" if stream == 0 else ">&-"
    done = subprocess.run(
        f'{sys.executable} -c "$PROGRAM" {stream}{way} </dev/null' if stream else f'{sys.executable} -c "$PROGRAM" 0<&-',
        shell=True,
        env=clean_environment({"PROGRAM": program}),
        timeout=60,
    )
    assert (done.returncode, (tmp_path / "file").read_bytes()) == (0, b"1")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_process_that_is_about_to_be_ended_waits_for_its_reader(stream: str) -> None:
    program = f"""
import os, sys
from hpctrain.launch.process_end import flush_to_reader
sys.{stream}.write("words")
flush_to_reader(30.0)
os.kill(os.getpid(), 9)
"""
    with subprocess.Popen([sys.executable, "-c", program], env=clean_environment(), **{stream: subprocess.PIPE}) as process:
        time.sleep(1.0)
        assert process.poll() is None  # no process has read yet
        assert (getattr(process, stream).read(), process.wait(timeout=20)) == (b"words", -9)


def test_no_wait_is_longer_than_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    begin = time.monotonic()
    flush_to_reader(0.2)
    assert time.monotonic() - begin < 5.0


def test_characters_that_the_encoding_of_an_output_lacks_are_escapes() -> None:
    program = "from hpctrain.launch.process_start import open_closed_streams as o; o(); print('caf\\xe9')"
    environ = clean_environment() | {"PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "caf\\xe9\n"), done.stderr


@pytest.mark.parametrize("descriptor", [1, 2])
@pytest.mark.parametrize("number", [errno.EPIPE, errno.ENOSPC, errno.EIO, errno.EBADF, errno.ECONNRESET])
def test_no_failure_of_a_write_is_an_error_of_a_run(
    descriptor: int, number: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Data are dropped at every error of every stream. The first failure of standard output is reported, or raised."""
    written = os.write

    def fail(to: int, data: bytes) -> int:
        if to == descriptor and bytes(data) == b"words":
            raise OSError(number, os.strerror(number))
        return written(to, data)

    monkeypatch.setattr(os, "write", fail)
    file = ForgivingFile(descriptor)
    assert [file.write(b"words") for _ in range(3)] == [5, 5, 5]
    assert capfd.readouterr().err.count(f"({os.strerror(number)}); the run continues") == (descriptor == 1)
    file = ForgivingFile(descriptor, raises=True)
    with contextlib.nullcontext() if descriptor == 2 else pytest.raises(OSError, match=STANDARD_OUTPUT) as raised:
        assert file.write(b"") == 0
        file.write(b"words")
    assert descriptor == 2 or raised.value.errno == number
    assert file.write(b"words") == 5
    assert "run continues" not in capfd.readouterr().err


def test_a_pipe_that_another_program_made_non_blocking_is_waited_for() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    threading.Timer(0.2, os.read, (reader, 1 << 20)).start()
    assert sum(ForgivingFile(writer).write(bytes(1 << 16)) for _ in range(2)) >= 1 << 17
    os.close(writer)


_MOMENTS = ("before the first line", "in the middle", "at the end")


def _broken(folder: Path, arguments: Sequence[str], streams: str, moment: str) -> tuple[int, str]:
    """Return exit code and standard error of a command whose reader of `streams` ends at a moment."""
    reader, writer = os.pipe()
    out = writer if "stdout" in streams else subprocess.DEVNULL
    with tempfile.TemporaryFile() as errors:
        err = writer if "stderr" in streams else errors
        command, environ = [sys.executable, "-m", "hpctrain", *arguments], clean_environment()
        with subprocess.Popen(command, cwd=folder, env=environ, stdout=out, stderr=err) as process:
            os.close(writer)
            if moment != _MOMENTS[0]:
                os.read(reader, 64)
            while moment == _MOMENTS[2] and b"epoch 2/3" not in os.read(reader, 4096):
                pass
            os.close(reader)
            code = process.wait(timeout=100)
        errors.seek(0)
        return code, errors.read().decode()


@pytest.mark.slow
@pytest.mark.parametrize("case", range(amount(3, 18)))
def test_a_run_whose_output_has_no_reader_trains_on(case: int, tmp_path: Path) -> None:
    """The run ends with its last checkpoint and code 0 for all streams that break, moments and styles of progress."""
    prepare(tmp_path, images=64, epochs=3)
    streams = ("stdout", "stdout and stderr", "stderr")[case % 3]
    moment = _MOMENTS[0 if streams == "stderr" else case // 3 % 3]
    style = ("lines", "bar", "none")[(case + case // 9) % 3] if moment == _MOMENTS[0] else "lines"
    code, errors = _broken(tmp_path, ["train", "storm.yaml", f"--progress={style}"], streams, moment)
    assert code == 0, errors
    assert "Traceback" not in errors
    assert "Exception ignored" not in errors
    assert list(tmp_path.glob("runs/*/checkpoints/*.h5"))


@pytest.mark.parametrize("words", ["list models", "--version", "--help", "config list", "sites", "config schema"])
def test_a_command_that_prints_ends_as_a_filter_does(words: str, tmp_path: Path) -> None:
    """It ends with code 1 and no message if its reader ends, and with code 2 and one sentence on a full disk."""
    assert _broken(tmp_path, words.split(), "stdout", _MOMENTS[0]) == (1, "")
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "hpctrain", *words.split()]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=clean_environment(), check=False)
    assert (done.returncode, done.stderr) == (2, "hpctrain: standard output cannot be used: No space left on device.\n")


@pytest.mark.slow
def test_a_run_whose_output_finds_no_room_trains_on(tmp_path: Path) -> None:
    prepare(tmp_path, images=64, epochs=1)
    command = f"exec {sys.executable} -m hpctrain train storm.yaml >/dev/full"
    done = subprocess.run(
        command, shell=True, cwd=tmp_path, env=clean_environment(), stderr=subprocess.PIPE, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("cannot write to standard output (No space left on device); the run continues without it") == 1
    assert "Traceback" not in done.stderr
    assert list(tmp_path.glob("runs/*/checkpoints/*.h5"))


def test_a_supervised_command_gets_no_pipe_without_a_reader() -> None:
    """SIGPIPE would end a launcher that writes there, in each attempt."""
    reader, writer = os.pipe()
    assert not _is_broken(writer)
    os.close(reader)
    assert _is_broken(writer)
    os.close(writer)


@pytest.mark.parametrize("ranks", [2, 64, 4096])
def test_few_ranks_speak_at_a_time(ranks: int) -> None:
    turns = [process_end.turn_seconds(rank, 300.0) for rank in range(ranks)]
    assert (turns, turns[:4]) == (sorted(turns), [0.0, 1.0, 2.0, 2.0][:ranks])
    assert turns[-1] <= 13
    assert max(process_end.turn_seconds(rank, 2.0) for rank in range(ranks)) <= 0.5


def test_every_line_has_the_place_and_the_file_has_them_too(capfd: pytest.CaptureFixture[str], tmp_path: object) -> None:
    log = rank_log.begin_rank_log()
    try:
        process_end.say_last_words(3, ["nothing has moved;", "stacks of all threads:"])
        assert "nothing has moved" in log._waiting[-1]
        assert "in test_every_line_has_the_place" in log._waiting[-1]
    finally:
        rank_log.end_rank_log()
    lines = capfd.readouterr().err.splitlines()
    assert lines[:2] == [f"{place(3)}nothing has moved;", f"{place(3)}stacks of all threads:"]
    assert all(line.startswith(place(3)) for line in lines)
    assert any("in test_every_line_has_the_place" in line for line in lines)


def test_a_stream_takes_their_place(capfd: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    process_end.say_last_words(0, ["one", "two"], stream, stacks=False)
    assert (stream.getvalue(), capfd.readouterr().err) == ("one\ntwo\n", "")


# A process that has mapped segments and written that down, then ends as is said.
_PROGRAM = """
import mmap, os, signal, sys
from pathlib import Path
from hpctrain.launch.shared_segments import announce, remember
memory = Path(sys.argv[1])
maps = []
announce(memory)
for name in sys.argv[3:]:
    with open(memory / name, "w+b") as file:
        file.truncate(8192)
        maps.append(mmap.mmap(file.fileno(), 8192))
if sys.argv[2] in ("stay", "kill"):
    remember(memory)
print("ready", flush=True)
if sys.argv[2] in ("kill", "kill in start"):
    os.kill(os.getpid(), signal.SIGKILL)
sys.stdin.read()
"""


def _process(memory: Path, end: str, *names: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(_PROGRAM), str(memory), end, *names]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def _end(process: subprocess.Popen[str]) -> None:
    process.communicate("", timeout=30)


def test_what_a_killed_process_has_left_goes_once(tmp_path: Path) -> None:
    (tmp_path / "somebody-elses").write_bytes(b"x")
    _end(_process(tmp_path, "kill", "a", "b"))
    assert remove_stale(tmp_path) == Removed(2, 16384)
    assert sorted(path.name for path in tmp_path.iterdir()) == [_folder(tmp_path).name, "somebody-elses"]
    assert remove_stale(tmp_path) == Removed()


def test_what_a_living_process_uses_stays(tmp_path: Path) -> None:
    living = _process(tmp_path, "stay", "shared", "own")
    _end(_process(tmp_path, "kill", "shared", "left"))
    assert remove_stale(tmp_path) == Removed(1, 8192)
    assert (tmp_path / "shared").exists()
    assert (tmp_path / "own").exists()
    living.kill()
    _end(living)
    assert (living.returncode, remove_stale(tmp_path)) == (-signal.SIGKILL, Removed(2, 16384))


def test_what_a_process_that_was_killed_while_mpi_started_has_left_goes(tmp_path: Path) -> None:
    """Its segments are in no list: what MPIs call so goes, if no process has mapped it and it is of that time."""
    (tmp_path / "mpich_shm_older").write_bytes(b"x")
    _end(_process(tmp_path, "kill in start", "mpich_shm_left", "sm_segment.left", "data.npy"))
    assert remove_stale(tmp_path) == Removed(2, 16384)
    kept = ["data.npy", "mpich_shm_older", _folder(tmp_path).name]
    assert (sorted(path.name for path in tmp_path.iterdir()), list(_folder(tmp_path).iterdir())) == (sorted(kept), [])


def test_files_that_a_start_under_way_may_have_made_stay_until_it_is_over(tmp_path: Path) -> None:
    first = _process(tmp_path, "start", "mpich_shm_first")
    living = _process(tmp_path, "start", "mpich_shm_mapped")
    (tmp_path / "mpich_shm_not_mapped_yet").write_bytes(b"x")
    _end(_process(tmp_path, "kill in start", "mpich_shm_left"))
    assert remove_stale(tmp_path) == Removed()
    for process in (first, living):
        process.kill()
        _end(process)
    assert (remove_stale(tmp_path), list(_folder(tmp_path).iterdir())) == (Removed(4, 3 * 8192 + 1), [])


def test_a_process_that_ends_in_order_is_forgotten(tmp_path: Path) -> None:
    with open(tmp_path / "a", "w+b") as file:
        file.truncate(4096)
        with mmap.mmap(file.fileno(), 4096):
            remember(tmp_path)
    (entry,) = _folder(tmp_path).iterdir()
    assert str(tmp_path / "a") in entry.read_text()
    forget(tmp_path)
    assert list(_folder(tmp_path).iterdir()) == []


def test_entries_of_another_namespace_or_machine_are_left_alone(tmp_path: Path) -> None:
    _folder(tmp_path).mkdir(mode=0o700)
    (tmp_path / "a").write_bytes(b"x")
    entry = _folder(tmp_path) / "1-99"
    entry.write_text(f"another-boot pid:[1]\n{tmp_path / 'a'}\n")
    assert remove_stale(tmp_path) == Removed()
    assert entry.exists()
    assert (tmp_path / "a").exists()


@pytest.mark.parametrize("where", ["outside", "link"])
def test_nothing_but_files_in_the_memory_is_removed(tmp_path: Path, where: str) -> None:
    memory, victim = tmp_path / "memory", tmp_path / "victim"
    victim.write_text("kept")
    _folder(memory).mkdir(mode=0o700, parents=True)
    (memory / "link").symlink_to(victim)
    named = memory / "link" if where == "link" else victim
    _end(_process(memory, "kill", "a"))
    (entry,) = _folder(memory).iterdir()
    entry.write_text(f"{entry.read_text()}{named}\n")
    assert (remove_stale(memory), victim.read_text()) == (Removed(1, 8192), "kept")
    assert (memory / "link").is_symlink()


def test_a_folder_that_others_can_write_in_is_not_trusted(tmp_path: Path) -> None:
    _end(_process(tmp_path, "kill", "a"))
    _folder(tmp_path).chmod(0o777)
    assert remove_stale(tmp_path) == Removed()
    assert (tmp_path / "a").exists()


def test_a_job_removes_what_the_one_before_has_left(job: Callable[..., Outcome], folder: Path) -> None:
    """All ranks are killed at once, and their launcher with them. Jobs of other tests may be the ones that remove it."""
    killed = """
    import os, signal, sys, time
    from hpctrain.training.step import TrainingStep
    from tests.support.kills import shared_memory_of
    def end(self, *rest):
        with open(f"mapped-{os.getpid()}", "w") as file:
            file.write("\\n".join(map(str, shared_memory_of([os.getpid()]))))
        time.sleep(1)
        os.killpg(0, signal.SIGKILL)
    TrainingStep.run = end
    from hpctrain.__main__ import main
    sys.argv = ["hpctrain", "train", "tiny.yaml"]
    main()
    """
    outcome = job(2, ["-c", textwrap.dedent(killed)], cwd=folder, env={"PYTHONPATH": str(Path(__file__).parents[2])})
    assert outcome.code != 0
    mapped = {Path(line) for file in folder.glob("mapped-*") for line in file.read_text().splitlines()}
    left = {path for path in mapped if path.exists()}
    outcome = job(2, ["-m", "hpctrain", "train", "tiny.yaml"], cwd=folder)
    assert outcome.code == 0, outcome.output
    assert not any(path.exists() for path in left)


@pytest.mark.parametrize(("megabytes", "ranks", "usual"), [(64, 8, True), (64, 9, False), (64, 60, False), (10, 1, False)])
def test_ucx_has_no_shared_memory_where_it_would_crash(
    megabytes: int, ranks: int, usual: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    blocks = megabytes * 1000
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((1000, 1000, blocks, blocks, blocks, 0, 0, 0, 0, 255)))
    monkeypatch.setattr(os, "environ", {})
    limit_ucx(ranks, tmp_path)
    assert os.environ == ({} if usual else {"UCX_TLS": "^posix"})
    monkeypatch.setattr(os, "environ", {"UCX_TLS": "rc"})
    limit_ucx(ranks, tmp_path)
    assert os.environ == {"UCX_TLS": "rc"}
    assert hint(tmp_path) == ("" if megabytes > 16 else f" ({tmp_path}, where MPI keeps messages, has {megabytes} MB left)")
