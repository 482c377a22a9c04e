"""Accounts of a run: steps, waits for data, memory, reads, cores and progress; its events and state; the reason of its end."""

import json
import re
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.backend.choice import make_backend
from hpctrain.comm.base import Communicator
from hpctrain.config.schema import AveragerConfig
from hpctrain.core.errors import ConfigError
from hpctrain.core.text import size_text
from hpctrain.flight.recorder import FlightRecorder
from hpctrain.job.automatic_choice import PredictedStep
from hpctrain.job.session import describe_cores
from hpctrain.launch.control_groups import peak_resident_bytes
from hpctrain.launch.process_end import End
from hpctrain.run import accounts
from hpctrain.run.accounts import DataAccount, PeakMemory
from hpctrain.run.messages import set_progress
from hpctrain.run.training import StopReason, stop_reason
from hpctrain.runs import state as run_state
from hpctrain.runs.directory import RunDirectory
from hpctrain.runs.state import RunReader, RunState
from hpctrain.training.accounts import StepParts
from hpctrain.training.snapshot import Position
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.run import lone_rank, run_virtual, virtual_engine
from tests.data.conftest import make_file as make_file
from tests.support.emulated import CudaKernelsFactory
from tests.support.recorded import SECOND, Heard, record

PARTS = StepParts(0.5, 20, 0.1875, 0.0625, 0.125, 0.03125, 0.09375)
PREDICTED = PredictedStep(0.45, 0.2, 1.0, "two nodes", "abc")


def _heard(choice: Any = None, *of_ranks: StepParts | None, **averager: Any) -> Heard:
    world = SimpleNamespace(size=len(of_ranks) or 1, allgather_object=lambda mine: of_ranks or (PARTS,))
    config, resolved = SimpleNamespace(averager=AveragerConfig(**averager)), SimpleNamespace(choice=choice)
    session: Any = SimpleNamespace(world=world, resolved=resolved, config=config)
    times: Any = SimpleNamespace(measured=lambda: None)
    accounts.finish_steps(session, make_backend("numpy"), times, heard := Heard(), 26)
    return heard


def test_a_run_of_few_steps_has_no_account() -> None:
    for parts in (replace(PARTS, steps=3), None):
        for heard in (_heard(None, parts), _heard(None, PARTS, parts)):
            assert (heard.lines, heard.records) == ([], [])


_LINE = (
    "step time 500 ms: compute and Python 188, posting and progress 62, communication not hidden 125, waiting for data 31, "
    "waiting for a core 94"
)


def test_a_run_that_chose_nothing_has_the_parts_of_its_step_and_no_prediction() -> None:
    heard = _heard()
    assert heard.lines == [_LINE]
    ((kind, values),) = heard.records
    assert kind == "steps"
    assert values == {
        "step": 26,
        "steps": 20,
        "measured_step_seconds": 0.5,
        "measured_work_seconds": 0.1875,
        "measured_messages_seconds": 0.0625,
        "measured_exposed_seconds": 0.125,
        "measured_data_seconds": 0.03125,
        "measured_core_seconds": 0.09375,
    }


def test_a_run_that_chose_is_compared_with_the_prediction_that_it_chose_by() -> None:
    heard = _heard(SimpleNamespace(prediction=PREDICTED))
    assert heard.lines == [f"{_LINE}; predicted 450"]
    ((_, values),) = heard.records
    predicted = {"predicted_step_seconds": 0.45, "predicted_exposed_seconds": 0.2, "accuracy": pytest.approx(0.9)}
    predicted |= {"measured_share": 1.0, "machine": "two nodes", "machine_digest": "abc"}
    assert {name: values[name] for name in predicted} == predicted


_SECONDS = st.floats(0, 100)


@given(*[_SECONDS] * 6)
def test_parts_add_up_to_the_step(
    seconds: float, exposed: float, messages: float, data: float, updates: float, busy: float
) -> None:
    """No time is in two parts or in none, even if the clocks disagree."""
    parts = StepParts.of(40, seconds, exposed, messages, data, updates, busy)
    awaited = parts.exposed_seconds + parts.data_seconds + parts.core_seconds
    assert parts.work_seconds + parts.messages_seconds + awaited == pytest.approx(seconds, abs=1e-9)
    assert parts.core_seconds >= -1e-9
    if messages + updates <= busy <= seconds - exposed - data:
        assert parts.work_seconds >= updates - 1e-9
        assert parts.core_seconds == pytest.approx(seconds - exposed - data - busy, abs=1e-9)


