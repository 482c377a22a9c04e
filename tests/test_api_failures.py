"""Programs with a loop of their own that die, hang or are stopped: what is said, the exit code, and what is kept."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import hpctrain
from hpctrain.cli.main import cli
from hpctrain.core.text import place
from hpctrain.flight.ring import file_name, read
from hpctrain.launch.process_end import DEADLINE, STOPPED, End
from hpctrain.launch.process_start import STOPS
from hpctrain.storage import checkpoint
from hpctrain_testing.run import Outcome
from tests.test_api import alone_without_a_launcher as alone_without_a_launcher

ROOT = Path(__file__).parents[1]
Job = Callable[..., Outcome]

#: a program of 6 steps; FAULT comes on the last rank before the fourth, END is called after each. Keywords are of `start`
PROGRAM = """
import os, signal, sys, time
import numpy as np
import hpctrain
from tests.support import nets
images, labels = np.random.default_rng(0).standard_normal((24, 9, 7, 3)), np.arange(24) % 4
with hpctrain.start(batch=8, progress="test", @KEYWORDS@) as job:
    replica = job.replica(nets.plain(), (9, 7, 3), optimizer={"name": "sgd", "momentum": 0.9}, backend="numpy")
    loader = job.array_loader(replica, images, labels)
    if os.path.exists("half.h5"):
        job.load(replica, "half.h5")
    while replica.global_step < 6:
        epoch, step = divmod(replica.global_step, 3)
        for batch in loader.epoch(epoch, step * 8):
            if replica.global_step == 3 and job.rank == job.size - 1:
                @FAULT@
            replica.step(batch, 0.05)
            @END@
    job.save(replica, "whole.h5")
    job.print("all steps are done")
