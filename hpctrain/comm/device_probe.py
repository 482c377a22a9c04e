"""Test of MPI messages from a GPU's memory, in a separate process because an MPI without support for them may end the process.

The process is started before MPI is, without the launcher's variables, so that it is an MPI job of one rank. It sends a message
to itself. This shows whether the library detects device memory, but does not test the network.
"""

from __future__ import annotations

import os
import subprocess
import sys
from signal import Signals

import numpy as np

from hpctrain.backend import choice
from hpctrain.backend.choice import NodePlace
from hpctrain.comm import mpi
from hpctrain.core.errors import BackendError, MissingLibraryError
from hpctrain.launch.launcher import without_launcher

#: outcomes of a trial, in this order: MPI delivers device memory; it does not (a colon and the reason follow); no MPI or CuPy
AWARE, UNAWARE, UNTRIED = "aware", "unaware", "untried"
#: part of the message of Cray's library if GPUs are requested and its GPU library is missing
GTL_WORDS = "GTL library is not linked"

_COMMAND = ("-m", "hpctrain.comm.device_probe")
_PROGRAM = "`python -m hpctrain.comm.device_probe`, which sends itself a message from GPU memory,"
_SECONDS = 20.0
_DEADLINE_SECONDS = 15.0
_BYTES = 1 << 16


def trial() -> str:
    """Run the test in a separate process, and return its outcome: AWARE, UNAWARE with a reason, or UNTRIED.

    If MPI reports that its GPU library is missing (`GTL_WORDS`), return the output of MPI instead. Call this before MPI starts in
    this process.
    """
    try:
        done = subprocess.run(
            [sys.executable, *_COMMAND],
            env=without_launcher(os.environ),
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{UNAWARE}: {_PROGRAM} did not end within {_SECONDS:g} s"
    except OSError as error:
        return f"{UNAWARE}: {_PROGRAM} could not be started ({error.strerror})"
    output = (done.stdout if done.returncode == 0 else done.stdout + done.stderr).strip()
    if done.returncode == 0 or GTL_WORDS in output:
        return output
    end = f"exit code {done.returncode}" if done.returncode > 0 else f"signal {Signals(-done.returncode).name}"
    words = f"; its last line was: {last_line(output)}" if output else " and printed nothing"
    return f"{UNAWARE}: {_PROGRAM} ended with {end}{words}"


def last_line(text: str) -> str:
    """Return the last line that is not empty."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def outcome() -> str:
    """Start MPI in this process, send a message from GPU memory to itself, and return the outcome."""
    try:
        mpi.world(_DEADLINE_SECONDS)
    except MissingLibraryError:
        return UNTRIED
    if not choice.cupy_is_installed():
        return UNTRIED
    try:
        choice.narrow(os.environ, NodePlace())
        from hpctrain.backend.cuda.cupy_device import CupyDevice

        device = CupyDevice(0)
        source, target, stream = device.allocate(_BYTES), device.allocate(_BYTES), device.stream("probe")
    except BackendError as error:
        return f"{UNAWARE}: {error}"
    sent, received = device.pinned(_BYTES), device.pinned(_BYTES)
    sent[:] = np.arange(_BYTES, dtype=np.uint8)
    device.upload(stream, source, sent)
    stream.synchronize()
    mpi.send_to_itself(source.pointer, target.pointer, _BYTES)
    device.download(stream, received, target)
    stream.synchronize()
    return AWARE if np.array_equal(sent, received) else f"{UNAWARE}: the received bytes differ from the sent bytes"


if __name__ == "__main__":
    print(outcome(), flush=True)
