"""Whole trainings from a configuration on nodes of several ranks: what one rank trains, wherever the ranks lie."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from hpctrain.averaging.collective_schedule import CollectiveSchedule
from hpctrain.comm.base import Communicator
from hpctrain.comm.grid import ProcessGrid
from hpctrain.comm.link import LinkModel
from hpctrain.comm.progress import ProgressEngine
from hpctrain.config.load import load
from hpctrain.config.schema import Config
from hpctrain.data import format as data_format
from hpctrain.experiment import collective_schedules, compute_only, dry_run
from hpctrain.experiment.automatic_choice import Resolved
from hpctrain.experiment.build import build, build_trainer
from hpctrain.experiment.session import Session
from hpctrain.launch.launcher import Launcher
from hpctrain.launch.threads import ThreadPlan
from hpctrain.parallel.groups import GridGroups
from hpctrain.storage.checkpoint import CheckpointContent
from hpctrain.storage.run_directory import RunDirectory
from hpctrain.train.metrics import Reporter
from hpctrain.train.snapshot import Position
from hpctrain.virtual.communicator import ThreadCommunicator
from hpctrain.virtual.counters import Counters, CountingCommunicator
from hpctrain.virtual.run import run_virtual, virtual_engine

CONFIG = """
name: nodes
seed: 7
backend: numpy
dtype: float64
model: {{name: small, channels: [3, 4], hidden: 9, dropout: 0.2}}
data:
  train: {folder}/train.h5
  augment: [{{name: flip}}]
batch: 14
epochs: 9
optimizer: {{name: lars, lr: 0.5, trust_coefficient: 0.1, momentum: 0.9, clip_norm: 0.4}}
averager: {{name: sharded, bucket_bytes: 700}}
schedule: {{name: constant}}
batch_norm: {{statistics: synchronised}}
"""

#: ranks, ranks of a node, overrides, and the parameter groups that are averaged in two levels
LAYOUTS: dict[str, tuple[int, int, tuple[str, ...], set[str]]] = {
    "4 on 2 nodes": (4, 2, (), {"all"}),
    "6 on 2 nodes, exchange": (6, 3, ("averager.fc_exchange=always",), {"all"}),
    "6 on 3 nodes, priority": (6, 2, ("averager={name: priority, slice_parameters: 90}",), {"all"}),
    "2 x 4 on 2 nodes": (8, 4, ("grid.rows=2", "plan.classifier.*=model"), {"all", "model"}),
    "3 x 2 on 2 nodes": (6, 3, ("grid.rows=3", "plan.stage1.*=domain", "plan.classifier.*=model"), {"all"}),
    "2 x 4 on unlike nodes": (8, 5, ("grid.rows=2", "plan.classifier.*=model"), {"model"}),  # the second row's 0 0 1 1
    "5 on unlike nodes": (5, 2, (), set()),
}
STEPS = 8  # operations are ordered by measured times after the fifth


@dataclass(frozen=True)
class Trained:
    """What a rank ends with. in_levels: the parameter groups that are averaged in two levels."""

    content: CheckpointContent
    in_levels: set[str]

    def assert_close(self, other: Trained) -> None:
        assert self.content.tensors.keys() == other.content.tensors.keys()
        for key, tensor in self.content.tensors.items():
            np.testing.assert_allclose(tensor, other.content.tensors[key], rtol=1e-9, atol=1e-12, err_msg=key)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration, and 33 images: batches of 14, 14 and 5."""
    folder, random = tmp_path_factory.mktemp("nodes"), np.random.default_rng(0)
    images = random.integers(0, 256, (33, 9, 8, 1), dtype=np.uint8)
    data_format.write(folder / "train.h5", 33, (9, 8, 1), ["a", "b", "c"], [(images, random.integers(0, 3, 33))])
    (folder / "nodes.yaml").write_text(CONFIG.format(folder=folder))
    return folder / "nodes.yaml"


@pytest.fixture(scope="module")
def alone(file: Path) -> Trained:
    return _train(file, 1, None)[0]


