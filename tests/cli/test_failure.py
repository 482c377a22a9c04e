"""Every command, given what it cannot use: one sentence a fault on standard error, exit code 2, and no traceback."""

from __future__ import annotations

import errno
import io
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from hpctrain.cli.arguments import Commands
from hpctrain.cli.config import KINDS
from hpctrain.cli.main import cli
from hpctrain.core.errors import DataError
from hpctrain.core.text import place
from hpctrain.launch.process_start import STANDARD_OUTPUT
from hpctrain.process.ends import BUG, USER_ERROR, job_ends_on_error
from hpctrain_testing.run import Outcome
from tests.cli.test_command_line import ALL
from tests.support.here import run_here

_LOGGED = re.compile(r"\d\d:\d\d:\d\d [A-Z]+ |note: ")

CONFIG = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")

_PATHS = {"CONFIG": CONFIG, "CONFIGS": str(Path(CONFIG).parent)}

#: command: arguments with which it must fail by the user's fault => words that the sentence must have
_MISTAKE_LINES = """
train: nowhere.yaml => The configuration nowhere.yaml cannot be read
train: train.py => train.py is a Python program, but a configuration must be a YAML file; run the program with `hpctrain script
train: CONFIG => There is no data file data/fashion-mnist/train.h5
train: CONFIG grid.rows=2 data.train=good.h5 data.test= => to keep this grid, start the program with `mpiexec -n 2`.
train: CONFIG data.augment=[flip,mixup] => the key data.mixing.mixup sets it.
train: CONFIG optimizer=adagrad => There is no optimizer "adagrad"
train: CONFIG --log-ranks al => must be all, none, or ranks such as 0,3,8-15; the nearest is all.
train: CONFIG --log-ranks 0,3 => --log-ranks names rank 3, but the job has 1 rank; the largest number is 0.
train: CONFIG output=file/runs data.train=good.h5 data.test= epochs=1 => file/runs
train: CONFIG data.train=goud.h5 => There is no data file goud.h5; the nearest file is good.h5.
train: CONFIG data.train=cut.h5 data.test= => cut.h5
train: CONFIG data.train=wrong_label.h5 data.test= => 17
train: CONFIG data.train=good.h5 data.test= model.classes=5 => set model.classes to 10
train: CONFIG data.train=nowhere/good.h5 => There is no data file nowhere/good.h5
train: run => run is the directory of a run, but a configuration must be a YAML file; write run/config.yaml, with --checkpoint run
eval: run => run is the directory of a run, but a configuration must be a YAML file; write run/config.yaml, with --checkpoint run
config check: CONFIGS => /configs is a directory, but a configuration must be a YAML file; name one of its files, such as
submit: CONFIGS --site local => configs/quickstart.yaml.
eval: nowhere.yaml => The configuration nowhere.yaml cannot be read
eval: CONFIG --checkpoint nowhere => /nowhere is not a run directory
eval: CONFIG --log-ranks 3-1 => --log-ranks has 3-1, but the first rank of a range must not exceed the last; use 1-3.
eval: CONFIG => has a checkpoint; train one first
eval: CONFIG --checkpoint best => has a best checkpoint, which requires checkpoint.best, and an evaluation and
predict: photos => There is no run with a checkpoint in
predict: photos --checkpoint nowhere => /nowhere is not a run directory
predict: photos --checkpoint file => file
predict: photos --config nowhere.yaml => The configuration nowhere.yaml cannot be read
predict: photos --config CONFIG => has a checkpoint; train one first
predict: photos --checkpoint best --runs photos => /photos has a best checkpoint
calibrate: --out nowhere/machine.yaml => nowhere/machine.yaml
checkpoint verify: file => 1 of 1 checkpoints cannot be used; no other checkpoint is left to resume from.
checkpoint show: file => file
weights export: file --out new.safetensors => file
plan search: CONFIG --ranks 2 --machine xc40 --measure => was not measured on it
data convert arrays: file out.h5 => file
config check: bytes => is not valid UTF-8
"""
#: that take nothing, and so does what follows; the doctor forks before it reads a file: see `tests/cli/test_doctor.py`
_WITHOUT_MISTAKE = ("config list", "config schema", "doctor", *(f"list {kind}" for kind in KINDS))
#: commands whose wrong calls are recorded in `tests/golden`
_RECORDED = (Path(__file__).parents[1] / "golden" / "calls.yaml").read_text().partition("\ncli: ")[2].splitlines()
MISTAKES: dict[str, list[tuple[list[str], str]]] = {}
for _line in _MISTAKE_LINES.strip().splitlines():
    _call, _, _words = _line.partition(" => ")
    _command, _, _arguments = _call.partition(": ")
    MISTAKES.setdefault(_command, []).append(([_PATHS.get(word, word) for word in shlex.split(_arguments)], _words))


