"""The beginning of a data file: what counts of it after an interruption at any byte, and nothing else."""

import os
import subprocess
import sys

import pytest

from hpctrain.data import unfinished
from hpctrain.data.unfinished import BLOCK_OFFSET, UnfinishedFile
from hpctrain.errors import DataError

CHUNKS = [(b"first chunk", {"n": 1}), (b"second" * 100, {"n": 2}), (b"x", {"n": 3, "skipped": ["é"]})]


def kept(path, source="x"):
    """What is kept of a beginning; it is left as it is then."""
    file = UnfinishedFile(path, source)
    result = [(block.tobytes(), record) for record, block in file.kept()]
    size = file.size
    file.close()
    assert size == sum(len(block) for block, _ in result)
    return result


@pytest.fixture
def path(tmp_path):
    """Of a file, whose beginning has all of `CHUNKS`."""
    file = UnfinishedFile(tmp_path / "a.h5", "x")
    assert list(file.kept()) == []
    for block, record in CHUNKS:
        file.append(memoryview(block), record)
    file.close()
    return tmp_path / "a.h5"


def test_all_of_it_is_kept_and_goes_on(path):
    file = UnfinishedFile(path, "x")
    assert [record for record, _ in file.kept()] == [record for _, record in CHUNKS]
    file.append(memoryview(b"more"), {"n": 4})
    assert file.read(0, 11) == b"first chunk"
    assert file.read(file.size - 4, 4) == b"more"
    file.close()
    assert kept(path) == [*CHUNKS, (b"more", {"n": 4})]


@pytest.mark.parametrize("which", ["partial", "partial.journal"])
def test_a_file_that_ends_anywhere_or_has_a_changed_byte_keeps_whole_chunks(path, which):
    """Of every prefix, and with every byte changed: a prefix of the chunks, as they were written."""
    both = {suffix: path.with_name(f"a.h5.{suffix}").read_bytes() for suffix in ("partial", "partial.journal")}
    seen = set()
    last = len(both[which]) - 1
    for place in [*range(0 if which != "partial" else BLOCK_OFFSET, last, 7), last]:
        for damaged in (both[which][:place], both[which][:place] + bytes([both[which][place] ^ 4]) + both[which][place + 1 :]):
            for suffix, content in both.items():
                path.with_name(f"a.h5.{suffix}").write_bytes(damaged if suffix == which else content)
            result = kept(path)
            assert result == CHUNKS[: len(result)]
            seen.add(len(result))
            assert kept(path) == result, "what was cut off stays so"
    assert seen == {0, 1, 2}


def test_a_file_of_somebody_else_stays(tmp_path):
    path, partial = tmp_path / "a.h5", tmp_path / "a.h5.partial"
    partial.write_bytes(b"half a download")
    with pytest.raises(DataError, match="exists already without the journal of a conversion"):
        UnfinishedFile(path, "source")
    assert partial.read_bytes() == b"half a download"


def test_another_source_begins_again(path, caplog):
    assert kept(path, "y") == []
    assert kept(path, "x") == []
    assert path.with_name("a.h5.partial").stat().st_size == BLOCK_OFFSET


def test_what_is_not_kept_leaves_nothing(path, tmp_path):
    file = UnfinishedFile(tmp_path / "b.h5")
    assert list(file.kept()) == []
    file.append(memoryview(b"bytes"), {})
    assert file.read(0, 5) == b"bytes"
    file.discard()
    file.discard()
    UnfinishedFile(path, "x").discard()
    assert list(tmp_path.iterdir()) == []


def test_the_end_leaves_the_file_alone(path, tmp_path):
    file = UnfinishedFile(path, "x")
    list(file.kept())
    file.publish()
    file.discard()
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.h5"]


def test_one_process_at_a_time(path):
    first = UnfinishedFile(path, "x")
    with pytest.raises(DataError, match=r"Another process writes .*a\.h5\.partial at this moment; wait for it"):
        UnfinishedFile(path, "x")
    first.close()
    kept(path)


def test_a_file_system_without_locks_will_do(path, monkeypatch):
    def refused(*arguments):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(unfinished.fcntl, "flock", refused)
    assert kept(path) == CHUNKS


@pytest.mark.job
@pytest.mark.slow
def test_a_conversion_that_is_killed_again_and_again_ends_in_the_same_bytes(tmp_path):
    """kill -9 at several moments; the last one is let go to its end."""
    code = """
import os, signal, sys
import numpy as np
from pathlib import Path
from hpctrain.data.image_writer import ImageFileWriter
path, kill_at = Path(sys.argv[1]), int(sys.argv[2])
images = np.random.default_rng(0).integers(0, 256, (40, 16, 16, 3), np.uint8)
calls = 0
write = os.pwrite
def counted(*arguments):
    global calls
    calls += 1
    if calls == kill_at:
        write(arguments[0], bytes(arguments[1])[:5], *arguments[2:])
        os.kill(os.getpid(), signal.SIGKILL)
    return write(*arguments)
os.pwrite = counted
with ImageFileWriter(path, 40, (16, 16, 3), ["a"], None, "x") as writer:
    print(writer.done)
    for begin in range(writer.done, 40, 4):
        writer.append(images[begin : begin + 4], np.zeros(4, np.int64))
"""

    def run(name, kill_at=0):
        arguments = [sys.executable, "-c", code, str(tmp_path / name), str(kill_at)]
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
        assert done.returncode == (-9 if kill_at else 0), done.stderr
        return int(done.stdout or -1)

    assert run("whole.h5") == 0
    for kill_at in (1, 2, 6, 9, 12, 16):
        run("a.h5", kill_at)
    assert run("a.h5") > 4
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "whole.h5").read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["a.h5", "whole.h5"]
