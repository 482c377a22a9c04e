"""Training from Python: the package's top is light, any ranks train what one rank does, and errors end the job in order."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import logging
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import hpctrain
from hpctrain.assembly.keywords import LOADER_KEYS, REPLICA_KEYS, START_KEYS, keyword_config
from hpctrain.core.yaml_source import KeyPath
from hpctrain.data.augmentations import AUGMENTATIONS
from hpctrain.data.augmentations.base import Augmentation
from hpctrain.data.sampler import Mixing
from hpctrain.data.writer import write_data_file
from hpctrain.job.session import StartedJob
from hpctrain.launch.launcher import Launcher
from hpctrain.launch.threads import NodeLoad, set_threads
from hpctrain.nn.layers import Layer
from hpctrain.nn.network import Lowering
from hpctrain.optim.base import Optimizer
from hpctrain.optim.schedules import LearningRateSchedule
from hpctrain.storage import checkpoint
from hpctrain_testing.run import Outcome
from tests.support import nets
from tests.support.api_program import TASK
from tests.support.one_rank import one_group, train_alone
from tests.support.training import Result, distance

ROOT = Path(__file__).parents[1]
Job = Callable[..., Outcome]


@cache
def alone() -> Result:
    return train_alone(TASK, one_group)


def trained(job: Job, ranks: int, path: Path, steps: int = TASK.steps, **keywords: object) -> dict[str, np.ndarray]:
    """Return the tensors that the program ends with, after `steps` steps."""
    given = json.dumps({"start": {"progress": "test"}, "replica": {}, "loader": {}, **keywords})
    outcome = job(ranks, ["-m", "tests.support.api_program", str(path), str(steps), given], cwd=ROOT)
    assert outcome.code == 0, outcome.output
    samples = sum(TASK.batch if step % 5 < 4 else TASK.samples % TASK.batch for step in range(steps))
    if "resume" not in keywords:
        assert outcome.stdout.split() == [str(samples), str(TASK.samples)]
    return dict(checkpoint.read(path).tensors)


def program(job: Job, ranks: int, folder: Path, body: str) -> Outcome:
    """A script whose lines are in the block of `start`."""
    head = ["import hpctrain", "from tests.support import nets", "with hpctrain.start(batch=8, progress='test') as job:"]
    (folder / "program.py").write_text("\n".join([*head, *(f"    {line}" for line in body.splitlines())]))
    return job(ranks, [str(folder / "program.py")], cwd=ROOT, env={"PYTHONPATH": str(ROOT)})


@pytest.mark.job
def test_the_package_imports_nothing_heavy() -> None:
    code = "import sys, hpctrain; dir(hpctrain); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    loaded = set(done.stdout.split())
    assert "hpctrain.version" in loaded
    assert not loaded & {"numpy", "mpi4py", "h5py", "pydantic", "click", "hpctrain.api"}


def test_names_are_the_same_for_programs_and_for_type_checkers() -> None:
    (for_types,) = [node for node in ast.parse(Path(hpctrain.__file__).read_text()).body if isinstance(node, ast.If)]
    imports = [node for node in for_types.body if isinstance(node, ast.ImportFrom) and node.module != "typing"]
    declared = {alias.name: node.module for node in imports for alias in node.names}
    assert declared == hpctrain._HOMES
    for name, module in declared.items():
        assert getattr(hpctrain, name) is getattr(importlib.import_module(str(module)), name)
        assert name in dir(hpctrain)
    with pytest.raises(AttributeError, match="has no attribute 'Replika'"):
        hpctrain.Replika


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_any_number_of_ranks_trains_what_one_rank_does(job: Job, ranks: int, tmp_path: Path) -> None:
    tensors = trained(job, ranks, tmp_path / "end.h5")
    expected = {f"parameters/{name}": value for name, value in alone().parameters.items()}
    expected |= {f"statistics/{name}": value for name, value in alone().statistics.items()}
    assert distance({name: tensors[name] for name in expected}, expected) < 1e-12


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("averager", ["blocking", {"name": "bucketed", "bucket_bytes": 512}])
def test_a_grid_trains_what_one_rank_does(job: Job, averager: object, tmp_path: Path) -> None:
    replica = {"averager": averager, "plan": {"default": "domain", "fc": "model"}, "micro_batches": 1}
    tensors = trained(job, 4, tmp_path / "end.h5", start={"rows": 2, "progress": "test"}, replica=replica)
    expected = {f"parameters/{name}": value for name, value in alone().parameters.items()}
    assert distance({name: tensors[name] for name in expected}, expected) < 1e-12


@pytest.mark.slow
def test_mixed_images_train_what_one_rank_does(job: Job, tmp_path: Path) -> None:
    options = {"mixup": 1.0, "cutmix": 1, "probability": 0.8}
    tensors = trained(job, 2, tmp_path / "end.h5", loader={"mixing": options})
    wanted = train_alone(replace(TASK, mixing=Mixing(1.0, 1.0, probability=0.8, seed=TASK.seed)), one_group)
    expected = {f"parameters/{name}": value for name, value in wanted.parameters.items()}
    assert distance({name: tensors[name] for name in expected}, expected) < 1e-12
    assert distance(dict(wanted.parameters), dict(alone().parameters)) > 1e-6


@pytest.mark.slow
def test_a_training_goes_on_bit_by_bit(job: Job, tmp_path: Path) -> None:
    whole = trained(job, 2, tmp_path / "whole.h5")
    trained(job, 2, tmp_path / "half.h5", steps=4)
    resumed = trained(job, 2, tmp_path / "end.h5", resume=str(tmp_path / "half.h5"))
    assert resumed.keys() == whole.keys()
    assert all(np.array_equal(resumed[name], whole[name]) for name in whole)


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_watches_a_training_changes_no_bit(job: Job, ranks: int, tmp_path: Path) -> None:
    start = {"progress": "test", "flight": str(tmp_path / "flight"), "signals": True}
    bare = trained(job, ranks, tmp_path / "bare.h5", replica={"checks_every_steps": 0})
    watched = trained(job, ranks, tmp_path / "watched.h5", start=start, replica={"checks_every_steps": 1, "on_nonfinite": "skip"})
    assert watched.keys() == bare.keys()
    assert all(np.array_equal(watched[name], bare[name]) for name in bare)
    assert len(list((tmp_path / "flight").iterdir())) == ranks


_UNSETTLED = """
import atexit
import numpy as np
atexit.register(lambda: print(f"rank {job.rank}: {before} operations, then {job.progress.outstanding}", flush=True))
replica = job.replica(nets.plain(), (9, 7, 3), backend='numpy')
for batch in job.array_loader(replica, np.zeros((8, 9, 7, 3), np.float32), np.arange(8) % 5).epoch(0):
    replica.step(batch, lr=0.01)