def test_a_run_that_waits_for_its_link_is_shown_auto() -> None:
    waiting = StepParts(0.5, 20, 0.3, 0.0, 0.2, 0.0, 0.0)
    (step, advice) = _heard(None, waiting, replace(waiting, exposed_seconds=0.155)).lines
    assert ", communication not hidden 178" in step  # the mean of the ranks
    assert advice.startswith("ranks waited for messages in 31% of each step or more; the same command with --auto ")
    others: tuple[tuple[StepParts, dict[str, Any]], ...] = (
        (replace(waiting, exposed_seconds=0.07), {}),  # below the limit, or this rank is slow and the other waits for it
        (replace(waiting, data_seconds=0.3, core_seconds=0.2), {}),  # ranks that wait for data or a core delay each other
        (waiting, {"name": "sparse"}),  # a search proposes nothing that sends as little
        (waiting, {"name": "priority", "wire": "bfloat16"}),
    )
    for other, averager in others:
        assert len(_heard(None, waiting, other, **averager).lines) == 1
    assert len(_heard(SimpleNamespace(prediction=PREDICTED), waiting, waiting).lines) == 1


@given(st.floats(1e-5, 1e4), st.lists(st.floats(0, 1), min_size=5, max_size=5), st.floats(1e-5, 1e4))
def test_printed_parts_add_up(seconds: float, shares: list[float], predicted: float) -> None:
    """No printed part is cut off, and the step and its parts have equally many decimals."""
    scale = seconds / (sum(shares) or 1.0)
    parts = [scale * share for share in shares] if sum(shares) else [seconds, *[0.0] * 4]
    line = accounts.step_line(StepParts(seconds, 40, *parts), PredictedStep(predicted, 0.0, 1.0, "", ""))
    whole, _, rest = line.replace(",", "").partition(" ms: ")
    texts = re.findall(r"[\d.]+", rest.partition(";")[0])
    decimals = len(whole.partition(".")[2])
    assert all(len(text.partition(".")[2]) == decimals for text in texts)
    assert sum(map(float, texts)) == pytest.approx(float(whole.removeprefix("step time ")), abs=3.1 * 10.0**-decimals)


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def step(self, account: DataAccount, wait: float, work: float) -> None:
        batch: Any = None
        account.before_batch()
        self.now += wait
        account.before_step(batch, whole=True)
        self.now += work
        account.after_step(Position(), usual=True)


#: (steps, wait, work) of each rank in two epochs, and in a third that has not ended
_Epochs = list[tuple[int, float, float]]


def _waited(*of_ranks: _Epochs) -> list[Heard]:
    """What every rank would say. Between epochs is an evaluation, which is no step."""

    def rank(comm: Communicator) -> Heard:
        session: Any = SimpleNamespace(world=comm, groups=SimpleNamespace(all_ranks=comm), progress=virtual_engine(comm))
        heard, clock = Heard(), _Clock()
        account = DataAccount(session, heard, clock)
        done = 0
        for number, (steps, wait, work) in enumerate(of_ranks[comm.rank], 1):
            for _ in range(steps):
                clock.step(account, wait, work)
            done += steps
            account.before_batch()  # there is none
            clock.now += 1000.0
            if number < len(of_ranks[comm.rank]):
                account.after_epoch(Position(epoch=number, global_step=done))
        account.finish(Position(epoch=len(of_ranks[comm.rank]) - 1, global_step=done))
        return heard

    return run_virtual(len(of_ranks), rank)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_epoch_has_the_mean_and_the_slowest_rank_and_the_end_all_of_them(ranks: int) -> None:
    of_ranks: list[_Epochs] = [[(4, 0.25 + rank / 4, 1.75 - rank / 4), (10, 0.0, 0.75), (2, 0.25, 2.0)] for rank in range(ranks)]
    for heard in _waited(*of_ranks):
        records = [record for _, record in heard.records]
        assert [(each["epoch"], each["step"], each["steps"]) for each in records] == [(1, 4, 4), (2, 14, 10), (3, 16, 2)]
        first, mean = records[0], 1.0 + (ranks - 1) / 2
        assert (first["seconds"], first["waited_seconds"], first["share"]) == (8.0, mean, mean / 8.0)
        assert (first["most_waited_seconds"], first["most_share"], first["rank"]) == (float(ranks), ranks / 8.0, ranks - 1)
        assert heard.lines[0].startswith(f"steps waited for data {(mean + 0.5) / 20:.1%} of the time")
        assert (f"rank {ranks - 1} {(ranks + 0.5) / 20:.1%}" in heard.lines[0]) == (ranks > 1)
    (nothing,) = _waited([(0, 0.0, 0.0)])
    assert (nothing.lines, nothing.records) == ([], []), "a run that trains nothing says nothing"


