"""The step block: numbers arrive at places that never move, whatever operators are made later."""

from __future__ import annotations

import numpy as np
import pytest

from hpctrain.backend.counter_random import key
from hpctrain.backend.kernels.base import StepContext
from hpctrain.backend.kernels.cuda.kernel_set import CudaKernelSet
from hpctrain.backend.kernels.cuda.step_block import KEYS, LEAST_IDS, StepBlock, StepPlaces
from tests.support.emulated import CudaKernelsFactory


def _read(kernels: CudaKernelSet, places: StepPlaces, count: int) -> tuple[int, list[int], list[int]]:
    """(training, key, the first ids)."""
    training, words, ids = (kernels.arithmetic.to_host(array) for array in (places.training, places.key, places.ids[:count]))
    return int(training[0]), words.view(np.uint32).tolist(), ids.tolist()


@pytest.mark.parametrize("seed", range(4))
def test_each_step_brings_its_numbers(cuda_kernels: CudaKernelsFactory, seed: int) -> None:
    kernels = cuda_kernels(seed=seed)
    block = StepBlock(kernels.runtime)
    block.begin(StepContext())
    places = {stream: block.register(*stream, 3) for stream in ((7, "a"), (7, "b"), (8, "a"))}
    for step in range(6):
        ids = np.array([step, 1 << 40, -step])
        block.begin(StepContext(step=step, training=step != 2, sample_ids=ids))
        for (stream_seed, layer), place in places.items():
            expected = int(step != 2), list(key("dropout", stream_seed, step, layer)), ids.tolist()
            assert _read(kernels, place, 3) == expected


def test_equal_streams_share_a_place(cuda_kernels: CudaKernelsFactory) -> None:
    block = StepBlock(cuda_kernels().runtime)
    first, again = (block.register(1, "a", count) for count in (5, 9))
    assert first.key.pointer == again.key.pointer
    assert block.register(2, "a", 5).key.pointer != first.key.pointer


def test_places_stay_when_later_operators_need_more_room(cuda_kernels: CudaKernelsFactory) -> None:
    kernels = cuda_kernels()
    block = StepBlock(kernels.runtime)
    places = [block.register(1, str(i), 2) for i in range(KEYS + 3)]
    places.append(block.register(1, "0", LEAST_IDS + 5))
    assert len({place.key.pointer for place in places}) == len(places)
    ids = np.arange(LEAST_IDS + 5) * 3
    block.begin(StepContext(step=4, sample_ids=ids))
    for layer, place in zip((*range(KEYS + 3), 0), places, strict=True):
        count = min(place.ids.size, ids.size)
        assert _read(kernels, place, count) == (1, list(key("dropout", 1, 4, str(layer))), ids[:count].tolist())
    assert places[-1].ids.size == LEAST_IDS + 5


def test_without_operators_nothing_is_uploaded(cuda_kernels: CudaKernelsFactory) -> None:
    kernels = cuda_kernels()
    used = kernels.runtime.device.memory_used()
    kernels.begin(StepContext(sample_ids=np.arange(9)))
    assert kernels.runtime.device.memory_used() == used
