"""An operation that is complete at a later test."""

import threading
from collections.abc import Callable


class Countdown:
    """Complete at its n-th test by any thread.

    Args:
        tests: How many tests it takes.
        at_test: Called at each test.
        text: What the operation is called in records and errors.
    """

    def __init__(self, tests: int, at_test: Callable[[], object] | None = None, text: str = "a fake allreduce") -> None:
        self.left, self.at_test, self.text = tests, at_test, text
        self.threads: set[str] = set()  # names of the threads that tested

    def test(self) -> bool:
        self.threads.add(threading.current_thread().name)
        if self.at_test is not None:
            self.at_test()
        self.left -= 1
        return self.left <= 0

    def __str__(self) -> str:
        return self.text
