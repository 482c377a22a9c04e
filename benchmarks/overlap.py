"""Step times of all averaging strategies over shaped links, next to compute-only, the wire and PyTorch's DDP, in one run.

    python -m benchmarks.overlap resnet18 --peer-python PATH          # 2 hosts at 0.5, 1 and 2 Gb/s; needs root and iproute2
    python -m benchmarks.overlap resnet18 --shared-memory             # 2 ranks on this machine
    python -m benchmarks.overlap --report benchmarks/results/overlap-resnet18.json

Each bandwidth is one job of one rank per host, each on a core of its own, and next to it one job of PyTorch on the same hosts
(PATH is a Python that has torch). They step in turn and sleep otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.overlap_report import SHARED_MEMORY, markdown, report
from benchmarks.shapes import SHAPES, Shape
from hpctrain.averaging.averagers import AVERAGERS
from hpctrain.bench.machine import machine_facts
from hpctrain.comm.progress import ProgressMode
from hpctrain.storage.atomic_write import write_json
from hpctrain_testing.lab import Lab, missing, take_down_at_termination
from hpctrain_testing.run import clean_environment, find_mpiexec

_FIXED_KIB = (256, 512, 1024, 2048, 4096, 8192)  # sizes of slices instead of those by rule

# name -> (averager, options); None: the local update only
VARIANTS: dict[str, tuple[str, dict[str, Any]] | None] = {
    "compute-only": None,
    "blocking": ("blocking", {}),
    "overlap": ("overlap", {}),
    "bucketed": ("bucketed", {}),
    "sharded": ("sharded", {"fc_exchange": "never"}),
    "sharded-auto": ("sharded", {"fc_exchange": "auto"}),
    "priority-auto": ("priority", {"fc_exchange": "auto"}),
    "sharded-one-level": ("sharded", {"fc_exchange": "never", "two_level": False}),  # where hosts have several ranks
    "priority": ("priority", {"fc_exchange": "never"}),
    **{f"sharded-{size}k": ("sharded", {"fc_exchange": "auto", "bucket_bytes": size << 10}) for size in _FIXED_KIB},
}
_NEEDED = ("compute-only", "blocking")
_SEVERAL_ON_A_HOST = ("sharded-one-level",)
# slices of fixed sizes, to compare with the rule of sizes
_WHERE_ASKED_FOR = tuple(f"sharded-{size}k" for size in _FIXED_KIB)
_ROOT = Path(__file__).resolve().parent.parent
_PORT = 29511
_PEER_ENVIRONMENT = ("THP_MEM_ALLOC_ENABLE=1",)  # huge pages make PyTorch's steps shorter


class JobError(RuntimeError):
    """A job ended otherwise than it should."""


class Jobs:
    """Processes that belong together: where one fails, all are ended."""

    def __init__(self, directory: Path, timeout_seconds: float) -> None:
        self._directory = directory
        self._give_up = time.monotonic() + timeout_seconds
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, command: Sequence[str]) -> None:
        """Start a process in a session of its own; what it prints goes to a file."""
        with (self._directory / f"{name}.log").open("wb") as log:
            self._running[name] = subprocess.Popen(
                command,
                cwd=_ROOT,
                env=clean_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self, name: str) -> None:
        """Until that process has ended well; JobError where it has failed, otherwise as `until`."""
        self.until(lambda: self._running[name].poll() is not None, name)
        if code := self._running[name].returncode:
            raise JobError(f"{name} ended with exit code {code}:\n{self._tail(name)}")

    def until(self, done: Callable[[], bool], may_end: str = "") -> None:
        """Until `done()`.

        Raises:
            JobError: a process other than `may_end` has ended, or the time is up; with the end of what was printed.
        """
        while not done():
            for name, process in self._running.items():
                if name != may_end and process.poll() is not None:
                    raise JobError(f"{name} ended with exit code {process.returncode}:\n{self._tail(name)}")
            if time.monotonic() > self._give_up:
                raise JobError("\n".join(["The time is up.", *map(self._tail, self._running)]))
            time.sleep(0.1)

    def end(self) -> None:
        """End what still runs."""
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _tail(self, name: str) -> str:
        return "\n".join((self._directory / f"{name}.log").read_text(errors="replace").splitlines()[-30:])


@contextlib.contextmanager
def jobs(timeout_seconds: float) -> Iterator[tuple[Path, Jobs]]:
    """A temporary directory and processes, both gone at the end."""
    directory = Path(tempfile.mkdtemp(prefix="overlap-"))
    running = Jobs(directory, timeout_seconds)
    try:
        yield directory, running
    finally:
        running.end()
        shutil.rmtree(directory, ignore_errors=True)


def run_job(
    program: str,
    values: Mapping[str, Any],
    *,
    rate: str,
    hosts: int,
    ranks_per_host: int,
    peer_python: str | None,
    timeout: float,
) -> dict[str, Any]:
    """What the ranks of a program have measured on hosts with links of this rate, or on this machine, one rank a core.

    Args:
        values: what the program reads from its file of settings, next to the paths of its result and of the peers' sockets.
        peer_python: a Python with torch, whose ranks are ready before the program starts; None: no peer.
    """
    lab, ranks = None if rate == SHARED_MEMORY else Lab(hosts, rate), hosts * ranks_per_host
    with lab or contextlib.nullcontext(), jobs(timeout) as (directory, running):
        settings, out = directory / "settings.json", directory / "result.json"
        peers = [directory / f"peer{rank}" for rank in range(ranks if peer_python else 0)]
        settings.write_text(json.dumps({**values, "out": out, "peers": peers}, default=str))
        master = "127.0.0.1" if lab is None else lab.address(0)
        for rank, path in enumerate(peers):
            command = ["env", *_PEER_ENVIRONMENT, str(peer_python), str(_ROOT / "benchmarks/ddp_peer.py"), str(settings)]
            command += ["--socket", str(path), "--rank", str(rank), "--ranks", str(ranks), "--master", f"{master}:{_PORT}"]
            here = ["taskset", "-c", str(rank % (os.cpu_count() or 1)), "env", "GLOO_SOCKET_IFNAME=lo", *command]
            running.start(f"pytorch rank {rank}", here if lab is None else lab.on_host(rank // ranks_per_host, command))
        running.until(lambda: all(path.exists() for path in peers))
        command = ["env", f"XDG_CACHE_HOME={directory}", sys.executable, "-m", "mpi4py", "-m", program, str(settings)]
        here = [find_mpiexec() or "mpiexec", "-bind-to", "core", "-n", str(ranks), *command]
        running.start("job", here if lab is None else lab.mpiexec(command, ranks_per_host))
        running.wait("job")
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", choices=SHAPES)
    parser.add_argument("--rates", default="500mbit,1gbit,2gbit", help="as tc writes them")
    parser.add_argument("--shared-memory", action="store_true", help="on this machine, without links")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument(
        "--variants",
        help="default: all that differ on these hosts; NAME@MODE: with this progress mode; NAME@test+1: one MPI call per test",
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--warmup", type=int, default=6, help="untimed steps of strategies that order messages by times")
    parser.add_argument("--nice", type=int, default=0, help="of all processes; below 0 ahead of others on this machine")
    parser.add_argument("--progress", default="test", choices=["none", "test", "thread"])
    parser.add_argument("--steps", type=int, default=1, help="timed steps of a turn, after one that is not timed")
    parser.add_argument("--kernels", default="onednn", choices=["onednn", "numpy"])
    parser.add_argument("--batch", type=int, help="images per rank")
    parser.add_argument("--pixels", type=int)
    parser.add_argument("--peer-python", help="a Python with torch; none: no peer")
    parser.add_argument("--timeout", type=float, default=1200.0, help="seconds that one bandwidth may take")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--markdown", action="store_true", help="print tables for a document")
    parser.add_argument("--report", type=Path, nargs="+", help="print the report of earlier runs' JSON; runs nothing")
    chosen = parser.parse_args(arguments)
    if not chosen.report:
        if chosen.model is None:
            parser.error(f"name a model: {', '.join(SHAPES)}")
        shape = SHAPES[chosen.model]
        changed = {"batch": chosen.batch or shape.batch, "pixels": chosen.pixels or shape.pixels}
        chosen.shape = Shape(**shape.as_dict() | changed)
        special = _WHERE_ASKED_FOR if chosen.ranks_per_host > 1 else (*_WHERE_ASKED_FOR, *_SEVERAL_ON_A_HOST)
        different = [name for name in VARIANTS if name not in special]
        chosen.variants = choose_variants(parser, chosen.variants.split(",") if chosen.variants else different)
    return chosen


def choose_variants(parser: argparse.ArgumentParser, asked: list[str]) -> list[str]:
    """The variants asked for, with those that all others are compared with."""
    for name in asked:
        if name.partition("@")[0] not in VARIANTS:
            parser.error(f"there is no variant {name}; there are {', '.join(VARIANTS)}")
        mode, plus, calls = name.partition("@")[2].partition("+")
        modes = [one.value for one in ProgressMode]
        if "@" in name and (mode not in modes or (plus and not calls.isdecimal())):
            parser.error(f"variant {name} needs one of {', '.join(modes)} after @, and a number of calls after +")
    wanted = [*_NEEDED, *(name for name in asked if name not in _NEEDED)]
    known = AVERAGERS.names()
    for name in wanted:
        choice = VARIANTS[name.partition("@")[0]]
        if choice is not None and choice[0] not in known:
            parser.error(f"variant {name} needs the averager {choice[0]}; there are {', '.join(known)}")
    return wanted


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0 where all was measured."""
    chosen = parse(arguments)
    found = [json.loads(path.read_text()) for path in chosen.report] if chosen.report else [measure(chosen)]
    for each in found:
        if chosen.markdown:
            print(markdown(each))
        else:
            report(each)
    return 0


