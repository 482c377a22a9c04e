"""Commands run in this process: `run_here` takes the arguments of `run_job`, but runs several ranks as virtual ones.

Kernels, files, messages and exit codes are those of a job. A test needs `run_job` for signals, a real MPI, a launcher, the
environment at the start of Python, and an abort that interrupts other ranks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any
from unittest.mock import patch

from hpctrain.cli.main import cli
from hpctrain.comm.base import SingleCommunicator
from hpctrain.comm.progress import ProgressEngine
from hpctrain.core import log
from hpctrain.job import session
from hpctrain.process import ends as failure
from hpctrain.process.rank import RankProcess
from hpctrain.runs import directory
from hpctrain_testing.run import Outcome, clean_environment
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.run import run_virtual, virtual_engine, wait

_PROGRAM = ["-m", "hpctrain"]
_RANK = threading.local()


def run_here(ranks: int, arguments: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> Outcome:
    """Run `hpctrain` with the arguments after "-m hpctrain", on virtual ranks if `ranks` is above 1."""
    words = list(arguments)
    assert words[:2] == _PROGRAM, "only the program itself runs here"
    begin = time.monotonic()
    processes: list[RankProcess] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, clean_environment(env), clear=True))
        stack.enter_context(patch.object(sys, "argv", ["hpctrain", *words[2:]]))
        stack.enter_context(patch.object(sys, "path", [*sys.path]))
        stack.enter_context(contextlib.chdir(cwd or Path.cwd()))
        stack.enter_context(patch.object(directory, "git_state", dict))  # it starts processes
        stack.enter_context(patch.object(SingleCommunicator, "abort", lambda world, code: None))  # it ends this process
        stack.enter_context(_recorded(processes))
        streams = stack.enter_context(_captured())
        stack.callback(_end, processes)
        code = _virtual(ranks, words[2:]) if ranks > 1 else _code(words[2:])
        return Outcome(code, *streams(), time.monotonic() - begin)


def virtual_rank() -> int:
    """Return the virtual rank of this thread; 0 if there is one rank."""
    world: ThreadCommunicator | None = getattr(_RANK, "world", None)
    return world.rank if world is not None else 0


def _code(words: list[str]) -> int:
    """Run the command, and return its exit code."""
    try:
        cli(words, prog_name="hpctrain")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _virtual(ranks: int, words: list[str]) -> int:
    """Run the command on virtual ranks, and return the largest exit code or that of an abort."""

    def program(comm: ThreadCommunicator) -> int:
        _RANK.world = comm
        return _code(words)

    configure = log.configure
    with (
        patch.object(RankProcess, "start_world", _start_world),
        patch.object(session, "ProgressEngine", _engine),
        patch.object(failure, "time", SimpleNamespace(sleep=_wait)),
        patch.object(log, "configure", lambda rank, *size: None if rank else configure(rank, *size)),
    ):
        try:
            return max(run_virtual(ranks, program, deadline_seconds=120))
        except SystemExit as end:
            return int(end.code or 0)


def _start_world(process: RankProcess, deadline_seconds: float) -> ThreadCommunicator:
    process.world = _RANK.world
    log.configure(_RANK.world.rank, _RANK.world.size)
    return process.world


def _engine(**options: Any) -> ProgressEngine:
    return virtual_engine(_RANK.world, **{name: value for name, value in options.items() if name not in ("rank", "abort")})


def _wait(seconds: float) -> None:
    """Wait until another rank has printed the error and ended the job."""
    if seconds:
        wait(_RANK.world.ibarrier())


@contextlib.contextmanager
def _recorded(processes: list[RankProcess]) -> Iterator[None]:
    """Collect in `processes` each `RankProcess` that is created."""
    initialise = RankProcess.__init__

    def recorded(process: RankProcess, *given: Any, **options: Any) -> None:
        initialise(process, *given, **options)
        processes.append(process)

    with patch.object(RankProcess, "__init__", recorded):
        yield


def _end(processes: Sequence[RankProcess]) -> None:
    """End what a real process ends by exiting: its threads, and the ownership of a run."""
    for process in processes:
        process.exits.close()
        if process.ownership is not None:
            process.ownership.release()
    for thread in threading.enumerate():
        if thread.name == "hpctrain-checkpoint":
            thread.join()


@contextlib.contextmanager
def _captured() -> Iterator[Callable[[], tuple[str, str]]]:
    """Redirect standard output and standard error to files; yield a function that returns their content."""
    root = logging.getLogger("hpctrain")
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.multiple(root, handlers=root.handlers[:], propagate=root.propagate))
        stack.callback(root.setLevel, root.level)
        files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in (1, 2)]
        for number, name in ((1, "stdout"), (2, "stderr")):
            original = os.dup(number)
            stack.callback(os.close, original)
            stack.callback(os.dup2, original, number)
            os.dup2(files[number - 1].fileno(), number)
            stream = stack.enter_context(open(number, "w", buffering=1, closefd=False))
            stack.enter_context(patch.object(sys, name, stream))
        yield lambda: (_content(files[0]), _content(files[1]))


def _content(file: IO[str]) -> str:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    file.seek(0)
    return file.read()