def _of_ranks(resident: list[int], devices: list[int | None]) -> list[PeakMemory]:
    """Every rank's account, where ranks have peaks of their own, which those of one process have not."""

    def one(comm: Any) -> PeakMemory:
        device = devices[comm.rank]
        used = SimpleNamespace(kernels=SimpleNamespace(used_bytes=lambda: device))
        gather = lambda mine: comm.allgather_object((resident[comm.rank], *mine[1:]))  # noqa: E731
        return accounts.peaks_over_ranks(SimpleNamespace(size=comm.size, allgather_object=gather), used)

    return run_virtual(len(resident), one)


def test_the_rank_and_the_gpu_that_held_most_count_and_every_rank_knows_it() -> None:
    assert _of_ranks([10, 40, 40, 30], [None] * 4) == [PeakMemory(40, 1, 30.0)] * 4
    assert _of_ranks([10, 20], [5, 7]) == [PeakMemory(20, 1, 15.0, 7)] * 2


def test_a_run_says_and_records_the_peak_of_its_process_if_it_trained() -> None:
    nothing, heard, before = Heard(), Heard(), peak_resident_bytes()
    run_virtual(1, lambda comm: accounts.finish_memory(comm, make_backend("numpy"), nothing, (26, 26)))
    assert (nothing.lines, nothing.records) == ([], [])
    run_virtual(1, lambda comm: accounts.finish_memory(comm, make_backend("numpy"), heard, (20, 26)))
    ((kind, values),) = heard.records
    assert (kind, values["step"], values["rank"], "device_bytes" in values) == ("memory", 26, 0, False)
    assert values["peak_bytes"] == values["mean_bytes"] >= before
    assert heard.lines == [f"peak memory {size_text(values['peak_bytes'])}"]


def test_lines_and_facts_of_memory_name_the_rank_and_gpus_where_there_are_several() -> None:
    peak = PeakMemory(612_345_678, 3, 600_000_000.0)
    assert accounts.memory_line(peak, 4) == "peak memory 612 MB on rank 3, 600 MB in the mean"
    facts = {"step": 9, "peak_bytes": 612_345_678, "rank": 3, "mean_bytes": 600_000_000.0}
    assert accounts.memory_facts(peak, 9) == facts
    assert accounts.memory_facts(PeakMemory(612_345_678, 3, 600_000_000.0, 5), 9) == facts | {"device_bytes": 5}


def _masks(*texts: range) -> list[frozenset[int]]:
    return [frozenset(cores) for cores in texts]


@pytest.mark.parametrize(
    ("cpus", "node_of", "line"),
    [
        (_masks(range(8)), [0], "0-7"),
        (_masks(range(8), range(8, 16)), [0, 0], "0-7 | 8-15"),
        (_masks(range(2), range(2)), [0, 0], "0-1, shared by 2 ranks"),
        (_masks(range(2), range(2, 4)) * 3, [0, 0, 1, 1, 2, 2], "0-1 | 2-3 on each of 3 nodes"),
        (_masks(range(2), range(2, 4), range(4)), [0, 0, 1], "0-1 | 2-3 on the first node; others differ"),
        (
            _masks(*(range(2 * rank, 2 * rank + 2) for rank in range(64))),
            [0] * 64,
            "0-1 | 2-3 | 4-5 | 6-7 | 8-9 | 10-11 | 12-13 | ... | 126-127",
        ),
    ],
)
def test_nodes_that_are_alike_are_reported_once_and_many_ranks_are_shortened(
    cpus: list[frozenset[int]], node_of: list[int], line: str
) -> None:
    assert describe_cores(cpus, node_of) == f"cores of the ranks: {line}"


