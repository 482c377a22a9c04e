"""A parent of a rank: it passes on codes and words, and explains an end that came without a conclusion."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import pytest

from hpctrain.doctor.watch import Notebook, RankEnd
from tests.support.jobs import clean_environment

pytestmark = pytest.mark.job

_PROGRAM = """
import json, os, signal, sys, time
from hpctrain.doctor.watch import watched

def work(notebook):
    notebook.write({"number": 1})
    notebook.write({"number": 2, "long": "x" * 300000})
    sys.stderr.write("words\\n" * WORDS)
    sys.stderr.flush()
    DEED

def explain(end):
    print(json.dumps([end.code, end.in_words, end.note and end.note["number"], end.words[-6:], len(end.words)]), flush=True)
    return 7

sys.exit(watched(work, explain, SECONDS))
"""


def watch(deed: str, words: int = 1, seconds: float = 60) -> tuple[int, list[Any] | None, str, float]:
    """(exit code, what `explain` was given, standard error, seconds) of a program whose rank does this."""
    program = _PROGRAM.replace("DEED", deed).replace("WORDS", str(words)).replace("SECONDS", str(seconds))
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program], env=clean_environment(), capture_output=True, text=True, timeout=120, check=False
    )
    told = json.loads(done.stdout) if done.stdout else None
    return done.returncode, told, done.stderr, time.monotonic() - begin


@pytest.mark.parametrize(("deed", "code"), [("return 0", 0), ("return 2", 2), ("sys.exit(2)", 2), ("sys.exit()", 0)])
def test_a_conclusion_is_passed_on(deed: str, code: int) -> None:
    assert watch(deed)[:3] == (code, None, "words\n")


@pytest.mark.parametrize(
    ("deed", "code", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", -11, "was ended by SIGSEGV"),
        ("os._exit(16)", 16, "left with exit code 16"),
        ("sys.exit(3)", 3, "left with exit code 3"),
    ],
)
def test_any_other_end_is_explained_with_the_last_words_and_note(deed: str, code: int, words: str) -> None:
    assert watch(deed)[:2] == (7, [code, words, 2, "words\n", 6])


def test_an_error_is_printed_and_explained() -> None:
    code, told, errors, _ = watch("1 / 0")
    assert (code, told and told[:3]) == (7, [1, "left with exit code 1", 2])
    assert "ZeroDivisionError" in errors


def test_a_rank_that_hangs_is_ended_when_its_time_is_over() -> None:
    code, told, _, seconds = watch("time.sleep(100)", seconds=4)
    assert (code, told and told[:3]) == (7, [None, "did not end", 2])
    assert seconds < 60


def test_many_words_are_all_passed_on() -> None:
    _, told, errors, _ = watch("os._exit(16)", words=50_000)
    assert errors == "words\n" * 50_000
    assert told is not None
    assert told[4] <= 1 << 14, "the last ones are kept"


def test_a_notebook_that_nobody_reads_takes_every_note() -> None:
    Notebook().write({"number": 1})
    assert RankEnd(None, "", None).in_words == "did not end"