def _session(config: Config, world: Communicator, progress: ProgressEngine) -> Session:
    grid = ProcessGrid(world, config.grid.rows, world.size // config.grid.rows)
    return Session(
        Launcher("none"), ThreadPlan(1, 1, "virtual ranks"), world, grid, GridGroups(grid), progress, Resolved(config), {}
    )


def _train(
    file: Path,
    ranks: int,
    per_node: int | None,
    *overrides: str,
    steps: int = STEPS,
    start: CheckpointContent | None = None,
    seed: int | None = None,
) -> list[Trained]:
    config, _ = load(file, overrides)

    def program(comm: ThreadCommunicator) -> Trained:
        session = _session(config, comm, virtual_engine(comm))
        parts = build(session)
        collective_schedules.agree(session, parts, start)
        position = Position() if start is None else parts.replica.load(start)
        trainer = build_trainer(session, parts, Reporter(), lambda at: None, steps=steps)
        outcome = trainer.run(position)
        parts.replica.drain()
        meta = collective_schedules.keep(session, parts, RunDirectory(file.parent))
        content = parts.replica.state(outcome.position, meta)
        return Trained(content, {name for name, strategy in parts.replica.strategies.items() if strategy.levels is not None})

    return run_virtual(ranks, program, ranks_per_node=per_node, seed=seed)


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nodes_train_what_one_rank_does(file: Path, alone: Trained, layout: str) -> None:
    ranks, per_node, overrides, in_levels = LAYOUTS[layout]
    every = _train(file, ranks, per_node, *overrides, seed=ranks)
    assert set().union(*(found.in_levels for found in every)) == in_levels
    for found in every:
        found.assert_close(alone)


@pytest.mark.slow
def test_a_resume_on_the_same_nodes_is_bitwise(file: Path) -> None:
    whole = _train(file, 4, 2)[0].content
    for stop in (3, 6):  # before and after operations are ordered by measured times
        begun = _train(file, 4, 2, steps=stop)[0].content
        again = _train(file, 4, 2, steps=STEPS - stop, start=begun, seed=stop)[0].content
        for key, tensor in whole.tensors.items():
            assert tensor.tobytes() == again.tensors[key].tobytes(), key


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(("before", "after"), [((4, 2), (3, None)), ((4, None), (4, 2)), ((6, 3), (6, 2))], ids=str)
def test_a_resume_on_other_nodes_goes_on(
    file: Path, alone: Trained, before: tuple[int, int | None], after: tuple[int, int | None]
) -> None:
    begun = _train(file, *before, steps=4)[0].content
    found = _train(file, *after, steps=STEPS - 4, start=begun)[0]
    found.assert_close(alone)
    schedules: dict[str, str] = found.content.meta["schedules"]  # type: ignore[assignment]
    ranks, per_node = after
    levels = f"; {ranks // per_node} nodes of {per_node}" if per_node else ""
    assert CollectiveSchedule.from_json(schedules["all"]).request.rpartition("parameters ")[2][16:] == levels


@pytest.mark.parametrize(("ranks", "per_node", "crosses"), [(4, 2, True), (4, 1, False), (3, None, False)])
def test_the_exchange_alone_is_an_averagers(file: Path, ranks: int, per_node: int | None, crosses: bool) -> None:
    """What a step's limit is made of crosses a node's link as often as in a step."""
    config, _ = load(file, ())

    def program(comm: ThreadCommunicator) -> tuple[int, int, int]:
        counters = Counters()
        session = _session(config, CountingCommunicator(comm, counters), virtual_engine(comm))
        network = build(session).replica.network
        before = counters.snapshot()
        compute_only.measure_exchange(session.groups, session.progress, network)
        counted = counters.since(before)
        repeats = counted.total("exchange alone across nodes", "ireduce_scatter").operations
        crossing = counted.total("exchange alone across nodes").exchanged_bytes
        return crossing, repeats, network.groups["all"].grad.nbytes

    found = run_virtual(ranks, program, ranks_per_node=per_node)
    _, repeats, whole = found[0]
    assert bool(repeats) is crosses
    assert sum(crossing for crossing, _, _ in found) == 2 * whole * repeats  # two nodes, each 2 (N - 1) / N of the whole


@pytest.mark.parametrize("fc_exchange", ["always", "never"])
def test_each_rank_exchanges_what_the_plan_says(file: Path, fc_exchange: str) -> None:
    """14 samples on 4 ranks, so that ranks differ, and not in the order in which a schedule counts them."""
    config, _ = load(file, (f"averager.fc_exchange={fc_exchange}",))

    def program(comm: ThreadCommunicator) -> int:
        counters = Counters()
        session = _session(config, CountingCommunicator(comm, counters), virtual_engine(comm))
        parts = build(session)
        collective_schedules.agree(session, parts)
        before = counters.snapshot()
        trainer = build_trainer(session, parts, Reporter(), lambda at: None, steps=1)
        trainer.run(Position())
        parts.replica.drain()
        counted = counters.since(before)
        kinds = ("ireduce_scatter", "iallgather", "ialltoall")
        names = {name for name, _ in counted if name.startswith(("data gradients", "data parameters"))}
        return sum(counted.total(name, kind).exchanged_bytes for name in names for kind in kinds)

    task = dry_run.prepare(config, 4)
    planned = dry_run.averaging_bytes(task, dry_run.group_schedules(task, LinkModel(1e-5, 1e-9), 2))
    assert len(set(planned)) > 1
    assert run_virtual(4, program, ranks_per_node=2) == list(planned)
