"""Faults put into one rank of a small training, or into all, and the sentences that must report each.

A fault is a few lines that run in the ranks that have it, before the training: they replace a function by one that fails once, in
step 2. The job must end, and the autopsy or the job's last lines must name the rank and the place.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from click.testing import CliRunner

from hpctrain.backend.choice import DEVICE_VARIABLE
from hpctrain.cli.main import cli
from hpctrain.data.writer import write_data_file
from hpctrain.flight.start_records import RECORDS
from hpctrain_testing.run import Outcome, patched_program, run_job

#: deadline of all faulty jobs; a job that hangs must end within this time and some seconds for the start
DEADLINE_SECONDS = 3.0
RANKS = 3
FAULTY = 1
_START_RECORDS = "records-of-the-start"

CONFIG = """
name: faulty
seed: 7
model: {name: small, channels: [4, 6], hidden: 9}
data: {train: train.h5, test: train.h5}
batch: 12
epochs: 2
optimizer: {name: sgd, lr: 0.01, momentum: 0.9}
schedule: constant
averager: overlap
"""

_PROGRAM = """
def once(owner, name, fault, when=lambda *arguments: True):
    "Replace a function: the first call for which `when` holds is `fault`'s, with the function itself before its arguments."
    original, done = getattr(owner, name), []
    def replaced(*arguments, **options):
        if not done and when(*arguments):
            done.append(True)
            return fault(original, *arguments, **options)
        return original(*arguments, **options)
    setattr(owner, name, replaced)
def in_step_2(self, batch, step, lr):
    return step == 1
def patch():
    if here not in @RANKS@:
        return
    from hpctrain.training.step import TrainingStep
@FAULT@
"""


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        name: readable name. lines: Python code. words: texts of which the findings or the job's last lines contain one.
        ranks: faulty ranks. overrides: changes to the configuration. blamed: whether the autopsy must blame the rank, not all.
    """

    name: str
    lines: str
    words: tuple[str, ...]
    ranks: tuple[int, ...] = (FAULTY,)
    overrides: tuple[str, ...] = ()
    blamed: bool = True


_STEP = 'once(TrainingStep, "run", lambda run, self, *rest: {}, in_step_2)'
_RAISE = """
def fail(run, self, *rest):
    raise {}
once(TrainingStep, "run", fail, in_step_2)
"""
_CLOSED = """
def close(run, self, *rest):
    os.closerange({})
    return run(self, *rest)
once(TrainingStep, "run", close, in_step_2)
"""
_OTHER = """
from hpctrain.launch.launcher import detect
from hpctrain.launch.processes import launcher_process, status_of
def end(run, self, *rest):
    os.kill({}, signal.{})
    return run(self, *rest)
once(TrainingStep, "run", end, in_step_2)
"""
_LAUNCHER = "launcher_process(detect(os.environ).rank_variable)"
_MPI = """
from hpctrain.comm.mpi import MpiCommunicator
steps = []
once(TrainingStep, "run", lambda run, self, *rest: (steps.append(1), run(self, *rest))[1], in_step_2)
once(MpiCommunicator, "iallreduce", lambda post, self, buffer: post(self, {}), lambda self, buffer: steps and buffer.size > 30)
"""
_HANG = "time.sleep(100)"
_FLIPPED = """
def flip(run, self, *rest):
    averager = next(iter(self._averagers.values()))
    averager.drain()
    arithmetic, place = averager.group.arithmetic, {}.reshape(-1)[:1]
    flipped = arithmetic.to_host(place).copy()
    flipped.view("uint32")[0] ^= 1 << 20
    arithmetic.from_host(place, flipped)
    return run(self, *rest)
once(TrainingStep, "run", flip, in_step_2)
"""
_CHECKS = ("checks.every_steps=1", "checkpoint.every_steps=1")
_DISK = """
import errno
from hpctrain.data import readers
from hpctrain.data.loader import Loader
def no_disk(*arguments):
    raise OSError(errno.EIO, "Input/output error")
def broken(make, *rest):
    readers._copy = lambda *arguments: -1
    os.preadv = no_disk
    return make(*rest)
once(Loader, "_make", broken, lambda self, slot, epoch, step, begin: step == 1)
"""

