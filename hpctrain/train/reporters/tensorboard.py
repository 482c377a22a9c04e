"""TensorBoard event files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpctrain.errors import ConfigError
from hpctrain.train.metrics import Reporter


class TensorBoard(Reporter):
    """Numbers of all records as TensorBoard event files in the run's directory, which needs the extra `export`.

    Args:
        directory: of the run. done_steps: of an earlier part of this run; TensorBoard hides what that wrote of later ones.

    Raises:
        ConfigError: tensorboardX is not installed.
    """

    def __init__(self, directory: Path, done_steps: int = 0) -> None:
        purged = done_steps + 1 if done_steps else None
        self._writer = tensorboard_writer()(str(directory / "tensorboard"), purge_step=purged)

    def record(self, kind: str, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, int | float) and name != "step":
                self._writer.add_scalar(f"{kind}/{name}", value, int(values.get("step", 0)))

    def close(self) -> None:
        self._writer.close()


def tensorboard_writer() -> Any:
    """The class that writes TensorBoard files.

    To be called before MPI starts, too: tensorboardX loads PyTorch where it is installed, which starts processes.

    Raises:
        ConfigError: tensorboardX is not installed.
    """
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            "The reporter tensorboard (metrics.tensorboard) is switched on, but tensorboardX is not installed; "
            "install hpctrain[export] or switch it off."
        ) from error
    return SummaryWriter
