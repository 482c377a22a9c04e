"""How kernels are built: once, for all processes, and never by what another user has put there."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hpctrain.backend.cuda import sources
from hpctrain.backend.cuda.emulator import build
from hpctrain.errors import BackendError
from tests.support.emulated import EmulatedDeviceFactory

TRIVIAL = 'extern "C" __attribute__((visibility("default"))) int answer() { return 42; }'


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    if build.compiler() is None:
        pytest.skip("there is no g++")
    monkeypatch.setattr(build, "_folder", lambda: tmp_path)
    return tmp_path


@pytest.mark.usefixtures("cache")
@pytest.mark.job
def test_a_source_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert build.build(TRIVIAL).answer() == 42
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))
    assert build.build(TRIVIAL).answer() == 42
    build.prepare([TRIVIAL])


@pytest.mark.usefixtures("cache")
@pytest.mark.job
def test_preparing_at_the_same_time_compiles_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    compile_one = build._compile

    def counted(text: str, target: Path) -> None:
        compiled.append(target)
        compile_one(text, target)

    monkeypatch.setattr(build, "_compile", counted)
    with ThreadPoolExecutor() as pool:
        list(pool.map(build.prepare, [[TRIVIAL]] * 4))
    assert len(compiled) == 1


@pytest.mark.job
def test_an_error_of_the_compiler_is_told_and_nothing_is_left(cache: Path) -> None:
    with pytest.raises(BackendError, match=r"g\+\+ refuses a CUDA source: .*nonsense"):
        build.build("nonsense;")
    with pytest.raises(BackendError, match="nonsense"):
        build.prepare(["nonsense;"])
    assert [path.name for path in cache.iterdir()] == ["lock"]


def test_no_compiler_is_told(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(BackendError, match=r"install it \(package g\+\+\)"):
        build.build(TRIVIAL)


def test_the_cache_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(build.os, "getuid", lambda: 12345)
    with pytest.raises(BackendError, match="belongs to another user"):
        build._folder.__wrapped__()


def test_the_sources_of_the_package_are_there_before_the_first_test(emulated_device: EmulatedDeviceFactory) -> None:
    emulated_device(0)
    assert all(build._target(sources.text(name)).exists() for name in sources.names())
