"""Which tests a run leaves out, by its level (docs/testing.md): quick, usual, or all.

Cases are drawn by HPCTRAIN_TEST_SEED, by default the date. A test that is named on the command line runs with all its cases.
HPCTRAIN_TEST_SHARE=2/4 takes the second of four shares of the files, so that each of four processes imports only its share.
"""

from __future__ import annotations

import os
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
#: Maximum number of cases of a test up to which level usual runs all of them; LARGE_SLOW is for tests with the marker `slow`.
LARGE, LARGE_SLOW = 12, 3
QUICK_CASES = 1
LEVELS = ("quick", "usual", "all")
#: Environment variables, because workers of pytest-xdist and ranks must draw the same cases and amounts.
LEVEL, SEED, SHARE = "HPCTRAIN_TEST_LEVEL", "HPCTRAIN_TEST_SEED", "HPCTRAIN_TEST_SHARE"


def amount(usual: int, everything: int) -> int:
    """Return the number of examples that a test draws: `everything` at level all, a third of `usual` at level quick."""
    level = os.environ.get(LEVEL)
    return everything if level == "all" else max(1, usual // 3) if level == "quick" else usual


def add_option(parser: pytest.Parser) -> None:
    """Add the option that names the level."""
    parser.addoption("--level", choices=LEVELS, default=os.environ.get(LEVEL, "usual"), help="how much of the tests runs")


class Sampling:
    """Deselect the cases that the level leaves out, and report their number."""

    def __init__(self, config: pytest.Config) -> None:
        self._level = os.environ[LEVEL] = config.getoption("--level")
        self._seed = os.environ[SEED] = os.environ.get(SEED) or date.today().strftime("%Y%m%d")
        self._left_out = 0
        share, _, shares = os.environ.get(SHARE, "1/1").partition("/")
        files = _by_size()
        self._other_shares = {*files} - {*files[int(share) - 1 :: int(shares)]}
        named = (argument.partition("[")[0].partition("::") for argument in config.args if "::" in argument)
        self._named = {f"{Path(file).resolve()}::{name}" for file, _, name in named}

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Leave out the files of other shares before they are imported."""
        return True if collection_path in self._other_shares else None

    @pytest.hookimpl(trylast=True)  # after -m and -k
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if self._level == "all":
            return
        functions: dict[str, list[pytest.Item]] = defaultdict(list)
        for item in items:
            functions[f"{item.path}::{item.nodeid.partition('[')[0].partition('::')[2]}"].append(item)
        kept = {item for name, cases in functions.items() for item in (cases if name in self._named else self._kept(cases))}
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        self._left_out = len(items) - len(kept)
        items[:] = [item for item in items if item in kept]

    def _kept(self, cases: Sequence[pytest.Item]) -> Sequence[pytest.Item]:
        """Return the cases of a function that run: those that have failed once, and a sample drawn by the seed."""
        if cases[0].get_closest_marker("thorough"):
            return ()
        always = {case for mark in cases[0].iter_markers("once_failed") for case in mark.args}
        chosen = [case for case in cases if case.nodeid.partition("[")[2][:-1] in always]
        drawn = random.Random(f"{self._seed} {cases[0].nodeid.partition('[')[0]}").sample(cases, len(cases))
        sample = cases[0].get_closest_marker("sample")
        limits = [*(sample.args if sample else ()), *((QUICK_CASES,) if self._level == "quick" else ())]
        if limits:
            return chosen + [case for case in drawn if case not in chosen][: min(limits)]
        large = LARGE_SLOW if cases[0].get_closest_marker("slow") else LARGE
        return cases if len(cases) <= large else chosen + [case for case in _covering(drawn, large) if case not in chosen]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["left_out"] = self._left_out

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:  # all workers of pytest-xdist leave out the same
        self._left_out = getattr(node, "workeroutput", {}).get("left_out", self._left_out)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._left_out:
            terminalreporter.line(
                f"{self._left_out} cases left out ({SEED}={self._seed} draws the same); `make test-all` runs all."
            )


def _by_size() -> list[Path]:
    """Return the files of all tests, the largest first, so that shares of every n-th take about the same time."""
    return sorted(TESTS.rglob("test_*.py"), key=lambda file: (-file.stat().st_size, file))


def _covering(drawn: Sequence[pytest.Item], least: int) -> list[pytest.Item]:
    """Return at least `least` cases in which each value of each parameter occurs."""
    met: set[tuple[str, int]] = set()
    with_new_values: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for case in drawn:
        values = {(name, id(value)) for name, value in _parameters(case).items()}
        (others if values <= met else with_new_values).append(case)
        met |= values
    return with_new_values + others[: max(0, least - len(with_new_values))]


def _parameters(case: pytest.Item) -> Mapping[str, object]:
    return case.callspec.params if hasattr(case, "callspec") else {}
