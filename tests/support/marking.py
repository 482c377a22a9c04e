"""The marker `job`: who asks for the `job` fixture has it, and a test that starts a process without it fails.

So `-m "not job"` is sure to be tests of this process alone, which share no cores with children and cost no start of Python.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import pytest

#: Audit events of CPython: the ways to start a process.
STARTS = frozenset({"subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty", "os.system", "os.exec", "os.spawn"})


class JobMarker:
    """Marks tests by their fixtures, and watches what the others start."""

    def __init__(self) -> None:
        self._watches = False
        self._started: list[str] = []
        sys.addaudithook(self._audit)  # as long as the process: an audit hook cannot be taken away

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: Sequence[pytest.Item]) -> None:
        for item in items:
            if "job" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.job)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, None, None]:
        with self.watching(item):
            yield

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        with self.watching(item):
            yield

    @contextmanager
    def watching(self, item: pytest.Item) -> Generator[None, None, None]:
        """Fail at the end where a process was started meanwhile and `item` is not marked."""
        self._started.clear()
        self._watches = item.get_closest_marker("job") is None
        try:
            yield
        finally:
            self._watches = False
        if self._started:
            pytest.fail(f"This test starts a process ({self._started[0]}), so it is marked with pytest.mark.job.", pytrace=False)

    def _audit(self, event: str, arguments: tuple[object, ...]) -> None:
        # Matplotlib asks for the system's fonts once on a machine, in whichever test draws first.
        if self._watches and event in STARTS and "fc-list" not in str(arguments):
            self._started.append(f"{event}{arguments!r}"[:200])
