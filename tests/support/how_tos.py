"""The how-tos, followed: their files lie in the packages, their lines stand in the modules that they name."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

from hpctrain.backend import specs
from hpctrain.backend.numpy import kernel_set as numpy_set
from hpctrain.backend.onednn import kernel_set as onednn_set
from hpctrain.cli import data as data_commands

Calls = list[tuple[str, Any]]


class WandbRun:
    """A run of `wandb`, whose steps may not fall."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self.step = 0

    def log(self, data: dict[str, Any], step: int | None = None) -> None:
        assert step is not None
        assert step >= self.step, "W&B refuses a step that falls"
        self.step = step
        self.calls.append(("metrics", (step, data)))

    def finish(self) -> None:
        self.calls.append(("end", None))


class WandbStandIn(ModuleType):
    """`wandb`, as far as it makes runs."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.calls: Calls = []

    def init(self, *, project: str, name: str, id: str, resume: str, dir: str) -> WandbRun:
        self.calls.append(("start", (project, name, id, resume, dir)))
        return WandbRun(self.calls)


ROOT = Path(__file__).parents[2]

MODEL = "docs/how-to-add-a-model.md"

OPERATOR = "docs/how-to-add-a-kernel-operator.md"

CONVERTER = "docs/how-to-add-a-converter.md"

STRATEGY = "docs/how-to-add-a-strategy.md"

OWN_CODE = "docs/own-code.md"


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def files(page: str) -> dict[str, str]:
    """Path -> text of each block that is a whole file: it begins with a docstring, and the text before it names the file."""
    text = (ROOT / page).read_text(encoding="utf-8")
    whole = re.finditer(r'^```python\n(""".*?)^```', text, re.MULTILINE | re.DOTALL)
    return {re.findall(r"`((?:hpctrain/|my_)[\w/]+\.py)`", text[: match.start()])[-1]: match[1] for match in whole}


@contextmanager
def followed(page: str, folder: Path) -> Iterator[None]:
    """Inside the block hpctrain is as its reader has it who has done what the page says. Files lie under `folder`.

    A page about code of the user's has its files in the working directory, which is `folder` then.
    """
    if page == OWN_CODE:
        write_own_code(folder)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "wandb", WandbStandIn())
            patch.chdir(folder)
            yield
        return
    new = {path: text for path, text in files(page).items() if not (ROOT / path).exists()} if "how-to" in page else {}
    modules = [path.removesuffix(".py").replace("/", ".") for path in new]
    with pytest.MonkeyPatch.context() as patch:
        for path, text in new.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
            package = importlib.import_module(str(Path(path).parent).replace("/", "."))
            patch.setattr(package, "__path__", [*package.__path__, str((folder / path).parent)])
        importlib.invalidate_caches()
        _EDITS.get(page, _nothing)(patch)
        try:
            yield
        finally:
            for name in modules:
                if sys.modules.pop(name, None) is not None:
                    package, _, leaf = name.rpartition(".")
                    delattr(sys.modules[package], leaf)


def write_own_code(folder: Path) -> None:
    """The files of docs/own-code.md, and its configuration `my.yaml`, which must be complete."""
    (folder / "my.yaml").write_text(blocks(OWN_CODE, "yaml")[0], encoding="utf-8")
    for path, text in files(OWN_CODE).items():
        (folder / path).write_text(text, encoding="utf-8")


def _nothing(patch: pytest.MonkeyPatch) -> None:
    """A page whose files are all."""


def _add_operator(patch: pytest.MonkeyPatch) -> None:
    spec = next(block for block in blocks(OPERATOR, "python") if "class LeakyReluSpec" in block)
    names = dict(vars(specs))
    exec(spec, names)
    patch.setattr(specs, "LeakyReluSpec", names["LeakyReluSpec"], raising=False)
    numpy_case, onednn_case = blocks(OPERATOR, "text")
    known = {"LeakyReluSpec": names["LeakyReluSpec"]}
    operator = importlib.import_module("hpctrain.backend.numpy.leaky_relu").LeakyRelu
    _insert(patch, numpy_set, {"        raise BackendError(f": numpy_case}, "NumpyKernelSet", known | {"LeakyRelu": operator})
    operator = importlib.import_module("hpctrain.backend.onednn.leaky_relu").LeakyReluOperator
    lines = {'        return "oneDNN has no such operation"': onednn_case}
    _insert(patch, onednn_set, lines, "OnednnKernelSet", known | {"LeakyReluOperator": operator})


def _insert(
    patch: pytest.MonkeyPatch, module: ModuleType, lines: Mapping[str, str], class_name: str, names: Mapping[str, object]
) -> None:
    """A class of a module gets the methods that it would have with lines put before the only places that hold certain texts."""
    assert module.__file__ is not None
    source = Path(module.__file__).read_text(encoding="utf-8")
    last = source.index(f"class {class_name}")
    for place, text in lines.items():
        before, found, after = source.rpartition(place) if place.lstrip().startswith("raise") else source.partition(place)
        assert found, f"{module.__name__} has no line {place!r}"
        assert len(before) > last, f"{module.__name__} has {place!r} outside {class_name}"
        source = before + text + found + after
    changed = ModuleType(module.__name__)
    vars(changed).update(names)
    exec(compile(source, module.__file__, "exec"), vars(changed))
    for name, method in vars(getattr(changed, class_name)).items():
        if isinstance(method, FunctionType):
            patch.setattr(getattr(module, class_name), name, method, raising=False)


def _add_command(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(data_commands.convert, "commands", dict(data_commands.convert.commands))
    command = next(block for block in blocks(CONVERTER, "python") if "@convert.command" in block)
    exec(command, dict(vars(data_commands)))


_EDITS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {OPERATOR: _add_operator, CONVERTER: _add_command}
