"""The text of sources: whole, every header once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpctrain.backend.cuda import sources


def test_all_sources_are_listed() -> None:
    assert "elementwise" in sources.names()
    assert [f"{name}.cu" for name in sources.names()] == sorted(path.name for path in sources.FOLDER.glob("*.cu"))


@pytest.mark.parametrize("name", sources.names())
def test_no_header_of_ours_is_left_to_be_included(name: str) -> None:
    headers = {path.name for path in sources.FOLDER.glob("*.cuh")}
    assert not headers & set(re.findall(r'#include "(.*)"', sources.text(name)))
    assert sources.text(name).count("struct bf16 {") == 1


def test_a_header_is_put_in_once(tmp_path: Path) -> None:
    (tmp_path / "twice.cu").write_text('#include "common.cuh"\n#include "common.cuh"\n#include "elsewhere.h"\n')
    text = sources.text("twice", tmp_path)
    assert text.count("struct bf16 {") == 1
    assert '#include "elsewhere.h"' in text
