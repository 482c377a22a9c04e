"""The file of hashes: what is appended is read again, behind kills, resumes and other optimisers, too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpctrain.errors import DataError
from hpctrain.storage.hash_file import HashFile, HashRecord, read_hashes
from hpctrain.storage.metrics_file import cut_back

A, B, C = "a" * 16, "b" * 16, "c" * 16


def record(step: int, **hashes: str) -> dict[str, object]:
    return {"step": step, "epoch": 1, "all": f"{step:016x}", "hashes": hashes}


def test_what_is_appended_is_read(tmp_path: Path) -> None:
    file = HashFile(tmp_path / "hashes.jsonl")
    file.append(record(10, x=A, y=B))
    file.append(record(20, x=A, y=C))
    found = read_hashes(tmp_path / "hashes.jsonl")
    assert found == {
        10: HashRecord(10, ("x", "y"), A + B, f"{10:016x}"),
        20: HashRecord(20, ("x", "y"), A + C, f"{20:016x}"),
    }
    assert found[20].by_key() == {"x": A, "y": C}
    assert len((tmp_path / "hashes.jsonl").read_text().splitlines()) == 3  # names are there once


def test_a_run_without_hashes_has_none(tmp_path: Path) -> None:
    assert read_hashes(tmp_path / "hashes.jsonl") == {}


def test_records_go_on_with_other_tensors(tmp_path: Path) -> None:
    """After a resume with other keys, and after another one that has cut these back: their names stay in the file."""
    path = tmp_path / "hashes.jsonl"
    HashFile(path).append(record(10, x=A))
    HashFile(path).append(record(20, x=A, y=B))
    cut_back(path, 0, 10)
    HashFile(path).append(record(20, x=C))
    assert {step: found.by_key() for step, found in read_hashes(path).items()} == {10: {"x": A}, 20: {"x": C}}
    HashFile(path).append(record(30, x=A))
    assert [list(json.loads(line)) for line in path.read_text().splitlines()].count(["tensors"]) == 3


def test_a_torn_line_is_left_out_and_then_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "hashes.jsonl"
    HashFile(path).append(record(10, x=A))
    with open(path, "ab") as torn:
        torn.write(b'{"step": 20, "ep')
    assert list(read_hashes(path)) == [10]
    HashFile(path).append(record(20, x=B))
    assert list(read_hashes(path)) == [10, 20]


@pytest.mark.parametrize(
    "line", ["nothing", "[1]", '{"step": 20, "hashes": "ab"}', '{"hashes": ""}', '{"step": "20", "hashes": "' + A + '"}']
)
def test_another_line_is_told_with_its_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "hashes.jsonl"
    HashFile(path).append(record(10, x=A))
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(DataError, match=r"Line 3 of .*hashes\.jsonl holds no hashes of 1 tensors; delete the line\."):
        read_hashes(path)
    HashFile(path).append(record(20, x=B))  # a run goes on, with its tensors' names once more
    assert json.loads(path.read_text().splitlines()[-2]) == {"tensors": ["x"]}


def test_tensors_that_differ_come_in_order(tmp_path: Path) -> None:
    one = HashRecord(1, ("x", "y", "z"), A + B + C, "")
    assert one.different(HashRecord(1, ("x", "y", "z"), A + B + C, "")) == ()
    assert one.different(HashRecord(1, ("x", "y", "z"), A + A + A, "")) == ("y", "z")
    assert one.different(HashRecord(1, ("z", "y", "more"), C + A + A, "")) == ("x", "y", "more")
    assert one.different(HashRecord(1, ("z", "x", "y"), C + A + B, "")) == ()