FAULTS: tuple[Fault, ...] = (
    Fault("a skipped step", _STEP.format("None"), ("rank 1 has not posted", "Rank 1 never posted", "rank 1 the")),
    Fault(
        "operations in another order",
        """
        from dataclasses import replace
        from hpctrain.averaging.allreduce import AllreduceAverager
        def reverse(begin, self, *rest):
            self.schedule = replace(self.schedule, operations=tuple(reversed(self.schedule.operations)))
            return begin(self, *rest)
        once(AllreduceAverager, "begin_step", reverse, lambda self, *rest: bool(self._previous.events))
        """,
        ("Ranks posted different operations", "Rank 1 never posted", "wait for each other"),
    ),
    Fault("a wrong count", _MPI.format("buffer[:-1]"), ("Ranks posted different operations",)),
    Fault("a wrong dtype", _MPI.format('buffer.astype("float64")'), ("Ranks posted different operations",)),
    Fault("an exception", _STEP.format("1 // 0"), ("Rank 1 failed first: ZeroDivisionError",)),
    Fault("sys.exit", _STEP.format("sys.exit(3)"), ("Rank 1 failed first: sys.exit(3) during a run",)),
    Fault("os._exit(0)", _STEP.format("os._exit(0)"), ("Rank 1 exited with code 0 before the run was over",)),
    Fault("SIGKILL", _STEP.format("os.kill(os.getpid(), signal.SIGKILL)"), ("Rank 1 was ended by SIGKILL",)),
    Fault("SIGABRT", _STEP.format("os.abort()"), ("Rank 1 was ended by SIGABRT",)),
    Fault("SIGSEGV", _STEP.format("os.kill(os.getpid(), signal.SIGSEGV)"), ("Rank 1 was ended by SIGSEGV",)),
    Fault("SIGSTOP", _STEP.format("os.kill(os.getpid(), signal.SIGSTOP)"), ("Rank 1 never posted", "Rank 1 was silent")),
    Fault(
        "SIGSTOP of all ranks",
        _STEP.format("os.kill(os.getpid(), signal.SIGSTOP)"),
        ("the process is stopped, or hangs without releasing Python's lock",),
        ranks=tuple(range(RANKS)),
        blamed=False,
    ),
    Fault(
        "an evaluation that one rank leaves out",
        'from hpctrain.training.trainer import Trainer\nonce(Trainer, "evaluate", lambda evaluate, self, position: None)',
        ("rank 1 has not posted", "Rank 1 never posted", "rank 1 the"),
    ),
    Fault("a rank that is too slow", _STEP.format(_HANG), ("Rank 1 was in a training step, step 2",)),
    Fault(
        "all ranks too slow",
        _STEP.format(_HANG),
        ("no progress within the deadline of 3 s, in a training step, step 2",),
        ranks=tuple(range(RANKS)),
        blamed=False,
    ),
    Fault(
        "a checkpoint on a disk that hangs",
        f'from hpctrain.storage import checkpoint\nonce(checkpoint, "write", lambda write, *rest: {_HANG})',
        ("Rank 0 was in a checkpoint", "no progress within the deadline of 3 s, in a checkpoint"),
        ranks=(0,),
        overrides=("checkpoint.asynchronous=false",),
        blamed=False,
    ),
    Fault(
        "a data read that hangs",
        f'from hpctrain.data.loader import Loader\nonce(Loader, "_make", lambda make, *rest: {_HANG}, '
        "lambda self, slot, epoch, step, begin: step == 1)",
        ("Rank 1 was in data loading",),
    ),
    Fault(
        "a data read that hangs on all ranks",
        f'from hpctrain.data.loader import Loader\nonce(Loader, "_make", lambda make, *rest: {_HANG}, '
        "lambda self, slot, epoch, step, begin: step == 1)",
        ("no progress within the deadline of 3 s, in data loading",),
        ranks=tuple(range(RANKS)),
        blamed=False,
    ),
    Fault("a disk that fails", _DISK, ("cannot be read: Input/output error", "(on rank 1 of 3"), overrides=("data.cache=false",)),
    Fault(
        "a data file that is cut short",
        """
        from hpctrain.data.loader import Loader
        def cut(make, *rest):
            os.truncate("train.h5", 0)
            return make(*rest)
        once(Loader, "_make", cut, lambda self, slot, epoch, step, begin: step == 1)
        """,
        ("of the data file train.h5 cannot be read: the file ends at byte 0",),
        overrides=("data.cache=false",),
        blamed=False,
    ),
    Fault(
        "a number that is not finite",
        """
        def poison(run, self, *rest):
            group = next(iter(self._averagers.values())).group
            group.arithmetic.fill(group.data[:1], float("nan"))
            return run(self, *rest)
        once(TrainingStep, "run", poison, in_step_2)
        """,
        ("is not finite", "are not finite"),
    ),
    Fault("another configuration", "", ("Rank 1 has another configuration than rank 0: seed is 8, not 7",), blamed=False),
    Fault(
        "other files of hpctrain",
        'from hpctrain.job import same_start\nonce(same_start, "package_files", '
        'lambda files, folder: {**files(folder), "nn/program.py": 1})',
        ("has other files of hpctrain than rank 0: nn/program.py differs",),
        ranks=(0,),
        blamed=False,
    ),
    Fault(
        "a flipped bit of a parameter",
        _FLIPPED.format("averager.group.data"),
        ("rank 1 holds other bits of parameter stage1.conv.weight",),
        overrides=_CHECKS,
    ),
    Fault(
        "a flipped bit of a parameter that another rank owns",
        _FLIPPED.format("averager.group.data[averager.owned()[0].start - 1 :]"),
        ("rank 1 holds other bits of parameter ",),
        overrides=("averager=sharded", "checkpoint.every_steps=1"),
    ),
    Fault(
        "a flipped bit of the optimizer's state, which every rank holds",
        _FLIPPED.format('averager.optimizer.state(averager.owned()[0])["momentum"]'),
        ("rank 1 holds other bits of the momentum of stage1.conv.weight",),
        overrides=_CHECKS,
    ),
    Fault(
        "a flipped bit of the optimizer's state, which its owner holds",
        _FLIPPED.format('averager.optimizer.state(averager.owned()[0])["momentum"]'),
        ("On rank 1 the momentum of ",),
        overrides=(*_CHECKS, "averager=sharded"),
    ),
    *(
        Fault(f"{name} at the start", line, words)
        for name, line, words in (
            ("an import error", "raise ImportError('no such module')", ("Rank 1 failed first: ImportError: no such module",)),
            ("sys.exit", "sys.exit(3)", ("Rank 1 failed first: the program exited with 3",)),
            ("os._exit(0)", "os._exit(0)", ("Rank 1 exited with code 0 before the run was over",)),
            ("SIGKILL", "os.kill(os.getpid(), signal.SIGKILL)", ("Rank 1 was ended by SIGKILL",)),
            ("a sleep", "time.sleep(100)", ("Rank 1 never posted the start of MPI",)),
            ("SIGSTOP", "os.kill(os.getpid(), signal.SIGSTOP)", ("Rank 1 never posted the start of MPI",)),
        )
    ),
    Fault("os._exit(1)", _STEP.format("os._exit(1)"), ("Rank 1 exited with code 1 before the run was over",)),
    Fault("KeyboardInterrupt", _RAISE.format("KeyboardInterrupt"), ("Rank 1 failed first: KeyboardInterrupt during a run",)),
    Fault("SystemExit of a program's own", _RAISE.format("SystemExit(0)"), ("Rank 1 failed first: sys.exit(0) during a run",)),
    Fault("RecursionError", _RAISE.format("RecursionError('too deep')"), ("Rank 1 failed first: RecursionError: too deep",)),
    Fault("SIGXCPU", _STEP.format("os.kill(os.getpid(), signal.SIGXCPU)"), ("Rank 1 was ended by SIGXCPU",)),
    Fault("SIGQUIT", _STEP.format("os.kill(os.getpid(), signal.SIGQUIT)"), ("Rank 1 was ended by SIGQUIT",)),
    Fault("all descriptors closed", _CLOSED.format("0, 4096"), ("Rank 1",)),
    Fault(
        "SIGSTOP of the parent process",
        _OTHER.format("os.getppid()", "SIGSTOP"),
        ("Rank 1 failed first: the parent process of this rank",),
    ),
    Fault("SIGSTOP of the launcher's process", _OTHER.format(_LAUNCHER, "SIGSTOP"), ("launcher's process",), blamed=False),
    Fault("SIGKILL of the launcher's process", _OTHER.format(_LAUNCHER, "SIGKILL"), ("launcher's process",), blamed=False),
    Fault(
        "SIGSTOP of the launcher's command",
        _OTHER.format(f"status_of({_LAUNCHER}).parent", "SIGSTOP"),
        ("launcher's process",),
        blamed=False,
    ),
    Fault("no memory", _STEP.format("__import__('numpy').empty(1 << 59)"), ("Rank 1 failed first: Memory ran out on rank 1",)),
)


