"""Accounts of a run, as lines at its end and as records: steps, waits for data, samples read, memory, and hashes of its state.

The account of steps divides the measured step into parts that add up to it, and compares it with the prediction by which the run
chose its plan. Rank 0 appends hashes of the state to a file of the run directory every few steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from hpctrain.backend.arithmetic import PinnedBytes
from hpctrain.backend.choice import Backend
from hpctrain.comm.base import Communicator
from hpctrain.core.text import size_text
from hpctrain.data.cache import summed
from hpctrain.job.automatic_choice import PredictedStep
from hpctrain.job.session import Session
from hpctrain.launch.control_groups import peak_resident_bytes
from hpctrain.run.build import TrainingSetup
from hpctrain.run.images import UnreadableReport
from hpctrain.runs.directory import RunDirectory
from hpctrain.runs.records import PatientRecords
from hpctrain.runs.results import prediction_head
from hpctrain.trace.tracer import Category
from hpctrain.training.accounts import DataWaits, MeasuredStep, Observer, OperatorSample, StepTimes, processor_seconds
from hpctrain.training.metrics import Reporter
from hpctrain.training.replica import Replica
from hpctrain.training.snapshot import Position
from hpctrain.training.trainer import Outcome

if TYPE_CHECKING:
    from hpctrain.training.state_hashes import StateHashes


#: minimum number of steps for an account of steps
FEWEST_STEPS = 14


#: maximum relative error of a prediction that is printed without an explanation
ACCEPTED_ERROR = 0.15


#: minimum total duration of the measured steps for an explanation; shorter runs depend too much on what else the machine does
JUDGED_SECONDS = 10.0


@dataclass(frozen=True)
class StepParts:
    """Parts of a step's duration. All parts add up to it.

    Attributes:
        steps: number of steps that were measured.
        compute_seconds: operators, loss, checks and updates; None: not known separately, and contained in `python_seconds`.
        python_seconds: the program's work between operators, outside of messages.
        messages_seconds: posting and progress of messages, outside of waits.
        core_seconds: time in which the program could run, but other threads or processes had its core.
        others_seconds: processor time of the rank's other threads, such as the loader's; not part of the sum.
    """

    seconds: float
    steps: int
    compute_seconds: float | None
    python_seconds: float
    messages_seconds: float
    exposed_seconds: float
    data_seconds: float
    core_seconds: float
    others_seconds: float = 0.0

    @classmethod
    def of(cls, measured: MeasuredStep, operators_share: float | None) -> StepParts:
        """Return the parts of a rank's step.

        Args:
            operators_share: share of operators in the processor time outside of messages and updates; None: not known.
        """
        work = max(0.0, measured.busy_seconds - measured.messages_seconds - measured.update_seconds)
        operators = work * (operators_share or 0.0)
        running = measured.seconds - measured.exposed_seconds - measured.data_seconds
        known = operators + measured.update_seconds + measured.messages_seconds
        python = min(work - operators, running - known)
        none = operators_share is None
        return cls(
            measured.seconds,
            measured.steps,
            None if none else operators + measured.update_seconds,
            python + (measured.update_seconds if none else 0.0),
            measured.messages_seconds,
            measured.exposed_seconds,
            measured.data_seconds,
            running - known - python,
            measured.others_seconds,
        )

    @property
    def work_seconds(self) -> float:
        """Processor time of the program: computation, Python and messages."""
        return (self.compute_seconds or 0.0) + self.python_seconds + self.messages_seconds


def operators_share(step: MeasuredStep | None, operator_seconds: float | None) -> float | None:
    """Return the share of operators in the processor time of a step outside of messages and updates; None without samples.

    Args:
        operator_seconds: sampled time of operators, loss and checks.
    """
    if step is None or operator_seconds is None:
        return None
    work = step.busy_seconds - step.messages_seconds - step.update_seconds
    return min(1.0, operator_seconds / work) if work > 0 else 1.0


def steps_over_ranks(world: Communicator, mine: StepParts | None) -> StepParts | None:
    """Return the mean over ranks of each part, and the minimum of the numbers of steps; None after too few. Collective."""
    of_ranks = [one for one in world.allgather_object(mine) if one is not None]
    if len(of_ranks) < world.size or min(one.steps for one in of_ranks) < FEWEST_STEPS:
        return None
    if any(one.compute_seconds is None for one in of_ranks):
        of_ranks = [
            replace(one, compute_seconds=None, python_seconds=one.python_seconds + (one.compute_seconds or 0.0))
            for one in of_ranks
        ]
    columns = {field.name: [getattr(one, field.name) for one in of_ranks] for field in fields(StepParts)}
    means: dict[str, Any] = {name: None if None in column else fmean(column) for name, column in columns.items()}
    return StepParts(**means | {"steps": min(columns["steps"])})


def accuracy(predicted_seconds: float, measured_seconds: float) -> float:
    """Return 1 - |predicted - measured| / measured; 1 is exact, 0 or less is useless."""
    return 1 - abs(predicted_seconds - measured_seconds) / measured_seconds


def step_lines(measured: StepParts, predicted: PredictedStep | None = None, reason: str = "") -> list[str]:
    """Return the lines of the account. Parts that round to 0 are omitted."""
    digits = decimals(measured.seconds)
    compute = measured.compute_seconds
    parts = {
        "compute and Python" if compute is None else "compute": measured.python_seconds if compute is None else compute,
        "Python": 0.0 if compute is None else measured.python_seconds,
        "posting and progress": measured.messages_seconds,
        "communication not hidden": measured.exposed_seconds,
        "waiting for data": measured.data_seconds,
        "waiting for a core": measured.core_seconds,
    }
    texts = {name: f"{seconds * 1e3:,.{digits}f}" for name, seconds in parts.items()}
    pieces = [f"{name} {text}" for name, text in texts.items() if float(text.replace(",", "")) != 0]
    pieces[0] = f"step time {measured.seconds * 1e3:,.{digits}f} ms: {pieces[0]}"
    if predicted is None:
        return [", ".join(pieces)]
    pieces[-1] += f"; predicted {predicted.seconds * 1e3:,.{decimals(predicted.seconds)}f}"
    sentences = [f"  {prediction_head(measured.seconds, predicted.seconds)}: {reason}"] if reason else []
    return [", ".join(pieces), *sentences]


def decimals(seconds: float) -> int:
    """Return the number of decimals of milliseconds for three significant digits."""
    return max(0, min(3, 2 - math.floor(math.log10(max(seconds * 1e3, 1e-3) * (1 + 5e-4)))))


def error_reason(measured: StepParts, predicted: PredictedStep) -> str:
    """Return the reason for a prediction that is off by more than `ACCEPTED_ERROR`, and advice; "" for other predictions.

    The reason is the part that differs most, in the direction of the error, from what the prediction assumed. The text states
    whether this difference is less than half of the error. Lost cores come first, because the other ranks wait for messages while
    one rank waits for its core.
    """
    if accuracy(predicted.seconds, measured.seconds) >= 1 - ACCEPTED_ERROR:
        return ""
    calibrate = "measure this machine with `hpctrain calibrate` and set machine to its file"
    lost_cores = "other threads and processes used the cores for {} per step; the rank's other threads used {}"
    waits = "waits for messages took {} per step, and {} in the simulation"
    data = "waits for data took {} per step, and {} in the prediction"
    work = "computation, Python and messages took {} per step, and {} in the prediction"
    causes = {  # measured and assumed seconds, and advice
        waits: (measured.exposed_seconds, predicted.exposed_seconds, calibrate),
        lost_cores: (measured.core_seconds, measured.others_seconds, "compare again on idle cores"),
        data: (measured.data_seconds, 0.0, "`hpctrain bench data` shows what limits the data"),
        work: (measured.work_seconds, predicted.seconds - predicted.exposed_seconds, calibrate),
    }
    sign = 1 if measured.seconds > predicted.seconds else -1
    excess = {text: sign * (now - assumed) for text, (now, assumed, _) in causes.items()}
    cause = max(causes, key=excess.__getitem__)
    lost_seconds = measured.core_seconds - measured.others_seconds
    if excess[cause] <= 0 or (sign > 0 and lost_seconds > ACCEPTED_ERROR * measured.seconds):
        cause = lost_cores  # also if no part differs in this direction, because predictions have no waits for cores
    now, assumed, advice = causes[cause]
    explains_half = excess[cause] >= abs(measured.seconds - predicted.seconds) / 2
    beginning = "" if explains_half else "no single part explains it; "
    return f"{beginning}{cause.format(_milliseconds(now), _milliseconds(assumed))}; {advice}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.{decimals(seconds)}f} ms"


def step_facts(measured: StepParts, step: int, predicted: PredictedStep | None = None, reason: str = "") -> dict[str, object]:
    """Return the record for the metrics.

    Args:
        step: global step at the end of the run.
    """
    account: dict[str, object] = {
        "step": step,
        "steps": measured.steps,
        "measured_step_seconds": measured.seconds,
        "measured_exposed_seconds": measured.exposed_seconds,
        "measured_messages_seconds": measured.messages_seconds,
        "measured_python_seconds": measured.python_seconds,
        "measured_data_seconds": measured.data_seconds,
        "measured_core_seconds": measured.core_seconds,
    }
    if measured.compute_seconds is not None:
        account["measured_compute_seconds"] = measured.compute_seconds
    if reason:
        account["prediction_note"] = reason
    if predicted is not None:
        account |= {
            "predicted_step_seconds": predicted.seconds,
            "predicted_exposed_seconds": predicted.exposed_seconds,
            "accuracy": accuracy(predicted.seconds, measured.seconds),
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
        pinned: pinned memory of the rank that has most of it; None if ranks compute on the processor.
    """

    most_bytes: int
    rank: int
    mean_bytes: float
    device_bytes: int | None = None
    pinned: PinnedBytes | None = None