def measure(chosen: argparse.Namespace) -> dict[str, Any]:
    """Run all bandwidths; the file is written after each."""
    take_down_at_termination()
    reason = None if chosen.shared_memory else missing()
    if reason is not None:
        raise SystemExit(reason)
    name = f"overlap-{chosen.model}{'-shared-memory' if chosen.shared_memory else ''}.json"
    out = chosen.out or _ROOT / "benchmarks/results" / name
    out.parent.mkdir(parents=True, exist_ok=True)
    result = {"model": chosen.model, "shape": chosen.shape.as_dict(), "machine": machine_facts(), "runs": []}
    values = {
        "shape": chosen.shape.as_dict(),
        "variants": {name: VARIANTS[name.partition("@")[0]] for name in chosen.variants},
        **{key: getattr(chosen, key) for key in ("kernels", "rounds", "steps", "warmup", "progress", "nice")},
    }
    place = {key: getattr(chosen, key) for key in ("hosts", "ranks_per_host", "peer_python", "timeout")}
    for rate in [SHARED_MEMORY] if chosen.shared_memory else chosen.rates.split(","):
        try:
            run = {"rate": rate, **run_job("benchmarks.overlap_ranks", values, rate=rate, **place)}
        except JobError as failure:
            raise SystemExit(f"{chosen.model} at {rate}: {failure}") from None
        result["runs"].append(run)
        write_json(out, result)
    print(f"written: {out}", flush=True)
    return result


if __name__ == "__main__":
    sys.exit(main())
