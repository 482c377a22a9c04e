"""Searches for a run among random histories of an output directory: copies, damage, permissions, names, starts that were killed.

The rule: a search returns the newest run of the name, in its original directory, or it raises an error. It returns no other run,
and it finds none only if there is none.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.comm.base import SingleCommunicator
from hpctrain.core.errors import CheckpointError
from hpctrain.run.resume import find_checkpoint
from hpctrain.run.stored_run import find_run
from hpctrain.runs import owner
from hpctrain.runs.directory import RunDirectory, latest, newest_runs, runs
from hpctrain.storage import checkpoint
from hpctrain.storage.checkpoint import CheckpointContent, checkpoint_path
from tests.support.sampling import amount
from tests.support.users import as_nobody
from tests.support.users import place as place

NAMES = ("net", "net-wide", "tiny")
_LONG = "# " + "x" * 300_000 + "\n"


@dataclass
class Truth:
    """What is known of a run: its name, its directory, its steps, and whether a search may refuse it."""

    name: str
    path: Path
    steps: list[int]
    doubt: bool = False


def start(output: Path, name: str, steps: list[int]) -> Path:
    """Make a run with checkpoints, as a training does, and return its directory."""
    config = f"{_LONG if name == NAMES[1] else ''}model: small\nname: {name}\n"
    run = RunDirectory.create(output, name, config=config, versions={}, git={})
    marker = owner.read_marker(run.path)
    assert marker is not None
    for number, step in enumerate(steps, 1):
        meta = {checkpoint.RUN: marker.identity, checkpoint.SEQUENCE: number, "config": config}
        checkpoint.write(checkpoint_path(run.checkpoints, step), CheckpointContent({"parameters/w": np.ones(2)}, meta))
    return run.path


class History:
    """Random history of an output directory.

    Args:
        make: function that makes a run, as `start` does.
    """

    def __init__(self, output: Path, seed: int, make: Callable[[Path, str, list[int]], Path] = start) -> None:
        self.output, self._draw, self.events = output, random.Random(seed), list[str]()
        self.truth, self.copies, self.copy_doubt = list[Truth](), list[tuple[Truth, Path]](), False
        output.mkdir(exist_ok=True)
        for _ in range(self._draw.randint(1, 3)):
            name, steps = (
                self._draw.choice(NAMES[: self._draw.randint(1, 3)]),
                [[], [3], [3, 5]][self._draw.choice([0, 1, 1, 2, 2])],
            )
            self.truth.append(Truth(name, make(output, name, steps), steps))
            self._note("run", self.truth[-1])
        kinds = (
            self._copy,
            self._copy,
            self._move,
            self._damage,
            self._damage,
            self._forbid,
            self._rename,
            self._kill,
            self._foreign,
        )
        for _ in range(self._draw.randint(0, 3)):
            self._draw.choice(kinds)()

    def expected(self, name: str | None, *, trained: bool) -> Truth | None:
        """Return the run that a search may find."""
        found = [run for run in self.truth if name in (None, run.name) and (run.steps or not trained)]
        return found[-1] if found else None

    def may_refuse(self) -> bool:
        """Return whether any run is damaged, or has copies and no directory of the original's name."""
        return self.copy_doubt or any(run.doubt for run in self.truth)

    def _note(self, *words: object) -> None:
        self.events.append(" ".join(map(str, words)))

    def _copy(self) -> None:
        run = self._draw.choice(self.truth)
        stamp = run.path.name
        path = self.output / self._draw.choice(
            [f"old-{stamp}", f"save-{stamp}", f"{stamp}-2", "backup", f"0-{stamp}", f"{stamp}.bak"]
        )
        if not path.exists():
            shutil.copytree(run.path, path, symlinks=True)
            self.copies.append((run, path))
            self._mark_doubt(run)
            self._note("copy", path)

    def _move(self) -> None:
        run = self._draw.choice(self.truth)
        run.path = run.path.rename(self.output / f"best{len(self.events)}{self._draw.choice(['', '-20200101-000000'])}")
        self._mark_doubt(run)
        self._note("moved to", run.path)

    def _mark_doubt(self, run: Truth) -> None:
        """Note that copies cannot be distinguished from an original that has another name, or that has been damaged."""
        moved = not run.path.name.startswith(NAMES)
        run.doubt = run.doubt or (moved and any(each is run for each, _ in self.copies))

    def _damage(self) -> None:
        run = self._draw.choice(self.truth)
        place = self._draw.choice([path for each, path in self.copies if each is run] + [run.path] * 2)
        name = self._draw.choice(["run.json", "config.yaml", "versions.json", "checkpoints", "newest checkpoint"])
        path = place / name if " " not in name else checkpoint_path(place / "checkpoints", max(run.steps, default=0))
        kind = self._draw.choice(["empty", "cut", "noise", "deleted", "later", "loop"])
        self._note(kind, path)
        if not os.path.lexists(path):
            return
        if place == run.path:
            run.doubt = True
        else:
            self.copy_doubt = True
        if name == "checkpoints":
            shutil.rmtree(path)
            if place == run.path:
                run.steps = []
                if not all((place / each).exists() for each in ("run.json", "config.yaml")):
                    self.truth.remove(run)
            return
        text = path.read_bytes()
        path.unlink()
        if kind == "loop":
            path.symlink_to(path.name)
        elif kind != "deleted":
            later = text.replace(b'"format_version": 1', b'"format_version": 2')
            path.write_bytes({"empty": b"", "cut": text[: len(text) // 2], "noise": b"\xff\0{" + text[3:], "later": later}[kind])
        elif place == run.path and "checkpoint" in name:
            run.steps = run.steps[:-1]
        elif place == run.path and name in ("run.json", "config.yaml") and not run.steps:
            self.truth.remove(run)  # a start that was killed looks alike
            self.copies = [(each, path) for each, path in self.copies if each is not run]
            self.copy_doubt = True
        if not self.truth:
            self.truth.append(Truth("net", start(self.output, "net", [3]), [3]))

    def _forbid(self) -> None:
        run = self._draw.choice(self.truth)
        names = ["run.json", "config.yaml", "checkpoints", *(["."] if run.path.name.startswith(f"{run.name}-20") else [])]
        path = run.path / self._draw.choice(names)
        self._note("forbidden", path)
        if path.exists() and not path.is_symlink():
            path.chmod(0)
            run.doubt = True

    def _rename(self) -> None:
        run = self._draw.choice(self.truth)
        if not run.doubt and not any(each is run for each, _ in self.copies):
            config = (run.path / "config.yaml").read_text()
            run.name = self._draw.choice(NAMES)
            (run.path / "config-00000003.yaml").write_text(config)
            (run.path / "config.yaml").write_text(f"name: {run.name}\n")
            self._note("resumed as", run.name, run.path)

    def _kill(self) -> None:
        path = self.output / f"{self._draw.choice(NAMES)}-20991231-235959"
        path.mkdir(exist_ok=True)
        left = ["checkpoints/", "versions.json", "git.json", "run.json", "config.yaml.1.partial"][: self._draw.randint(0, 5)]
        for name in left:
            (path / name).mkdir(exist_ok=True) if name.endswith("/") else (path / name).write_text("{}")
        if "run.json" in left:
            owner.mark(path, owner.RunMarker("f" * 16, 1 << 62))
        self._note("killed start", path, *left)

    def _foreign(self) -> None:
        path = self.output / self._draw.choice(["notes", "exp-20991231-235959", "wandb"])
        path.mkdir(exist_ok=True)
        (path / "config.yaml").write_text("name: net\n")
        (path / "run.json").write_text('{"id": 3}') if path.name == "wandb" else None
        if self._draw.random() < 0.3:
            (self.output / "private").mkdir(mode=0, exist_ok=True)
        self._note("of another program", path)


def check(history: History, search: str, found: object, name: str | None, *, trained: bool) -> None:
    """Require that a search found the run of the history that it may find, or refused it for a reason."""
    expected, context = history.expected(name, trained=trained), f"{search} of {name}: {found!r}; {'; '.join(history.events)}"
    if isinstance(found, Exception):
        assert expected is None or history.may_refuse(), context
        return
    assert found == (None if expected is None else expected.path), context


def searched(search: Callable[[], Any]) -> Any:
    """Return the directory that a search finds, its error, or None."""
    try:
        found = search()
    except (CheckpointError, OSError) as error:
        return error
    return None if found is None else Path(found)


def searches(output: Path, name: str) -> Iterator[tuple[str, str | None, bool, Callable[[], Any]]]:
    """Yield each search of the commands: words, name, whether it needs a checkpoint, and a function that returns a directory."""

    def checkpoint_of(source: str) -> Any:
        there = find_checkpoint(SingleCommunicator(), str(output), name, source)
        return None if there is None else there[0].parent.parent

    yield "auto", name, True, lambda: checkpoint_of("auto")
    yield "newest of a name", name, False, lambda: getattr(latest(output, name), "path", None)
    yield "predict", None, True, lambda: checkpoint_of(find_run("auto", output).source)
    yield "watch and report", None, False, lambda: newest_runs(output)[0].path
    yield "checkpoint list", None, True, lambda: newest_runs(output, trained=True)[0].path
    yield (
        "compare",
        None,
        False,
        lambda: newest_runs(output, 2)[1].path if len(list(runs(output, None))) > 1 else newest_runs(output)[0].path,
    )


def test_a_search_finds_the_newest_run_of_its_name_or_says_why_not(place: Path) -> None:
    first = int(os.environ["HPCTRAIN_TEST_SEED"])
    for seed in range(first, first + amount(24, 200)):
        history = History(place / str(seed), seed)
        with as_nobody():
            for name in NAMES:
                for words, asked, trained, search in searches(history.output, name):
                    check(history, words, searched(search), asked, trained=trained)