def _rank(*, may_communicate: bool = True) -> Any:
    world, engine = lone_rank()
    library = "MPICH 5, level single"
    return SimpleNamespace(world=world, progress=engine, threads_may_communicate=may_communicate, mpi_library=library)


def test_a_progress_thread_is_refused_if_mpi_does_not_allow_it() -> None:
    with pytest.raises(ConfigError, match=r"progress is thread, .* but MPI has started at level single"):
        set_progress(_rank(may_communicate=False), SimpleNamespace(), "thread")


def test_with_a_device_one_thread_does_everything(cuda_kernels: CudaKernelsFactory) -> None:
    rank = _rank()
    rank.world = SimpleNamespace(size=2)
    network: Any = SimpleNamespace(kernels=cuda_kernels())
    for mode in ("test", "none"):
        assert set_progress(rank, network, mode) == mode
    with pytest.raises(ConfigError, match=r"^progress is thread, but backend cuda enqueues"):
        set_progress(rank, network, "thread")


START = {"kind": "start", "time": 1000.0, "epochs": 2, "samples": 100, "done_samples": 0, "last_sample": 200}
INTERVAL = {"kind": "interval", "time": 1010.0, "epoch": 1, "step": 5, "images": 50, "loss": 2.0, "top1": 0.5, "lr": 0.1}


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path, "run", config="a: 1\n", versions={}, git={})


def _write(directory: RunDirectory, *records: dict[str, Any], torn: str = "") -> None:
    text = "".join(json.dumps(record) + "\n" for record in records)
    directory.metrics_path.write_text(text + torn)


def _state(directory: RunDirectory, now: float = 1020.0) -> RunState:
    return RunReader(directory).read(now)


def test_time_left_follows_from_the_pace_since_the_latest_start(directory: RunDirectory) -> None:
    earlier = {**START, "time": 1.0, "last_sample": 100}
    _write(directory, earlier, START, INTERVAL)
    state = _state(directory)
    assert (state.step, state.done_samples, state.seconds_left, state.end) == (5, 50, 30.0, None)


@pytest.mark.parametrize("torn", ["", '{"kind": "inter', "no json\n", "[1]\n{"])
def test_lines_that_are_torn_or_none_are_left_out(directory: RunDirectory, torn: str) -> None:
    _write(directory, START, INTERVAL, torn=torn)
    assert [line["kind"] for line in _state(directory).records] == ["start", "interval"]


def test_an_empty_run_has_a_state(directory: RunDirectory) -> None:
    state = _state(directory)
    assert (state.records, state.ranks, state.events) == ((), (), [])
    assert (state.checkpoint, state.end, state.step, state.seconds_left) == (None, None, 0, None)


def test_a_reader_follows_a_file_that_grows_and_one_that_is_cut(directory: RunDirectory) -> None:
    reader = RunReader(directory)
    for records in ((START,), (START, INTERVAL), (START, INTERVAL, {**INTERVAL, "step": 6}), (START,)):
        _write(directory, *records)
        assert len(reader.read(0.0).records) == len(records)


def test_without_flight_records_the_metrics_tell_the_end(directory: RunDirectory) -> None:
    last = {**INTERVAL, "kind": "epoch", "epoch": 2, "images": 100}
    stop = {"kind": "stop", "time": 1011.0, "epoch": 1, "step": 5, "by": "SIGTERM"}
    _write(directory, START, INTERVAL, stop)
    assert _state(directory).end == "stopped by SIGTERM after step 5"
    _write(directory, START, INTERVAL, stop, START)
    assert _state(directory).end is None
    _write(directory, START, INTERVAL, last)
    assert _state(directory).end == "finished"


def _end(*ranks: Any, records: tuple[dict[str, Any], ...] = (START,), now: float = 101.0) -> str | None:
    return run_state._end(records, ranks, now)


def test_ranks_tell_whether_the_run_goes_on() -> None:
    here, gone = socket.gethostname(), 2**22 + 1  # above the largest number of a process
    finished = [record(rank, end=End.FINISHED) for rank in range(2)]
    assert _end(*finished) == "finished"
    stop = {"kind": "stop", "step": 5, "by": "max_time"}
    assert _end(*finished, records=(START, stop)) == "stopped by max_time after step 5"
    assert _end(finished[0], record(1)) is None
    assert _end(record(0), record(1), now=1000.0) is not None  # silent for longer than the deadline
    assert _end(record(0), record(1), now=130.0) is None
    assert _end(record(0, host=here, process=gone), now=111.0) is not None
    assert _end(record(0, host=here, process=gone), now=105.0) is None
    assert _end(record(0, host=here, process=1), now=1000.0) is None  # stopped, perhaps, but there
    failed = _end(record(0, end=End.FAILED, sentence="It broke.", seen_ns=50 * SECOND), record(1, end=End.SIGNAL, signal=9))
    assert failed is not None
    assert "It broke" in failed


