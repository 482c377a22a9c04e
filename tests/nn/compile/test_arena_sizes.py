"""The memory of the five benchmark networks, in bytes of [training, evaluation]: golden numbers, which may fall but not rise.

A change that needs less memory writes its numbers here. A change that needs more must save more than that elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from hpctrain.backend.onednn.binding import processor_flags
from hpctrain.backend.onednn.kernel_set import available
from tests.support.arena_sizes import arena_sizes, arena_sizes_with

NUMPY = {
    "resnet50-224": [682899456, 57802752],
    "vgg16-224": [269494272, 107467776],
    "resnet34-48": [19167232, 6570048],
    "resnet20-32": [102641152, 17229568],
    "small-28": [10177024, 5341184],
}
# oneDNN's kernels ask for scratch of their own and choose layouts by the instruction set, so the library is held to one of two.
ONEDNN = {
    "AVX2": {
        "resnet50-224": [682324480, 57868288],
        "vgg16-224": [317308928, 102907904],
        "resnet34-48": [18089344, 9744384],
        "resnet20-32": [113611648, 12592128],
        "small-28": [4139904, 2007040],
    },
    "AVX512_CORE": {
        "resnet50-224": [682489216, 57868288],
        "vgg16-224": [317821824, 102907904],
        "resnet34-48": [18093824, 9744384],
        "resnet20-32": [113747584, 12592128],
        "small-28": [4301952, 2007040],
    },
}
_PROCESSOR_FLAG = {"AVX2": "avx2", "AVX512_CORE": "avx512bw"}


def _assert_not_above(measured: Mapping[str, list[int]], golden: Mapping[str, list[int]]) -> None:
    assert measured.keys() == golden.keys()
    risen = {
        name: f"{now:,} bytes, at most {allowed:,} are allowed"
        for name, sizes in golden.items()
        for now, allowed in zip(measured[name], sizes, strict=True)
        if now > allowed
    }
    assert not risen


def test_numpy_needs_no_more_memory_than_before() -> None:
    _assert_not_above(arena_sizes("numpy"), NUMPY)


@pytest.mark.slow
@pytest.mark.job
@pytest.mark.parametrize("instruction_set", ONEDNN)
def test_onednn_needs_no_more_memory_than_before(instruction_set: str) -> None:
    if (reason := available()) is not None:
        pytest.skip(reason)
    if _PROCESSOR_FLAG[instruction_set] not in processor_flags():
        pytest.skip(f"The processor lacks {instruction_set}.")
    _assert_not_above(arena_sizes_with(instruction_set), ONEDNN[instruction_set])
