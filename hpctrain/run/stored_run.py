"""Runs for commands that receive no configuration file: the run is found by its directory and described by its own files.

`find_run` imports NumPy only if the argument is a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.config.load import parse
from hpctrain.config.schema import Config
from hpctrain.core.errors import CheckpointError, ConfigError
from hpctrain.core.yaml_source import Source
from hpctrain.runs.directory import AUTO, BEST, RunDirectory, find_best, named_run, newest_runs

#: overrides with which a prediction replaces a training's settings of ranks, machine and duration
FRESH = (
    "threads=auto",
    "grid={}",
    "plan={}",
    "averager=sharded",
    "micro_batches=1",
    "machine=null",
    "progress=test",
    "trace=false",
    "metrics={}",
    "max_time=null",
    "flight=none",
)


@dataclass(frozen=True)
class StoredRun:
    """A run or one of its checkpoints.

    Attributes:
        source: path of the run directory or checkpoint, for `find_checkpoint`.
        config: text of its configuration.
        label: path of the file that contains the text, for messages.
    """

    source: str
    config: str
    label: str

    def parsed(self, overrides: Sequence[str]) -> tuple[Config, Source]:
        """Return the configuration with `FRESH` and `overrides` applied in order, and the positions of its values.

        Raises:
            ConfigError: an override is invalid, or the configuration names user code, which is imported only if the user names
                it.
        """
        config, source = parse(self.config, self.label, (*FRESH, *overrides), stored=True)
        from hpctrain.assembly.options import named, names

        for kind, name in named(config):
            if name not in names(kind):
                raise ConfigError(
                    f'{self.label} names user code, "{name}", which is imported only if you name it yourself; '
                    f"give --config, such as --config {self.label if self.label.endswith('.yaml') else 'FILE.yaml'}."
                )
        return config, source


def find_run(checkpoint: str, directory: Path) -> StoredRun:
    """Return the run that `--checkpoint` names. The call reads its configuration, but not its checkpoints.

    Args:
        checkpoint: "auto" (newest run that has a checkpoint), "best" (best checkpoint of the newest run that has one), a run
            directory, or a checkpoint.
        directory: directory that "auto" and "best" search for runs.

    Raises:
        CheckpointError: there is no such run or checkpoint.
    """
    if checkpoint in (AUTO, BEST):
        best = None if checkpoint == AUTO else find_best(directory, None)
        run = newest_runs(directory, trained=True)[0] if best is None else RunDirectory(best.parent.parent)
        return replace(_of_run(run), source=str(best or run.path))
    path = Path(checkpoint)
    if path.is_file() or path.suffix == ".shards":
        return _of_checkpoint(path)
    return _of_run(named_run(checkpoint))


def _of_run(run: RunDirectory) -> StoredRun:
    return StoredRun(str(run.path), run.config(), str(run.path / "config.yaml"))


def _of_checkpoint(path: Path) -> StoredRun:
    """Return a checkpoint, possibly outside of its run, with the configuration in its metadata."""
    from hpctrain.storage.checkpoint import open_checkpoint

    meta = open_checkpoint(path).meta
    if "config" not in meta:
        raise CheckpointError(
            f"{path} was written by a Python program with its own training loop, and does not name its model; "
            "predict in that program, or give a checkpoint of `hpctrain train`."
        )
    return StoredRun(str(path), str(meta["config"]), str(path))
