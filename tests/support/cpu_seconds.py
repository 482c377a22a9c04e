"""A pytest plugin that measures each test's processor time, its child processes' included: a busy machine changes that little.

`python -m pytest -p tests.support.cpu_seconds --cpu-seconds FILE ...` appends one JSON line per test to FILE. It prints the sums
by folder, and the tests that should be marked `slow`.
"""

from __future__ import annotations

import json
import resource
from collections import defaultdict
from collections.abc import Generator, Mapping
from pathlib import Path, PurePosixPath

import pytest

#: A test function that takes longer, with all its parameters together, is marked `slow`.
SLOW_SECONDS = 1.0


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option that names the file of measurements."""
    parser.addoption(
        "--cpu-seconds", metavar="FILE", type=Path, help="append each test's processor seconds to FILE as JSON lines"
    )


def pytest_configure(config: pytest.Config) -> None:
    """With a file to write to: measure."""
    path = config.getoption("--cpu-seconds")
    if path is not None:
        config.pluginmanager.register(_CpuSeconds(path), "cpu-seconds-of-tests")


class _CpuSeconds:
    """Processor time from a test's setup to its teardown, user and system, of this process and of children that ended in between.

    Where several processes run tests, each appends to the same file, and the first sums up.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        self._begin_bytes = self._path.stat().st_size if self._path.exists() else 0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, bool | None, bool | None]:
        here, children = _seconds(resource.RUSAGE_SELF), _seconds(resource.RUSAGE_CHILDREN)
        handled = yield
        here, children = _seconds(resource.RUSAGE_SELF) - here, _seconds(resource.RUSAGE_CHILDREN) - children
        line = {"test": item.nodeid, "here": round(here, 3), "children": round(children, 3), "marks": _marks(item)}
        with self._path.open("a") as lines:
            lines.write(json.dumps(line) + "\n")
        return handled

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        with self._path.open() as file:
            file.seek(self._begin_bytes)
            lines = [json.loads(line) for line in file]
        folders: dict[str, float] = defaultdict(float)
        unmarked: dict[str, float] = defaultdict(float)
        for line in lines:
            seconds = line["here"] + line["children"]
            folders[str(PurePosixPath(line["test"].split("::")[0]).parent)] += seconds
            if not line["marks"]:
                unmarked[line["test"].split("[")[0]] += seconds
        terminalreporter.section("processor seconds by folder")
        _print_sums(terminalreporter, folders, 0.0)
        terminalreporter.section(f"neither slow nor job, and of more than {SLOW_SECONDS:g} processor seconds")
        _print_sums(terminalreporter, unmarked, SLOW_SECONDS)


def _print_sums(terminalreporter: pytest.TerminalReporter, sums: Mapping[str, float], least: float) -> None:
    for name, seconds in sorted(sums.items(), key=lambda entry: -entry[1]):
        if seconds > least:
            terminalreporter.line(f"{seconds:9.1f}  {name}")


def _seconds(who: int) -> float:
    usage = resource.getrusage(who)
    return usage.ru_utime + usage.ru_stime


def _marks(item: pytest.Item) -> list[str]:
    return [name for name in ("slow", "job") if item.get_closest_marker(name)]
