"""Crashes of a process before a chosen system call of its work."""

from __future__ import annotations

import os
from collections.abc import Callable

from hpctrain.training.saving import BackgroundWriter

_CALLS = ("pwrite", "fsync", "replace", "ftruncate", "open", "unlink", "mkdir", "rmdir")


def crash_at(call: int, work: Callable[[], object]) -> bool:
    """Run `work` in a child process that ends before system call number `call`; return whether the work finished."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    calls = 0
    try:
        for name in _CALLS:
            original = getattr(os, name)

            def counted(*arguments: object, original: Callable[..., object] = original, **options: object) -> object:
                nonlocal calls
                calls += 1
                if calls > call:
                    os._exit(1)
                return original(*arguments, **options)

            setattr(os, name, counted)
        writer = BackgroundWriter()
        writer.start(work)
        os._exit(0 if writer.wait(60) and writer.result() is None else 2)
    finally:
        os._exit(3)
