"""Measurements of a run, reported and recorded: step times, waits for data, samples read, memory, and hashes of the state."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from hpctrain.averaging.averagers import AVERAGERS
from hpctrain.backend.choice import Backend
from hpctrain.comm.base import Communicator
from hpctrain.core.text import size_text
from hpctrain.data.cache import summed
from hpctrain.data.loader import Batch
from hpctrain.job.automatic_choice import PredictedStep
from hpctrain.job.session import Session
from hpctrain.launch.control_groups import peak_resident_bytes
from hpctrain.run.build import TrainingSetup
from hpctrain.run.images import UnreadableReport
from hpctrain.runs.directory import RunDirectory
from hpctrain.runs.records import PatientRecords
from hpctrain.trace.tracer import Category
from hpctrain.training.accounts import Observer, StepParts, StepTimes
from hpctrain.training.metrics import Reporter
from hpctrain.training.replica import Replica
from hpctrain.training.snapshot import Position

if TYPE_CHECKING:
    from hpctrain.training.state_hashes import StateHashes


#: minimum number of steps for which step times are reported
FEWEST_STEPS = 14


def finish_steps(session: Session, backend: Backend, times: StepTimes, reporter: Reporter, step: int) -> None:
    """Report and record the step times of a run that ends at global step `step`, unless it had too few steps. Collective."""
    of_ranks = [one for one in session.world.allgather_object(times.measured()) if one is not None]
    if len(of_ranks) < session.world.size or min(one.steps for one in of_ranks) < FEWEST_STEPS:
        return
    parts, choice = mean_parts(of_ranks), session.resolved.choice
    predicted = None if choice is None else choice.prediction
    reporter.record("steps", step_facts(parts, step, predicted))
    reporter.say(step_line(parts, predicted))
    # With other averagers a search would change the training. On a GPU, waits for messages include waits for kernels.
    averager = session.config.averager
    exact = getattr(AVERAGERS.find(averager.name), "sums_shards", False) and "bfloat16" not in averager.options.values()
    if choice is None and exact and backend.kernels.arithmetic.on_host and (advice := auto_advice(of_ranks)):
        reporter.say(advice)


def mean_parts(of_ranks: Sequence[StepParts]) -> StepParts:
    """Return the mean over ranks of each part, and the lowest number of steps."""
    columns = {field.name: [getattr(one, field.name) for one in of_ranks] for field in fields(StepParts)}
    means: dict[str, Any] = {name: fmean(column) for name, column in columns.items()}
    return StepParts(**means | {"steps": min(columns["steps"])})


# Share of a step in waits for messages from which `--auto` is recommended.
_WORTH_A_SEARCH = 0.15


def auto_advice(of_ranks: Sequence[StepParts]) -> str:
    """Return the line that recommends `--auto` if all ranks wait long for messages; otherwise "".

    Other ranks wait for a slow rank, but not that rank itself, so the shortest wait counts. Ranks that are delayed in turn, by
    data or by other programs, all wait for each other. The waits must therefore be longer than these delays.
    """
    least = min(of_ranks, key=lambda one: one.exposed_seconds)
    mean = mean_parts(of_ranks)
    if least.exposed_seconds <= max(_WORTH_A_SEARCH * mean.seconds, mean.data_seconds + mean.core_seconds):
        return ""
    return (
        f"ranks waited for messages in {least.exposed_seconds / mean.seconds:.0%} of each step or more; "
        "the same command with --auto (Python: grid, plan, averager auto) may be faster"
    )


def step_line(measured: StepParts, predicted: PredictedStep | None = None) -> str:
    """Return the line on the measured parts of a step and on its predicted time, if any. Parts that round to 0 are omitted."""
    digits = decimals(measured.seconds)
    parts = {
        "compute and Python": measured.work_seconds,
        "posting and progress": measured.messages_seconds,
        "communication not hidden": measured.exposed_seconds,
        "waiting for data": measured.data_seconds,
        "waiting for a core": measured.core_seconds,
    }
    texts = {name: f"{seconds * 1e3:,.{digits}f}" for name, seconds in parts.items()}
    pieces = ", ".join(f"{name} {text}" for name, text in texts.items() if float(text.replace(",", "")) != 0)
    end = "" if predicted is None else f"; predicted {predicted.seconds * 1e3:,.{decimals(predicted.seconds)}f}"
    return f"step time {measured.seconds * 1e3:,.{digits}f} ms: {pieces}{end}"


def decimals(seconds: float) -> int:
    """Return how many decimals, at most 3, a time needs in milliseconds to show three significant digits."""
    return max(0, min(3, 2 - math.floor(math.log10(max(seconds * 1e3, 1e-3) * (1 + 5e-4)))))


def step_facts(measured: StepParts, step: int, predicted: PredictedStep | None = None) -> dict[str, object]:
    """Return the record of the step times for the metrics; the run ends at global step `step`."""
    account: dict[str, object] = {"step": step, "steps": measured.steps, "measured_step_seconds": measured.seconds}
    for part in ("work_seconds", "messages_seconds", "exposed_seconds", "data_seconds", "core_seconds"):
        account[f"measured_{part}"] = getattr(measured, part)
    if predicted is not None:
        account |= {
            "predicted_step_seconds": predicted.seconds,
            "predicted_exposed_seconds": predicted.exposed_seconds,
            "accuracy": 1 - abs(predicted.seconds - measured.seconds) / measured.seconds,
            "measured_share": predicted.measured_share,
            "machine": predicted.machine,
            "machine_digest": predicted.machine_digest,
        }
    return account


@dataclass(frozen=True)
class PeakMemory:
    """Peak resident memory of the ranks, in bytes.

    It includes shared memory that a rank has touched, and pages of files that it has mapped and read.

    Attributes:
        rank: lowest rank with the maximum.
        device_bytes: maximum memory in use on the GPU of a rank, at the end; None if ranks compute on the processor.
    """

    most_bytes: int
    rank: int
    mean_bytes: float
    device_bytes: int | None = None


def peaks_over_ranks(world: Communicator, backend: Backend) -> PeakMemory:
    """Return the peaks since each process began. Collective over the world."""
    own = peak_resident_bytes(), backend.kernels.used_bytes()
    of_ranks = world.allgather_object(own)
    resident = [on_host for on_host, _ in of_ranks]
    on_devices = [on_device for _, on_device in of_ranks if on_device is not None]
    most = max(resident)
    return PeakMemory(most, resident.index(most), fmean(resident), max(on_devices, default=None))


def finish_memory(world: Communicator, backend: Backend, reporter: Reporter, steps: tuple[int, int]) -> None:
    """Report and record the peak memory, unless no step was trained. Collective over the world.

    Args:
        steps: global steps at the beginning and at the end of the job.
    """
    if steps[0] != steps[1]:
        peak = peaks_over_ranks(world, backend)
        reporter.record("memory", memory_facts(peak, steps[1]))
        reporter.say(memory_line(peak, world.size))


def memory_line(peak: PeakMemory, ranks: int) -> str:
    """Return the line on peak memory."""
    of_rank = f" on rank {peak.rank}, {size_text(peak.mean_bytes)} in the mean" if ranks > 1 else ""
    on_device = "" if peak.device_bytes is None else f"; {size_text(peak.device_bytes)} of a GPU"
    return f"peak memory {size_text(peak.most_bytes)}{of_rank}{on_device}"


def memory_facts(peak: PeakMemory, step: int) -> dict[str, object]:
    """Return the record of the peak memory for the metrics; the run ends at global step `step`."""
    values: dict[str, object] = {"step": step, "peak_bytes": peak.most_bytes, "rank": peak.rank, "mean_bytes": peak.mean_bytes}
    if peak.device_bytes is not None:
        values["device_bytes"] = peak.device_bytes
    return values


#: minimum fraction of the time spent waiting for data for which advice is printed
_NOTABLE_SHARE = 0.05


class DataAccount(Observer):
    """Observer that reports how long steps wait for data. `after_epoch` and `finish` are collective over the ranks that train.

    Args:
        clock: function that returns seconds, called three times per step.
    """

    def __init__(self, session: Session, reporter: Reporter, clock: Callable[[], float] = time.perf_counter) -> None:
        self._session, self._reporter, self._clock = session, reporter, clock
        self._begin = self._came = self._seconds = self._waited_seconds = 0.0
        self._steps = 0
        self._every_step = np.zeros((session.groups.all_ranks.size, 4))

    def before_batch(self) -> None:
        self._begin = self._clock()

    def before_step(self, batch: Batch, *, whole: bool) -> None:
        self._came = self._clock()

    def after_step(self, position: Position, *, usual: bool) -> None:
        self._steps += 1
        self._seconds += self._clock() - self._begin
        self._waited_seconds += self._came - self._begin

    def after_epoch(self, position: Position) -> None:
        """Record the waits in this run's steps of the epoch that ends at `position`."""
        self._record(position.epoch, position)

    def finish(self, position: Position) -> None:
        """Record the waits in an unfinished epoch, and report the waits in all steps of this run."""
        self._record(position.epoch + 1, position)
        if self._every_step[:, 1].all():
            waits = _waits(self._every_step)
            of_rank = f" (mean of the ranks; rank {waits['rank']} {waits['most_share']:.1%})" if len(self._every_step) > 1 else ""
            advice = "; `hpctrain bench data` shows what limits the data" if waits["most_share"] > _NOTABLE_SHARE else ""
            self._reporter.say(f"steps waited for data {waits['share']:.1%} of the time{of_rank}{advice}")

    def _record(self, epoch: int, position: Position) -> None:
        table = self._gathered()
        self._every_step[:, 0] = table[:, 0]
        self._every_step[:, 1:] += table[:, 1:]
        if table[:, 1].all():
            self._reporter.record("data", {"epoch": epoch, "step": position.global_step, **_waits(table)})

    def _gathered(self) -> np.ndarray:
        """Return the sums since the previous call, and reset them. Collective.

        The table has a row per rank: world rank, number of steps, duration of the steps, and waits for data, both in seconds.
        """
        comm, progress = self._session.groups.all_ranks, self._session.progress
        own = np.array([self._session.world.rank, self._steps, self._seconds, self._waited_seconds])
        self._steps, self._seconds, self._waited_seconds = 0, 0.0, 0.0
        table = np.zeros((comm.size, len(own)))
        queue = progress.queue(comm)
        progress.wait(queue.post(lambda: comm.iallgather(own, table.reshape(-1), [len(own)] * comm.size), "waits for data"))
        return table


