"""How commands read their configuration: an unknown name is told by itself, before what follows from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.cli.loading import load_config
from hpctrain.errors import ConfigError

TEXT = """
model: small
data: {train: x.h5}
batch: 8
epochs: 1
optimizer: {name: sgd, lr: 0.1}
schedule: constant
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "a.yaml").write_text(TEXT)
    return tmp_path / "a.yaml"


def test_overrides_are_applied_and_places_known(file: Path) -> None:
    config, source = load_config(file, ("batch=9", "model.hidden=5"))
    assert (config.batch, config.model.options, config.epochs) == (9, {"hidden": 5}, 1)
    assert 'override "batch=9"' in str(source.locate(("batch",)))
    assert "a.yaml:5" in str(source.locate(("epochs",)))


@pytest.mark.parametrize("override", ["model=smal", "optimizer.name=sgdd", "averager=sharted", "schedule=cosinus"])
def test_an_unknown_name_is_the_only_fault_of_its_section(file: Path, override: str) -> None:
    name = override.partition("=")[2]
    with pytest.raises(ConfigError, match=f'There is no [a-z ]+ "{name}"; the nearest is') as caught:
        load_config(file, (override, "batch=0"))
    assert len(str(caught.value).splitlines()) == 2
