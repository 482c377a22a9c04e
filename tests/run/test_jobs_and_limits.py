"""Jobs of users' programs, nodes with several ranks, time limits, flight records, and full disks."""

import contextlib
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import hpctrain
from hpctrain.assembly.recipe import Recipe
from hpctrain.averaging.collective_schedule import CollectiveSchedule
from hpctrain.comm.base import Communicator, SingleCommunicator
from hpctrain.comm.groups import ProcessGrid
from hpctrain.comm.link import LinkModel
from hpctrain.comm.progress import ProgressEngine
from hpctrain.config.load import load
from hpctrain.config.schema import Config
from hpctrain.core.errors import ConfigError, ShapeError
from hpctrain.data.writer import write_data_file
from hpctrain.flight.autopsy import records_in
from hpctrain.flight.recorder import FlightRecorder
from hpctrain.flight.ring import file_name, read
from hpctrain.job.automatic_choice import Resolved
from hpctrain.job.flight_records import keep, watched
from hpctrain.job.session import Session
from hpctrain.launch.launcher import Launcher
from hpctrain.launch.process_end import FINISHED, STOPPED, End
from hpctrain.launch.threads import ThreadPlan
from hpctrain.parallel.groups import GridGroups
from hpctrain.planner import planned_run
from hpctrain.planner.program.group_schedules import group_schedules
from hpctrain.run import reproducibility, trace_report
from hpctrain.run.build import build
from hpctrain.run.python_job import Stopped
from hpctrain.run.resume import Start
from hpctrain.run.training import max_time
from hpctrain.runs.directory import FLIGHT_POINTER, RunDirectory, flight_directory
from hpctrain.storage import weights_file
from hpctrain.storage.checkpoint import CheckpointContent
from hpctrain.storage.weights_file import WeightsFile
from hpctrain.training.metrics import Reporter
from hpctrain.training.snapshot import Position
from hpctrain.training.trainer import Cadence, Trainer
from hpctrain_testing import faults
from hpctrain_testing.faults import Fault, run_fault
from hpctrain_testing.run import patched_program
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.counters import Counters, CountingCommunicator
from hpctrain_testing.virtual.run import run_virtual, virtual_engine
from tests.support import nets, network_state, run_in_process
from tests.support.recorded import Heard
from tests.support.runs import train_virtual
from tests.support.signal_storm import final_tensors, prepare, same_bits
from tests.support.tiny_runs import whole_lines
from tests.test_api import alone_without_a_launcher as alone_without_a_launcher


@pytest.fixture(autouse=True)
def without_launcher(alone_without_a_launcher) -> None:
    """Programs start alone."""


IMAGES, LABELS = np.random.default_rng(0).standard_normal((16, 9, 7, 3)), np.arange(16) % 4


def test_no_stop_is_requested_without_signals(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), hpctrain.start(batch=8) as job:
        _ = job.stop_requested
    assert "call `start` with signals=True" in capsys.readouterr().err


def test_stopping_passes_through_what_takes_ordinary_errors() -> None:
    def asks() -> None:
        with hpctrain.start(batch=8) as job:
            try:
                job.stop()
            except Exception as error:
                pytest.fail(f"taken for an error: {error}")
        pytest.fail("the program has gone on")

    assert not issubclass(Stopped, Exception)
    with pytest.raises(SystemExit) as left:
        asks()
    assert left.value.code == 85


@pytest.mark.parametrize("background", [False, True])
def test_counts_of_skipped_steps_are_kept(background: bool, tmp_path: Path) -> None:
    images = IMAGES.copy()
    with hpctrain.start(batch=8) as job:
        replica = job.replica(nets.plain(), (9, 7, 3), on_nonfinite={"action": "skip", "most": 3})
        for batch in job.array_loader(replica, images, LABELS, shuffle=False).epoch(0):
            batch.x[...] = np.nan if replica.global_step == 1 else batch.x
            replica.step(batch, 0.1)
        job.save(replica, tmp_path / "net.h5", background=background, seen=16)
        again = job.replica(nets.plain(), (9, 7, 3), on_nonfinite="skip")
        assert job.load(again, tmp_path / "net.h5") == {"seen": 16}
        assert (again.global_step, again.loop.skipped, again.loop.skipped_in_a_row) == (2, 1, 1)


