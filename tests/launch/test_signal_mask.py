"""Signals are held back as soon as the program is read, before anything that takes time."""

from __future__ import annotations

import pytest

from hpctrain.launch.signal_mask import HELD
from tests.support.jobs import run_job

# The program; names what is loaded when the signals are blocked for the first time.
_LOADED = """
import signal, sys
def blocked(how, numbers, mask=signal.pthread_sigmask):
    if how == signal.SIG_BLOCK:
        print(len(numbers), *sorted(set(sys.modules) - before), flush=True)
        signal.pthread_sigmask = mask
    return mask(how, numbers)
signal.pthread_sigmask = blocked
before = set(sys.modules)
import runpy
sys.argv = ["hpctrain", "train", "nowhere.yaml"]
runpy.run_module("hpctrain", run_name="__main__", alter_sys=True)
"""


@pytest.mark.job
def test_the_mask_comes_before_all_else() -> None:
    outcome = run_job(0, ["-c", _LOADED])
    held, *loaded = outcome.stdout.splitlines()[0].split()
    assert int(held) == len(HELD)
    # Of the interpreter's own: what it takes to run a module.
    theirs = {"runpy", "pkgutil", "importlib.util", "importlib._abc", "importlib.machinery", "importlib", "types", "zipimport"}
    ours = {name for name in loaded if name.startswith("hpctrain")}
    assert ours == {"hpctrain", "hpctrain.version", "hpctrain.launch", "hpctrain.launch.signal_mask"}
    assert not {"typing", "threading", "ctypes", "dataclasses", "numpy", "click"} & (set(loaded) - theirs)