def _waits(table: np.ndarray) -> dict[str, Any]:
    """Return the record of the waits in a table of `DataAccount`; the shares are fractions of the steps' mean duration."""
    ranks, steps, seconds, waited = table.T
    slowest, mean = int(waited.argmax()), float(seconds.mean())
    return {
        "steps": int(steps.min()),
        "seconds": mean,
        "waited_seconds": float(waited.mean()),
        "share": float(waited.mean()) / mean,
        "most_waited_seconds": float(waited[slowest]),
        "most_share": float(waited[slowest]) / mean,
        "rank": int(ranks[slowest]),
    }


_WORDS: Mapping[str, str] = {
    "file": "from the data files",
    "local": "from the nodes' local copies",
    "memory": "from memory of the nodes",
    "nodes": "from other nodes",
}


class ReadReport(Observer):
    """Observer that reports how many samples a run has read, and from which source. Its methods are collective."""

    def __init__(self, session: Session, setup: TrainingSetup, reporter: Reporter) -> None:
        self._world, self._reporter, self._cache = session.world, reporter, setup.cache
        self._gaps = UnreadableReport(session, setup.files, reporter)

    def after_epoch(self, position: Position) -> None:
        """Record the samples and bytes that all ranks have read so far, by source, and the unreadable samples."""
        self._gaps.record(position)
        total = self._total()
        if any(total.values()):
            self._reporter.record("reads", {"epoch": position.epoch, "step": position.global_step, **total})

    def finish(self, position: Position) -> None:
        """Report the samples read by all ranks, and record unreadable samples."""
        total = self._total()
        if any(total.values()):
            parts = [
                f"{total[f'{name}_samples']:,} {text} ({size_text(total[f'{name}_bytes'])})"
                for name, text in _WORDS.items()
                if total.get(f"{name}_samples")
            ]
            self._reporter.say(f"samples read: {', '.join(parts)}")
        self._gaps.finish(position)

    def _total(self) -> dict[str, int]:
        if self._cache is None:
            return {}
        return summed(self._world.allgather_object(self._cache.counts.values()))