def prepare(folder: Path) -> None:
    """Write a configuration and 24 small images, which make 2 steps per epoch."""
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (24, 9, 8, 1), dtype=np.uint8)
    write_data_file(folder / "train.h5", 24, (9, 8, 1), ["a", "b", "c"], [(images, random.integers(0, 3, 24))])
    (folder / "faulty.yaml").write_text(CONFIG)


def run_fault(
    fault: Fault, folder: Path, timeout_seconds: float = 60, *, through_mpi4py: bool = True, device: str | None = None
) -> Outcome:
    """Run the job with a fault, in a folder that `prepare` has filled.

    Args:
        through_mpi4py: whether `python -m mpi4py` starts the job; otherwise Python starts it, like the console script.
        device: device of each rank, for backend cuda; None: the host.

    Raises:
        subprocess.TimeoutExpired: the job hangs; it has been ended.
    """
    lines = textwrap.indent(textwrap.dedent(fault.lines).strip() or "pass", "    ")
    program = patched_program(_PROGRAM).replace("@RANKS@", repr(fault.ranks)).replace("@FAULT@", lines)
    if fault.name == "another configuration":
        program = program.replace("def patch():", f"if here in {fault.ranks!r}:\n    sys.argv.append('seed=8')\ndef patch():")
    if fault.name == "other files of hpctrain":  # read by the first rank of a node; here all ranks but one are first
        program = program.replace("import os, runpy", 'import os\nos.environ["MPI_LOCALRANKID"] = "0"\nimport runpy')
    (folder / "faulty.py").write_text(program)
    arguments = ["faulty.py", "train", "faulty.yaml", f"deadline_seconds={DEADLINE_SECONDS}", *fault.overrides]
    if device is not None:
        arguments.append("backend=cuda")
    env = {RECORDS: str(folder / _START_RECORDS)} | ({} if device is None else {DEVICE_VARIABLE: device})
    return run_job(RANKS, arguments, env=env, cwd=folder, timeout_seconds=timeout_seconds, through_mpi4py=through_mpi4py)


def findings(folder: Path) -> Mapping[str, object]:
    """Return the autopsy of the run in a folder, or of its start if the job ended before it had a run directory."""
    runs = sorted((folder / "runs").iterdir()) if (folder / "runs").exists() else []
    result = CliRunner().invoke(cli, ["autopsy", str(runs[-1] if runs else folder / _START_RECORDS), "--json"])
    values: Mapping[str, object] = json.loads(result.output) if result.exit_code == 0 else {"findings": [], "blamed": []}
    return values


def is_named(fault: Fault, outcome: Outcome, report: Mapping[str, object]) -> bool:
    """Return whether the sentences name the right rank and place."""
    sentences = [*report["findings"], outcome.output] if isinstance(report["findings"], Sequence) else [outcome.output]
    blamed = report["blamed"]
    rightly = not fault.blamed or (isinstance(blamed, Sequence) and FAULTY in blamed and len(blamed) < RANKS)
    return rightly and any(words in str(sentence) for sentence in sentences for words in fault.words)