def test_a_wrong_weight_is_seen_before_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def flips() -> None:
        with hpctrain.start(batch=8) as job:
            replica = job.replica(nets.plain(), (9, 7, 3))
            for batch in job.array_loader(replica, IMAGES, LABELS).epoch(0):
                replica.step(batch, 0.1)
            replica.drain()
            next(iter(replica.network.parameters.values())).data.reshape(-1)[0] += 1
            job.save(replica, tmp_path / "net.h5")

    with pytest.raises(SystemExit):
        flips()
    said = capsys.readouterr().err
    assert "changed between two updates" in said
    assert "replica.parameters_written()" in said
    assert not (tmp_path / "net.h5").exists()


def test_a_replica_starts_from_weights_and_trains_what_is_not_frozen(tmp_path: Path) -> None:
    with hpctrain.start(batch=8) as job:
        first = job.replica(nets.residual(), (9, 7, 3), seed=5)
        weights_file.write(tmp_path / "w.safetensors", WeightsFile(network_state.export(first.network)))
        replica = job.replica(nets.residual(classes=4), (9, 7, 3), frozen=["*conv*", "*bn*", "layer2.downsample.*"])
        with pytest.raises(hpctrain.HpctrainError, match=r'leave such layers out by ignore=\["fc\.\*"\]'):
            job.load_weights(replica, tmp_path / "w.safetensors")
        job.load_weights(replica, tmp_path / "w.safetensors", ignore=["fc.*"])
        by_seed = replica.network.parameters["fc.weight"].data.copy()
        for batch in job.array_loader(replica, IMAGES, LABELS).epoch(0):
            replica.step(batch, lr=0.1)
        replica.settle()
        replica.require_alike()
        for name, parameter in replica.network.parameters.items():
            if name.startswith("fc."):
                continue
            np.testing.assert_array_equal(parameter.data, first.network.parameters[name].data)
        assert not np.array_equal(replica.network.parameters["fc.weight"].data, by_seed)


def test_images_of_a_file_have_sizes_by_epoch_and_are_mixed(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (16, 9, 7, 3), np.uint8)
    write_data_file(tmp_path / "train.h5", 16, (9, 7, 3), list("abcde"), [(pixels, LABELS)])
    with hpctrain.start(batch=8) as job:
        replica = job.replica(nets.residual(), (9, 7, 3), backend="numpy")
        loader = job.loader(replica, tmp_path / "train.h5", sizes=[(0, 5), (1, 7)], mixing={"mixup": 1.0})
        for epoch, shape in enumerate([(6, 5, 3), (9, 7, 3)]):
            for batch in loader.epoch(epoch):
                assert batch.x.shape[1:] == shape
                assert batch.mixed is not None
                replica.step(batch, 0.1)
        assert replica.settle() is not None
        with pytest.raises(ConfigError, match="the smallest value is 1"):
            job.loader(replica, tmp_path / "train.h5", sizes=[(0, 5), (0, 7)])
        plain = job.replica(nets.plain(), (9, 7, 3), backend="numpy")
        with pytest.raises(ShapeError, match="which this training or its evaluation also uses: Layer fc1"):
            job.loader(plain, tmp_path / "train.h5", sizes=[(0, 5), (1, 7)])


