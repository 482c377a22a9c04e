"""Arguments of the loaders that a program makes, checked against its replica."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hpctrain.errors import ConfigError, ShapeError
from hpctrain.experiment.loader_arguments import check_shape, mixing_of


def _replica(*, on_host: bool = True) -> Any:
    arithmetic = SimpleNamespace(on_host=on_host)
    return SimpleNamespace(network=SimpleNamespace(image_shape=(8, 8, 3), kernels=SimpleNamespace(arithmetic=arithmetic)))


def test_images_have_the_shape_that_the_replica_takes() -> None:
    check_shape((8, 8, 3), _replica())
    with pytest.raises(ShapeError, match=r"Images come out as \(8, 9, 3\), but the replica takes \(8, 8, 3\)"):
        check_shape((8, 9, 3), _replica())


def test_mixing_is_made_of_its_options() -> None:
    assert mixing_of(None, 3, _replica()) is None
    mixing = mixing_of({"mixup": 0.2}, 3, _replica())
    assert mixing is not None
    assert mixing.mixes


@pytest.mark.parametrize(("options", "words"), [({"mixup": -1.0}, "mixup"), ({"blend": 1.0}, "blend")])
def test_wrong_options_are_named(options: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        mixing_of(options, 3, _replica())


def test_a_gpu_mixes_nothing_so_far() -> None:
    assert mixing_of({"mixup": 0.0}, 3, _replica(on_host=False)) is not None
    with pytest.raises(ConfigError, match="leave mixing out"):
        mixing_of({"mixup": 0.2}, 3, _replica(on_host=False))
