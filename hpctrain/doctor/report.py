"""Report of the doctor: a table of 80 columns, or JSON for programs."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from typing import Any

from hpctrain.core.console import PlainConsole, plain_table
from hpctrain.doctor.check import Severity, exit_code
from hpctrain.doctor.job import Examination
from hpctrain.doctor.nodes import GPUS, GpuFacts
from hpctrain.doctor.ranks import BINDING, CoreFacts
from hpctrain.job.session import ranges

_WIDTH = 80  # without a terminal, as under mpiexec
_STYLES = {Severity.OK: "", Severity.REMARK: "cyan", Severity.WARNING: "yellow", Severity.FAULT: "bold red"}


def print_table(examination: Examination, *, strict: bool) -> None:
    """Print the findings with their fixes, and the conclusion."""
    text, terminal = io.StringIO(), sys.stdout.isatty() and examination.job.launcher.name == "none"
    width = None if terminal else _WIDTH
    console = PlainConsole(file=text, width=width, force_terminal=terminal)
    table = plain_table(gap=1)
    for _ in range(2):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, findings in examination.findings.items():
        for number, finding in enumerate(findings):
            table.add_row(name if not number else "", finding.severity.value, finding.sentence, style=_STYLES[finding.severity])
            if finding.fix:
                table.add_row("", "fix", finding.fix)
    console.print(table)
    console.print()
    console.print(conclusion(examination, strict=strict))
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in text.getvalue().split("\n")[:-1]))


def conclusion(examination: Examination, *, strict: bool) -> str:
    """Return the last line: whether a training would run well here."""
    counts = {severity: sum(one.severity is severity for one in examination.all_findings) for severity in Severity}
    faults, warnings = counts[Severity.FAULT], counts[Severity.WARNING]
    total = f"{_count(faults, 'fault')} and {_count(warnings, 'warning')}"
    if not exit_code(examination.all_findings, strict=strict):
        if warnings:
            return f"A training would run here: {total}."
        remarks = counts[Severity.REMARK]
        return "A training would run well here." if not remarks else f"A training would run here: {_count(remarks, 'remark')}."
    return f"{'A training would not run well here' if faults else 'Warnings count here'}: {total}."


def _count(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun if number == 1 else f'{noun}s'}"


def rank_map(examination: Examination) -> Iterator[dict[str, Any]]:
    """Yield host, CPUs, threads and GPUs of each rank, in rank order."""
    for rank, facts in enumerate(examination.by_rank):
        cores, gpus = facts.get(BINDING.name), facts.get(GPUS.name)
        yield {
            "rank": rank,
            "host": examination.job.hosts[rank],
            "node": examination.job.node_of[rank],
            "cpus": ranges(cores.cpus) if isinstance(cores, CoreFacts) else "",
            "threads": cores.threads if isinstance(cores, CoreFacts) else None,
            "gpus": list(gpus.visible) if isinstance(gpus, GpuFacts) else [],
        }


def print_json(examination: Examination, *, strict: bool) -> None:
    """Print the outcome as one JSON object."""
    findings = [
        {"check": name, "severity": one.severity.value, "key": one.key, "sentence": one.sentence, "fix": one.fix}
        for name, of_check in examination.findings.items()
        for one in of_check
    ]
    job = examination.job
    content = {
        "exit_code": exit_code(examination.all_findings, strict=strict),
        "ranks": job.size,
        "nodes": len(job.nodes),
        "launcher": job.launcher.name,
        "mpi": job.library,
        "findings": findings,
        "map": list(rank_map(examination)),
    }
    print(json.dumps(content, indent=1))