def peaks_over_ranks(world: Communicator, backend: Backend) -> PeakMemory:
    """Return the peaks since each process began. Collective over the world."""
    own = peak_resident_bytes(), backend.kernels.used_bytes(), backend.kernels.pinned_bytes()
    of_ranks = world.allgather_object(own)
    resident = [on_host for on_host, _, _ in of_ranks]
    on_devices = [on_device for _, on_device, _ in of_ranks if on_device is not None]
    pinned = max((of_rank for _, _, of_rank in of_ranks if of_rank is not None), key=lambda one: one.total, default=None)
    most = max(resident)
    return PeakMemory(most, resident.index(most), fmean(resident), max(on_devices, default=None), pinned)


def finish_memory(world: Communicator, backend: Backend, reporter: Reporter, steps: tuple[int, int]) -> None:
    """Report and record the peak memory, unless no step was trained. Collective over the world.

    Args:
        steps: global steps at the beginning and at the end of the job.
    """
    if steps[0] != steps[1]:
        peak = peaks_over_ranks(world, backend)
        reporter.record("memory", memory_facts(peak, steps[1]))
        reporter.say(memory_line(peak, world.size))
        if peak.pinned is not None:
            reporter.say(pinned_line(peak.pinned))


def memory_line(peak: PeakMemory, ranks: int) -> str:
    """Return the line on peak memory."""
    of_rank = f" on rank {peak.rank}, {size_text(peak.mean_bytes)} in the mean" if ranks > 1 else ""
    on_device = "" if peak.device_bytes is None else f"; {size_text(peak.device_bytes)} of a GPU"
    return f"peak memory {size_text(peak.most_bytes)}{of_rank}{on_device}"


