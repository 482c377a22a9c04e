"""What the how-tos show how to add is found where they say. (That their code runs is seen in test_blocks.py.)"""

import re
from pathlib import Path

import pytest

import hpctrain.models
from hpctrain.models import catalogue

DOCS = Path(__file__).parents[2] / "docs"


def blocks(name: str) -> list[str]:
    found = re.findall(r"^```python\n(.*?)^```", (DOCS / name).read_text(), re.MULTILINE | re.DOTALL)
    assert found
    return found


def test_adding_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = blocks("how-to-add-a-model.md")[0]
    (tmp_path / "plain.py").write_text(model)
    monkeypatch.setattr(hpctrain.models, "__path__", [*hpctrain.models.__path__, str(tmp_path)])
    assert {"plain", "plain_deep"} <= set(catalogue.names())
    assert catalogue.options("plain_deep")["channels"] == [32, 64, 128, 256]
