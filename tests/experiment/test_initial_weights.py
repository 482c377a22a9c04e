"""Trainings that start from a file of weights: on any grid the same ones, whole or without some names, and with frozen layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hpctrain.averaging.strategies.sharded import Sharded
from hpctrain.backend.kernels.numpy.kernel_set import NumpyKernelSet
from hpctrain.comm.progress import ProgressEngine
from hpctrain.errors import CheckpointError
from hpctrain.experiment.initial_weights import put_weights
from hpctrain.models import catalogue, interchange
from hpctrain.nn.network import Network
from hpctrain.optim.optimizers.sgd import Sgd
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.storage import weights_file
from hpctrain.storage.checkpoint import checkpoints, parameter_key, read, statistic_key
from hpctrain.storage.run_directory import latest
from hpctrain.storage.weights_file import WeightsFile
from hpctrain.train.replica import Replica
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine
from tests.support import nets
from tests.support.run_in_process import prepare, train
from tests.support.training import Task, assemble, replica_of

PLANS = {
    "1x1": ParallelPlan(),
    "2x2 model": ParallelPlan(2, 2, Parallelism.MODEL),
    "3x1 domain": ParallelPlan(3, 1, Parallelism.DOMAIN),
}


def task_on(plan: ParallelPlan) -> Task:
    return Task(nets.residual, NumpyKernelSet(), lambda: Sgd(momentum=0.9), plan=plan)


def network_by_seed(seed: int) -> Network:
    network = Network(nets.residual(), Task.image_shape, NumpyKernelSet(), dtype="float64", seed=seed)
    for name, view in network.statistics.views.items():
        view[...] = np.random.default_rng(len(name)).random(view.shape)
    return network


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of weights that are not those of the task's seed, in float64."""
    weights_file.write(tmp_path / "w.safetensors", WeightsFile(interchange.export(network_by_seed(11))))
    return tmp_path / "w.safetensors"


def on_ranks(plan: ParallelPlan, work: Callable[[ThreadCommunicator, Replica], object]) -> list[object]:
    def program(comm: ThreadCommunicator) -> object:
        engine: ProgressEngine = virtual_engine(comm)
        return work(comm, replica_of(task_on(plan), comm, engine, Sharded))

    return list(run_virtual(plan.rows * plan.cols, program, seed=4))


def whole_state(replica: Replica) -> dict[str, np.ndarray]:
    parameters = {name: assemble(replica, name, one.data) for name, one in replica.network.parameters.items()}
    return parameters | {name: view.copy() for name, view in replica.network.statistics.views.items()}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("ignore", [(), ("fc.*", "layer2.bn1.*")])
def test_every_grid_starts_from_the_same_bits(path: Path, plan: str, ignore: tuple[str, ...]) -> None:
    drawn, file = network_by_seed(Task.seed), network_by_seed(11)

    def start(comm: ThreadCommunicator, replica: Replica) -> dict[str, np.ndarray]:
        put_weights(comm, replica, path, ignore, "residual")
        return whole_state(replica)

    for state in on_ranks(PLANS[plan], start):
        assert isinstance(state, dict)
        for name, parameter in file.parameters.items():
            left_out = bool(ignore) and name.startswith(("fc.", "layer2.bn1."))
            wanted = drawn.parameters[name].data if left_out else parameter.data
            assert state[name].tobytes() == np.ascontiguousarray(wanted).tobytes(), name
        for name, view in file.statistics.views.items():
            if ignore and name.startswith("layer2.bn1."):
                view = np.full_like(view, float(name.endswith("var")))
            assert state[name].tobytes() == view.tobytes(), name


def test_what_does_not_fit_is_refused_alike_and_changes_nothing(path: Path) -> None:
    content = dict(weights_file.read(path).tensors)
    content["fc.bias"] = np.zeros(9)
    weights_file.write(path, WeightsFile(content))

    def start(comm: ThreadCommunicator, replica: Replica) -> str:
        before = whole_state(replica)
        with pytest.raises(CheckpointError) as raised:
            put_weights(comm, replica, path, (), "residual")
        assert all(np.array_equal(values, before[name]) for name, values in whole_state(replica).items())
        return str(raised.value)

    said = on_ranks(PLANS["2x2 model"], start)
    assert len(set(map(str, said))) == 1
    assert "fc.bias of" in str(said[0])
    assert 'set init.ignore, as in ["fc.*"]' in str(said[0])