"""
FAILS = "raise ValueError('mine alone')"
STOPS_ITSELF = "os.path.exists('half.h5') or (os.kill(os.getpid(), signal.SIGTERM), time.sleep(0.5))"
SAVES = "if job.stop_requested: job.save(replica, 'half.h5', background=True); job.stop()"


def run(
    job: Job, ranks: int, folder: Path, fault: str = "pass", end: str = "pass", *, keywords: str = "flight='flight'", **more: Any
) -> Outcome:
    text = PROGRAM.replace("@KEYWORDS@", keywords).replace("@FAULT@", fault).replace("@END@", end)
    (folder / "program.py").write_text(text)
    return job(ranks, ["program.py"], cwd=folder, env={"PYTHONPATH": str(ROOT)}, **more)


def autopsy(folder: Path) -> dict[str, Any]:
    result = CliRunner().invoke(cli, ["autopsy", str(folder / "flight"), "--json"])
    assert result.exit_code == 0, result.output
    findings: dict[str, Any] = json.loads(result.output)
    return findings


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("through_mpi4py", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_an_error_of_one_rank_ends_the_job_with_its_traceback_once(
    job: Job, ranks: int, through_mpi4py: bool, tmp_path: Path
) -> None:
    outcome = run(job, ranks, tmp_path, FAILS, through_mpi4py=through_mpi4py)
    assert outcome.code == 1, outcome.output
    assert outcome.stderr.count("ValueError: mine alone") == outcome.stderr.count("Traceback") == 1
    assert f"\n{place(ranks - 1, ranks) if ranks > 1 else ''}Traceback" in f"\n{outcome.stderr}"
    findings = autopsy(tmp_path)
    assert findings["findings"][0].startswith(f"Rank {ranks - 1} failed first: ValueError: mine alone")
    assert len(findings["ranks"]) == ranks


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_wrong_call_is_one_sentence_with_its_line(job: Job, ranks: int, tmp_path: Path) -> None:
    outcome = run(job, ranks, tmp_path, "replica.step(batch, rate=0.05)")
    assert outcome.code == 2, outcome.output
    assert outcome.stderr.count("TypeError: Replica.step() got an unexpected keyword argument 'rate' (program.py, line") == 1
    assert "Traceback" not in outcome.output


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_learning_rate_of_its_own_on_one_rank_ends_the_job(job: Job, ranks: int, tmp_path: Path) -> None:
    outcome = run(job, ranks, tmp_path, "replica.step(batch, 0.06); continue")
    assert outcome.code == 2, outcome.output
    sentence = f"Rank {ranks - 1} has other values in step 4 than rank 0: lr is 0.06, not 0.05; make lr"
    assert outcome.stderr.count(sentence) == 1, outcome.output
    assert not (tmp_path / "whole.h5").exists()


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [0, 1, 3])
def test_a_rank_that_hangs_outside_of_waits_is_ended_and_named(job: Job, ranks: int, tmp_path: Path) -> None:
    keywords = "flight='flight', deadline_seconds=4"
    outcome = run(job, ranks, tmp_path, "time.sleep(1000)", keywords=keywords)
    assert outcome.code in (DEADLINE, 1), outcome.output  # of Open MPI's launcher
    last = max(ranks, 1) - 1
    assert f"Rank {last} was in the program, between steps, step 3 for" in " ".join(autopsy(tmp_path)["findings"])
    assert "autopsy: " in outcome.stderr


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_that_all_hang_alike_are_ended(job: Job, ranks: int, tmp_path: Path) -> None:
    outcome = run(job, ranks, tmp_path, end="replica.global_step != 3 or time.sleep(1000)", keywords="deadline_seconds=4")
    assert outcome.code in (DEADLINE, 1), outcome.output
    assert "no progress within the deadline of 4 s, in the program, between steps, step 3" in outcome.stderr
    assert not (tmp_path / "flight").exists()


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [1, 3])
def test_one_that_was_killed_is_in_the_records(job: Job, ranks: int, tmp_path: Path) -> None:
    outcome = run(job, ranks, tmp_path, "os.kill(os.getpid(), 9)")
    assert outcome.code != 0
    state = autopsy(tmp_path)["ranks"][-1]
    assert (state["rank"], state["step"], state["end"]) == (ranks - 1, 3, "unknown")


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [0, 1, 2, 3])
def test_a_request_to_stop_saves_and_the_next_start_goes_on_bit_by_bit(job: Job, ranks: int, tmp_path: Path) -> None:
    keywords, whole, stopped = "signals=True, flight='flight'", tmp_path / "whole", tmp_path / "stopped"
    whole.mkdir()
    stopped.mkdir()
    assert run(job, ranks, whole, end=SAVES, keywords=keywords).code == 0
    outcome = run(job, ranks, stopped, STOPS_ITSELF, SAVES, keywords=keywords)
    assert outcome.code == STOPPED, outcome.output
    assert "all steps are done" not in outcome.stdout
    assert {state["end"] for state in autopsy(stopped)["ranks"]} == {"finished"}
    assert checkpoint.read(stopped / "half.h5").meta["position"]["global_step"] == 5  # type: ignore[index]
    again = run(job, ranks, stopped, STOPS_ITSELF, SAVES, keywords=keywords)
    assert again.code == 0, again.output
    one, other = (checkpoint.read(folder / "whole.h5").tensors for folder in (whole, stopped))
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[name], other[name]) for name in one)


def test_a_signal_without_a_handler_ends_a_process_as_usual(job: Job, tmp_path: Path) -> None:
    assert run(job, 0, tmp_path, "os.kill(os.getpid(), signal.SIGTERM)", keywords="flight=None").code == -signal.SIGTERM


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [0, 1, 2])
def test_a_checkpoint_on_its_way_survives_the_divergence_of_all(job: Job, ranks: int, tmp_path: Path) -> None:
    """Writing is slow, and under way when the error comes."""
    writes = """
        import threading
        original = os.pwrite
        def slow(*arguments):
            if threading.current_thread().name == "hpctrain-checkpoint":
                time.sleep(0.05)
            return original(*arguments)
        os.pwrite = slow
        job.save(replica, "good.h5", background=True)
        loader._images[...] = np.nan
    """
    end = f"if replica.global_step == 4:\n{indent(dedent(writes).strip(), ' ' * 16)}"
    outcome = run(job, ranks, tmp_path, end=end)
    assert outcome.code == 2, outcome.output
    assert "not finite" in outcome.stderr
    assert checkpoint.read(tmp_path / "good.h5").meta["position"]["global_step"] == 4  # type: ignore[index]


def test_a_lone_process_that_fails_waits_for_its_checkpoint(job: Job, tmp_path: Path) -> None:
    outcome = run(job, 0, tmp_path, end=f"job.save(replica, 'good.h5', background=True); {FAILS}")
    assert outcome.code == 1, outcome.output
    assert checkpoint.read(tmp_path / "good.h5").meta["position"]["global_step"] == 1  # type: ignore[index]


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("differs", "sentence"),
    [
        ("signals=RANK == 1", "Rank 1 has other arguments of hpctrain.start than rank 0: signals is True, not False"),
        ("batch=8 + RANK", "Rank 1 has other arguments of hpctrain.start than rank 0: batch is 9, not 8"),
        ("", "Rank 1 has other arguments of job.replica than rank 0: on_nonfinite is skip, not stop"),
    ],
)
def test_ranks_that_are_asked_for_different_things_are_refused(job: Job, differs: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import os, hpctrain\n"
        "from tests.support import nets\n"
        "RANK = int(os.environ.get('PMI_RANK') or os.environ.get('OMPI_COMM_WORLD_RANK') or 0)\n"
        f"with hpctrain.start(**{{'batch': 8, **dict({differs})}}) as job:\n"
        "    job.replica(nets.plain(), (9, 7, 3), on_nonfinite='skip' if RANK else 'stop')\n"
    )
    outcome = job(2, ["program.py"], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
    assert outcome.code == 2, outcome.output
    assert outcome.stderr.count(sentence) == 1, outcome.stderr


# -- one process ---------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("alone_without_a_launcher")
def test_nothing_is_left_of_a_lone_process_that_fails(tmp_path: Path) -> None:
    """As in a notebook, which goes on: no heartbeat, and signals as they were."""
    handlers, before = {number: signal.getsignal(number) for number in STOPS}, set(threading.enumerate())

    def fails() -> None:
        with hpctrain.start(batch=8, flight=tmp_path, signals=True):
            assert any(thread.name == "hpctrain-heartbeat" for thread in threading.enumerate())
            assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) >= set(STOPS)
            raise ZeroDivisionError

    with pytest.raises(SystemExit):
        fails()
    assert not [thread for thread in threading.enumerate() if thread not in before and thread.name.startswith("hpctrain-")]
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & set(STOPS)
    assert {number: signal.getsignal(number) for number in STOPS} == handlers
    assert read(tmp_path / file_name(0)).end is End.FAILED


@pytest.mark.usefixtures("alone_without_a_launcher")
def test_a_lone_process_without_records_is_not_watched() -> None:
    """A debugger may hold it as long as it likes."""
    before = set(threading.enumerate())
    with hpctrain.start(batch=8):
        assert not any(thread.name == "hpctrain-heartbeat" for thread in set(threading.enumerate()) - before)


@pytest.mark.usefixtures("alone_without_a_launcher")
def test_records_without_room_do_not_end_a_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    with hpctrain.start(batch=8, flight=tmp_path / "file"):
        pass
    assert "no flight records: " in capsys.readouterr().err


@pytest.mark.usefixtures("alone_without_a_launcher")
def test_signals_are_refused_outside_of_the_main_thread(capsys: pytest.CaptureFixture[str]) -> None:
    def begin() -> None:
        with pytest.raises(SystemExit), hpctrain.start(batch=8, signals=True):
            pytest.fail("the block has begun")

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    assert "Python receives signals in its main thread only" in capsys.readouterr().err
