"""Make each wrong call of `calls.yaml`, and print the answers. `make refusals` writes them to `refusals.txt`.

Run it in a process of its own, without a launcher. An answer is the type of the error, the exit code and the sentences. Paths in
the temporary directory begin with {tmp}.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import yaml
from click.testing import CliRunner

import hpctrain
from hpctrain.cli.main import cli
from hpctrain.core.errors import HpctrainError
from hpctrain.data.writer import write_data_file
from tests.support import nets

HERE = Path(__file__).parent

#: variables whose values would change answers; the others that are not in _KEPT are removed
_SET = {"COLUMNS": "1000", "HOME": "/home/user", "NO_COLOR": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
_KEPT = ("PATH", "LD_", "PYTHON", "MPI4PY_")
#: lines about the machine and about the use of click's commands
_LEFT_OUT = re.compile(r"Usage: |Try '|.*busy machine: ")

Change = str | Sequence[str]


def _changed(text: str, change: Change) -> str:
    """Return a text with one part replaced, or the new text."""
    if isinstance(change, str):
        return change
    old, new = change
    assert old in text, f"{old!r} is not in the file"
    return text.replace(old, new, 1)


def _answer(error: BaseException | None, code: object, said: str) -> str:
    """Return the answer of an error and the lines that the command prints."""
    while error is not None and isinstance(error, SystemExit | RuntimeError):
        error = error.__cause__ or error.__context__
    kind = "UsageError" if error is None else type(error).__name__
    lines = (re.sub("^(hpctrain|Error): ", "", line) for line in said.splitlines() if line and not _LEFT_OUT.match(line))
    return "\n".join([f"{kind} {code}", *lines])


def _command(*words: str) -> str:
    result = CliRunner().invoke(cli, words)
    return "accepted" if result.exit_code == 0 else _answer(result.exception, result.exit_code, result.output)


def _config(change: Change) -> str:
    text = Path("base.yaml").read_text()
    Path("base.yaml").write_text(_changed(text, change))
    answer = _command("config", "check", "base.yaml")
    Path("base.yaml").write_text(text)
    return answer


def _site(change: Change) -> str:
    Path("hpctrain/sites/own.yaml").write_text(_changed(Path("site.yaml").read_text(), change))
    return _command("sites", "own")


def _machine(change: Change) -> str:
    Path("own_machine.yaml").write_text(_changed(Path("machine.yaml").read_text(), change))
    return _command("plan", "simulate", "base.yaml", "model=small", "--ranks", "1", "--machine", "own_machine.yaml")


def _start(**keywords: Any) -> None:
    with hpctrain.start(**{"batch": 8, **keywords}):
        pass


@contextlib.contextmanager
def _programs() -> Iterator[Callable[[str], str]]:
    """Return a function that answers an expression, which may use a running job (context manager)."""
    images, labels = np.zeros((9, 9, 7, 3)), np.arange(9) % 5
    write_data_file(Path("a.h5"), 9, (9, 7, 3), list("abcde"), [(images.astype(np.uint8), labels)])
    config = yaml.safe_load(Path("base.yaml").read_text())
    names = {"hpctrain": hpctrain, "nets": nets, "np": np, "start": _start, "config": config, "images": images, "labels": labels}

    def answer(expression: str) -> str:
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                eval(expression, dict(names))
        except SystemExit as left:
            return _answer(left, left.code, said.getvalue())
        except Exception as error:
            said_once = str(error).partition(". Did you mean")[0]  # which Python adds from version 3.13 on
            return _answer(error, 2 if isinstance(error, HpctrainError) else 1, said_once)
        return "accepted"

    with hpctrain.start(batch=8, progress="test") as job:
        names |= {"job": job, "replica": job.replica(nets.plain(), (9, 7, 3), backend="numpy")}
        yield answer


def answers() -> Iterator[str]:
    """Yield each call of `calls.yaml` with its answer. The working directory is the temporary one."""
    calls = yaml.safe_load((HERE / "calls.yaml").read_text())
    for name, text in calls.pop("files").items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    Path("hpctrain/sites").mkdir(parents=True)
    with _programs() as program:
        answer: dict[str, Callable[[Any], str]] = {
            "config": _config,
            "override": lambda overrides: _command("config", "check", "base.yaml", *overrides.split("  ")),
            "site": _site,
            "machine": _machine,
            "api": program,
            "cli": lambda words: _command(*shlex.split(words)),
        }
        for kind, of_kind in calls.items():
            for call in of_kind if isinstance(of_kind, list) else of_kind.splitlines():
                shown = (call if isinstance(call, str) else " -> ".join(call)).replace("\n", r"\n")
                yield f"[{kind}] {shown}".strip() + f"\n{answer[kind](call)}\n"


def main() -> None:
    """Print all answers."""
    with TemporaryDirectory() as name:
        folder = Path(name).resolve()
        kept = {key: value for key, value in os.environ.items() if key.startswith(_KEPT)}
        os.environ.clear()
        os.environ.update(kept, XDG_CONFIG_HOME=str(folder), **_SET)
        os.chdir(folder)
        sys.stdout.write("\n".join(answers()).replace(str(folder), "{tmp}"))
        os.chdir("/")


if __name__ == "__main__":
    main()