CONFIG = """
{{name: nodes, seed: 7, backend: numpy, dtype: float64, model: {{name: small, channels: [3, 4], hidden: 9, dropout: 0.2}},
 data: {{train: {folder}/train.h5, augment: [{{name: flip}}]}}, batch: 14, epochs: 9, schedule: {{name: constant}},
 optimizer: {{name: lars, lr: 0.5, trust_coefficient: 0.1, momentum: 0.9, clip_norm: 0.4}},
 averager: {{name: sharded, bucket_bytes: 700}}, batch_norm: {{statistics: synchronised}}}}
"""
STEPS = 8  # operations are ordered by measured times after the fifth


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration, and 33 images: batches of 14, 14 and 5."""
    folder, random = tmp_path_factory.mktemp("nodes"), np.random.default_rng(0)
    images = random.integers(0, 256, (33, 9, 8, 1), dtype=np.uint8)
    write_data_file(folder / "train.h5", 33, (9, 8, 1), ["a", "b", "c"], [(images, random.integers(0, 3, 33))])
    (folder / "nodes.yaml").write_text(CONFIG.format(folder=folder))
    return folder / "nodes.yaml"


@pytest.fixture(scope="module")
def alone(file: Path) -> CheckpointContent:
    return _train(file, 1, None)[0]


def _session(config: Config, world: Communicator, progress: ProgressEngine) -> Session:
    grid = ProcessGrid(world, config.grid.rows, world.size // config.grid.rows)
    threads, resolved = ThreadPlan(1, 1, "virtual ranks"), Resolved(Recipe.of(config))
    return Session(Launcher("none"), threads, world, grid, GridGroups(grid), progress, resolved, {})


def _train(
    file: Path,
    ranks: int,
    per_node: int | None,
    *overrides: str,
    steps: int = STEPS,
    start: CheckpointContent | None = None,
    seed: int | None = None,
) -> list[CheckpointContent]:
    config, _ = load(file, overrides)

    def program(comm: ThreadCommunicator) -> CheckpointContent:
        session = _session(config, comm, virtual_engine(comm))
        parts = build(session)
        position = Position() if start is None else Position.from_meta(start.meta)
        begun = None if start is None else Start(None, file, start, position, (), parts.data)
        parts.replica.agree(reproducibility.stored_schedules(session, parts, begun), parts.transport)
        if start is not None:
            parts.replica.load(start)
        trainer = Trainer(parts, Cadence.of(config, steps), Reporter(), lambda at: None)
        outcome = trainer.run(position)
        parts.replica.drain()
        meta = reproducibility.keep_schedules(session, parts, RunDirectory(file.parent))
        return parts.replica.state(outcome.position, meta)

    return run_virtual(ranks, program, ranks_per_node=per_node, seed=seed)


@pytest.mark.slow
def test_a_resume_on_the_same_nodes_is_bitwise(file: Path) -> None:
    whole = _train(file, 4, 2)[0]
    for stop in (3, 6):  # before and after operations are ordered by measured times
        begun = _train(file, 4, 2, steps=stop)[0]
        again = _train(file, 4, 2, steps=STEPS - stop, start=begun, seed=stop)[0]
        for key, tensor in whole.tensors.items():
            assert tensor.tobytes() == again.tensors[key].tobytes(), key


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(("before", "after"), [((4, 2), (3, None)), ((4, None), (4, 2)), ((6, 3), (6, 2))], ids=str)
def test_a_resume_on_other_nodes_goes_on(
    file: Path, alone: CheckpointContent, before: tuple[int, int | None], after: tuple[int, int | None]
) -> None:
    begun = _train(file, *before, steps=4)[0]
    found = _train(file, *after, steps=STEPS - 4, start=begun)[0]
    assert found.tensors.keys() == alone.tensors.keys()
    for key, tensor in found.tensors.items():
        np.testing.assert_allclose(tensor, alone.tensors[key], rtol=1e-9, atol=1e-12, err_msg=key)
    schedules: dict[str, str] = found.meta["schedules"]
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
        trace_report.measure_exchange(session.groups, session.progress, network)
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
        parts.replica.agree(transport=parts.transport)
        before = counters.snapshot()
        trainer = Trainer(parts, Cadence.of(config, 1), Reporter(), lambda at: None)
        trainer.run(Position())
        parts.replica.drain()
        counted = counters.since(before)
        kinds = ("ireduce_scatter", "iallgather", "ialltoall")
        names = {name for name, _ in counted if name.startswith(("data gradients", "data parameters"))}
        return sum(counted.total(name, kind).exchanged_bytes for name in names for kind in kinds)

    task = planned_run.prepare(config, 4)
    planned = planned_run.averaging_bytes(task, group_schedules(task.job, task.candidate, LinkModel(1e-5, 1e-9), 2))
    assert len(set(planned)) > 1
    assert run_virtual(4, program, ranks_per_node=2) == list(planned)


def test_without_a_limit_there_is_nothing_to_say() -> None:
    limit = max_time(None)
    assert not limit.limit.finite
    assert (limit.sentence, limit.reason) == ("", None)


def test_slurm_says_when_its_job_ends() -> None:
    assert max_time("slurm", {"SLURM_JOB_END_TIME": str(int(time.time()) + 9)}).limit.finite


# The program, in which a step takes 0.4 s longer and a checkpoint 0.3 s; rank RANK alone takes the limit for so much shorter.
_SLOW = """
rank, shorter = int(sys.argv.pop(1)), float(sys.argv.pop(1))
def patch():
    from hpctrain.storage import checkpoint
    from hpctrain.training.step import TrainingStep
    from hpctrain.training.stopping import TimeLimit
    step, write, limit = TrainingStep.run, checkpoint.write, TimeLimit.__init__
    TrainingStep.run = lambda *rest: (time.sleep(0.4), step(*rest))[1]
    checkpoint.write = lambda *rest: (time.sleep(0.3), write(*rest))[1]
    less = shorter if here == rank else 0.0
    TimeLimit.__init__ = lambda self, seconds=float("inf"), *rest: limit(self, seconds - less, *rest)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A configuration and data: 30 steps."""
    prepare(tmp_path, images=960, epochs=1)
    (tmp_path / "slow.py").write_text(patched_program(_SLOW))
    return tmp_path


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize(("ranks", "rank", "shorter"), [(0, 0, 0.0), (2, 1, 4.0)])
def test_a_run_ends_before_its_limit_and_goes_on_bit_by_bit(job, folder: Path, ranks: int, rank: int, shorter: float) -> None:
    """Also where one rank alone finds that the time is over: the others agree."""
    assert job(ranks, ["-m", "hpctrain", "train", "storm.yaml", "output=whole"], cwd=folder).code == FINISHED
    limit, begin = 10.0 + shorter, time.time()
    outcome = job(ranks, ["slow.py", str(rank), str(shorter), "train", "storm.yaml", f"max_time={limit:g}s"], cwd=folder)
    assert outcome.code == STOPPED, outcome.output
    assert f"stopped by max_time, {limit:g} s after step" in outcome.stdout
    written = list((folder / "runs").glob("*/checkpoints/*.h5"))
    assert len(written) == 1
    assert 2.0 < written[0].stat().st_mtime - begin < 10.5
    assert job(ranks, ["-m", "hpctrain", "train", "storm.yaml", "--resume", "auto"], cwd=folder).code == FINISHED
    assert same_bits(final_tensors(folder, "runs"), final_tensors(folder, "whole"))


def test_a_run_that_is_done_in_time_is_not_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor is one whose limit is over in its last step, where nothing is left."""
    run_in_process.prepare(tmp_path)
    run_in_process.train(tmp_path, "max_time=1000h")  # a limit counts from the start of the process
    run_in_process.train(tmp_path, "data.test=", "epochs=1", "batch=10", "max_time=0.001")
    said = capsys.readouterr().out
    assert re.search(r"max_time, .* s: the run ends with a checkpoint and exit code 85 before", said)
    assert "stopped" not in said


