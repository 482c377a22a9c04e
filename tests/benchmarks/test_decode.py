"""The benchmark of decoders: what is installed runs, and figures are of pairs."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks.decode import CROP, PIXELS, chains, decoders, large, main, table


def photo(height: int, width: int) -> bytes:
    """A JPEG file."""
    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)).save(out, "JPEG")
    return out.getvalue()


@pytest.mark.parametrize("shape", [(40, 30), (30, 40)])
def test_large_pictures_lie_as_the_small_ones(shape: tuple[int, int]) -> None:
    with Image.open(io.BytesIO(large(photo(*shape)))) as image:
        assert (image.height > image.width) == (shape[0] > shape[1])
        assert {image.height, image.width} == {400, 533}


def test_all_decoders_give_the_same_pixels() -> None:
    content = photo(31, 45)
    first, *others = [decode(content) for decode in decoders().values()]
    assert all(np.array_equal(pixels, first) for pixels in others)


def test_ours_goes_to_the_network() -> None:
    out = chains()["hpctrain"]([photo(300, 280)])
    assert isinstance(out, np.ndarray)
    assert out.shape == (1, CROP, CROP, 3)


def test_rates_and_ratios_are_of_rounds() -> None:
    lines = table("some", 10, {"decode: hpctrain": [0.5, 0.5], "decode: Pillow": [1.0, 2.0]}).splitlines()
    assert "| decode: Pillow | 8 | 3.000 [2.000, 4.000] |" in lines


@pytest.mark.slow
def test_everything_installed_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(2):
        (tmp_path / f"{number}.jpg").write_bytes(photo(80, 70))
    assert main([str(tmp_path), "--rounds", "1", "--out", str(tmp_path / "rounds.json")]) == 0
    seconds = json.loads((tmp_path / "rounds.json").read_text())["seconds"]
    assert all({f"decode to {PIXELS} px: hpctrain", "to the network: hpctrain"} <= set(of) for of in seconds.values())
    assert capsys.readouterr().out.count("| decode: hpctrain |") == 2
