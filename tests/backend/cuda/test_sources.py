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


#: what no source may hold, by the reason; common.cuh alone has the first two, for all
FORBIDDEN = {
    r"__shared__": "shared memory is declared by SHARED, which the emulated device fills with NaN",
    r"#include <": "compilers at run time have no standard headers",
    r"\batomic\w*\(": "sums have one order",
    r"__threadfence|cooperative_groups|\bvolatile\b": "blocks do not talk to each other",
    r"#pragma once": "a header becomes part of the main file, and compilers warn of it there",
    r"\bprintf\b|\bassert\b|\bmalloc\b|\bnew\b": "kernels neither print nor allocate",
    r"__launch_bounds__\((?!256\b|THREADS\b)": "blocks have 256 threads at most",
}


def broken_rules(text: str) -> list[str]:
    code = re.sub(r"//.*", "", text)
    return [reason for pattern, reason in FORBIDDEN.items() if re.search(pattern, code)]


@pytest.mark.parametrize("path", sorted(sources.FOLDER.iterdir()), ids=lambda path: path.name)
def test_sources_keep_the_rules_of_kernels(path: Path) -> None:
    allowed = list(FORBIDDEN.values())[:2] if path.name == "common.cuh" else []
    assert [reason for reason in broken_rules(path.read_text()) if reason not in allowed] == []


@pytest.mark.parametrize(
    ("line", "broken"),
    [
        ("__shared__ float sums[32];", 1),
        ("#include <cstdint>", 1),
        ("atomicAdd(sum, 1.0f);", 1),
        ("__threadfence();", 1),
        ("__launch_bounds__(512) name", 1),
        ("__launch_bounds__(256, 4) name  // not atomicAdd(), no __shared__", 0),
    ],
)
def test_broken_rules_are_seen(line: str, broken: int) -> None:
    assert len(broken_rules(line)) == broken


@pytest.mark.parametrize("name", sources.names())
def test_every_line_is_named_as_in_its_file(name: str) -> None:
    files = {path.name: path.read_text().splitlines() for path in sources.FOLDER.iterdir()}
    file, number, seen = "", 0, 0
    for line in sources.text(name).splitlines():
        if mark := re.fullmatch(r'#line (\d+) "(.*)"', line):
            file, number = mark[2], int(mark[1])
        else:
            original = files[file][number - 1]
            assert line in (original, "" if original.startswith("#include") else original)
            number, seen = number + 1, seen + 1
    assert seen >= len(files[f"{name}.cu"]) + len(files["common.cuh"]) - 3
