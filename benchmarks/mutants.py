"""Mutation testing: small changes to the package, and the tests that find them.

A mutant changes one operator, number or condition, or drops one call.

    python -m benchmarks.mutants draw mutants.json --count 60              draw mutants, the same number from each package
    python -m benchmarks.mutants probe mutants.json --checkout DIR         run the tests once to find which ones reach each mutant
    python -m benchmarks.mutants run mutants.json --checkout DIR DIR2      run for each mutant the tests that reach it
    python -m benchmarks.mutants show mutants.json                         print a table

A checkout is a clone with a virtual environment of its own (`make .venv/installed-dev`). This program changes files of its
package and restores them from git, so commit first. A test kills a mutant if it fails or hangs with it, fails again by itself,
and passes by itself without it. Only tests that reach a mutant run, the cheap ones first, until one kills it, so 60 mutants take
minutes.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import random
import re
import resource
import select
import subprocess
import threading
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

PACKAGES = ("averaging", "parallel", "nn/compile", "backend", "data", "storage", "launch")
_ONE_PROCESS = "parallel[1]"  # mpi-pytest: tests without ranks
_PYTEST = [".venv/bin/python", "-m", "pytest"]
MPI_TEST = re.compile(r"tests/mpi/.*nprocs=(\d)")
_SWAPS: dict[type, str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.And: "or",
    ast.Or: "and",
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.FloorDiv: "*",
    ast.Div: "*",
    ast.Mod: "//",
}
# The probe finds its file by its own path, because jobs that tests start get no HPCTRAIN_ variables.
_PROBE = """import os
from pathlib import Path
_hits = Path(__file__).parents[1] / "build/mutants/hits.tsv"
_seen = set()
def hit(k):
    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    if (k, test) not in _seen:
        _seen.add((k, test))
        try:
            with _hits.open("a") as file:
                file.write(f"{k}\\t{test}\\n")
        except OSError:
            pass
"""
#: environment variable with the file of each test's processor time, which this module appends as a plugin of pytest
_COSTS = "MUTANTS_COSTS"
# A test has failed if it prints nothing for this many seconds plus this many times its processor time in the probe.
_PATIENCE_SECONDS, _PATIENCE_FACTOR = 120, 20
_TESTS_PER_PROCESS = 200


def sites(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the possible changes in the functions of a file: file, function, old text and new text."""
    source = file.read_text()
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef) or function.name == "__repr__":
            continue
        for node in _computing(function.body):
            new = _changed(node, source)
            if new is not None:
                yield {"file": str(file), "function": function.name, "old": ast.get_source_segment(source, node), "new": new}


