"""Backend cuda as users run it, on the emulated device: trainings are those of NumPy, go on bit by bit, and mistakes are one
sentence."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpctrain.backend.choice import DEVICE_VARIABLE
from hpctrain.config.load import parse
from hpctrain.planner.planned_run import description, prepare
from hpctrain_testing.run import Outcome
from tests.support.emulated import EmulatedDeviceFactory
from tests.support.here import run_here
from tests.support.tiny_runs import (
    Start,
    accuracy,
    assert_close,
    assert_same,
    hpctrain,
    newest_checkpoint,
    newest_run,
    sentence,
    tiny,
)
from tests.support.tiny_runs import prepare as prepare_folder

pytestmark = pytest.mark.slow

CONFIG = tiny(
    "backend: cuda, model: {name: small, channels: [4, 6], hidden: 9, dropout: 0.2}, "
    "data: {train: FOLDER/train.h5, test: FOLDER/test.h5, augment: [{name: pad_crop, padding: 1}, {name: flip}]}, "
    "optimizer: {name: sgd, lr: 0.05, momentum: 0.9, weight_decay: 1.0e-3, clip_norm: 0.5}, "
    "schedule: {name: cosine, warmup_epochs: 0.5}"
)

Run = Callable[..., Outcome]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A configuration and two small data files: 43 images to train on (the last batch has 11), 21 to test on."""
    return prepare_folder(tmp_path, CONFIG, 43)


@pytest.fixture
def run(folder: Path, emulated_device: EmulatedDeviceFactory) -> Run:
    """hpctrain with a command and more arguments, on the emulated device of a seed (None: on what is here)."""

    def start(command: str, *more: str, seed: object = 0, ranks: int = 0, code: int = 0, start: Start = run_here) -> Outcome:
        environment = {} if seed is None else {DEVICE_VARIABLE: f"hpctrain_testing.emulator:{seed}"}
        return hpctrain(ranks, folder, command, *more, code=code, start=start, env=environment)

    return start


def test_a_training_in_float64_is_that_of_numpy(run: Run, folder: Path) -> None:
    """Loaders, dropout, micro-batches, clipping, synchronised statistics, checkpoints and evaluation, with work done late."""
    options = ("dtype=float64", "micro_batches=2", "batch_norm.statistics=synchronised", "trace=true")
    ours = run("train", *options, seed=3)
    theirs = run("train", *options, "backend=numpy", "output=numpy")
    assert_close(newest_checkpoint(folder), newest_checkpoint(folder, "numpy"))
    assert accuracy(ours) == accuracy(theirs)
    assert "kernels cuda on emulated, float64; averager sharded" in ours.stdout
    directory = newest_run(folder)
    versions = json.loads((directory.path / "versions.json").read_text())
    assert (versions["kernels"], versions["device"]) == ("cuda", "emulated")
    assert json.loads((directory.path / "trace.json").read_text())["traceEvents"]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_resume_is_bitwise_in_any_order_of_threads(run: Run, folder: Path, precision: str) -> None:
    option = f"precision={precision}"
    run("train", option, "output=whole", seed=0)
    run("train", option, "--steps", "4", seed=1)
    resumed = run("train", option, "--resume", "auto", seed=2)
    assert "resumed at epoch 2, step 4" in resumed.stdout
    assert_same(newest_checkpoint(folder), newest_checkpoint(folder, "whole"))


def test_a_checkpoint_goes_on_and_is_evaluated_on_any_backend(run: Run, folder: Path) -> None:
    run("train", "precision=bfloat16", "--steps", "3")
    for backend in ("backend=numpy", "precision=tf32"):
        outcome = run("eval", backend)
        assert "21 samples" in outcome.stdout
    outcome = run("train", "backend=numpy", "--resume", "auto")
    assert "precision: bfloat16 -> float32" in outcome.stdout


