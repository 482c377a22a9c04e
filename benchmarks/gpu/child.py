"""Runs programs for a stage. Their output goes to the stage's log at once, so that a stopped stage has it in its log."""

from __future__ import annotations

import codecs
import math
import os
import selectors
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path


def watch(
    command: Sequence[str], *, seconds: float = math.inf, cwd: Path | None = None, on_line: Callable[[str], None] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program, print its output and errors at once, and return its exit code with both as one text.

    Args:
        seconds: time limit of the program; may be infinite. on_line: called with each line as soon as it is complete.

    Raises:
        subprocess.TimeoutExpired: the program was killed at its limit; the exception has the output.
    """
    decoder, text, line = codecs.getincrementaldecoder("utf-8")("replace"), "", ""
    end = time.monotonic() + seconds
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=cwd
    ) as process:
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            data = b" "
            while data:
                if not selector.select(None if end == math.inf else max(0.0, end - time.monotonic())):
                    process.kill()  # without reading to the end: its children may hold the pipe open
                    raise subprocess.TimeoutExpired(command, seconds, text)
                data = os.read(process.stdout.fileno(), 1 << 16)
                piece = decoder.decode(data, final=not data)
                print(piece, end="", flush=True)
                text += piece
                *lines, line = (line + piece).split("\n")
                for whole in lines if on_line is not None else ():
                    on_line(whole)
    return subprocess.CompletedProcess(command, process.returncode, text)