def pinned_line(pinned: PinnedBytes) -> str:
    """Return the line on pinned memory."""
    messages, images = size_text(pinned.messages), size_text(pinned.images)
    return f"pinned memory of a rank {size_text(pinned.total)}: messages {messages}, images {images}"


def memory_facts(peak: PeakMemory, step: int) -> dict[str, object]:
    """Return the record for the metrics.

    Args:
        step: global step at the end of the run.
    """
    values: dict[str, object] = {"step": step, "peak_bytes": peak.most_bytes, "rank": peak.rank, "mean_bytes": peak.mean_bytes}
    if peak.device_bytes is not None:
        values["device_bytes"] = peak.device_bytes
    if peak.pinned is not None:
        values |= {"pinned_message_bytes": peak.pinned.messages, "pinned_image_bytes": peak.pinned.images}
    return values


#: minimum fraction of the time spent waiting for data for which advice is printed
_NOTABLE_SHARE = 0.05


@dataclass(frozen=True)
class WaitsOfRanks:
    """Waits for data, summed over steps.

    Attributes:
        seconds: duration of the steps, mean over ranks.
        waited_seconds: waits for data in the steps, mean over ranks.
        most_waited_seconds: waits of the rank that waited longest.
    """

    steps: int = 0
    seconds: float = 0.0
    waited_seconds: float = 0.0
    most_waited_seconds: float = 0.0
    rank: int = 0

    @classmethod
    def of(cls, table: np.ndarray) -> WaitsOfRanks:
        """Return the waits from a table with a row per rank.

        Columns: world rank, number of steps, duration of the steps, and waits for data, both in seconds.
        """
        ranks, steps, seconds, waited = table.T
        slowest = int(waited.argmax())
        return cls(int(steps.min()), float(seconds.mean()), float(waited.mean()), float(waited[slowest]), int(ranks[slowest]))

    @property
    def share(self) -> float:
        """Fraction of the steps' duration that was spent waiting for data, mean over ranks; 0 without steps."""
        return self.waited_seconds / self.seconds if self.seconds else 0.0

    @property
    def most_share(self) -> float:
        """Waits of the rank that waited longest, as a fraction of the steps' mean duration; 0 without steps."""
        return self.most_waited_seconds / self.seconds if self.seconds else 0.0

    def facts(self) -> dict[str, object]:
        """Return the record for the metrics."""
        return {
            "steps": self.steps,
            "seconds": self.seconds,
            "waited_seconds": self.waited_seconds,
            "share": self.share,
            "most_waited_seconds": self.most_waited_seconds,
            "most_share": self.most_share,
            "rank": self.rank,
        }

    def line(self, ranks: int) -> str:
        """Return the line for the end of a run: the fraction of the steps' duration that was spent waiting for data."""
        words = [f"steps waited for data {self.share:.1%} of the time"]
        if ranks > 1:
            words[0] += f" (mean of the ranks; rank {self.rank} {self.most_share:.1%})"
        if self.most_share > _NOTABLE_SHARE:
            words.append("`hpctrain bench data` shows what limits the data")
        return "; ".join(words)


