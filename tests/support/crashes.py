"""Work whose process ends before one of its calls to the system."""

from __future__ import annotations

import os
from collections.abc import Callable

from hpctrain.storage.background_writer import BackgroundWriter

_CALLS = ("pwrite", "fsync", "replace", "ftruncate", "open", "unlink", "mkdir", "rmdir")


def crash_at(call: int, work: Callable[[], object]) -> bool:
    """Run `work` in a thread of a child process that ends before its call number `call` to the system; whether it did all."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    made = []
    try:
        for name in _CALLS:
            original = getattr(os, name)

            def counted(*arguments: object, original: Callable[..., object] = original, **options: object) -> object:
                made.append(1)
                if len(made) > call:
                    os._exit(1)
                return original(*arguments, **options)

            setattr(os, name, counted)
        writer = BackgroundWriter()
        writer.start(work)
        os._exit(0 if writer.wait(60) and writer.result() is None else 2)
    finally:
        os._exit(3)
