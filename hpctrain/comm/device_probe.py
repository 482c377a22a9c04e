"""A trial whether MPI takes messages from a GPU's memory, in a process of its own: where it does not, MPI may end the process.

The process is started before MPI is, without the launcher's variables, and so it is an MPI job of its own, of one rank. It sends
a message to itself: that shows whether the library asks where memory lies, and not what its network does with such messages.
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

#: outcomes of a trial; a reason follows UNAWARE and a colon
AWARE, UNAWARE, UNTRIED = "aware", "unaware", "untried"
#: the words of Cray's library if GPUs are requested and it lacks its part for them
GTL_WORDS = "GTL library is not linked"

_COMMAND = ("-m", "hpctrain.comm.device_probe")
_PROGRAM = "`python -m hpctrain.comm.device_probe`, which sends itself a message from GPU memory,"
_SECONDS = 20.0
_DEADLINE_SECONDS = 15.0
_BYTES = 1 << 16


def trial() -> str:
    """Return AWARE, UNAWARE with a reason, UNTRIED, or what MPI printed when it ended the process.

    The reason names the program, its exit code or signal, and the last line that it printed. Call it before MPI starts here.
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
    """Return the last line that is not empty; "" if there is none."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def outcome() -> str:
    """Start MPI alone, and send one message from the memory of a GPU to itself."""
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
    return AWARE if np.array_equal(sent, received) else f"{UNAWARE}: the bytes that arrived are others"


if __name__ == "__main__":
    print(outcome(), flush=True)