class RunHashes(Observer):
    """Observer that records hashes of the state. If hashes are configured, constructor, `begin` and `read_state` are collective.

    Args:
        replica: replica on which all ranks have agreed.
        directory: directory of the run. If its disk is full, records are kept in memory (see `Bookkeeping`).
    """

    def __init__(self, session: Session, replica: Replica, directory: RunDirectory) -> None:
        self._is_root, self._replica, self._trace = session.is_root, replica, session.progress.trace
        self._hashes: StateHashes | None = None
        self._every = session.config.hashes.every_steps
        if not self._every:
            return
        from hpctrain.runs.records import HashFile  # here: only runs that keep hashes need it
        from hpctrain.training.state_hashes import StateHashes

        self._hashes = StateHashes(replica)
        self._records = PatientRecords(directory.bookkeeping, "hashes", HashFile(directory.hashes_path).append)

    def begin(self, position: Position) -> None:
        """Record the hashes of a new run, to distinguish different initial weights from a later divergence."""
        if self._every and not position.global_step:
            self.read_state(position)

    def reads_state(self, step: int) -> bool:
        return bool(self._every) and step % self._every == 0

    def read_state(self, position: Position) -> None:
        """Record the hashes of the state at `position`. The call drains the replica."""
        assert self._hashes is not None
        from hpctrain.training.state_hashes import hash_of_all  # loaded earlier, by StateHashes

        begin_ns = self._trace.clock_ns() if self._trace is not None else 0
        self._replica.drain()
        hashes = self._hashes.take()
        if self._is_root:
            whole = hash_of_all(hashes)
            self._records.add({"step": position.global_step, "epoch": position.epoch + 1, "all": whole, "hashes": hashes})
        if self._trace is not None:
            self._trace.add(Category.WORK, "hashes", begin_ns, self._trace.clock_ns())

    def finish(self, position: Position) -> None:
        """Write the records that are still in memory, and report lost ones. Not collective.

        Args:
            position: position at the end of the run.
        """
        if self._hashes is not None:
            self._records.close()
