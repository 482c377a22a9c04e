"""A process that tries whether MPI takes messages from a GPU's memory: where it does not, MPI may end the process.

Started by `subjects/gpu.py`; prints one word, and the reason where it was not to be.
"""

from __future__ import annotations

import os

import numpy as np

from hpctrain.backend.cuda import choose
from hpctrain.backend.cuda.choose import NodePlace
from hpctrain.comm import mpi
from hpctrain.doctor.subjects.gpu import AWARE, UNAWARE, UNTRIED
from hpctrain.errors import BackendError, MissingLibraryError

_DEADLINE_SECONDS = 15.0
_BYTES = 1 << 16


def outcome() -> str:
    """Start MPI alone, and send one message from the memory of a GPU to itself."""
    try:
        mpi.world(_DEADLINE_SECONDS)
    except MissingLibraryError:
        return UNTRIED
    if not choose.cupy_is_installed():
        return UNTRIED
    try:
        choose.narrow(os.environ, NodePlace())
        from hpctrain.backend.cuda.cupy_device import CupyDevice

        device = CupyDevice(0)
        source, target, stream = device.allocate(_BYTES), device.allocate(_BYTES), device.stream("probe")
    except BackendError as error:
        return f"{UNAWARE}: {error}"
    sent, received = np.arange(_BYTES, dtype=np.uint8), np.zeros(_BYTES, np.uint8)
    device.upload(stream, source, sent)
    stream.synchronize()
    mpi.send_to_itself(source.pointer, target.pointer, _BYTES)
    device.download(stream, received, target)
    stream.synchronize()
    return AWARE if np.array_equal(sent, received) else f"{UNAWARE}: the bytes that arrived are others"


if __name__ == "__main__":
    print(outcome(), flush=True)
