"""Tests as another user, because root may read and write everything."""

from __future__ import annotations

import codecs
import importlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hpctrain.runs import owner
from hpctrain.storage import checkpoint

_NOBODY = 65534


@contextmanager
def as_nobody() -> Iterator[None]:
    """Run a block without root's permissions, and with empty caches of the contents of files."""
    owner._read_marker.cache_clear()
    checkpoint._read_sequence_and_run.cache_clear()
    user = os.geteuid()
    # Python remembers a failed import.
    for encoding in ("ascii", "latin-1", "utf-8-sig", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"):
        codecs.lookup(encoding)
    if user == 0:
        os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(user)
        importlib.invalidate_caches()  # the listings of directories that only root may read are empty


@pytest.fixture
def place() -> Iterator[Path]:
    """Directory that every user can read."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)
