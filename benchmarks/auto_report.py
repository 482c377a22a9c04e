"""The measurements of `auto.py` as a table with the bars: how near the choice is to the fastest, how good predictions are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from benchmarks.pairs import Interval, interval, ratio

_DDP = "ddp"
_COLUMNS = ("default", "bucketed", "priority", "second", "auto", _DDP)
_SLOW_LINKS = ("700mbit", "1200mbit")
# Bars: of the fastest variant, in all jobs but three; of the default; over DDP where links are slow, and the median over DDP;
# accuracy of predictions on average, and of each.
_OF_FASTEST, _BUT = 0.97, 3
_OF_DEFAULT = 0.95
_OVER_DDP, _OVER_DDP_MEDIAN = 1.25, 1.6
_MEAN_ACCURACY, _LEAST_ACCURACY = 0.95, 0.85


class Measured:
    """The figures of one job. Ratios are medians of pairs of the same round."""

    def __init__(self, found: Mapping[str, Any]) -> None:
        self.found = found
        self.name: str = found["name"]
        self.rate: str = found["job"]["rate"]
        self._names: Mapping[str, str] = found["names"]
        self._seconds = {words: [turn["step_seconds"] for turn in turns] for words, turns in found["rounds"].items()}
        self.has_peer = _DDP in self._seconds
        self.pick = self._names["auto"]

    def words(self, name: str) -> str:
        """What a variant is: the key of its measurement."""
        return self._names.get(name, name)

    def step(self, name: str) -> Interval | None:
        """Seconds; None if there is no such variant."""
        words = self.words(name)
        return interval(self._seconds[words]) if words in self._seconds else None

    def auto_over(self, name: str) -> Interval:
        """Throughput of `auto` over that of another variant."""
        return ratio(self._seconds[self.words(name)], self._seconds[self.pick])

    @property
    def fastest(self) -> str:
        """The variant with the lowest median."""
        medians = {words: float(np.median(seconds)) for words, seconds in self._seconds.items()}
        return min(medians, key=lambda words: medians[words])

    def predicted_over_measured(self, words: str) -> float:
        return float(self.found["predicted"][words]["seconds"] / np.median(self._seconds[words]))

    def accuracy(self) -> dict[str, float]:
        """1 - |predicted - measured| / measured of each variant of hpctrain, by its words."""
        return {words: 1 - abs(self.predicted_over_measured(words) - 1) for words in self.found["predicted"]}


_ROW = "{:>2} {:<56}" + " {:>8}" * len(_COLUMNS) + " {:>21} {:>21} {:>21} {:>5} {:>9} {:>6}  {}"


def report(result: Mapping[str, Any], say: Callable[[str], None] = print) -> None:
    """Print a row for each job, and the bars."""
    say(f"seed {result['seed']}; {result['machine']}")
    titles = [f"{name}, s" for name in _COLUMNS]
    say(_ROW.format("", "job", *titles, "auto over fastest", "over default", "over DDP", "p/m", "worst p/m", "start", "choice"))
    measured = {int(number): Measured(found) for number, found in result["jobs"].items()}
    for number, job in sorted(measured.items()):
        report_job(number, job.found, say)
    _bars([measured[number] for number in sorted(measured)], say)


def report_job(number: int, found: Mapping[str, Any], say: Callable[[str], None] = print) -> None:
    """Print the row of one job."""
    job = Measured(found)
    steps = [job.step(name) for name in _COLUMNS]
    accuracy = job.accuracy()
    worst = min(accuracy, key=lambda words: accuracy[words])
    say(
        _ROW.format(
            number,
            job.name,
            *("" if step is None else f"{step.median:.3f}" for step in steps),
            str(job.auto_over(job.fastest)),
            str(job.auto_over("default")),
            str(job.auto_over(_DDP)) if job.has_peer else "",
            f"{job.predicted_over_measured(job.pick):.2f}",
            f"{job.predicted_over_measured(worst):.2f}",
            f"{found['start_seconds']:.1f}",
            job.pick,
        )
    )


def _bars(jobs: list[Measured], say: Callable[[str], None]) -> None:
    """Print each bar with what was measured, and the jobs that miss it."""
    of_fastest = {job.name: job.auto_over(job.fastest).median for job in jobs}
    _bar(say, f"auto at least {_OF_FASTEST} of the fastest, in all but {_BUT}", of_fastest, _OF_FASTEST, _BUT)
    _bar(
        say,
        f"auto at least {_OF_DEFAULT} of the default",
        {job.name: job.auto_over("default").median for job in jobs},
        _OF_DEFAULT,
    )
    over_ddp = {job.name: (job.auto_over(_DDP).median, job.rate) for job in jobs if job.has_peer}
    slow = {name: over for name, (over, rate) in over_ddp.items() if rate in _SLOW_LINKS}
    _bar(say, f"auto at least {_OVER_DDP} times as fast as DDP over slow links", slow, _OVER_DDP)
    if over_ddp:
        median = float(np.median([over for over, _ in over_ddp.values()]))
        say(f"{_mark(median >= _OVER_DDP_MEDIAN)} median over DDP at least {_OVER_DDP_MEDIAN}: {median:.2f}")
    accuracy = {f"{job.name}: {words}": value for job in jobs for words, value in job.accuracy().items()}
    mean = float(np.mean(list(accuracy.values())))
    say(f"{_mark(mean >= _MEAN_ACCURACY)} predictions right to {_MEAN_ACCURACY:.0%} on average: {mean:.1%} of {len(accuracy)}")
    _bar(say, f"each prediction right to {_LEAST_ACCURACY:.0%}", accuracy, _LEAST_ACCURACY)


def _bar(say: Callable[[str], None], what: str, values: Mapping[str, float], least: float, may_miss: int = 0) -> None:
    missing = sorted((value, name) for name, value in values.items() if value < least)
    say(f"{_mark(len(missing) <= may_miss)} {what}: {len(values) - len(missing)} of {len(values)}")
    for value, name in missing or sorted((value, name) for name, value in values.items())[:1]:
        say(f"     {value:.3f}  {name}")


def _mark(met: bool) -> str:
    return "met   " if met else "MISSED"