def test_scores_of_the_device_are_counted_as_its_loss_counts_them(run: Run, folder: Path) -> None:
    run("train", "precision=bfloat16", "--steps", "3")
    contents = {}
    for flip in ((), ("--flip",)):
        for options in (("precision=bfloat16",), ("precision=float32", "backend=numpy")):
            content = json.loads(run("eval", *options, "--json", *flip, "--confusion").stdout)
            matrix = np.array(content["confusion"]["matrix"])
            assert (np.trace(matrix), matrix.sum()) == (content["hits1"], content["samples"])
            contents[options, flip] = content["loss"]
        here, on_host = (loss for (_, with_flip), loss in contents.items() if with_flip == flip)
        assert np.isclose(here, on_host, rtol=0.02)


WAYS = {
    "staged": "transport staged: messages pass through host memory",
    "mpi": "transport mpi: as configured (not yet run between GPUs)",
    "nccl": "transport nccl: as configured (not yet run between GPUs)",
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_train_what_one_trains(way: str, job: Start, run: Run, folder: Path) -> None:
    """With an MPI between them, whatever way their gradients take, and statistics and checkpoints by way of the host."""
    options = ("dtype=float64", "batch_norm.statistics=synchronised", "evaluate.batch=4")
    chosen = () if way == "staged" else (f"transport={way}",)
    ours = run("train", *options, *chosen, "trace=true", ranks=2, seed=4, start=job)
    theirs = run("train", *options, "backend=numpy", "output=numpy")
    assert_close(newest_checkpoint(folder), newest_checkpoint(folder, "numpy"))
    assert accuracy(ours) == accuracy(theirs)
    assert "2 ranks" in ours.stdout
    assert f"{WAYS[way]}\n" in ours.stdout


@pytest.mark.sample(1)
@pytest.mark.parametrize("averager", ["bucketed", "sharded"])
def test_two_ranks_resume_to_the_last_bit(run: Run, folder: Path, averager: str) -> None:
    options = (f"averager={averager}", "batch_norm.statistics=synchronised")
    run("train", *options, "output=whole", ranks=2, seed=0)
    run("train", *options, "--steps", "4", ranks=2, seed=1)
    run("train", *options, "--resume", "auto", ranks=2, seed=2)
    assert_same(newest_checkpoint(folder), newest_checkpoint(folder, "whole"))


#: more arguments, and ranks; 0: a process without MPI
WAYS_ON = {"three devices": (("averager=bucketed",), 3), "one device": ((), 0), "two ranks of the host": (("backend=numpy",), 2)}


def test_a_run_of_two_devices_goes_on_on_others(run: Run, folder: Path) -> None:
    """From the middle of an epoch, on another number of ranks or another backend: where one rank of NumPy ends, undisturbed."""
    options = ("dtype=float64", "batch_norm.statistics=synchronised")
    run("train", *options, "backend=numpy", "output=numpy")
    run("train", *options, "--steps", "4", ranks=2, seed=5)
    for way, (more, ranks) in WAYS_ON.items():
        output = way.replace(" ", "-")
        shutil.copytree(folder / "runs", folder / output)
        outcome = run("train", *options, *more, f"output={output}", "--resume", "auto", ranks=ranks, seed=6)
        assert "resumed at epoch 2, step 4" in outcome.stdout
        assert_close(newest_checkpoint(folder, output), newest_checkpoint(folder, "numpy"), 1e-10, 1e-10)


@pytest.mark.sample(1)
@pytest.mark.parametrize("use", ["model", "domain"])
def test_two_ranks_that_split_layers_train_what_one_trains(run: Run, folder: Path, use: str) -> None:
    """Images and layers, their activations and split parameters, checkpoints and evaluation, on virtual ranks."""
    options = ("dtype=float64", "batch_norm.statistics=synchronised", "evaluate.batch=4", f"plan.default={use}")
    ours = run("train", *options, "grid.rows=2", "trace=true", ranks=2, seed=6)
    theirs = run("train", *options, "backend=numpy", "output=numpy")
    assert_close(newest_checkpoint(folder), newest_checkpoint(folder, "numpy"))
    assert accuracy(ours) == accuracy(theirs)
    assert "transport staged: messages pass through host memory" in ours.stdout


def test_a_split_training_is_resumed_to_the_last_bit_and_evaluated(run: Run, folder: Path) -> None:
    """Its mixed plan in bfloat16, with weights that are watched; a checkpoint goes on anywhere."""
    options = ("precision=bfloat16", "grid.rows=2", "plan.default=domain", "plan.classifier.*=model", "checks.every_steps=1")
    run("train", *options, "output=whole", ranks=2, seed=0)
    run("train", *options, "--steps", "4", ranks=2, seed=1)
    run("train", *options, "--resume", "auto", ranks=2, seed=2)
    assert_same(newest_checkpoint(folder), newest_checkpoint(folder, "whole"))
    split = json.loads(run("eval", *options, "--json", ranks=2, seed=3).stdout)
    alone = json.loads(run("eval", "backend=numpy", "precision=float32", "--json").stdout)
    assert split["samples"] == alone["samples"] == 21
    assert np.isclose(split["loss"], alone["loss"], rtol=0.02)


MISTAKES: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "a way between GPUs on the host": (
        {"ranks": 2},
        ["backend=numpy", "transport=nccl"],
        "transport is nccl, which applies to GPUs only; set it to auto, or backend to",
    ),
    "NCCL with sparse": (
        {"ranks": 2},
        ["averager.name=sparse", "transport=nccl"],
        "transport is nccl, but averager sparse chooses the elements to send",
    ),
    "no such device": (
        {"seed": "x"},
        [],
        "HPCTRAIN_CUDA_DEVICE is 'hpctrain_testing.emulator:x': the seed of an emulated device must be an integer",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_one_sentence(run: Run, mistake: str) -> None:
    how, overrides, words = MISTAKES[mistake]
    assert words in sentence(run("train", *overrides, **how, code=2))


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is installed")
def test_without_cupy_one_sentence_says_what_to_install(run: Run) -> None:
    outcome = run("train", seed=None, code=2)
    assert "hpctrain: Backend cuda needs CuPy, which is not installed; install hpctrain[gpu13]" in outcome.stderr


def test_the_engine_is_timed_on_it(folder: Path, emulated_device: EmulatedDeviceFactory) -> None:
    arguments = ["-m", "hpctrain", "bench", "engine", "--model", "small", "--batch", "2", "--px", "8", "--steps", "1"]
    more = ["--backend", "cuda", "--precision", "bfloat16", "--out", "engine.json"]
    outcome = run_here(0, [*arguments, *more], cwd=folder, env={DEVICE_VARIABLE: "hpctrain_testing.emulator"})
    assert outcome.code == 0, outcome.output
    assert "small, cuda on emulated, bfloat16, batch 2, 8 px" in " ".join(outcome.stdout.split())
    measured = json.loads((folder / "engine.json").read_text())
    assert measured["backend"] == "cuda"
    assert not measured["fallbacks"]
    assert all(layer["forward_seconds"] > 0 for layer in measured["layers"] if layer["kind"] in ("Conv2d", "BatchNorm", "Linear"))


def test_a_plan_counts_activations_in_their_precision_and_parameters_in_float32(
    folder: Path, emulated_device: EmulatedDeviceFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DEVICE_VARIABLE, "hpctrain_testing.emulator")
    reports = {}
    for precision in ("float32", "bfloat16"):
        config, _ = parse((folder / "tiny.yaml").read_text(), "tiny.yaml", [f"precision={precision}"])
        task = prepare(config, 1)
        (memory,) = description(task).memory or ()
        reports[precision] = memory
    assert reports["bfloat16"].parameters == reports["float32"].parameters
    assert reports["bfloat16"].activations < 0.8 * reports["float32"].activations
