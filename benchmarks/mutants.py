"""Mutation testing: small changes to the package, and the tests that find them.

A mutant changes one operator, number or condition, or drops one call.

    python -m benchmarks.mutants draw mutants.json --count 60              draw mutants, the same number from each package
    python -m benchmarks.mutants probe mutants.json --checkout DIR         run the tests once to find which ones reach each mutant
    python -m benchmarks.mutants run mutants.json --checkout DIR DIR2      run for each mutant the tests that reach it
    python -m benchmarks.mutants show mutants.json                         print a table

A checkout is a clone with its own virtual environment (`make .venv/installed-dev`). This program changes and restores its files.
The first test that fails or takes too long kills a mutant. Only tests that reach a mutant run, so 60 mutants take minutes.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import subprocess
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGES = ("averaging", "parallel", "nn/compile", "backend/kernels", "data", "storage", "launch")
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
_PROBE = """import os
_seen = set()
def hit(k):
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if (k, test) not in _seen:
        _seen.add((k, test))
        with open(os.environ["HPCTRAIN_MUTANT_HITS"], "a") as file:
            file.write(f"{k}\\t{test}\\n")
"""


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


def probe(mutants: list[dict[str, Any]], checkout: Path, level: str) -> None:
    """Run the tests once with a probe at each mutant, and store the tests that reach it, cheapest first."""
    hits, costs = checkout / "hits.tsv", checkout / "costs.jsonl"
    (checkout / "hpctrain/_mutants.py").write_text(_PROBE)
    for mutant in mutants:
        source, begin, end = place(mutant, checkout)
        call = f"__import__('hpctrain._mutants', fromlist=['hit']).hit({mutant['id']})"
        text = f"({call}, {mutant['old']})[1]"
        (checkout / mutant["file"]).write_text(source[:begin] + text + source[end:])
    environment = _environment(checkout) | {"HPCTRAIN_MUTANT_HITS": str(hits.absolute()), "HPCTRAIN_TEST_LEVEL": level}
    measure = ["-p", "tests.support.cpu_seconds", "--cpu-seconds", str(costs.absolute())]
    single_process = [
        ".venv/bin/python",
        "-m",
        "pytest",
        "-q",
        "-n",
        str(os.cpu_count()),
        "--dist",
        "worksteal",
        "-m",
        "parallel[1]",
        *measure,
    ]
    subprocess.run(single_process, cwd=checkout, env=environment)
    for ranks in (2, 3, 4):
        subprocess.run(
            _with_ranks(ranks, ["-q", *measure, "-m", f"parallel[{ranks}]", "tests/mpi"]), cwd=checkout, env=environment
        )
    _restore(checkout)
    seconds: dict[str, float] = defaultdict(float)
    for line in costs.read_text().splitlines():
        cost = json.loads(line)
        seconds[cost["test"]] = max(seconds[cost["test"]], cost["here"] + cost["children"])
    reached: dict[int, set[str]] = defaultdict(set)
    for line in hits.read_text().splitlines():
        number, _, test = line.partition("\t")
        reached[int(number)].add(test)
    for mutant in mutants:
        tests = sorted(reached[mutant["id"]] & seconds.keys(), key=lambda test: seconds[test])
        mutant["tests"] = [[test, round(seconds[test], 2)] for test in tests]


def run(mutants: list[dict[str, Any]], checkouts: list[Path], out: Path, all_mutants: list[dict[str, Any]]) -> None:
    """Run for each mutant the tests that reach it, one thread per checkout; write each result at once."""
    waiting = list(reversed(mutants))
    lock = threading.Lock()

    def work(checkout: Path) -> None:
        while True:
            with lock:
                if not waiting:
                    return
                mutant = waiting.pop()
            killer = _killer(mutant, checkout)
            with lock:
                mutant["killed_by"] = killer
                out.write_text(json.dumps(all_mutants, indent=1))
                print(f"{mutant['id']:3} {mutant['file']} {mutant['old']!r} -> {mutant['new']!r}: {killer}", flush=True)

    threads = [threading.Thread(target=work, args=(checkout,)) for checkout in checkouts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _killer(mutant: dict[str, Any], checkout: Path) -> str | None:
    """Return the first test that fails with a mutant; None if all pass."""
    source, begin, end = place(mutant, checkout)
    (checkout / mutant["file"]).write_text(source[:begin] + f"({mutant['new']})" + source[end:])
    try:
        groups: dict[int, list[tuple[str, float]]] = defaultdict(list)
        for test, seconds in mutant["tests"]:
            match = MPI_TEST.search(test)
            groups[int(match[1]) if match else 1].append((test, seconds))
        for ranks, tests in sorted(groups.items()):
            for first in range(0, len(tests), 300):
                killer = _first_failure(ranks, tests[first : first + 300], checkout)
                if killer is not None:
                    return killer
    finally:
        _restore(checkout)
    return None


def _first_failure(ranks: int, tests: list[tuple[str, float]], checkout: Path) -> str | None:
    names = [test for test, _ in tests]
    arguments = ["-x", "-q", "--no-header", "--level", "all", *names]
    command = [".venv/bin/python", "-m", "pytest", *arguments] if ranks == 1 else _with_ranks(ranks, arguments)
    limit = 120 + 10 * sum(seconds for _, seconds in tests)
    with subprocess.Popen(
        command,
        cwd=checkout,
        env=_environment(checkout),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            return "too slow"
    if process.returncode == 0:
        return None
    match = re.search(r"^(?:FAILED|ERROR) (\S+.*?)(?: - |$)", output, re.MULTILINE)
    return match[1] if match else f"exit code {process.returncode}"


def _with_ranks(ranks: int, arguments: list[str]) -> list[str]:
    return [".venv/bin/mpiexec", "-n", str(ranks), ".venv/bin/python", "-m", "mpi4py", "-m", "pytest", *arguments]


def _environment(checkout: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(checkout.absolute())}


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
    parser.add_argument("--level", default="usual", help="level of the tests that `probe` runs")
    parser.add_argument("--checkout", type=Path, nargs="*", default=[])
    parser.add_argument("--survivors", action="store_true", help="run only the mutants that no test has killed")
    options = parser.parse_args()
    mutants = draw(options.count, options.seed) if options.action == "draw" else json.loads(options.file.read_text())
    if options.action == "probe":
        probe(mutants, options.checkout[0], options.level)
    if options.action == "run":
        selected = [mutant for mutant in mutants if not options.survivors or mutant.get("killed_by") is None]
        run(selected, options.checkout, options.file, mutants)
    if options.action == "show":
        for mutant in mutants:
            change = f"{mutant['old']!r} -> {mutant['new']!r}"
            print(f"{mutant['id']:3} {mutant['file']}:{mutant['function']} {change}: {mutant.get('killed_by')}")
    options.file.write_text(json.dumps(mutants, indent=1))


if __name__ == "__main__":
    main()
