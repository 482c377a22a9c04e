"""Commands that read files of a run end soon and with a sentence, whatever these files contain."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpctrain.cli.main import cli
from hpctrain.flight.recorder import FlightRecorder
from hpctrain.flight.ring import file_name
from hpctrain.launch.process_end import End
from hpctrain.runs.directory import RunDirectory
from hpctrain.runs.records import HashFile
from tests.support.runs import write_checkpoint, write_run, write_trace
from tests.support.sampling import amount

pytestmark = pytest.mark.slow

_CASES = amount(10, 60)
_EVENTS = (
    {"kind": "skip", "time": 1.0, "step": 3, "held": "gradients", "layer": "conv", "ranks": [0]},
    {"kind": "shrink", "time": 2.0, "lost": [1], "ranks": 3, "step": 4},
    {"kind": "stop", "time": 30.0, "epoch": 3, "step": 30, "by": "SIGINT"},
)


def _flipped(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(draw.choice([1, 4, 64])):
        if data:
            data[draw.randrange(min(len(data), 1 << draw.randrange(4, 19)))] = draw.choice(
                [0, 10, 34, 48, 57, 123, 255, draw.randrange(256)]
            )
    path.write_bytes(data)


def _cut(path: Path, draw: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: draw.randrange(len(data) + 1)])


def _words(path: Path, draw: random.Random) -> None:
    """Replace JSON values by values of other types, and append lines that no run writes."""
    data = path.read_bytes()
    old = draw.choice([b"1", b"0.5", b'"epoch"', b'"interval"', b"[", b"{", b": ", b"step", b"time", b"samples"])
    new = draw.choice([b"null", b'"x"', b"[]", b"{}", b"-1", b"1e400", b"NaN", b"true", b"9" * 30, b""])
    path.write_bytes(
        data.replace(old, new, draw.choice([1, 3, -1])) + draw.choice([b"", b"\xff\n", b"[" * 90_000 + b"\n", b"3\n"])
    )


def _replaced(make: Callable[[Path], object]) -> Callable[[Path, random.Random], None]:
    def replace(path: Path, draw: random.Random) -> None:
        path.unlink()
        make(path)

    return replace


_DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "flipped": _flipped,
    "cut": _cut,
    "words": _words,
    "empty": _replaced(lambda path: path.write_bytes(b"")),
    "random": lambda path, draw: (path.write_bytes(draw.randbytes(draw.randrange(1, 1 << 19))), None)[1],
    "pipe": _replaced(os.mkfifo),
    "directory": _replaced(lambda path: path.mkdir()),
    "dangling link": _replaced(lambda path: path.symlink_to("nowhere")),
    "endless link": _replaced(lambda path: path.symlink_to("/dev/zero")),
    "huge": _replaced(lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 1 << 40)),
}


# Other damage may leave a record that can be read.
_SEEN = ("empty", "random", "pipe", "directory", "dangling link", "endless link", "huge")


def _record(directory: Path, rank: int) -> None:
    recorder = FlightRecorder()
    recorder.join(rank, 2, 1, 30.0)
    recorder.step(1, 5)
    recorder.phase("a training step")
    number = recorder.queued(recorder.queue_of("gradients", (0, 1)), "a.weight", 0)
    recorder.started(number, "allreduce of 8 float32 elements")
    recorder.wait("a.weight", number)
    recorder.ended(End.FAILED if rank else End.RUNNING, "why", (rank,))
    recorder.keep_in(directory)


def _run(folder: Path) -> RunDirectory:
    run = write_run(folder, events=_EVENTS)
    write_trace(run)
    write_checkpoint(run, 30, weight=[1.0, 2.0])
    hashes = HashFile(run.hashes_path)
    hashes.append({"step": 10, "epoch": 1, "all": "0" * 16, "hashes": {"parameters/weight": "0" * 16}})
    (run.checkpoints / "best.json").write_text(
        '{"checkpoint": "checkpoint-00000030.h5", "step": 30, "epoch": 3, "measure": "top1", "value": 0.5}'
    )
    for rank in range(2):
        _record(run.flight, rank)
    return run


def _ends_in_words(arguments: list[str], case: str) -> str:
    result = CliRunner().invoke(cli, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), (case, arguments, result.exc_info)
    assert result.exit_code in (0, 2), (case, result.output)
    return result.output


def test_a_damaged_record_leaves_the_others_readable(tmp_path: Path) -> None:
    for case in range(_CASES):
        draw = random.Random(case)
        run = _run(tmp_path / str(case))
        damage = list(_DAMAGES)[case % len(_DAMAGES)]
        victim = draw.choice([run.flight / file_name(1), run.flight / file_name(1), run.path / "flight-directory"])
        if victim.name == "flight-directory":
            victim.write_text("elsewhere\n")
        (run.flight / "notes.txt").write_bytes(b"\xff\xfe")
        _DAMAGES[damage](victim, draw)
        words = _ends_in_words(["autopsy", str(run.path)], f"{case} {damage} {victim.name}")
        _ends_in_words(["watch", str(run.path), "--once"], f"{case} {damage} {victim.name}")
        if victim.parent == run.flight:
            assert "a training step" in words, (case, damage, words)
            assert "1 entry is not a flight record" in words
            notes = json.loads(_ends_in_words(["autopsy", str(run.path), "--json"], damage))["notes"]
            assert (damage in _SEEN) <= any(str(victim) in note for note in notes), (case, damage, notes)


def test_damaged_files_of_a_run_end_in_words(tmp_path: Path) -> None:
    for case in range(_CASES):
        draw = random.Random(case)
        run, other = _run(tmp_path / str(case)), _run(tmp_path / f"{case}-other")
        damage = list(_DAMAGES)[case % len(_DAMAGES)]
        names = ("metrics.jsonl", "metrics.jsonl", "hashes.jsonl", "time_table.json", "versions.json", "checkpoints/best.json")
        victim = run.path / draw.choice(names)
        _DAMAGES[damage](victim, draw)
        for command in (
            ["watch", str(run.path), "--once"],
            ["compare", str(run.path), str(other.path)],
            ["trace", str(run.path)],
        ):
            _ends_in_words(command, f"{case} {damage} {victim.name}")