def test_all_ranks_refuse_what_slurm_does_not_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_in_process.prepare(tmp_path)
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    with pytest.raises(ConfigError, match="max_time is slurm, but the environment has no SLURM_JOB_END_TIME"):
        train_virtual(2, tmp_path / "tiny.yaml", "max_time=slurm")
    assert not (tmp_path / "runs").exists()


def _kept_session(flight: FlightRecorder | None, where: str) -> Session:
    alone = SingleCommunicator()
    progress = ProgressEngine(rank=0, deadline_seconds=5, abort=alone.abort, flight=flight)
    values: dict[str, Any] = {
        "progress": progress,
        "config": SimpleNamespace(flight=where),
        "is_root": True,
        "world": SingleCommunicator(),
        "grid": SimpleNamespace(node=alone),
    }
    return cast("Session", SimpleNamespace(**values))


def _directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path, "x", config="name: x\n", versions={}, git={})


def test_a_run_that_ends_well_has_finished(tmp_path: Path) -> None:
    flight, directory = FlightRecorder(), _directory(tmp_path)
    with watched(flight, SingleCommunicator(), 30.0):
        session = _kept_session(flight, "run")
        keep(session, directory, Heard())
    found = read(directory.path / "flight" / file_name(0))
    assert (found.end, found.ranks, found.deadline_ns) == (End.FINISHED, 1, 30_000_000_000)
    assert found.job > 0


