"""Averaging over slow links: sparse, 16-bit and dense messages on 4 ranks at 100 to 500 Mb/s, and priority on 2 hosts.

    python -m benchmarks.slow_links --list                      # the cases, the most important first, and what each takes
    python -m benchmarks.slow_links                             # all that the file of results lacks; needs root and iproute2
    python -m benchmarks.slow_links 200mbit --rounds 9          # the cases with this word in their name
    python -m benchmarks.slow_links --report                    # Markdown of what has been measured; runs nothing

A case is one MPI job in which all variants step in turn. It is written to the file of results when it ends, so a run that is
interrupted goes on with the case that it was at. All cases take 65 minutes with 9 rounds, the four at 200 Mb/s half of it; no
round begins more than `--minutes` after a case's first one. Variants warm up over links that are not shaped; after `--screen`
rounds those dense ones that are more than 5 % slower than the best leave, with what is compared with them only.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.lab import Lab, LabError, missing, take_down_at_termination
from benchmarks.overlap import JobError, jobs, rank_command
from benchmarks.overlap_rounds import screened, take_word
from benchmarks.shapes import SHAPES
from benchmarks.slow_links_cases import CASES, Case, choice, named, possible
from benchmarks.slow_links_report import markdown
from hpctrain.bench.interleaved import machine_facts
from hpctrain.storage.atomic_write import write_json
from tests.support.jobs import find_mpiexec

_RESULTS = Path(__file__).resolve().parent / "results"
OUT = _RESULTS / "slow-links.json"
PREDICTIONS = _RESULTS / "slow-links-predicted.json"
# One thread a rank: ranks share cores, and a step's compute is to be the same in all variants.
_THREADS = ("env", "OMP_NUM_THREADS=1", "OPENBLAS_NUM_THREADS=1")
_LINK_BYTES = 8 << 20  # of the message that measures the link
_SETUP_SECONDS = 25.0
_UNKNOWN_SECONDS = 2.0  # of a step, for an estimate


def run_case(case: Case, chosen: argparse.Namespace) -> dict[str, Any]:
    """All rounds of a case.

    Raises:
        JobError: a rank failed, or time is up. LabError: no laboratory can be built.
    """
    variants, refused = possible(case)
    begin = time.monotonic()
    with jobs(chosen.timeout) as (directory, running):
        settings, out = _write_settings(case, {name: variants[name] for name in variants}, chosen, directory)
        command = [*_THREADS, *rank_command(settings)]
        if case.rate is None:
            launcher = find_mpiexec()
            if launcher is None:
                raise LabError("There is no mpiexec; install the package mpich into this environment.")
            running.start("job", [launcher, "-bind-to", "core", "-n", str(case.ranks), *command])
            running.wait("job")
        else:
            with Lab(case.hosts, case.rate) as lab:
                running.start("job", lab.mpiexec(command, case.ranks_per_host))
                running.wait("job", partial(take_word, _words(directory), partial(_set_rate, lab, case.rate)))
        return {
            "case": case.name,
            "sections": variants,
            "refused": refused,
            "machine": machine_facts(),
            "seconds": time.monotonic() - begin,
            **json.loads(out.read_text()),
        }


def _set_rate(lab: Lab, rate: str, word: str) -> None:
    lab.set_rate(None if word == "unshaped" else rate)


def _words(directory: Path) -> Path:
    return directory / "link"


def _write_settings(case: Case, variants: dict[str, Any], chosen: argparse.Namespace, directory: Path) -> tuple[Path, Path]:
    path, out = directory / "settings.json", directory / "result.json"
    values = {
        "shape": SHAPES[case.model].as_dict(),
        "kernels": "onednn",
        "variants": {name: None if section is None else choice(section) for name, section in variants.items()},
        "rounds": case.rounds(chosen.rounds),
        "out": str(out),
        "progress": chosen.progress,
        "nice": chosen.nice,
        "bare": False,
        "link_bytes": _LINK_BYTES,
        "seconds": 60.0 * chosen.minutes,
        "screen": case.screen,
        "screen_rounds": chosen.screen,
        "link_words": str(_words(directory)) if case.wire_bound else "",
    }
    path.write_text(json.dumps(values))
    return path, out


def lines_of_cases(cases: tuple[Case, ...], rounds: int, measured: dict[str, Any], predicted: dict[str, Any]) -> list[str]:
    """A line a case: its name, what it takes by the predictions or took, and whether it has been measured."""
    lines = []
    for case in cases:
        minutes = expected_seconds(case, rounds, predicted) / 60
        took = measured.get(case.name)
        state = "" if took is None else f", measured in {took['seconds'] / 60:.1f}"
        lines.append(f"{case.name}: {len(case.variants)} variants, about {minutes:.1f} minutes{state}")
    total = sum(expected_seconds(case, rounds, predicted) for case in cases)
    lines.append(f"{len(cases)} cases, about {total / 60:.0f} minutes")
    return lines


def expected_seconds(case: Case, rounds: int, predicted: dict[str, Any], screen_rounds: int = 2) -> float:
    """About what a case takes: two steps a turn, of all variants at first and after the screen of those that stay."""
    of_case = predicted.get(case.name, {})
    steps = {name: float(of_case.get(name) or _UNKNOWN_SECONDS) for name in case.variants}
    stay, number = list(steps), case.rounds(rounds)
    if case.screen is not None:
        stay = screened({name: [{"step_seconds": seconds}] for name, seconds in steps.items()}, case.screen)
    first = min(number, screen_rounds)
    after = (number - first) * sum(steps[name] for name in stay)
    return _SETUP_SECONDS + 3.0 * len(steps) + 2 * (first * sum(steps.values()) + after)


def read(path: Path) -> dict[str, Any]:
    """A file of results by case; nothing where there is none."""
    values: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return values


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="cases with one of these words in their name; by default all")
    parser.add_argument("--rounds", type=int, default=9, help="at 200 Mb/s and of priority; a third of it elsewhere")
    parser.add_argument("--screen", type=int, default=2, help="rounds of all variants")
    parser.add_argument("--minutes", type=float, default=6.0, help="after the first round of a case, in which rounds begin")
    parser.add_argument("--timeout", type=float, default=1200.0, help="seconds that one case may take")
    parser.add_argument("--progress", default="auto", choices=["auto", "none", "test", "thread", "posting"])
    parser.add_argument("--nice", type=int, default=0, help="of all processes; below 0 ahead of others on this machine")
    parser.add_argument("--again", action="store_true", help="measure cases that the file has, too")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--list", action="store_true", help="print the cases; run nothing")
    parser.add_argument("--report", action="store_true", help="print the report as Markdown; run nothing")
    chosen = parser.parse_args(arguments)
    try:
        chosen.cases = named(chosen.words)
    except ValueError as error:
        parser.error(str(error))
    return chosen


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0 where all that was asked for has been measured."""
    chosen = parse(arguments)
    results, predictions = read(chosen.out), read(PREDICTIONS)
    predicted = predictions.get("step_seconds", {})
    if chosen.list:
        print("\n".join(lines_of_cases(chosen.cases, chosen.rounds, results, predicted)))
        return 0
    if not chosen.report:
        measure(chosen, results)
    measured = {case.name: results[case.name] for case in CASES if case.name in results}
    print(markdown(measured, predicted, predictions.get("rule_crossover", {})))
    return 0


def measure(chosen: argparse.Namespace, results: dict[str, Any]) -> None:
    """Run the cases that are not among the results; the file is written after each."""
    take_down_at_termination()
    for number, case in enumerate(chosen.cases, 1):
        if case.name in results and not chosen.again:
            continue
        reason = None if case.rate is None else missing()
        if reason is not None:
            raise SystemExit(reason)
        print(f"{number} of {len(chosen.cases)}: {case.name}", file=sys.stderr, flush=True)
        try:
            results[case.name] = run_case(case, chosen)
        except (JobError, LabError) as failure:
            raise SystemExit(f"{case.name}: {failure}") from None
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(chosen.out, results)


if __name__ == "__main__":
    sys.exit(main())