def _computing(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Walk statements, except nested functions, annotations, raised errors and log messages."""
    for statement in body:
        for node in ast.walk(statement):
            text = ast.unparse(node) if isinstance(node, (ast.Raise, ast.Call)) else ""
            if isinstance(node, ast.Raise) or text.startswith(("log.", "logger.", "_log")):
                for below in ast.walk(node):
                    below.left_out = True  # type: ignore[attr-defined]
            if isinstance(node, (ast.AnnAssign, ast.FunctionDef)):
                for below in ast.walk(getattr(node, "annotation", node)):
                    below.left_out = True  # type: ignore[attr-defined]
            if not hasattr(node, "left_out"):
                yield node


def _changed(node: ast.AST, source: str) -> str | None:
    """Return the source of a node after its change; None if the node has no change."""
    whole = ast.get_source_segment(source, node) or ""
    if "\n" in whole:
        return None
    if isinstance(node, (ast.BinOp, ast.Compare, ast.BoolOp)):
        left, operator, right = {
            ast.BinOp: lambda: (node.left, node.op, node.right),
            ast.Compare: lambda: (node.left, node.ops[0], node.comparators[0]),
            ast.BoolOp: lambda: (node.values[0], node.op, node.values[1]),
        }[type(node)]()
        if type(operator) in _SWAPS and (
            isinstance(node, ast.BinOp) or len(getattr(node, "ops", getattr(node, "values", ()))) <= 2
        ):
            texts = [ast.get_source_segment(source, side) for side in (left, right)]
            return f"({texts[0]}) {_SWAPS[type(operator)]} ({texts[1]})"
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return str(node.value + 1)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return f"({ast.get_source_segment(source, node.operand)})"
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return "None"
    return None


def draw(count: int, seed: int) -> list[dict[str, Any]]:
    """Return `count` random mutants, as many from each package, and at most one per function."""
    drawn = []
    generator = random.Random(seed)
    for number, package in enumerate(PACKAGES):
        candidates = [site for file in sorted(Path("hpctrain", package).rglob("*.py")) for site in sites(file)]
        share = count * (number + 1) // len(PACKAGES) - count * number // len(PACKAGES)
        functions: set[tuple[str, str]] = set()
        for site in generator.sample(candidates, len(candidates)):
            if len(functions) < share and (site["file"], site["function"]) not in functions:
                functions.add((site["file"], site["function"]))
                drawn.append({"id": len(drawn), **site})
    return drawn


def place(mutant: dict[str, Any], checkout: Path) -> tuple[str, int, int]:
    """Return the text of the mutant's file in a checkout, and the first and last position of the old text in it (characters)."""
    source = (checkout / mutant["file"]).read_text()
    starts = [0, *(match.end() for match in re.finditer("\n", source))]
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef) and function.name == mutant["function"]:
            for node in _computing(function.body):
                segment = ast.get_source_segment(source, node)
                if segment == mutant["old"] and _changed(node, source) == mutant["new"]:
                    begin = starts[node.lineno - 1] + len(
                        source.splitlines()[node.lineno - 1].encode()[: node.col_offset].decode()
                    )
                    return source, begin, begin + len(segment)
    raise LookupError(f"{mutant} is not in {checkout}")


def probe(mutants: list[dict[str, Any]], checkout: Path, level: str, paths: list[str]) -> None:
    """Run the tests once with a probe at each mutant, and store the tests that reach it, cheapest first.

    paths: folders and files of tests; all of them if empty. The tests that an earlier probe has found remain.
    """
    folder = checkout.absolute() / "build/mutants"
    folder.mkdir(parents=True, exist_ok=True)
    hits, costs = folder / "hits.tsv", folder / "costs.jsonl"
    for file in (hits, costs):
        file.write_text("")
    (checkout / "hpctrain/_mutants.py").write_text(_PROBE)
    for mutant in mutants:
        call = f"__import__('hpctrain._mutants', fromlist=['hit']).hit({mutant['id']})"
        _write(mutant, checkout, f"({call}, {mutant['old']})[1]")
    measure = ["-q", "-p", "benchmarks.mutants"]
    spread = ["-n", str(os.cpu_count()), "--maxprocesses", "8", "--dist", "worksteal", "-m", _ONE_PROCESS]
    commands = [[*_PYTEST, *measure, *spread, *paths]]
    if not paths or any(path.startswith("tests/mpi") for path in paths):
        commands += [_with_ranks(ranks, [*measure, "-m", f"parallel[{ranks}]", "tests/mpi"]) for ranks in (2, 3, 4)]
    try:
        for command in commands:
            subprocess.run(command, cwd=checkout, env=_environment(checkout, level) | {_COSTS: str(costs)})
    finally:
        _restore(checkout)
    _store(mutants, hits, costs)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, bool | None, bool | None]:
    """Append a test's processor time to the file of costs, in seconds, with that of its child processes."""
    begin_seconds = _processor_seconds()
    handled = yield
    with open(os.environ[_COSTS], "a") as costs:
        costs.write(json.dumps([item.nodeid, round(_processor_seconds() - begin_seconds, 3)]) + "\n")
    return handled


