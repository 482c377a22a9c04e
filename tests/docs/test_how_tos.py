"""The code in the how-tos runs as it stands there."""

import re
from pathlib import Path
from typing import Any

import pytest

import hpctrain.models
from hpctrain.models import catalogue

DOCS = Path(__file__).parents[2] / "docs"


def blocks(name: str) -> list[str]:
    found = re.findall(r"^```python\n(.*?)^```", (DOCS / name).read_text(), re.MULTILINE | re.DOTALL)
    assert found
    return found


def test_adding_a_layer() -> None:
    names: dict[str, Any] = {"__name__": "how_to"}
    for block in blocks("how-to-add-a-layer.md"):
        exec(compile(block, "how-to-add-a-layer.md", "exec"), names)


def test_adding_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, check = blocks("how-to-add-a-model.md")
    (tmp_path / "plain.py").write_text(model)
    monkeypatch.setattr(hpctrain.models, "__path__", [*hpctrain.models.__path__, str(tmp_path)])
    assert {"plain", "plain_deep"} <= set(catalogue.names())
    exec(compile(check, "how-to-add-a-model.md", "exec"), {})
    assert catalogue.options("plain_deep")["channels"] == [32, 64, 128, 256]