class DataAccount(DataWaits):
    """Reports how long steps waited for data. `after_epoch` and `finish` are collective over the ranks that train."""

    def __init__(self, session: Session, reporter: Reporter) -> None:
        super().__init__()
        self._session, self._reporter = session, reporter
        self._every_step = np.zeros((session.groups.all_ranks.size, 4))

    def after_epoch(self, position: Position) -> None:
        """Record the waits in this run's steps of the epoch that ends at `position`."""
        self._record(position.epoch, position)

    def finish(self, position: Position) -> None:
        """Record the waits in an unfinished epoch, and report the waits in all steps of this run."""
        self._record(position.epoch + 1, position)
        whole = WaitsOfRanks.of(self._every_step)
        if whole.steps:
            self._reporter.say(whole.line(len(self._every_step)))

    def _record(self, epoch: int, position: Position) -> None:
        table = self._gathered()
        of_epoch = WaitsOfRanks.of(table)
        self._every_step[:, 0] = table[:, 0]
        self._every_step[:, 1:] += table[:, 1:]
        if of_epoch.steps:
            self._reporter.record("data", {"epoch": epoch, "step": position.global_step, **of_epoch.facts()})

    def _gathered(self) -> np.ndarray:
        """Return the sums since the previous call, a row per rank with the columns of `WaitsOfRanks.of`. Collective."""
        comm, progress = self._session.groups.all_ranks, self._session.progress
        mine = self.take()
        own = np.array([self._session.world.rank, mine.steps, mine.seconds, mine.waited_seconds])
        table = np.zeros((comm.size, len(own)))
        queue = progress.queue(comm)
        progress.wait(queue.post(lambda: comm.iallgather(own, table.reshape(-1), [len(own)] * comm.size), "waits for data"))
        return table