def _processor_seconds() -> float:
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _store(mutants: list[dict[str, Any]], hits: Path, costs: Path) -> None:
    """Store the tests that reach each mutant, from the files that a probe has written.

    A mutant that a fixture or an import reaches counts as reached by all tests of that file.
    """
    seconds: dict[str, float] = defaultdict(float)
    for line in costs.read_text().splitlines():
        test, cost = json.loads(line)
        seconds[test] = max(seconds[test], cost)
    files: dict[str, set[str]] = defaultdict(set)
    for test in seconds:
        files[test.partition("::")[0]].add(test)
    reached: dict[int, set[str]] = defaultdict(set)
    for line in hits.read_text().splitlines():
        number, _, current = line.partition("\t")
        test, _, phase = current.rpartition(" ")
        reached[int(number)] |= {test} if phase == "(call)" else files[test.partition("::")[0]]
    for mutant in mutants:
        known = dict(mutant.get("tests", ()))
        known |= {test: round(seconds[test], 2) for test in reached[mutant["id"]] & seconds.keys()}
        mutant["tests"] = sorted(known.items(), key=lambda entry: entry[1])


def run(mutants: list[dict[str, Any]], checkouts: list[Path], level: str, out: Path, all_mutants: list[dict[str, Any]]) -> None:
    """Run for each mutant the tests that reach it, one thread per checkout; write each result at once."""
    waiting = list(reversed(mutants))
    lock = threading.Lock()

    def work(checkout: Path) -> None:
        while True:
            with lock:
                if not waiting:
                    return
                mutant = waiting.pop()
            killer = _killer(mutant, checkout, level)
            with lock:
                mutant["killed_by"] = killer
                out.write_text(json.dumps(all_mutants, indent=1))
                print(f"{mutant['id']:3} {mutant['file']} {mutant['old']!r} -> {mutant['new']!r}: {killer}", flush=True)

    threads = [threading.Thread(target=work, args=(checkout,)) for checkout in checkouts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _killer(mutant: dict[str, Any], checkout: Path, level: str) -> str | None:
    """Return the first test that fails with a mutant, fails again by itself, and passes without the mutant."""
    try:
        _write(mutant, checkout, mutant["new"])
        groups: dict[int, list[tuple[str, float]]] = defaultdict(list)
        for test, seconds in mutant["tests"]:
            match = MPI_TEST.search(test)
            groups[int(match[1]) if match else 1].append((test, seconds))
        for ranks, tests in sorted(groups.items()):
            for first in range(0, len(tests), _TESTS_PER_PROCESS):
                waiting = tests[first : first + _TESTS_PER_PROCESS]
                while (failed := _first_failure(ranks, waiting, checkout, level)) is not None:
                    if _confirmed(mutant, ranks, failed, checkout, level):
                        return failed[0]
                    print(f"{mutant['id']:3} not counted: {failed[0]}", flush=True)
                    waiting = [test for test in waiting if test != failed]
    finally:
        _restore(checkout)
    return None


def _confirmed(mutant: dict[str, Any], ranks: int, test: tuple[str, float], checkout: Path, level: str) -> bool:
    """Return whether a test fails by itself with a mutant, and passes with the old text in parentheses."""
    if _first_failure(ranks, [test], checkout, level) is None:
        return False
    _restore(checkout)
    _write(mutant, checkout, mutant["old"])
    passes = _first_failure(ranks, [test], checkout, level) is None
    _restore(checkout)
    _write(mutant, checkout, mutant["new"])
    return passes


def _first_failure(ranks: int, tests: list[tuple[str, float]], checkout: Path, level: str) -> tuple[str, float] | None:
    """Return the first test that fails, crashes or hangs; None if all pass. Tests of a file run together."""
    if not tests:
        return None
    files = list(dict.fromkeys(test.partition("::")[0] for test, _ in tests))
    tests = sorted(tests, key=lambda test: files.index(test[0].partition("::")[0]))
    arguments = ["-x", "-v", "--no-header", "--tb=no", "-r", "N", *(test for test, _ in tests)]
    command = [*_PYTEST, *arguments] if ranks == 1 else _with_ranks(ranks, arguments)
    patience = _PATIENCE_SECONDS + _PATIENCE_FACTOR * max(seconds for _, seconds in tests)
    code, output = _output(command, checkout, level, patience)
    if code == 0:
        return None
    lines = [line for line in output.splitlines() if line.startswith("tests/")]
    wrong = [line for line in lines if re.search(r" (FAILED|ERROR) *(\[ *\d+%\])?$", line)]
    line = (wrong or lines or [""])[-1]
    # Without a line of a test, all of them fail: at an import, for instance.
    return max((test for test in tests if line.startswith(f"{test[0]} ")), key=lambda test: len(test[0]), default=tests[0])


def _output(command: list[str], checkout: Path, level: str, patience: float) -> tuple[int, str]:
    """Return the exit code and the output of a command; kill it if it prints nothing for `patience` seconds."""
    with subprocess.Popen(
        command,
        cwd=checkout,
        env=_environment(checkout, level),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        output = b""
        while select.select([process.stdout], [], [], patience)[0]:
            piece = os.read(process.stdout.fileno(), 1 << 16)  # type: ignore[union-attr]
            if not piece:
                break
            output += piece
        else:
            for child in [*psutil.Process(process.pid).children(recursive=True), process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
    return process.returncode, output.decode(errors="replace")


def _with_ranks(ranks: int, arguments: list[str]) -> list[str]:
    return [".venv/bin/mpiexec", "-n", str(ranks), ".venv/bin/python", "-m", "mpi4py", "-m", "pytest", *arguments]


def _environment(checkout: Path, level: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    own = {"PYTHONPATH": str(checkout.absolute()), "HPCTRAIN_TEST_LEVEL": level}
    return kept | own | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def _write(mutant: dict[str, Any], checkout: Path, text: str) -> None:
    """Replace a mutant's old text by `text` in parentheses."""
    source, begin, end = place(mutant, checkout)
    (checkout / mutant["file"]).write_text(f"{source[:begin]}({text}){source[end:]}")


def _restore(checkout: Path) -> None:
    subprocess.run(["git", "checkout", "-q", "--", "hpctrain"], cwd=checkout, check=True)
    (checkout / "hpctrain/_mutants.py").unlink(missing_ok=True)


def main() -> None:
    """Parse the command line, and draw, probe, run or show mutants."""
    parser = argparse.ArgumentParser(description="Make mutants of the package, and find the tests that kill them.")
    parser.add_argument("action", choices=["draw", "probe", "run", "show"])
    parser.add_argument(
        "file", type=Path, nargs="?", default=Path("mutants.json"), help="the mutants; every action updates this file"
    )
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--level", default="usual", help="level of the tests")
    parser.add_argument("--tests", nargs="*", default=[], help="folders and files of tests that `probe` runs; all by default")
    parser.add_argument("--checkout", type=Path, nargs="*", default=[])
    parser.add_argument("--survivors", action="store_true", help="run only the mutants that no test has killed")
    options = parser.parse_args()
    mutants = draw(options.count, options.seed) if options.action == "draw" else json.loads(options.file.read_text())
    if options.action == "probe":
        probe(mutants, options.checkout[0], options.level, options.tests)
    if options.action == "run":
        selected = [mutant for mutant in mutants if not options.survivors or mutant.get("killed_by") is None]
        run(selected, options.checkout, options.level, options.file, mutants)
    if options.action == "show":
        for mutant in mutants:
            change = f"{mutant['old']!r} -> {mutant['new']!r}"
            print(f"{mutant['id']:3} {mutant['file']}:{mutant['function']} {change}: {mutant.get('killed_by')}")
    options.file.write_text(json.dumps(mutants, indent=1))


if __name__ == "__main__":
    main()
