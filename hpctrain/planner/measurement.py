"""The job that calibrates: all its ranks measure the machine that they run on, and the first one writes it down."""

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path

from hpctrain.backend.choice import make_backend
from hpctrain.backend.cuda.choose import NodePlace
from hpctrain.comm.base import Communicator
from hpctrain.comm.progress import ProgressEngine
from hpctrain.comm.raise_on_all_ranks import raise_on_all_ranks
from hpctrain.launch.threads import usable_cores
from hpctrain.planner import machine_file, rate_measurement
from hpctrain.planner.calibration import RankFacts, calibrate
from hpctrain.planner.machine import Link, Machine, OperatorClass
from hpctrain.storage.atomic_write import check_target

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_COLUMNS = 80  # where there is no terminal, as under mpiexec


def run_calibration(world: Communicator, threads: int, seconds: float, out: Path, deadline_seconds: float) -> Machine:
    """Measure, write the machine's file and print a summary. Collective over `world`.

    Args:
        threads: of this rank. seconds: that it may take. deadline_seconds: the longest that one wait may take.

    Raises:
        OSError: the file cannot be written; told before anything is measured.
    """
    raise_on_all_ranks(world, lambda: check_target(out, streams=True) if world.rank == 0 else None)
    progress = ProgressEngine(rank=world.rank, deadline_seconds=deadline_seconds, abort=world.abort)
    backend = make_backend("auto", place=NodePlace(world.size))
    begin = time.perf_counter()
    machine = calibrate(
        world,
        progress,
        facts_here(),
        lambda before: rate_measurement.measure(backend.kernels, threads, before),
        name=out.stem,
        when=time.strftime("%Y-%m-%d"),
        seconds=seconds,
        physical_cores=usable_cores,
    )
    if world.rank == 0:
        machine_file.write(out, machine)
        print_machine(machine)
        print(f"{out}: calibrated in {time.perf_counter() - begin:.0f} s with kernels {backend.kernels.name}")
    return machine


def facts_here() -> RankFacts:
    """The cores that this process may run on, its node's memory, and its processor's name."""
    return RankFacts(frozenset(os.sched_getaffinity(0)), _memory_bytes(), _processor())


def print_machine(machine: Machine) -> None:
    """A table of every number of a machine, on stdout, and where it is from: beside the first of several from one source."""
    from rich.table import Table  # not for the trainings that take facts from here

    from hpctrain.core.console import PlainConsole

    table = Table(title=f"{machine.name}: {machine.description}", title_justify="left", box=None)
    for heading in ("number", "value", "source"):
        table.add_column(heading, overflow="fold")
    told = ""
    for key, value in _lines(machine):
        source = _source(machine, key)
        table.add_row(key, value, "" if source == told else source)
        told = source
    PlainConsole(file=sys.stdout, width=None if sys.stdout.isatty() else _COLUMNS).print(table)


def _source(machine: Machine, key: str) -> str:
    """Where a number is from, or the first one of a section."""
    below = (name for name in machine.sources if name.startswith(f"{key}."))
    return machine_file.source_of(machine, next(below, key))


def _lines(machine: Machine) -> list[tuple[str, str]]:
    lines = [
        ("nodes", f"{machine.nodes}"),
        ("ranks_per_node", f"{machine.ranks_per_node}"),
        ("cores_per_rank", f"{machine.cores_per_rank:g}"),
        ("memory_bytes", f"{machine.memory_bytes / 1e9:.1f} GB"),
        ("ranks_per_card", f"{machine.ranks_per_card}"),
    ]
    for name, link in (("within", machine.within), ("between", machine.between)):
        lines += [(f"{name}.{key}", value) for key, value in _link_lines(link)]
    for kind in OperatorClass:
        rate = machine.rates[kind]
        slowed = f", {machine.concurrency[kind]:.2f} times slower than alone" if kind in machine.concurrency else ""
        speed = f"{rate.flops_per_second / 1e9:.1f} Gflop/s, " if kind is not OperatorClass.MEMORY else ""
        speed += f"{rate.bytes_per_second / 1e9:.1f} GB/s, {rate.call_seconds * 1e6:.0f} us a call{slowed}"
        lines.append((f"rates.{kind}", speed))
    return lines


def _link_lines(link: Link) -> list[tuple[str, str]]:
    lines = []
    for one in link.segments:
        rate = f"{1e-9 / one.beta_seconds_per_byte:.2f} GB/s" if one.beta_seconds_per_byte else "no time a byte"
        unattended = "" if one.unattended_bytes is None else f", {one.unattended_bytes / 1024:.0f} KiB between polls"
        polls = f", {one.polls} polls before" if one.polls else ""
        begin = f"{one.from_bytes / 1024:g} KiB"
        lines.append(("segments", f"from {begin}: {one.alpha_seconds * 1e6:.1f} us, {rate}{unattended}{polls}"))
    lines.append(("operation_seconds", f"{link.operation_seconds * 1e6:.0f} us"))
    lines.append(("byte_seconds", f"{link.byte_seconds * 1e12:.0f} ps"))
    lines.append(("sum_seconds", f"{link.sum_seconds * 1e12:.0f} ps"))
    lines.append(("burst_bytes", f"{link.burst_bytes / 1024:.0f} KiB"))
    return lines


def _memory_bytes() -> int:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _LIMITS:
        try:
            limit = int(Path(path).read_text())
        except (OSError, ValueError):  # no such file, or "max"
            continue
        physical = min(physical, limit)
    return physical


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