def test_records_of_the_latest_start_count_where_the_clock_has_gone_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, year_ns = _directory(tmp_path), 365 * 86400 * 10**9
    now_ns = time.time_ns()
    for start, time_ns in enumerate((now_ns + year_ns, now_ns - year_ns, now_ns)):
        monkeypatch.setattr(time, "time_ns", lambda time_ns=time_ns: time_ns)
        for rank in (0, 1):  # of which the later one is of the first start alone
            if rank and start:
                continue
            flight = FlightRecorder()
            flight.join(rank, 2 if start == 0 else 1, time.time_ns(), 30.0)
            flight.step(1, start + 1)
            keep(_kept_session(flight, "run"), directory, Heard())
    assert [(found.rank, found.step) for found in records_in(directory.path / "flight")] == [(0, 3)]


def test_times_of_all_records_are_those_of_rank_0(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Clocks of nodes differ, but the autopsy compares times of different ranks."""
    flight = FlightRecorder()
    monkeypatch.setattr(time, "time_ns", lambda: 10**18)
    with watched(flight, SingleCommunicator(), 30.0):
        flight.keep_in(tmp_path)
        found = read(tmp_path / file_name(0))
    assert 1e9 <= found.wall_seconds(time.perf_counter_ns()) < 1e9 + 600


def test_the_record_of_a_run_that_raises_has_no_end(tmp_path: Path) -> None:
    flight, directory = FlightRecorder(), _directory(tmp_path)

    def fails() -> None:
        with watched(flight, SingleCommunicator(), 30.0):
            keep(_kept_session(flight, "run"), directory, Heard())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert read(directory.path / "flight" / file_name(0)).end is End.RUNNING


def test_elsewhere_and_nowhere(tmp_path: Path) -> None:
    directory, reporter = _directory(tmp_path), Heard()
    keep(_kept_session(FlightRecorder(), "none"), directory, reporter)
    keep(_kept_session(None, "run"), directory, reporter)
    assert not (directory.path / "flight").exists()
    keep(_kept_session(FlightRecorder(), str(tmp_path / "local")), directory, reporter)
    assert (directory.path / FLIGHT_POINTER).read_text().strip() == str(tmp_path / "local" / directory.path.name)
    assert flight_directory(directory.path) == tmp_path / "local" / directory.path.name
    assert (tmp_path / "local" / directory.path.name / file_name(0)).exists()
    keep(_kept_session(FlightRecorder(), "run"), directory, reporter)  # a resume with other options
    assert flight_directory(directory.path) == directory.path / "flight"
    assert (directory.path / "flight" / file_name(0)).exists()
    assert reporter.lines == []


def test_a_disk_without_room_does_not_end_the_run(tmp_path: Path) -> None:
    directory, reporter, flight = _directory(tmp_path), Heard(), FlightRecorder()
    (tmp_path / "file").write_text("")
    keep(_kept_session(flight, str(tmp_path / "file")), directory, reporter)
    assert flight.directory is None
    assert reporter.lines[0].startswith("no flight records: ")
    flight.phase("goes on")


# Rank 0 fills the disk before step 2 of 4, and maybe makes room again before step 4.
_FILL = """
def fill(run, self, *rest):
    import glob
    with open(glob.glob("runs/*/metrics.jsonl")[0], "ab") as metrics:  # up to the end of its page, where there would be room
        metrics.write(b'{"kind": "page"}'.ljust(-metrics.tell() % 4096 + 4096 - 1) + b"\\n")
    with open("runs/filler", "wb", buffering=0) as file:
        size = 1 << 16
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2
    return run(self, *rest)
once(TrainingStep, "run", fill, in_step_2)
"""
_EMPTY = """
def empty(run, self, *rest):
    os.unlink("runs/filler")
    return run(self, *rest)
once(TrainingStep, "run", empty, lambda self, batch, step, lr: step == 3)
"""
_OVERRIDES = ("checkpoint.every_epochs=0", "metrics.interval_seconds=0.0001", "trace=true", "deadline_seconds=100")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder whose `runs` is a disk of 2 MB; skips where this user may mount none."""
    faults.prepare(tmp_path)
    runs = tmp_path / "runs"
    runs.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "hpctrain-test", runs], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", "-l", runs], check=True)


