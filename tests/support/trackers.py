"""Stand-ins for the modules of trackers: they take what MLflow and W&B take, and keep it."""

from __future__ import annotations

from types import ModuleType
from typing import Any

Calls = list[tuple[str, Any]]


class MlflowStandIn(ModuleType):
    """The functions of `mlflow` that need no run in hand, with its names of arguments."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.calls: Calls = []

    def set_experiment(self, experiment_name: str | None = None) -> None:
        self.calls.append(("experiment", experiment_name))

    def start_run(self, run_id: str | None = None, run_name: str | None = None) -> None:
        self.calls.append(("start", run_name))

    def log_metrics(self, metrics: dict[str, float], step: int | None = None, synchronous: bool | None = None) -> None:
        assert all(isinstance(value, float) for value in metrics.values())
        self.calls.append(("metrics", (step, metrics)))

    def end_run(self, status: str = "FINISHED") -> None:
        self.calls.append(("end", status))


class WandbRun:
    """A run of `wandb`, whose steps may not fall."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self.step = 0

    def log(self, data: dict[str, Any], step: int | None = None) -> None:
        assert step is not None
        assert step >= self.step, "W&B refuses a step that falls"
        self.step = step
        self.calls.append(("metrics", (step, data)))

    def finish(self) -> None:
        self.calls.append(("end", None))


class WandbStandIn(ModuleType):
    """`wandb`, as far as it makes runs."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.calls: Calls = []

    def init(self, *, project: str, name: str, id: str, resume: str, dir: str) -> WandbRun:
        self.calls.append(("start", (project, name, id, resume, dir)))
        return WandbRun(self.calls)


def stand_ins() -> tuple[MlflowStandIn, WandbStandIn]:
    """One of each."""
    return MlflowStandIn(), WandbStandIn()