def test_another_file_on_a_rank_is_told_by_all(path: Path) -> None:
    def start(comm: ThreadCommunicator, replica: Replica) -> str:
        own = path if comm.rank != 2 else path.with_name("other.safetensors")
        with pytest.raises(CheckpointError) as raised:
            put_weights(comm, replica, own, (), "residual")
        return str(raised.value).partition(" ")[2]

    weights_file.write(path.with_name("other.safetensors"), WeightsFile({"a": np.zeros(1)}))
    said = on_ranks(PLANS["2x2 model"], start)
    assert len(set(map(str, said))) == 1
    assert str(said[0]).startswith("2 has another file of weights than rank 0: sha256 is ")


# -- whole runs ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A configuration, data, and weights of its model with another number of classes."""
    prepare(tmp_path)
    model = catalogue.build("small", {"channels": (2,), "hidden": 3, "classes": 8})
    network = Network(model, (7, 6, 1), NumpyKernelSet(), seed=99)
    for view in network.statistics.views.values():
        view[...] = 0.7
    weights_file.write(tmp_path / "w.safetensors", WeightsFile(interchange.export(network)))
    return tmp_path


def overrides(folder: Path, *others: str) -> tuple[str, ...]:
    return (f"init.weights={folder}/w.safetensors", "init.ignore=[classifier.fc2.*]", "init.freeze=[stage1.*]", *others)


def newest(folder: Path) -> dict[str, np.ndarray]:
    directory = latest(folder / "runs", "tiny")
    assert directory is not None
    return dict(read(checkpoints(directory.checkpoints)[-1][1]).tensors)


def test_a_run_is_fine_tuned_and_resumes_without_the_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(folder, *overrides(folder))
    whole = newest(folder)
    said = capsys.readouterr().out
    assert f"weights of {folder}/w.safetensors, without classifier.fc2.*" in said
    assert "2 layers frozen:" in said
    train(folder, *overrides(folder), steps=2)
    file = weights_file.read(folder / "w.safetensors").tensors
    (folder / "w.safetensors").unlink()
    train(folder, *overrides(folder), resume="auto")
    resumed = newest(folder)
    assert resumed.keys() == whole.keys()
    for key, values in whole.items():
        assert resumed[key].tobytes() == values.tobytes(), key
    np.testing.assert_array_equal(whole[parameter_key("stage1.conv.weight")].transpose(0, 3, 1, 2), file["stage1.conv.weight"])
    np.testing.assert_array_equal(whole[statistic_key("stage1.bn.running_mean")], file["stage1.bn.running_mean"])
    assert not np.array_equal(whole[parameter_key("classifier.fc1.bias")], file["classifier.fc1.bias"])
    assert {key.rpartition("/")[2] for key in whole if key.startswith("optimizer/")} == {
        f"classifier.{layer}.{role}" for layer in ("fc1", "fc2") for role in ("weight", "bias")
    }


def test_a_resume_with_other_frozen_layers_is_refused(folder: Path) -> None:
    train(folder, *overrides(folder), steps=2)
    with pytest.raises(
        CheckpointError, match=r"init.freeze: .* -> .*may not change: the optimiser's state belongs to the layers"
    ):
        train(folder, *overrides(folder, "init.freeze=[]"), resume="auto")


def test_another_number_of_classes_tells_of_ignore(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"classifier.fc2.bias of .* has shape \(8,\).*(\n.*)*set init.ignore, as in"):
        train(folder, *overrides(folder, "init.ignore=[]"))
    with pytest.raises(CheckpointError, match="There is no file of weights"):
        train(folder, *overrides(folder, "init.weights=nowhere.pt"))
