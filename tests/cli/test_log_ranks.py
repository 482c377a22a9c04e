"""`--log-ranks`: which ranks have files, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.cli.log_ranks import names
from hpctrain.errors import ConfigError
from hpctrain.rank_spans import spans
from tests.support.faults import CONFIG, prepare
from tests.support.jobs import Outcome

Job = Callable[..., Outcome]


@given(st.sets(st.integers(0, 63), min_size=1))
def test_lists_name_what_they_are_written_from(ranks: set[int]) -> None:
    for text in (spans(sorted(ranks)), ",".join(map(str, ranks))):
        assert {rank for rank in range(64) if names(text, 64, rank)} == ranks


def test_words_name_all_and_none() -> None:
    assert all(names("all", 5, rank) for rank in range(5))
    assert not any(names("none", 5, rank) for rank in range(5))


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("al", "or ranks such as 0,3,8-15; the nearest is all."),
        ("nono", "the nearest is none."),
        ("0;3", "the nearest is all."),
        ("", "the nearest is all."),
        ("-1", "the nearest is all."),
        ("3-1", "which begins behind its end; the nearest is 1-3."),
        ("0,4", "names rank 4, but the job has 4 ranks; the largest number is 3."),
        ("0-99", "names rank 99, but the job has 4 ranks; the largest number is 3."),
    ],
)
def test_what_names_no_ranks_is_refused_alike(text: str, end: str) -> None:
    sentences = set()
    for rank in range(4):
        with pytest.raises(ConfigError) as error:
            names(text, 4, rank)
        sentences.add(str(error.value))
    [sentence] = sentences
    assert sentence.startswith("--log-ranks ")
    assert sentence.endswith(end)


@pytest.mark.slow
def test_named_ranks_have_files_with_all_that_they_log(job: Job, tmp_path: Path) -> None:
    prepare(tmp_path)
    command = ["-m", "hpctrain", "train", "faulty.yaml", "--log-ranks", "0,2", "--steps", "2"]
    outcome = job(3, command, cwd=tmp_path)
    assert outcome.code == 0, outcome.output
    [run] = (tmp_path / "runs").iterdir()
    assert sorted(path.name for path in (run / "logs").iterdir()) == ["rank-0000.log", "rank-0002.log"]
    text = (run / "logs" / "rank-0002.log").read_text()
    assert re.search(r"DEBUG +process \d+ on \S+, hpctrain \S+, launcher .*: train faulty.yaml --log-ranks 0,2 --steps 2\n", text)
    assert re.search(r"DEBUG +epoch 1, step 1: loss \S+; in 1 step this rank waited \S+ s for others\n", text)
    assert "Backend" in text  # other ranks than 0 say that to nobody else
    said = [line for line in outcome.stdout.splitlines() if line.startswith("epoch ")]
    assert said
    assert all(line in (run / "logs" / "rank-0000.log").read_text() for line in said)
    assert "@" not in outcome.stdout + outcome.stderr  # rank 0 alone speaks, and needs no place
    resumed = job(3, [*command, "--resume", str(run), "epochs=3"], cwd=tmp_path)
    assert resumed.code == 0, resumed.output
    assert (run / "logs" / "rank-0002.log").read_text().startswith(text)
    evaluated = job(2, ["-m", "hpctrain", "eval", "faulty.yaml", "--checkpoint", str(run), "--log-ranks", "all"], cwd=tmp_path)
    assert evaluated.code == 0, evaluated.output
    assert (run / "logs" / "rank-0001.log").is_file()


def test_a_rank_that_is_not_there_is_one_sentence(job: Job, tmp_path: Path) -> None:
    prepare(tmp_path)
    outcome = job(2, ["-m", "hpctrain", "train", "faulty.yaml", "--log-ranks", "2"], cwd=tmp_path)
    assert outcome.code == 2, outcome.output
    sentence = "hpctrain: --log-ranks names rank 2, but the job has 2 ranks; the largest number is 1.\n"
    assert outcome.stderr.count("hpctrain: ") == outcome.stderr.count(sentence) == 1
    assert "name: faulty" in CONFIG
    assert not (tmp_path / "runs").exists()
