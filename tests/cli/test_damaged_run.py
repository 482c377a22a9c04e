"""Commands that read files of a run end soon and with a sentence, whatever these files contain."""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from hpctrain.cli.main import cli
from hpctrain.flight.recorder import FlightRecorder
from hpctrain.flight.ring import file_name
from hpctrain.launch.process_end import End
from hpctrain.models.catalogue import build
from hpctrain.models.state_dict import declared_state
from hpctrain.runs.directory import RunDirectory
from hpctrain.runs.records import HashFile
from hpctrain.storage.weights_file import WeightsFile, write
from tests.support.folder_trees import GOOD
from tests.support.runs import write_checkpoint, write_run, write_trace
from tests.support.sampling import amount

pytestmark = pytest.mark.slow
CONFIGS = Path(__file__).resolve().parents[2] / "configs"

_CASES = amount(10, 60)
_EVENTS = (
    {"kind": "skip", "time": 1.0, "step": 3, "held": "gradients", "layer": "conv", "ranks": [0]},
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


_FIELDS = (
    "kind", "time", "epoch", "step", "images", "samples", "done_samples", "last_sample", "epochs", "loss", "top1", "ema_top1",
    "lr", "images_per_second", "set", "by", "error", "held", "layer", "ranks", "changes", "size", "from_step",
    "peak_bytes", "measured_step_seconds", "seconds", "waited_seconds",
)  # fmt: skip
_KINDS = (
    "interval", "epoch", "evaluation", "test", "start", "stop", "skip", "resume", "rollback", "steps", "memory", "data",
)  # fmt: skip
_ODD = (
    *(None, True, -1, 0, 1.5, float("inf"), float("nan"), 10**30, 10**400, 1e308, 5e-324, 1 << 63, -(10**18)),
    *("x", "\ud800", "\x1b[2J", "y" * 5000, [], [1], ["a"], [None], {}, {"a": {"b": [1]}}),
)


def test_odd_values_in_metrics_end_in_words(tmp_path: Path) -> None:
    """Readers show what a run can have written, for any value of any field, missing fields, and clocks that go back."""
    run, other = write_run(tmp_path / "run", events=_EVENTS), write_run(tmp_path / "other")
    whole = [json.loads(line) for line in run.metrics_path.read_text().splitlines()]
    for case in range(6 * _CASES):
        draw = random.Random(case)
        lines = [dict(line) for line in whole]
        lines += [
            {"kind": draw.choice(_KINDS), **{name: draw.choice(_ODD) for name in draw.sample(_FIELDS, 8)}} for _ in range(2)
        ]
        draw.shuffle(lines)
        for line in draw.choices(lines, k=draw.choice([1, 4, 16])):
            line[draw.choice(_FIELDS)] = draw.choice(_ODD)
            line.pop(draw.choice(_FIELDS), None)
        run.metrics_path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        for command in (["watch", str(run.path), "--once"], ["compare", str(run.path), str(other.path)]):
            _ends_in_words(command, str(case))


_FACTS_DRAWN = random.Random(0)


def _weights(path: Path) -> None:
    """Write weights whose metadata may have facts of other types, because damaged bytes leave no readable metadata."""
    options = {"classes": 2, "hidden": 8, "channels": [4, 4]}
    facts = {
        "model_options": json.dumps(options),
        "classes": '["a", "b"]',
        "image_shape": "[9, 9, 1]",
        "mean": "[0.5]",
        "std": "[1]",
    }
    if _FACTS_DRAWN.random() < 0.5:
        facts[_FACTS_DRAWN.choice(list(facts))] = _FACTS_DRAWN.choice(
            ["{", "[]", "[9]", "{}", '"x"', "null", '["a", 1]', "[[1]]", "NaN"]
        )
    state = {name: np.ones(entry.shape, np.float32) for name, entry in declared_state(build("small", options)).items()}
    write(path, WeightsFile(state, {"model": "small", **facts}))


def _idx(path: Path) -> None:
    path.write_bytes(struct.pack(">4B3i", 0, 0, 8, 3, 6, 8, 8) + bytes(6 * 64))
    path.with_name("labels").write_bytes(struct.pack(">4Bi", 0, 0, 8, 1, 6) + bytes(6))


def _table(path: Path) -> None:
    for name in "ab":
        path.with_name(f"{name}.png").write_bytes(GOOD["png"])
    path.write_text("file,label\na.png,cat\nb.png,dog\n")


_FOREIGN: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "a.yaml": (lambda path: path.write_text(_CONFIG), ("config", "check", "a.yaml")),
    "machine.yaml": (
        lambda path: (
            path.with_name("b.yaml").write_text(_CONFIG),
            path.write_bytes((CONFIGS / "machines/xc40.yaml").read_bytes()),
        ),
        ("plan", "simulate", "b.yaml", "--machine", "machine.yaml", "--ranks", "2"),
    ),
    "d.npz": (lambda path: np.savez(path, images=_IMAGES, labels=_LABELS), ("data", "convert", "arrays", "d.npz", "o.h5")),
    "c.npz": (
        lambda path: np.savez_compressed(path, images=_IMAGES, labels=_LABELS),
        ("data", "convert", "arrays", "c.npz", "o.h5"),
    ),
    "images": (_idx, ("data", "convert", "idx", "images", "labels", "o.h5")),
    "t.csv": (_table, ("data", "convert", "csv", "t.csv", "o.h5", "--size", "8")),
    "w.safetensors": (_weights, ("weights", "export", "w.safetensors", "--out", "x.safetensors")),
    "v.safetensors": (_weights, ("weights", "show", "v.safetensors", "--json")),
}
_CONFIG = """
model: {name: small, channels: [4, 4], hidden: 8}
data: {train: synthetic, test: synthetic, synthetic: {height: 8, width: 8, channels: 1, classes: 3, samples: 40, test_samples: 8}}
batch: 8
epochs: 2
optimizer: {name: sgd, lr: 0.05}
schedule: cosine
"""
_IMAGES, _LABELS = np.arange(6 * 8 * 8, dtype=np.uint8).reshape(6, 8, 8, 1), np.arange(6) % 3


@pytest.mark.parametrize("name", _FOREIGN)
def test_damaged_foreign_files_end_in_words(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make, command = _FOREIGN[name]
    for case in range(4 * _CASES):
        draw = random.Random(f"{name} {case}")
        make(Path(name))
        if case % 4:  # the others are whole
            draw.choice([_flipped, _cut, _words, _words])(Path(name), draw)
        words = _ends_in_words(list(command), f"{case}")
        assert case or "safetensors" in name or not words.startswith(("hpctrain: ", "Usage")), words
        for written in Path().glob("[ox].*"):
            written.unlink()
