"""The results of a run in a few figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from hpctrain.runs.state import Record
from hpctrain.report.record import RunRecord
from hpctrain.train.progress_text import duration_text, loss_text

#: stands for a figure that is not known
UNKNOWN = "-"
MOST_HOSTS = 2
#: a longer silence between two records is a pause of the run, not work
LONGEST_STEP_SECONDS = 600.0


@dataclass(frozen=True)
class Summary:
    """The figures; None: not known. Accuracies are fractions.

    Args:
        end: how the run ended, or that it goes on. epochs: that were completed. steps: that were done. ranks, hosts: of the
        latest start. best_epoch: of the evaluation with the highest top1. seconds: of training, without pauses between jobs.
        images_per_second: the median of the epochs, or of the intervals. step_seconds, exposed_seconds: of a step, and waited for
        messages in it; predicted_step_seconds: as the run had it simulated at its end.
        peak_bytes: resident at most, of the rank that held most; device_bytes: of its GPU; both of the latest end.
        data_share, most_data_share: of the time, in which steps waited for data, in the mean of the ranks and on the one that
        waited longest in each epoch.
    """

    end: str
    epochs: int
    steps: int
    ranks: int | None
    hosts: tuple[str, ...]
    test_loss: float | None
    top1: float | None
    top5: float | None
    best_top1: float | None
    best_epoch: int | None
    images_per_second: float | None
    seconds: float
    step_seconds: float | None
    exposed_seconds: float | None
    predicted_step_seconds: float | None
    peak_bytes: float | None
    device_bytes: float | None
    data_share: float | None
    most_data_share: float | None


def summary(record: RunRecord) -> Summary:
    """The figures of a run."""
    records = record.state.records
    evaluations = [entry for entry in records if entry.get("kind") == "evaluation"]
    last = evaluations[-1] if evaluations else {}
    ranked = [entry for entry in evaluations if isinstance(entry.get("top1"), int | float)]
    best = max(ranked, key=lambda entry: entry["top1"], default=None)
    epochs = [entry for entry in records if entry.get("kind") == "epoch"]
    step, memory = record.state.latest("steps"), record.state.latest("memory")
    return Summary(
        end=record.state.end or "goes on, or nobody knows",
        epochs=max((_whole(entry, "epoch") for entry in epochs), default=0),
        steps=max((_whole(entry, "step") for entry in records), default=0),
        ranks=record.state.ranks[0].ranks if record.state.ranks else None,
        hosts=tuple(dict.fromkeys(rank.host for rank in record.state.ranks)),
        test_loss=_number(last, "loss"),
        top1=_number(last, "top1"),
        top5=_number(last, "top5"),
        best_top1=None if best is None else float(best["top1"]),
        best_epoch=None if best is None else _whole(best, "epoch"),
        images_per_second=_rate(epochs) or _rate([entry for entry in records if entry.get("kind") == "interval"]),
        seconds=_seconds(records),
        step_seconds=_number(step, "measured_step_seconds"),
        exposed_seconds=_number(step, "measured_exposed_seconds"),
        predicted_step_seconds=_number(step, "predicted_step_seconds"),
        peak_bytes=_number(memory, "peak_bytes"),
        device_bytes=_number(memory, "device_bytes"),
        data_share=_share(records, "waited_seconds"),
        most_data_share=_share(records, "most_waited_seconds"),
    )


def texts(summaries: Sequence[Summary]) -> list[tuple[str, list[str]]]:
    """(heading, the text of each run) of all figures, for people."""
    return [
        ("state", [figures.end for figures in summaries]),
        ("ranks", [_text(figures.ranks, "d") for figures in summaries]),
        ("hosts", [_hosts(figures.hosts) for figures in summaries]),
        ("epochs", [f"{figures.epochs:,}" for figures in summaries]),
        ("steps", [f"{figures.steps:,}" for figures in summaries]),
        ("test loss", [UNKNOWN if figures.test_loss is None else loss_text(figures.test_loss) for figures in summaries]),
        ("test top-1", [_text(figures.top1, ".2%") for figures in summaries]),
        ("test top-5", [_text(figures.top5, ".2%") for figures in summaries]),
        ("best test top-1", [_best(figures.best_top1, figures.best_epoch) for figures in summaries]),
        ("images/s", [_text(figures.images_per_second, ",.0f") for figures in summaries]),
        ("step", [_milliseconds(figures.step_seconds) for figures in summaries]),
        ("waited in a step", [_milliseconds(figures.exposed_seconds) for figures in summaries]),
        ("step, predicted", [_milliseconds(figures.predicted_step_seconds) for figures in summaries]),
        ("peak memory", [_megabytes(figures.peak_bytes) for figures in summaries]),
        *_of_gpus(summaries),
        ("waited for data", [_waits(figures.data_share, figures.most_data_share) for figures in summaries]),
        ("time of training", [duration_text(figures.seconds) for figures in summaries]),
    ]


def _text(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else format(value, form)


def _hosts(hosts: Sequence[str]) -> str:
    """A few hosts by name, many by their number."""
    if not hosts:
        return UNKNOWN
    return ", ".join(hosts) if len(hosts) <= MOST_HOSTS else f"{len(hosts):,}, {hosts[0]} first"


def _milliseconds(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else f"{1e3 * seconds:.4g} ms"


def _megabytes(size_bytes: float | None) -> str:
    return UNKNOWN if size_bytes is None else f"{size_bytes / 1e6:,.0f} MB"


def _of_gpus(summaries: Sequence[Summary]) -> list[tuple[str, list[str]]]:
    """The memory of GPUs, where a run had some."""
    of_runs = [figures.device_bytes for figures in summaries]
    return [] if all(one is None for one in of_runs) else [("memory of a GPU", [_megabytes(one) for one in of_runs])]


def _best(value: float | None, epoch: int | None) -> str:
    return UNKNOWN if value is None else f"{value:.2%} (epoch {epoch})"


def _waits(share: float | None, most: float | None) -> str:
    return UNKNOWN if share is None else f"{share:.1%} of the time, at most {most or share:.1%} on a rank"


def _share(records: Sequence[Record], waited: str) -> float | None:
    entries = [entry for entry in records if entry.get("kind") == "data" and _number(entry, "seconds")]
    seconds = sum(_number(entry, "seconds") or 0.0 for entry in entries)
    return sum(_number(entry, waited) or 0.0 for entry in entries) / seconds if seconds else None


def _seconds(records: Sequence[Record]) -> float:
    times = [entry["time"] for entry in records if isinstance(entry.get("time"), int | float)]
    gaps = (later - earlier for earlier, later in pairwise(times))
    return float(sum(gap for gap in gaps if 0.0 < gap <= LONGEST_STEP_SECONDS))


def _rate(entries: Sequence[Record]) -> float | None:
    rates = [rate for entry in entries if (rate := _number(entry, "images_per_second"))]
    return median(rates) if rates else None


def _number(entry: Record, key: str) -> float | None:
    value = entry.get(key)
    return float(value) if isinstance(value, int | float) else None


def _whole(entry: Record, key: str) -> int:
    value = entry.get(key)
    return value if isinstance(value, int) else 0
