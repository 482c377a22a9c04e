"""Runs, schedules and data files of earlier versions are read, and runs go on as they did then (see tests/fixtures/README.md)."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.averaging.collective_schedule import CollectiveSchedule
from hpctrain.data.facts import DataFacts
from hpctrain.data.format import ImageFile
from hpctrain.experiment.resume import data_of
from hpctrain.storage import checkpoint
from hpctrain.storage.checkpoint import CheckpointContent
from hpctrain.storage.run_directory import RunDirectory
from tests.support.jobs import Outcome
from tests.support.write_fixtures import CASES, CLASSES, SAMPLES, SHAPE, STEPS, arithmetic

FIXTURES = Path(__file__).parents[1] / "fixtures"


def _newest(run: Path) -> CheckpointContent:
    newest = checkpoint.read_newest(run / "checkpoints")
    assert newest is not None
    return newest[1]


def _schedules(content: CheckpointContent) -> dict[str, str]:
    """By name; earlier versions kept the one of whole parameters once for each rank of a split group."""
    schedules: Any = content.meta["schedules"]
    of_rows = {name for name in schedules if name.startswith("all-row")}
    assert all(schedules[name] == schedules["all"] for name in of_rows)
    return {name: text for name, text in schedules.items() if name not in of_rows}


@pytest.mark.parametrize("case", CASES)
def test_a_run_of_an_earlier_version_goes_on_as_it_did(job: Callable[..., Outcome], tmp_path: Path, case: str) -> None:
    shutil.copy(FIXTURES / "train.h5", tmp_path)
    run = tmp_path / "run"
    shutil.copytree(FIXTURES / case / "run", run)
    command = ["-m", "hpctrain", "train", "run/config.yaml", "--resume", "run", "--steps", str(STEPS)]
    outcome = job(CASES[case].ranks, command, cwd=tmp_path)
    assert outcome.code == 0, outcome.output
    assert " -> " not in outcome.stdout, "a resume with the run's own configuration changes no value"
    here, expected = _newest(run), checkpoint.read(FIXTURES / case / "end.h5")
    compared = [key for key in expected.meta if key not in ("position", "config", "schedules")]
    assert {key: here.meta[key] for key in compared} == {key: expected.meta[key] for key in compared}
    same_bits = arithmetic() == (FIXTURES / "arithmetic.txt").read_text().strip()
    assert set(here.tensors) == set(expected.tensors)
    for key, tensor in expected.tensors.items():
        values = here.tensors[key]
        if key.startswith("optimizer/lazy_gradient/"):
            values = values.sum(axis=0)  # each rank's own now
        assert values.dtype == tensor.dtype
        np.testing.assert_allclose(values, tensor, rtol=1e-12, atol=1e-13, err_msg=key)
        assert not same_bits or values.tobytes() == tensor.tobytes(), key
    _assert_same_position(here, expected)
    if case == "lazy":
        assert _schedules(here) != _schedules(_newest(FIXTURES / case / "run")), "its allreduces are reduce-scatters now"
    elif case != "blocking":
        assert _schedules(here) == _schedules(_newest(FIXTURES / case / "run")), "the stored schedules were made for this request"


def _assert_same_position(here: CheckpointContent, expected: CheckpointContent) -> None:
    ours, theirs = dict(here.meta["position"]), dict(expected.meta["position"])  # type: ignore[call-overload]
    sums, expected_sums = ours.pop("sums"), theirs.pop("sums")
    assert ours == theirs
    assert sums == pytest.approx(expected_sums, rel=1e-12)


@pytest.mark.parametrize("case", [case for case in CASES if case != "blocking"])
def test_a_stored_schedule_keeps_its_digest_and_its_request(case: str) -> None:
    texts = RunDirectory.open(FIXTURES / case / "run").schedules()
    assert texts
    assert texts == _newest(FIXTURES / case / "run").meta["schedules"]
    for text in texts.values():
        schedule = CollectiveSchedule.from_json(text)
        assert schedule.to_json() == text
        assert schedule.digest() == hashlib.sha256(text.encode()).hexdigest()
        assert schedule.request == json.loads(text)["request"]


def test_the_cases_hold_what_they_are_for() -> None:
    lazy, sharded = (_newest(FIXTURES / case / "run") for case in ("lazy", "sharded"))
    assert any(np.any(tensor) for key, tensor in lazy.tensors.items() if key.startswith("optimizer/lazy_gradient/"))
    assert CollectiveSchedule.from_json(_schedules(sharded)["all"]).timed


@pytest.mark.parametrize("name", ["train.h5", "train-version-1.h5"])
def test_a_data_file_of_an_earlier_version_is_read(name: str) -> None:
    file = ImageFile.open(FIXTURES / name)
    file.verify()
    random = np.random.default_rng(3)
    assert file.images.dtype == np.uint8
    assert np.array_equal(file.images, random.integers(0, 256, (SAMPLES, *SHAPE), dtype=np.uint8))
    assert np.array_equal(file.labels, random.integers(0, len(CLASSES), SAMPLES))
    assert tuple(file.class_names) == CLASSES
    assert data_of(_newest(FIXTURES / "sharded" / "run")) == DataFacts.of(file)