LEAVES = [(name.split(), command) for name, command in ALL.items() if not isinstance(command, click.Group)]


def test_no_command_is_left_out_and_no_group_prints_tracebacks() -> None:
    for name in (" ".join(words) for words, _ in LEAVES):
        recorded = any(f"{line.strip()} ".startswith(f"{name} ") for line in _RECORDED)
        assert recorded or name in MISTAKES or name in _WITHOUT_MISTAKE, name
    assert all(isinstance(command, Commands) for command in ALL.values() if isinstance(command, click.Group))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with files of the wrong kind, some of the right one, and no launcher in the environment."""
    import h5py
    import numpy as np
    from PIL import Image

    from hpctrain.data.writer import write_data_file

    (tmp_path / "file").write_text("neither YAML: nor: data\n")
    (tmp_path / "bytes").write_bytes(b"name: \xff\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("model: small\n")
    (tmp_path / "photos" / "ant").mkdir(parents=True)
    Image.new("RGB", (4, 4)).save(tmp_path / "photos" / "ant" / "a.png")
    images, labels = np.zeros((128, 28, 28, 1), np.uint8), np.arange(128) % 10
    write_data_file(tmp_path / "good.h5", 128, (28, 28, 1), [str(i) for i in range(10)], [(images, labels)])
    (tmp_path / "cut.h5").write_bytes((tmp_path / "good.h5").read_bytes()[:3000])
    shutil.copy(tmp_path / "good.h5", tmp_path / "wrong_label.h5")
    with h5py.File(tmp_path / "wrong_label.h5", "r+", locking=False) as file:
        file["labels"][3] = 17
    monkeypatch.chdir(tmp_path)
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
        monkeypatch.setenv(variable, "1")  # commands set these
    return tmp_path


@pytest.mark.parametrize("command", MISTAKES)
def test_a_users_mistake_is_a_sentence(folder: Path, command: str) -> None:
    for arguments, words in MISTAKES[command]:
        if command in ("train", "eval", "predict", "calibrate"):  # which set up their process
            done = run_here(0, ["-m", "hpctrain", command, *arguments], cwd=folder)
            code, output, errors = done.code, done.stdout, done.stderr
        else:
            result = CliRunner().invoke(cli, [*command.split(), *arguments])
            code, output, errors = result.exit_code, f"{result.stdout}{result.exception!r}", result.stderr
        assert code == USER_ERROR, (arguments, output, errors)
        assert words in errors, (arguments, errors)
        said = [line for line in errors.splitlines() if not _LOGGED.match(line)]
        assert all(line.startswith("hpctrain: ") and line.endswith(".") for line in said), (arguments, errors)
        assert "Traceback" not in output + errors, arguments
        assert not (folder / "out.h5").exists()
        assert not list(folder.glob("runs/*")), arguments


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (DataError("One.\nTwo."), "hpctrain: One.\nhpctrain: Two.\n"),
        (OSError(errno.EACCES, "Permission denied", "a.h5"), "hpctrain: a.h5 cannot be used: Permission denied.\n"),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "hpctrain: A file cannot be written: No space left on device; free disk space, or use another disk.\n",
        ),
    ],
)
def test_what_the_user_can_mend_is_said(error: Exception, sentence: str) -> None:
    result = CliRunner().invoke(_raising(error), ["go"])
    assert (result.exit_code, result.stderr) == (USER_ERROR, sentence)


@pytest.mark.parametrize("error", [ZeroDivisionError("no such luck"), ValueError("x"), OSError("no number")])
def test_a_bug_keeps_its_traceback(error: Exception) -> None:
    assert CliRunner().invoke(_raising(error), ["go"]).exception is error


def _raising(error: Exception) -> click.Command:
    def go() -> None:
        raise error

    return Commands(commands={"go": click.Command("go", callback=go)})


@pytest.mark.parametrize(("rank", "said"), [("0", 1), ("3", 0)])
def test_a_command_that_needs_no_ranks_is_reported_once_under_a_launcher(
    monkeypatch: pytest.MonkeyPatch, rank: str, said: int
) -> None:
    for name, value in {
        "MPI_LOCALNRANKS": "4",
        "MPI_LOCALRANKID": rank,
        "PMI_SIZE": "4",
        "PMI_RANK": rank,
        "PMI_PORT": "n1:4000",
    }.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(cli, ["config", "check", "nowhere.yaml"])
    assert result.exit_code == USER_ERROR
    assert len(result.stderr.splitlines()) == said


def test_a_missing_mpi_library_is_said_once_a_job(job: Callable[..., Outcome], tmp_path: Path) -> None:
    outcome = job(2, ["-m", "hpctrain", "train", CONFIG], env={"MPI4PY_LIBMPI": str(tmp_path / "libmpi.so")})
    assert outcome.code != 0
    assert outcome.stderr.count("hpctrain: MPI cannot be started") == 1, outcome.output
    assert "pip install" in outcome.stderr
    assert "Traceback" not in outcome.output


_ASKED = "Unable to allocate 8.00 EiB for an array with shape (1,)"


@pytest.mark.parametrize(
    ("error", "code", "failed", "said"),
    [
        (DataError("One."), USER_ERROR, "One.", "hpctrain: One.\n"),
        # Also an exit that says it is no error: this process would end, and the others wait for it.
        (SystemExit(None), BUG, "sys.exit() during a run", "sys.exit() during a run ends the job.\n"),
        (SystemExit(0), BUG, "sys.exit(0) during a run", "sys.exit(0) during a run ends the job.\n"),
        (SystemExit("why"), BUG, "sys.exit('why') during a run", "sys.exit('why') during a run ends the job.\n"),
        (MemoryError(f"{_ASKED[:-16]}\nwith shape (1,)."), USER_ERROR, "Memory ran out on rank 0 (", f"): {_ASKED}"),
        (MemoryError(""), USER_ERROR, "Memory ran out on rank 0 (", "): an allocation of unknown size was refused"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe", STANDARD_OUTPUT), BUG, "", ""),  # no process would read a message
        (FileNotFoundError(errno.ENOENT, "No"), USER_ERROR, "the", "hpctrain: the working directory cannot be used: No.\n"),
    ],
)
def test_an_error_ends_the_job_once_and_says_why(
    error: BaseException, code: int, failed: str, said: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())  # which is replaced where its reader has left
    aborted: list[int] = []
    failures: list[str] = []
    with (
        pytest.raises(SystemExit) as end,
        job_ends_on_error(lambda: 0, aborted.append, lambda sentence, ranks: failures.append(sentence)),
    ):
        raise error
    sys.stdout.close()
    assert (end.value.code, aborted) == (code, [code])
    assert [sentence[: len(failed)] for sentence in failures] == ([failed] if failed else [])
    written = capsys.readouterr().err
    assert said in written
    if isinstance(error, MemoryError):
        assert written == f"hpctrain: {failures[0]}\n"
    if not said:
        assert written == ""


@pytest.mark.parametrize(
    ("rank", "reported_by", "silent"), [(0, None, 0.0), (0, 0, 0.0), (3, 3, 0.0), (3, None, 1.5), (3, 0, 30.0), (0, 3, 30.0)]
)
def test_an_error_of_all_ranks_is_left_to_the_one_that_says_it(
    rank: int, reported_by: int | None, silent: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """With many ranks on few cores that one may come to it much later; a rank that may be alone waits for a moment only."""
    slept: list[float] = []
    monkeypatch.setattr("hpctrain.process.ends.time.sleep", slept.append)
    error = DataError("One.")
    with pytest.raises(SystemExit), job_ends_on_error(lambda: rank, lambda code: None):
        raise error if reported_by is None else error.of_all_ranks(reported_by)
    assert slept == [silent]
    assert capsys.readouterr().err == f"hpctrain: {place(rank) if rank else ''}One.\n"


@pytest.mark.parametrize("words", ["config show FILE", "submit FILE --site local --dry-run"])
def test_an_interrupted_command_ends_with_one_sentence(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """click's own answer is the single word Aborted!, with the exit code of a defect."""

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    for room in ("assembly.faults", "config.load"):
        monkeypatch.setattr(f"hpctrain.{room}.load", interrupted)
    outcome = CliRunner().invoke(cli, words.split())
    assert (outcome.stderr, outcome.exit_code) == ("hpctrain: Interrupted by Ctrl-C.\n", 130)


@pytest.mark.parametrize(("words", "command"), LEAVES)
def test_an_option_in_the_place_of_a_path_is_refused(words: list[str], command: click.Command) -> None:
    """`--out --steps` does not write a file called --steps."""
    paths = (one for one in command.params if isinstance(one, click.Option) and isinstance(one.type, click.Path))
    for option in (one for one in paths if not isinstance(one.flag_value, str)):
        for name in option.opts:
            outcome = CliRunner().invoke(cli, [*words, name, "--steps"])
            assert outcome.exit_code == USER_ERROR
            assert f"Invalid value for '{name}'" in outcome.stderr