class Slow:  # incomplete at the first test, on posting; the messages of the step may be complete already
    def __init__(self):
        self.tests, self.sums = 0, np.ones(1000)
        self.message = job.world.iallreduce(self.sums)
    def test(self):
        self.tests += 1
        return self.tests > 1 and self.message.test()
job.progress.queue(job.world).post(Slow, "slow")
before = job.progress.outstanding
"""


def test_a_program_that_ends_with_messages_on_their_way_waits_for_them(job: Job, tmp_path: Path) -> None:
    """They are written to arrays that are no more when MPI ends, and would end the process with a broken heap."""
    outcome = program(job, 2, tmp_path, _UNSETTLED)
    assert outcome.code == 0, outcome.output
    said = sorted(line.split() for line in outcome.stdout.splitlines())
    assert [words[-1] for words in said] == ["0", "0"], outcome.output
    assert all(int(words[2]) > 0 for words in said), outcome.output


def test_an_error_of_all_ranks_is_one_sentence(job: Job, tmp_path: Path) -> None:
    outcome = program(job, 2, tmp_path, "job.replica(nets.plain(), (9, 7, 3), averager='shardet')")
    assert outcome.code == 2, outcome.output
    assert outcome.stderr.count("hpctrain: ") == 1
    assert 'There is no averager "shardet"; the nearest is "sharded"' in outcome.stderr
    assert "Traceback" not in outcome.stderr


@pytest.fixture
def alone_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpctrain.api.detect", lambda environ: Launcher("none"))
    monkeypatch.setattr("hpctrain.api.set_threads", partial(set_threads, environ={"OMP_NUM_THREADS": "1"}))


@pytest.mark.usefixtures("alone_without_a_launcher")
@pytest.mark.parametrize("others", [0, 1])
def test_start_reports_a_busy_machine_once(
    others: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The Python API warns with the sentence of the command `train`, to stderr once a job of this process has set up its log."""
    monkeypatch.setattr("hpctrain.launch.threads.node_load", lambda launcher, threads: NodeLoad(2 * others, 1, threads, 2))
    monkeypatch.setattr(logging.getLogger("hpctrain"), "handlers", [])  # those of another test write to its closed stream
    with hpctrain.start(batch=8):
        pass
    assert (capsys.readouterr().err + caplog.text).count("busy machine: ") == others