_WORDS: Mapping[str, str] = {
    "file": "from the data files",
    "local": "from the nodes' local copies",
    "memory": "from memory of the nodes",
    "nodes": "from other nodes",
}


class ReadReport(Observer):
    """Reports how many samples a run has read, and from which source. Its methods are collective."""

    def __init__(self, session: Session, setup: TrainingSetup, reporter: Reporter) -> None:
        self._world, self._reporter, self._cache = session.world, reporter, setup.cache
        self._gaps = UnreadableReport(session, setup.files, reporter)

    def after_epoch(self, position: Position) -> None:
        """Record the samples and bytes that all ranks have read so far, by source, and the unreadable samples."""
        self._gaps.tell(position)
        total = self._total()
        if any(total.values()):
            self._reporter.record("reads", {"epoch": position.epoch, "step": position.global_step, **total})

    def finish(self, position: Position) -> None:
        """Report the samples read by all ranks, record unreadable samples, and keep local copies for later runs."""
        total = self._total()
        if any(total.values()):
            self._reporter.say(reads_line(total))
        if self._cache is not None:
            self._cache.keep()
        self._gaps.finish(position)

    def _total(self) -> dict[str, int]:
        if self._cache is None:
            return {}
        return summed(self._world.allgather_object(self._cache.counts.values()))


def reads_line(total: Mapping[str, int]) -> str:
    """Return the line with the counts by source."""
    parts = [
        f"{total[f'{name}_samples']:,} {text} ({size_text(total[f'{name}_bytes'])})"
        for name, text in _WORDS.items()
        if total.get(f"{name}_samples")
    ]
    return f"samples read: {', '.join(parts)}"


class RunHashes(Observer):
    """Records hashes of the state. Its constructor, `begin` and `read_state` are collective if hashes are configured.

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
        """Record the hashes of the state at `position`. Drains the replica."""
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


class RunAccount:
    """Account of steps. Its creation, before the first step, and `finish`, after the last one, are collective over the world.

    Args:
        most_steps: upper bound of the number of steps; a run with too few steps has no account.

    Attributes:
        observers: observers of the training. They measure its steps, and the operators of a few steps if these run on the
            processor and there is no trace.
    """

    def __init__(self, session: Session, setup: TrainingSetup, most_steps: float = math.inf) -> None:
        self._session = session
        self._wanted = most_steps >= FEWEST_STEPS
        on_host, threads = setup.backend.kernels.arithmetic.on_host, session.threads.threads
        processor = processor_seconds if on_host and threads == 1 else None
        self._step_times = StepTimes(session.progress, processor=processor)
        self._sample: OperatorSample | None = None
        if self._wanted and session.progress.trace is None and on_host:
            self._sample = OperatorSample(setup.replica, threads)
        self.observers: Sequence[Observer] = [self._step_times, *([] if self._sample is None else [self._sample])]

    def finish(self, outcome: Outcome, reporter: Reporter) -> None:
        """Report and record the account, unless the run had too few steps. Collective over the world."""
        if not self._wanted:
            return
        measured, sample = self._step_times.measured(), self._sample
        share = operators_share(self._step_times.after_sample(), None if sample is None else sample.operator_seconds())
        parts = steps_over_ranks(self._session.world, None if measured is None else StepParts.of(measured, share))
        if parts is None:
            return
        choice = self._session.resolved.choice
        predicted = None if choice is None else choice.prediction
        reason = "" if predicted is None else error_reason(parts, predicted)
        reporter.record("steps", step_facts(parts, outcome.position.global_step, predicted, reason))
        for line in step_lines(parts, predicted, reason if parts.steps * parts.seconds >= JUDGED_SECONDS else ""):
            reporter.say(line)
