"""The step block: numbers of one step in a device's memory, so that kernels read them where arguments are fixed.

A captured graph repeats the arguments of its launches. What changes from step to step lies therefore at places that never move.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hpctrain.backend.counter_random import key
from hpctrain.backend.cuda.device_array import DeviceArray
from hpctrain.backend.operators import StepContext
from hpctrain.backend.kernels.cuda.runtime import CudaRuntime
from hpctrain.backend.cuda.runtime import Staging

#: keys, and at least so many sample ids, that one area has room for
KEYS, LEAST_IDS = 64, 1024

_HEADER = 1  # words before the keys: whether the step is one of training
_UPLOADS = 4  # areas' contents on their way before the host waits


@dataclass(frozen=True)
class StepPlaces:
    """Where one operator's numbers of the step lie, for the life of the kernel set.

    training: int64 (1,), not 0 in training. key: two 32-bit words in an int64 (1,). ids: int64, those of the step's samples.
    """

    training: DeviceArray
    key: DeviceArray
    ids: DeviceArray


class _Area:
    """Memory for so many keys and ids; it never moves and never grows."""

    def __init__(self, runtime: CudaRuntime, ids: int) -> None:
        words = _HEADER + KEYS + ids
        self._memory = runtime.device.allocate(8 * words).view("int64")
        self._words = np.zeros(words, np.int64)
        self._staging = Staging(runtime, self._words.nbytes, _UPLOADS)
        self._streams: dict[tuple[int, str], int] = {}
        self._ids = ids

    def has_room(self, stream: tuple[int, str], ids: int) -> bool:
        return ids <= self._ids and (stream in self._streams or len(self._streams) < KEYS)

    def places(self, stream: tuple[int, str]) -> StepPlaces:
        number = _HEADER + self._streams.setdefault(stream, len(self._streams))
        return StepPlaces(self._memory[:_HEADER], self._memory[number : number + 1], self._memory[_HEADER + KEYS :])

    def begin(self, context: StepContext) -> None:
        words, count = self._words, min(self._ids, context.sample_ids.size)
        words[0] = context.training
        for (seed, layer), number in self._streams.items():
            words[_HEADER + number : _HEADER + number + 1].view(np.uint32)[:] = key("dropout", seed, context.step, layer)
        stop = _HEADER + KEYS + count
        words[_HEADER + KEYS : stop] = context.sample_ids[:count]
        self._staging.upload(self._memory[:stop], words[:stop])


class StepBlock:
    """The step's numbers for all operators of a set: whether it is training, the keys of their random streams, sample ids.

    Operators register when they are made; `begin` uploads, once for each area of memory: a second area is made only where the
    first has not enough room for a later operator.
    """

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        self._areas: list[_Area] = []

    def register(self, seed: int, layer: str, ids: int) -> StepPlaces:
        """Places for the dropout stream of (seed, layer) and for the first `ids` sample ids of each step."""
        stream = seed, layer
        for area in self._areas:
            if area.has_room(stream, ids):
                return area.places(stream)
        self._areas.append(_Area(self._runtime, max(ids, LEAST_IDS)))
        return self._areas[-1].places(stream)

    def begin(self, context: StepContext) -> None:
        """Enqueue the upload of a step's numbers; what was enqueued before reads those of the step before."""
        for area in self._areas:
            area.begin(context)
