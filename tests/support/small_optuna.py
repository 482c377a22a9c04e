"""The part of Optuna that docs/sweeps.md uses, for tests without Optuna. It prunes the second trial."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace


class TrialPruned(Exception):
    pass


class Trial:
    def __init__(self, number: int) -> None:
        self.number, self.params, self.value = number, dict[str, float](), float("nan")
        self._reports: list[tuple[float, int]] = []

    def suggest_float(self, name: str, low: float, high: float, *, log: bool = False) -> float:
        self.params[name] = (low * high) ** 0.5 if log else (low + high) / 2
        return self.params[name]

    def report(self, value: float, step: int) -> None:
        assert step == len(self._reports) + 1, "epochs must be reported in order"
        self._reports.append((value, step))

    def should_prune(self) -> bool:
        return self.number == 1


class Study:
    def __init__(self) -> None:
        self.trials: list[Trial] = []

    def optimize(self, objective: Callable[[Trial], float], n_trials: int) -> None:
        for number in range(n_trials):
            trial, pruned = Trial(number), False
            try:
                trial.value = objective(trial)
            except TrialPruned:
                pruned = True
            assert pruned == trial.should_prune(), "only a trial that should be pruned may raise TrialPruned, and it must"
            self.trials.append(trial)

    @property
    def best_params(self) -> dict[str, float]:
        return max((trial for trial in self.trials if trial.value == trial.value), key=lambda trial: trial.value).params


def create_study(direction: str, pruner: object) -> Study:
    return Study()


pruners = SimpleNamespace(MedianPruner=object)
