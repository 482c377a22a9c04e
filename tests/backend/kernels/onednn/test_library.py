"""Where oneDNN's library is looked for, and what is said where it is not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hpctrain.backend.kernels.onednn import library


def test_the_environments_word_is_the_only_candidate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(library.ENVIRONMENT_VARIABLE, str(tmp_path / "libdnnl.so.3"))
    assert library.candidates() == [str(tmp_path / "libdnnl.so.3")]
    with pytest.raises(OSError, match=r"libdnnl\.so\.3: cannot open shared object file"):
        library.load()


def test_the_prefix_comes_before_the_loaders_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(library.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path))
    assert library.candidates() == ["libdnnl.so.3"]
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libdnnl.so.3").touch()
    assert library.candidates() == [str(tmp_path / "lib" / "libdnnl.so.3"), "libdnnl.so.3"]


def test_nobody_is_asked_for_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """No ldconfig, no compiler: a look starts no process, whether or not the library is there."""

    def refuse(*arguments: object, **keywords: object) -> None:
        raise AssertionError(f"a process: {arguments}")

    monkeypatch.delenv(library.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr("subprocess.Popen", refuse)
    monkeypatch.setattr("os.popen", refuse)
    library.available()