def test_clocks_that_differ_end_no_run_that_is_followed(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader counts how long a rank on another machine is silent on its own clock, if the wall clocks may simply differ."""
    beat, seconds = [100 * SECOND], [0.0]
    monkeypatch.setattr(run_state, "_flight", lambda of: (record(0, ranks=1, seen_ns=beat[0]),))
    monkeypatch.setattr(time, "monotonic", lambda: seconds[0])
    skewed, reader = 5 * 3600.0, RunReader(directory, follows=True)
    assert RunReader(directory).read(skewed).end is not None, "one look has the clocks alone"
    for _ in range(9):
        assert reader.read(beat[0] / SECOND + skewed).end is None
        beat[0] += 30 * SECOND
        seconds[0] += 30.0
    for silent, ended in ((0.0, False), (69.0, False), (71.0, True)):
        assert (reader.read(beat[0] / SECOND + skewed + silent).end is not None) == ended
        seconds[0] = 270.0 + (69.0 if silent == 0.0 else 71.0)
    assert RunReader(directory, follows=True).read(3e6).end is not None
    gone = record(0, host=socket.gethostname(), process=2**22 + 1, ranks=1)
    assert _end(gone, now=-3600.0) is not None, "the clock was set back after its end"


def test_records_of_ranks_are_read_where_the_run_says_they_lie(directory: RunDirectory, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    directory.point_to_flight(elsewhere)
    recorder = FlightRecorder()
    recorder.join(0, 1, time.time_ns(), 60.0)
    recorder.keep_in(elsewhere)
    recorder.step(1, 17)
    state = _state(directory, time.time())
    assert ([one.rank for one in state.ranks], state.step) == ([0], 17)
    assert state.silent_seconds(state.ranks[0]) < 60
    (elsewhere / "rank-00000.flight").write_bytes(b"short")
    assert _state(directory).ranks == ()


def test_the_newest_checkpoint_is_that_of_the_latest_step(directory: RunDirectory) -> None:
    for name in ("checkpoint-00000009.h5", "checkpoint-00000010.shards", "checkpoint-00000011.h5.partial", "best.json"):
        (directory.checkpoints / name).write_text("")
    state = _state(directory, time.time())
    assert state.checkpoint == directory.checkpoints / "checkpoint-00000010.shards"
    assert state.checkpoint_age_seconds < 60


@pytest.mark.parametrize(
    ("ranks", "signals", "sentence"),
    [
        (3, {}, None),
        (3, {0: signal.SIGTERM, 1: signal.SIGTERM, 2: signal.SIGTERM}, "SIGTERM"),
        (3, {1: signal.SIGINT}, "SIGINT on rank 1"),
        (
            8,
            {0: signal.SIGTERM, 1: signal.SIGTERM, 2: signal.SIGTERM, 5: signal.SIGTERM, 6: signal.SIGINT},
            "SIGTERM on ranks 0-2, 5",
        ),
    ],
)
def test_the_lowest_rank_names_the_signal(ranks: int, signals: dict[int, signal.Signals], sentence: str | None) -> None:
    def reason(comm: ThreadCommunicator) -> StopReason | None:
        return stop_reason(comm, SimpleNamespace(request=signals.get(comm.rank)))

    assert {None if said is None else str(said) for said in run_virtual(ranks, reason)} == {sentence}


def test_a_limit_is_a_reason_where_no_rank_had_a_signal() -> None:
    def reasons(comm: ThreadCommunicator) -> tuple[str, str]:
        limit = "max_time, 60 s" if comm.rank == 1 else None
        asked = SimpleNamespace(request=signal.SIGTERM if comm.rank == 2 else None)
        quiet = SimpleNamespace(request=None)
        return str(stop_reason(comm, quiet, limit)), str(stop_reason(comm, asked, limit))

    assert set(run_virtual(3, reasons)) == {("max_time, 60 s", "SIGTERM on rank 2")}
