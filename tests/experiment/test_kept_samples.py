"""The sentences on what is kept of a data file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpctrain.data.format import ImageFile
from hpctrain.experiment.kept_samples import KeptSamples, sentences
from tests.data.conftest import make_file as make_file

Make = Callable[..., tuple[ImageFile, Any, Any]]

MEMORY = "data images.h5: {} stay in memory of each node (1.5 GB)"
LOCAL = "data images.h5: {} stay in a local copy on each node (2 GB)"
AGAIN = ", the others are read again in each epoch"


@pytest.mark.parametrize(
    ("kept", "expected"),
    [
        ({"memory": 13}, [MEMORY.format("all samples")]),
        ({"memory": 8}, [MEMORY.format("61 % of the samples") + AGAIN]),
        (
            {"memory": 8, "local": 5, "local_first": 8},
            [MEMORY.format("61 % of the samples"), LOCAL.format("38 % of the samples")],
        ),
        (
            {"memory": 8, "local": 2, "local_first": 8, "local_denied": "/disk has room for 2 GB"},
            [
                MEMORY.format("61 % of the samples"),
                LOCAL.format("15 % of the samples") + ", as /disk has room for 2 GB" + AGAIN,
            ],
        ),
        (
            {"memory": 8, "local": 13, "found": 9},
            [MEMORY.format("61 % of the samples"), LOCAL.format("all samples") + ", 9 of them from an earlier run"],
        ),
        ({"local": 13}, [LOCAL.format("all samples")]),
        (
            {"memory": 8, "local_denied": "/disk has room for 0 GB"},
            [
                MEMORY.format("61 % of the samples") + AGAIN,
                "data images.h5: there is no local copy, as /disk has room for 0 GB",
            ],
        ),
        ({}, ["data images.h5: no sample stays in memory of a node, all are read again in each epoch"]),
    ],
)
def test_what_is_kept_is_told(make_file: Make, kept: dict[str, Any], expected: list[str]) -> None:
    file = make_file()[0]
    file.path = Path("images.h5")
    assert list(sentences(file, KeptSamples(**kept, memory_bytes=1_500_000_000, local_bytes=2_000_000_000))) == expected


def test_memory_that_ranks_cannot_share_is_told(make_file: Make) -> None:
    file = make_file()[0]
    file.path = Path("images.h5")
    (sentence,) = sentences(file, KeptSamples(memory=13, memory_bytes=10**9, denied="Operation not permitted"))
    why = "in memory of each rank, as the ranks of a node cannot share it (Operation not permitted) (1 GB)"
    assert sentence == f"data images.h5: all samples stay {why}"
