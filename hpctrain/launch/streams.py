"""Standard streams that the starter of this process has closed (`hpctrain train ... >&-`; some batch systems close stdin)."""

from __future__ import annotations

import os
import sys


def open_closed_streams() -> None:
    """Put /dev/null where one of the descriptors 0 to 2 is closed: call it before any file is opened.

    The next file, be it a checkpoint, would get that number, and what MPI, the keeper or a signal has to say would be written
    into it. Python has None for such a stream.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            stream = open(number, mode, closefd=False)  # noqa: SIM115  as long as the process
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