_SPINNING = {"none": ({}, "1000"), "count": ({"GOMP_SPINCOUNT": "7"}, "7"), "policy": ({"OMP_WAIT_POLICY": "passive"}, "0")}


@pytest.mark.job
@pytest.mark.parametrize("users", _SPINNING)
def test_threads_of_a_team_sleep_early_on_a_busy_node(users: str, tmp_path: Path) -> None:
    """OpenMP's library reads the number of spins when it is loaded; a value that the user has set wins."""
    variables, spins = _SPINNING[users]
    clean = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    (tmp_path / "program.py").write_text(
        "import hpctrain\nfrom hpctrain.launch import threads\n"
        "threads.node_load = lambda launcher, number: threads.NodeLoad(3, 1, number, 2)\n"
        "with hpctrain.start(batch=8) as job:\n    job.replica(hpctrain.model('small'), (28, 28, 1))\n"
    )
    done = subprocess.run(
        [sys.executable, str(tmp_path / "program.py")],
        env={**clean, **variables, "OMP_DISPLAY_ENV": "verbose", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("this machine has no oneDNN, or another OpenMP than GNU's")
    assert f"GOMP_SPINCOUNT = '{spins}'" in done.stderr


@pytest.mark.usefixtures("alone_without_a_launcher")
def test_held_out_samples_are_read_by_the_loader_of_validation_alone(tmp_path: Path) -> None:
    """Loaders of training and validation share no sample."""
    images, labels = np.zeros((30, 9, 7, 3), np.uint8), np.arange(30) % 5
    write_data_file(tmp_path / "a.h5", 30, (9, 7, 3), list("abcde"), [(images, labels)])
    write_data_file(tmp_path / "grey.h5", 30, (9, 7, 1), list("abcde"), [(images[..., :1], labels)])
    with hpctrain.start(batch=8) as job:
        replica = job.replica(nets.plain(), (9, 7, 3))
        training = job.loader(replica, tmp_path / "a.h5", validation=0.2, seed=3)
        validation = job.loader(replica, tmp_path / "a.h5", validation_of=training, shuffle=False)
        ids = [[sample for batch in loader.epoch(0) for sample in batch.sample_ids] for loader in (training, validation)]
        assert sorted(ids[0] + ids[1]) == list(range(30))
        assert np.bincount(labels[ids[1]]).tolist() == [2, 1, 1, 1, 1]
        assert len(training) == 3
        replica.evaluate(validation)
        for other in (job.loader(replica, tmp_path / "a.h5"), validation):
            with pytest.raises(hpctrain.HpctrainError, match="must be the loader of the training samples"):
                job.loader(replica, tmp_path / "a.h5", validation_of=other)
        with pytest.raises(hpctrain.HpctrainError, match=r"those of .*grey.h5 have 1; convert .*a.h5 again"):
            job.loader(replica, tmp_path / "a.h5", like=tmp_path / "grey.h5")


#: values of many types, each of them wrong for most arguments
_WRONG: tuple[Any, ...] = (3, -2.5, float("nan"), True, "0.05", b"x", [1, "a"], {"a": 1}, object(), dict)


def _faults(name: str, call: Callable[..., object], given: dict[str, Any], argument: str, values: Sequence[object]) -> list[str]:
    """Errors of calls with a wrong value that are no sentence of hpctrain's."""
    faults = []
    for value in values:
        try:
            call(**{**given, argument: value})
        except Exception as error:
            if not isinstance(error, hpctrain.HpctrainError) or "_empty" in str(error) or not str(error).endswith("."):
                faults.append(f"{name}({argument}={value!r}): {type(error).__name__}: {error}")
    return faults


def _attempts(folder: Path, job: hpctrain.Job) -> dict[str, tuple[Callable[..., object], dict[str, Any]]]:
    """Public functions and methods by name, each with arguments that it accepts."""
    images, labels = np.zeros((9, 9, 7, 3)), np.arange(9) % 5
    write_data_file(folder / "a.h5", 9, (9, 7, 3), list("abcde"), [(images.astype(np.uint8), labels)])
    replica = job.replica(nets.plain(), (9, 7, 3), backend="numpy")
    loader = job.array_loader(replica, images, labels)
    job.save(replica, folder / "net.h5")
    batch = next(iter(loader.epoch(0)))
    return {
        "replica": (job.replica, {"model": nets.plain(), "image_shape": (9, 7, 3)}),
        "loader": (job.loader, {"replica": replica, "path": folder / "a.h5"}),
        "array_loader": (job.array_loader, {"replica": replica, "images": images, "labels": labels}),
        "save": (job.save, {"replica": replica, "path": folder / "net.h5"}),
        "load": (job.load, {"replica": replica, "path": folder / "net.h5"}),
        "load_weights": (job.load_weights, {"replica": replica, "path": folder / "weights.pt"}),
        "step": (replica.step, {"batch": batch, "lr": 0.0}),
        "evaluate": (replica.evaluate, {"loader": loader}),
        "epoch": (lambda **given: next(iter(loader.epoch(**given))), {"epoch": 0, "first": 0}),
        "model": (hpctrain.model, {"name": "small"}),
        "schedule": (hpctrain.schedule, {"name": "cosine", "base_lr": 0.1, "epochs": 2, "steps_per_epoch": 2}),
        "Automatic": (
            lambda **given: hpctrain.Automatic(**given).best(StartedJob(job.world, 1, 60.0), 8),
            {"model": nets.plain(), "image_shape": (9, 7, 3), "backend": "none"},
        ),
    }


@pytest.mark.usefixtures("alone_without_a_launcher")
def test_values_of_wrong_types_are_refused_with_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without checks of types, a wrong argument ends with an AttributeError, or with the error of a kernel."""
    monkeypatch.chdir(tmp_path)
    faults = list[str]()
    with hpctrain.start(batch=8) as job:
        for name, (call, given) in _attempts(tmp_path, job).items():
            taken = {"epoch": ("epoch", "first"), "Automatic": inspect.signature(hpctrain.Automatic).parameters}
            for argument in taken.get(name, inspect.signature(call).parameters):
                if argument in ("notes", "options", "mirrored", "confusion", "advance"):
                    continue
                faults += _faults(name, call, given, argument, _WRONG)
    assert not faults, "\n".join(faults)


_KEYS = {hpctrain.start: START_KEYS, hpctrain.Automatic: REPLICA_KEYS, hpctrain.Job.replica: REPLICA_KEYS}


@pytest.mark.parametrize(("function", "keys"), [*_KEYS.items(), (hpctrain.Job.loader, LOADER_KEYS)])
def test_keywords_have_the_defaults_of_their_keys(function: Callable[..., object], keys: dict[str, KeyPath]) -> None:
    """A signature repeats them for its readers. None is the default of a keyword that then leaves its key out."""
    parameters = inspect.signature(function).parameters.values()
    given = {one.name: one.default for one in parameters if one.name in keys and one.default is not one.empty}
    assert len(given) >= 3
    assert keyword_config(function, keys, given) == keyword_config(function, keys, {})


#: legal values by name, for parameters of constructors that have no default
_LEGAL: dict[str, Any] = {
    "channels_in": 4,
    "channels_out": 8,
    "kernel": 3,
    "features_in": 4,
    "features_out": 2,
    "channels": 4,
    "before": 1,
    "after": 1,
    "layers": [],
    "body": {},
    "base_lr": 0.1,
    "epochs": 6,
    "steps_per_epoch": 5,
    "milestones_epochs": (2.0,),
}


def _constructors() -> Iterator[type]:
    """Yield hpctrain's public layers, optimisers, schedules and augmentations."""
    for name in AUGMENTATIONS.names():
        AUGMENTATIONS.find(name)
    pending: list[type] = [Layer, Optimizer, LearningRateSchedule, Augmentation]
    while pending:
        kind = pending.pop()
        pending += kind.__subclasses__()
        if kind.__module__.startswith("hpctrain.") and not inspect.isabstract(kind) and not kind.__name__.startswith("_"):
            yield kind


def test_constructors_refuse_values_of_wrong_types_with_a_sentence() -> None:
    """Without the check, the layer would fail in a kernel, or the constructor with an error of Python's arithmetic."""
    faults, kinds = list[str](), set()
    for kind in _constructors():
        parameters = inspect.signature(kind).parameters
        needed = [name for name, one in parameters.items() if one.default is inspect.Parameter.empty]
        if not set(needed) <= set(_LEGAL) or not parameters:  # users do not construct it
            continue
        kinds.add(kind.__name__)
        for argument in parameters:
            given = {name: _LEGAL[name] for name in needed}
            faults += _faults(kind.__name__, kind, given, argument, (*_WRONG, "x", None, np.int64(2), np.array([2, 2])))
    assert not faults, "\n".join(faults)
    assert {"Conv2d", "Linear", "Dropout", "Residual", "Sgd", "Lamb", "Cosine", "Step", "PadCrop", "RandAugment"} <= kinds


def test_a_type_error_inside_of_a_call_that_fits_stays_as_it_is() -> None:
    """Otherwise a defect in code of the user, which hpctrain calls, would be reported as a wrong call."""

    class Net(hpctrain.Sequential):
        def __init__(self) -> None:
            super().__init__({"relu": hpctrain.ReLU()})
            len(3)  # type: ignore[arg-type]

    with pytest.raises(TypeError, match="has no len"):
        Net()
    with pytest.raises(TypeError, match="unsupported operand"):
        hpctrain.RunningSums().add(SimpleNamespace(loss="much"))  # type: ignore[arg-type]


@pytest.mark.parametrize("image_shape", [(1, 28, 28), (3, 28, 28)])
def test_a_shape_with_its_channels_first_is_refused_as_such(image_shape: tuple[int, int, int]) -> None:
    """A message about the channels of the first layer would lead to a model for images of 28 channels."""
    first, *sides = image_shape
    sentence = f"image_shape is {image_shape}, but shapes are (height, width, channels); the nearest is {(*sides, first)}."
    with pytest.raises(hpctrain.HpctrainError) as raised:
        Lowering(hpctrain.model("small")).graph(1, image_shape)
    assert str(raised.value) == sentence
    model = hpctrain.Sequential([hpctrain.Conv2d(28, 4, 5), hpctrain.ReLU()])
    with pytest.raises(hpctrain.HpctrainError, match="Layer 0: An input of height"):  # too small, but its channels fit
        Lowering(model).graph(1, image_shape)


@pytest.mark.job
@pytest.mark.usefixtures("alone_without_a_launcher")
def test_an_error_of_a_training_has_the_frame_of_the_call_only() -> None:
    """Frames of hpctrain between the call and the fault would hide the sentence that helps."""
    with pytest.raises(hpctrain.HpctrainError, match="nearest known key") as raised:
        hpctrain.train({"modle": "small"})
    frames = [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
    assert frames[1:] == ["train"]
    assert raised.value.__suppress_context__