def metrics(folder: Path) -> list[dict]:
    [path] = folder.glob("runs/*/metrics.jsonl")
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


@pytest.mark.job
@pytest.mark.slow
def test_a_run_without_room_trains_to_its_end(small_disk: Path) -> None:
    with_tensorboard = ("metrics.tensorboard=true",) if find_spec("tensorboardX") else ()
    outcome = run_fault(Fault("full", _FILL, (), ranks=(0,), overrides=(*_OVERRIDES, *with_tensorboard)), small_disk)
    assert outcome.code == 0, outcome.output
    errors = outcome.stderr
    assert "Traceback" not in errors
    assert errors.count("Cannot write the metrics (No space left on device); the run continues and will try again.") == 1
    assert "lines of the metrics could not be written (No space left on device) and are lost." in errors
    assert "was not written (No space left on device)" in whole_lines(outcome.stdout)  # the trace
    assert "test accuracy" in outcome.stdout
    assert "epoch 2/2: train loss" in outcome.stdout
    assert not list(small_disk.glob("runs/*/trace.json"))
    os.unlink(small_disk / "runs" / "filler")
    assert {record["kind"] for record in metrics(small_disk)} == {"progress", "start", "page"}  # what was written before


@pytest.mark.job
@pytest.mark.slow
def test_what_finds_room_later_is_complete(small_disk: Path) -> None:
    outcome = run_fault(Fault("full", _FILL + _EMPTY, (), ranks=(0,), overrides=_OVERRIDES), small_disk)
    assert outcome.code == 0, outcome.output
    assert "The metrics can be written again." in outcome.stderr
    assert "lost" not in outcome.stderr
    assert [record["step"] for record in metrics(small_disk) if record["kind"] == "interval"] == [1, 2, 3, 4]
    assert list(small_disk.glob("runs/*/trace.json"))


@pytest.mark.job
@pytest.mark.slow
def test_no_room_for_flight_records_is_reported(small_disk: Path) -> None:
    """Room for them is taken at the start, so that a full disk is no SIGBUS later."""
    directory, flight, heard = _directory(small_disk / "runs"), FlightRecorder(), Heard()
    with open(small_disk / "runs" / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    keep(_kept_session(flight, "run"), directory, heard)
    assert flight.directory is None
    assert heard.lines[0].startswith("no flight records: ")
    assert "(No space left on device)" in heard.lines[0]
