"""A thousand bits that flip and files that end early: each is found and the checkpoint before is used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hpctrain.storage.checkpoint import read_newest
from tests.storage.test_sharded_checkpoint import assert_is, content, replace, write_sharded, write_single

Writer = Callable[[Path, int], Path]

#: writer, file of the checkpoint, bits that flip, early ends
CASES: dict[str, tuple[Writer, str | None, int, int]] = {
    "single": (write_single, None, 300, 60),
    "shard 0": (write_sharded, "shard-00000.h5", 160, 30),
    "shard 1": (write_sharded, "shard-00001.h5", 160, 30),
    "manifest": (write_sharded, "manifest.json", 160, 30),
    "digest": (write_sharded, "manifest.sha256", 50, 20),
}


def test_there_are_a_thousand() -> None:
    assert sum(flips + ends for *_, flips, ends in CASES.values()) == 1000


def used(directory: Path) -> int:
    """The step of the checkpoint that is used, in which every bit is right."""
    newest = read_newest(directory)
    assert newest is not None
    step = int(newest[0].name.split("-")[1].split(".")[0])
    assert_is(newest[1], step)
    return step


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_damage_is_found_and_the_checkpoint_before_is_used(tmp_path: Path, case: str) -> None:
    writer, name, flips, ends = CASES[case]
    write_single(tmp_path, 7)
    path = writer(tmp_path, 9)
    file = path if name is None else path / name
    whole, random = file.read_bytes(), np.random.default_rng(sorted(CASES).index(case))
    for _ in range(flips):
        place, bit = int(random.integers(len(whole))), int(random.integers(8))
        damaged = bytearray(whole)
        damaged[place] ^= 1 << bit
        replace(file, bytes(damaged))
        assert used(tmp_path) == 7, f"bit {bit} of byte {place} of {len(whole)}"
    for length in random.integers(0, len(whole), ends):
        replace(file, whole[: int(length)])
        assert used(tmp_path) == 7, f"{length} of {len(whole)} bytes"
    replace(file, whole)
    assert used(tmp_path) == 9


@pytest.mark.parametrize("writer", [write_single, write_sharded])
def test_every_byte_of_every_element_counts(tmp_path: Path, writer: Writer) -> None:
    """Where it is stored in one run."""
    write_single(tmp_path, 7)
    path = writer(tmp_path, 9)
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    random, tried = np.random.default_rng(5), 0
    for values in content(9).tensors.values():
        for file in files:
            whole = file.read_bytes()
            begin = whole.find(values.tobytes())
            if begin < 0:
                continue
            for place in range(begin, begin + values.nbytes, max(1, values.nbytes // 8)):
                damaged = bytearray(whole)
                damaged[place] ^= 1 << int(random.integers(8))
                replace(file, bytes(damaged))
                assert used(tmp_path) == 7
                tried += 1
            replace(file, whole)
    assert tried >= 12
