"""Directory of one run: configuration, versions, metrics, and checkpoints.

    <output>/<name>-<YYYYmmdd-HHMMSS>/      start time in UTC
        run.json         proves that the directory is a run, and orders it among other runs (see `RunMarker`)
        config.yaml      resolved configuration of the latest start
        config-<step>.yaml      configuration until that step, if a resume changed it
        versions.json    versions of Python and of the packages that compute
        git.json         revision of the repository from which the run was started; {} outside a repository
        metrics.jsonl    one JSON object per line; a resume truncates it to the position of its checkpoint
        hashes.jsonl     hashes of the state after some steps, if enabled; truncated like the metrics
        schedule-<group>.json   operations that the averager of a parameter group posts in a step, in order
        choice.json      automatic choice of grid, plan and averager, if the configuration leaves them open
        flight/          last operations of each rank
        logs/            log files of the ranks that --log-ranks names
        owners/          previous owners of the run and the current one (see `runs.owner`)
        flight-directory      path of the flight records, if they are stored in another directory
        machine.yaml     machine model measured for the automatic choice, if the configuration names none
        checkpoints/
            best.json    checkpoint with the best evaluation, for users and commands (see `BestRecord`)

One rank creates and writes the directory; the others receive its path. Nothing here communicates. A resume reads the best
evaluation from the metadata of its checkpoint and writes best.json again, so that best.json may be deleted.

`listed_runs` decides which directories of an output are runs, in which order, and which of them is the original of its copies.
All searches for a run use it. A run that cannot be read ends a search that reaches it; no other run takes its place.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import re
import secrets
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import count, islice
from pathlib import Path

import yaml

from hpctrain.core.errors import CheckpointError, ConfigError, DataError
from hpctrain.core.files import TEXT_BYTES, json_object, read_bytes, read_text
from hpctrain.launch.process_start import release
from hpctrain.runs import records
from hpctrain.runs.owner import MARKER, Claim, Ownership, RunMarker, mark, read_marker, unreadable
from hpctrain.runs.records import Bookkeeping
from hpctrain.storage.atomic_write import PARTIAL, remove_unfinished, write_bytes, write_json, write_text
from hpctrain.version import __version__

#: sources of a resume or an evaluation, in place of a path
AUTO, BEST = "auto", "best"
_CHECKPOINT = re.compile(r"checkpoint-(\d{8,})\.(h5|shards)")
_EARLIER = re.compile(r"config-(\d{8,})\.yaml")
_NAME = re.compile(r"^name:.*$", re.MULTILINE)
_STAMPED = re.compile(r"(.*)-\d{8}-\d{6}(?:-\d+)?", re.DOTALL)
_LEGAL_NAME = re.compile(r"[A-Za-z0-9._][A-Za-z0-9._-]*")
_GIT_SECONDS = 10
# Size limit in bytes of the file that contains a path, above the longest path of any file system.
_LONGEST_PATH = 1 << 14
_MOST_BYTES_OF_SMALL = TEXT_BYTES

#: files of a traced run: events for a time line, and time tables of a step
TRACE_FILE, TABLE_FILE = "trace.json", "time_table.json"
#: name of the file with the path of the flight records
FLIGHT_POINTER = "flight-directory"


def software_versions(**others: str) -> dict[str, str]:
    """Return the versions of Python and of the packages that compute, extended by `others` (kernel set, MPI library)."""
    found = {"python": platform.python_version(), "hpctrain": __version__}
    for package in ("numpy", "mpi4py", "h5py"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "none"
    return {**found, **others}


def git_state(directory: Path | None = None) -> dict[str, object]:
    """Return {"revision", "dirty"} of the repository around `directory`; {} if there is none.

    Call it before MPI starts, because it starts processes.

    Args:
        directory: directory inside the repository; None: the current directory.
    """
    try:
        revision = _git(directory, "rev-parse", "HEAD")
        changes = _git(directory, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"revision": revision, "dirty": bool(changes)}


def _git(directory: Path | None, *words: str) -> str:
    # Without optional locks, a reader never blocks other commands in the repository.
    command = ["git", "--no-optional-locks", *words]
    done = subprocess.run(
        command, cwd=directory, capture_output=True, text=True, timeout=_GIT_SECONDS, check=True, preexec_fn=release
    )
    return done.stdout.strip()


@dataclass(frozen=True)
class RunDirectory:
    """Files of one run. Use `create` or `open` to construct it.

    Args:
        bookkeeping: writer of files that are not essential for the run.
        ownership: ownership of the run, checked before further writes; None: not checked.
    """

    path: Path
    bookkeeping: Bookkeeping = field(default_factory=Bookkeeping, compare=False, repr=False)
    ownership: Claim | None = field(default=None, compare=False, repr=False)

    @classmethod
    def create(
        cls,
        output: Path,
        name: str,
        *,
        config: str,
        versions: Mapping[str, str],
        git: Mapping[str, object],
    ) -> RunDirectory:
        """Create a run directory in `output`, named after the run and the time in UTC. Call it on one rank only.

        Every call creates a different directory.

        Raises:
            ConfigError: `name` is not a plain file name, `config` is too long, or the directory cannot be created.
        """
        _check_length(config)
        if not _LEGAL_NAME.fullmatch(name):
            legal = re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip("-") or "run"
            raise ConfigError(
                f"The run name is {name!r}, but must have only letters, digits, dots, dashes and underscores, and no leading "
                f"dash, such as {legal!r}."
            )
        try:
            run = cls(_make_unique(Path(output), f"{name}-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"))
            run.checkpoints.mkdir()
            write_json(run.path / "versions.json", dict(versions))
            write_json(run.path / "git.json", dict(git))
            others = (other.marker for other in listed_runs(output, None))
            later_than_all = max([time.time_ns(), *(1 + marker.order for marker in others if marker)])
            mark(run.path, RunMarker(secrets.token_hex(8), later_than_all))
            # Last, because a directory with a marker and a configuration is a run.
            write_text(run.path / "config.yaml", config)
        except OSError as error:
            raise ConfigError(
                f"Cannot create a run directory in output {output} ({error.strerror}); choose another output."
            ) from error
        return run

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """Return the run in the existing directory `path`.

        Raises:
            CheckpointError: `path` does not exist, is not a run directory, cannot be read, or has another version of the format.
        """
        run = cls(Path(path))
        if not os.path.lexists(run.path):
            raise CheckpointError(f"There is no run directory {run.path.absolute()}.")
        if not is_run(run.path):
            raise CheckpointError(f"{run.path.absolute()} is not a run directory, because it lacks {MARKER} or config.yaml.")
        return run

    @property
    def checkpoints(self) -> Path:
        """Directory of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def metrics_path(self) -> Path:
        """File of the metrics, one JSON object per line."""
        return self.path / "metrics.jsonl"

    @property
    def hashes_path(self) -> Path:
        """File of the hashes of the state after some steps, if the run keeps them (see `HashFile`)."""
        return self.path / "hashes.jsonl"

    @property
    def choice_path(self) -> Path:
        """File of the automatic choice of the latest start."""
        return self.path / "choice.json"

    @property
    def machine_path(self) -> Path:
        """File of the machine model that was measured for the automatic choice."""
        return self.path / "machine.yaml"

    @property
    def flight(self) -> Path:
        """Directory of the flight records of the run's ranks, unless they are stored elsewhere."""
        return self.path / "flight"

    def log_path(self, rank: int) -> Path:
        """Return the log file of a rank."""
        return self.path / "logs" / f"rank-{rank:04d}.log"

    def point_to_flight(self, directory: Path | None) -> None:
        """Record the directory of the flight records; None: the run directory.

        Raises:
            OSError: the record cannot be written.
        """
        pointer = self.path / FLIGHT_POINTER
        if directory is None:
            pointer.unlink(missing_ok=True)
        else:
            write_text(pointer, f"{directory}\n")

    def flight_records(self) -> Path:
        """Return the directory of the ranks' flight records, which may not exist.

        Raises:
            DataError: the file with the path of the directory is damaged.
        """
        pointer = self.path / FLIGHT_POINTER
        if not pointer.is_file():
            return self.flight
        text = os.fsdecode(read_bytes(pointer, _LONGEST_PATH)).strip()
        if not text.isprintable() or not text:
            raise DataError(f"{pointer} does not contain a path; delete the file, and give the directory of flight records.")
        return Path(text)

    def schedule_path(self, group: str) -> Path:
        """Return the path of the schedule of a parameter group's averager."""
        return self.path / f"schedule-{group}.json"

    def config(self) -> str:
        """Return the text of the resolved configuration."""
        return read_text(self.path / "config.yaml", TEXT_BYTES)

    def follow_config(self, config: str, step: int, earlier: str) -> None:
        """Make `config` the run's configuration from `step` on. Keep the previous one, `earlier`, next to it if it differs.

        Configurations that were stored at this step or later are removed. Files that no run wrote are kept.

        Raises:
            ConfigError, CheckpointError: `config` is too long, or the directory cannot be written.
        """
        _check_length(config)
        dated = ((_EARLIER.fullmatch(path.name), path) for path in self.path.iterdir())
        gone = {path for match, path in dated if match and int(match[1]) >= step and _is_run_config(path)}
        try:
            if config != earlier:
                kept = self.path / f"config-{step:08d}.yaml"
                if kept in gone or not os.path.lexists(kept):
                    write_text(kept, earlier)
                gone.discard(kept)
            if config != self.config():
                write_text(self.path / "config.yaml", config)
            for path in gone:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(f"Cannot write the configuration to {self.path} ({records.reason(error)}).") from error

    def append_metrics(self, record: Mapping[str, object]) -> None:
        """Append one line and hand it to the operating system. Non-finite numbers become null, because JSON has none.

        An incomplete last line, left by a killed process, is removed first. One process appends at a time.

        Raises:
            RunOwnedError: another job has taken over the run.
            OSError: the line cannot be written.
        """
        require_owned(self)
        records.append_lines(self.metrics_path, json.dumps(_finite(record), allow_nan=False) + "\n")

    def cut_metrics(self, epoch: int, step: int, *, evaluates: bool = False, goes_back: bool = False) -> None:
        """Cut metrics and hashes back to the checkpoint from which the run resumes (see `records.cut_back`)."""
        require_owned(self)
        for path in (self.metrics_path, self.hashes_path):
            records.cut_back(path, epoch, step, evaluates=evaluates, goes_back=goes_back)

    def metrics(self) -> list[dict[str, object]]:
        """Return the records of all complete lines, without an incomplete last line.

        Raises:
            DataError: another line is not a JSON object.
            OSError: the file cannot be read.
        """
        if not self.metrics_path.exists():
            return []
        *lines, _torn = read_bytes(self.metrics_path).split(b"\n")
        records = []
        for number, line in enumerate(lines, 1):
            record = json_object(line)
            if record is None:
                raise DataError(f"Line {number} of {self.metrics_path} is not a JSON object; delete the line.")
            records.append(record)
        return records


def named_run(source: str) -> RunDirectory:
    """Return the run directory that a value of `--resume` or `--checkpoint` names.

    Raises:
        CheckpointError: as for `RunDirectory.open`; the message about a path that does not exist names the other legal values.
    """
    if not os.path.lexists(source):
        raise CheckpointError(
            f"{Path(source).absolute()} is not a run directory or a checkpoint, as it does not exist; give {AUTO}, {BEST} or the "
            f"path of one."
        )
    return RunDirectory.open(Path(source))


@dataclass(frozen=True)
class StoredCheckpoint:
    """Checkpoint on the disk, described by file names and sizes only.

    Attributes:
        path: file, or directory of shards.
        written: time of the last write, in seconds of the wall clock.
        version: value that changes whenever the checkpoint is written again.
    """

    step: int
    path: Path
    n_bytes: int
    written: float
    version: tuple[int, ...]

    @classmethod
    def of(cls, step: int, path: Path) -> StoredCheckpoint:
        """Return the description of a checkpoint.

        Raises:
            OSError: the checkpoint has been deleted, or it is a broken link.
        """
        status = path.stat()
        n_bytes = sum(entry.stat().st_size for entry in os.scandir(path)) if path.is_dir() else status.st_size
        return cls(step, path, n_bytes, status.st_mtime, (status.st_ino, status.st_size, status.st_mtime_ns))


def stored_checkpoints(directory: Path) -> list[StoredCheckpoint]:
    """Return the checkpoints of a directory, lowest step first, without broken links and files deleted during the call.

    Raises:
        CheckpointError: the directory exists, but cannot be read.
    """
    found = []
    try:
        for entry in os.scandir(directory):
            if match := _CHECKPOINT.fullmatch(entry.name):
                with contextlib.suppress(FileNotFoundError):
                    found.append(StoredCheckpoint.of(int(match[1]), Path(entry.path)))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise unreadable(directory, error) from error
    return sorted(found, key=lambda stored: (stored.step, stored.path))


def flight_directory(run: Path) -> Path:
    """Return the directory of a run's flight records: the recorded one, by default its subdirectory `flight`.

    If this directory does not exist, return `run` itself.

    Raises:
        DataError: the file with the path of the directory is damaged.
    """
    kept = RunDirectory(run).flight_records()
    return kept if kept.is_dir() else run


def require_owned(run: RunDirectory) -> None:
    """Raise if another job has taken over the run, because this process seemed to be dead; errors: see `Claim.require`."""
    if run.ownership is not None:
        run.ownership.require()


def small_files(run: RunDirectory) -> dict[str, bytes]:
    """Return the contents of a run directory's small files by name, without records and unfinished files.

    They identify the run, and suffice to restore a directory that `--resume` finds.
    """
    paths = sorted(path for path in run.path.iterdir() if path.is_file() and path.suffix not in (".jsonl", PARTIAL))
    return {path.name: path.read_bytes() for path in paths if path.stat().st_size <= _MOST_BYTES_OF_SMALL}


def restore_files(run: RunDirectory, files: Mapping[str, bytes]) -> None:
    """Restore missing small files of the run, for example after its directory was deleted during the training.

    Raises:
        CheckpointError: the files cannot be written.
    """
    try:
        missing = [name for name in files if not (run.path / name).exists()]
        if missing:
            run.checkpoints.mkdir(parents=True, exist_ok=True)
        for name in sorted(missing, key=lambda name: name == "config.yaml"):  # last, because it makes the directory a run
            write_bytes(run.path / name, files[name])
        if isinstance(run.ownership, Ownership):
            run.ownership.restore()
    except OSError as error:
        raise CheckpointError(f"Cannot restore the missing files of the run {run.path} ({records.reason(error)}).") from error


def _make_unique(output: Path, stem: str) -> Path:
    output.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        path = output / (stem if number == 1 else f"{stem}-{number}")
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            return path
    raise AssertionError("unreachable")


def _is_run_config(path: Path) -> bool:
    """Return whether a run wrote this file: it contains the key `output`, in exactly the form in which a run dumps YAML."""
    try:
        text = read_text(path, TEXT_BYTES)
        content = yaml.safe_load(text)
        return isinstance(content, dict) and "output" in content and text == yaml.safe_dump(content, sort_keys=False, width=120)
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return False


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _check_length(config: str) -> None:
    """Raise unless a configuration is short enough for every reader of run directories."""
    if len(config) > TEXT_BYTES:
        raise ConfigError(f"The configuration has {len(config):,} characters with all its keys; the maximum is {TEXT_BYTES:,}.")


@dataclass(frozen=True)
class ListedRun:
    """Run in an output directory, which may be unreadable.

    Attributes:
        name, marker: name in its configuration, and its marker; None if unknown.
        fault: why the run cannot be read, or cannot be distinguished from its copies; None if it can.
    """

    path: Path
    name: str | None
    marker: RunMarker | None
    fault: CheckpointError | None

    def open(self) -> RunDirectory:
        """Return the run, or raise its fault."""
        if self.fault is not None:
            raise self.fault
        return RunDirectory(self.path)

    def may_have_name(self, name: str) -> bool:
        """Return whether the run may have a name.

        If its name cannot be read, the name of the directory in which it began decides. Any name is possible if this directory is
        unknown, or if a resume has changed the configuration.
        """
        if self.name is not None:
            return self.name == name
        closed = not os.access(self.path, os.X_OK, effective_ids=True)
        began = self.path.name if closed else "" if self.marker is None else self.marker.directory
        match = _STAMPED.fullmatch(began)
        return match is None or match[1] == name or any(self.path.glob("config-*.yaml"))


def listed_runs(output: Path, name: str | None) -> list[ListedRun]:
    """Return all runs below `output`, newest first in the order of their markers. Runs without a readable marker come first.

    Of several copies of a run, only the original is returned (see `_original`).

    Args:
        name: name in the configuration of the runs; None: any name.

    Raises:
        CheckpointError: `output` exists, but cannot be listed.
    """
    try:
        paths = [Path(entry.path) for entry in os.scandir(output)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise unreadable(Path(output), error) from error
    copies: dict[object, list[ListedRun]] = {}
    for run in filter(None, map(_listed, paths)):
        if name is None or run.may_have_name(name):
            fault = run.fault or (unreadable(run.path / "config.yaml", "it has no name") if name and run.name is None else None)
            key = (run.marker.identity, run.name) if run.marker and not fault else run.path
            copies.setdefault(key, []).append(replace(run, fault=fault))

    def age(run: ListedRun) -> tuple[float, bool, Path]:  # no copy takes the place of an original that cannot be read
        return math.inf if run.marker is None else run.marker.order, run.fault is not None, run.path

    return sorted(map(_original, copies.values()), key=age, reverse=True)


def _listed(path: Path) -> ListedRun | None:
    """Return the run in a directory; None if another program made the directory, or a start that was killed.

    A start writes the marker, then config.yaml, then checkpoints.
    """
    marker, name, fault = None, None, None
    if _STAMPED.fullmatch(path.name) is None and not os.access(path, os.X_OK, effective_ids=True):
        return None  # a file, or a private directory that does not have the name of a run
    try:
        marker = read_marker(path)
        lacking = MARKER if marker is None else "config.yaml"
        if not is_run(path):
            if os.path.lexists(path / lacking) or not stored_checkpoints(path / "checkpoints"):
                return None
            raise unreadable(path / lacking, "it is missing")
    except CheckpointError as error:
        fault = error
    try:
        name = _name_in(path / "config.yaml")
    except CheckpointError as error:
        fault = fault or error
    return ListedRun(path, name, marker, fault)


def _original(copies: Sequence[ListedRun]) -> ListedRun:
    """Return the only copy, or the one whose directory has the recorded name; without such a one, the first with a fault."""
    named = [run for run in copies if run.marker and run.marker.directory == run.path.name]
    if len({run.path.resolve() for run in copies}) == 1 or len(named) == 1:
        return (named or copies)[0]
    paths = " and ".join(sorted(str(run.path) for run in copies))
    fault = CheckpointError(f"{paths} are copies of one run; name one of them, or move the others elsewhere.")
    return replace(copies[0], fault=fault)


def is_run(path: Path) -> bool:
    """Return whether a marker and a configuration prove that a directory is a run; raise if the marker cannot be read."""
    return os.path.lexists(path / "config.yaml") and read_marker(path) is not None


def containing_run(path: Path) -> Path | None:
    """Return `path` if it is a run directory, or the run of a directory of checkpoints; None if there is no run; see `is_run`."""
    place = path.parent if path.name == "checkpoints" else path
    return place if is_run(place) else None


def runs(output: Path, name: str | None) -> Iterator[RunDirectory]:
    """Yield all runs below `output`, newest first, or raise if the next one cannot be read; see `listed_runs`."""
    return (run.open() for run in listed_runs(output, name))


def newest_runs(output: Path, count: int = 1, *, trained: bool = False) -> list[RunDirectory]:
    """Return the newest `count` runs in a directory, oldest first: the default of commands that read runs.

    Args:
        trained: whether to ignore runs without a checkpoint.

    Raises:
        CheckpointError: there are fewer runs, or one of them cannot be read.
    """
    found = (run for run in runs(output, None) if not trained or stored_checkpoints(run.checkpoints))
    newest = list(islice(found, count))
    if len(newest) < count:
        words = f"{'only one' if newest else 'no'} run{' with a checkpoint' if trained else ''}"
        wanted = "the directory of a run" if count == 1 else f"the directories of {count} runs"
        raise CheckpointError(f"There is {words} in {output.absolute()}; give {wanted}.")
    return newest[::-1]


def run_of_checkpoint(path: Path, meta: Mapping[str, object]) -> RunDirectory | None:
    """Return the run of the checkpoint `path`; None if it is in no run directory, or in the directory of another run."""
    for place in (path, path.absolute(), path.resolve()):
        run = RunDirectory(place.parent.parent)
        if place.parent.name == run.checkpoints.name and is_run(run.path):
            marker = read_marker(run.path)
            if marker is not None and meta.get("run") == marker.identity:
                return run
    return None


def _name_in(path: Path) -> str | None:
    """Return the name in a run's configuration; None if it has none. Only this line is parsed, because there may be many runs."""
    try:
        line = _NAME.search(read_text(path, TEXT_BYTES))
        return None if line is None else str(yaml.safe_load(line[0])["name"])
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise unreadable(path, error) from error


def latest(output: Path, name: str) -> RunDirectory | None:
    """Return the newest run called `name`; None if there is none. The errors are those of `runs`."""
    return next(iter(runs(output, name)), None)


#: name of the file with the best checkpoint, in the directory of checkpoints
BEST_RECORD = "best.json"
_LARGEST_BYTES = 1 << 20


@dataclass(frozen=True)
class BestRecord:
    """Checkpoint with the best evaluation.

    Args:
        checkpoint: name of the file or directory.
        measure: metric of the comparison, "top1", "top5" or "loss", with the prefix "ema_" for averaged weights.
        value: value of the metric; accuracies are fractions.
    """

    checkpoint: str
    step: int
    epoch: int
    measure: str
    value: float

    def __post_init__(self) -> None:
        texts, numbers = (self.checkpoint, self.measure), (self.step, self.epoch, self.value)
        if not all(isinstance(text, str) for text in texts) or not all(isinstance(number, int | float) for number in numbers):
            raise TypeError("a field has the wrong type")

    def __str__(self) -> str:
        value = f"{self.value:.4f}" if self.measure.endswith("loss") else f"{self.value:.2%}"
        return f"{self.measure} {value} after epoch {self.epoch}"


def write_best(directory: Path, best: BestRecord | None) -> None:
    """Store the record in a directory of checkpoints, atomically; None deletes it.

    Raises:
        OSError: the record cannot be written.
    """
    if best is not None and _stored_best(directory) != asdict(best):
        write_json(directory / BEST_RECORD, asdict(best))
        return
    remove_unfinished(directory / BEST_RECORD)
    if best is None:
        (directory / BEST_RECORD).unlink(missing_ok=True)


def read_best(directory: Path) -> BestRecord | None:
    """Return the record in a directory of checkpoints; None if there is none.

    Raises:
        CheckpointError: the record cannot be read.
    """
    path = directory / BEST_RECORD
    try:
        return BestRecord(**(json_object(read_bytes(path, _LARGEST_BYTES)) or {}))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(path, error) from error
    except TypeError as error:
        raise CheckpointError(
            f"{path} is not a record of a best checkpoint; delete the file; the run writes it again when it resumes."
        ) from error


def find_best(output: Path, name: str | None) -> Path:
    """Return the best checkpoint of the newest run called `name`, or of any name, that has one.

    Raises:
        CheckpointError: no run has a best checkpoint, its file is missing, or a newer run cannot be read.
    """
    for run in runs(output, name):
        best = read_best(run.checkpoints)
        if best is None:
            continue
        path = run.checkpoints / best.checkpoint
        if not path.exists():
            raise CheckpointError(
                f"The best checkpoint of the run {run.path}, {best.checkpoint} ({best}), no longer exists; "
                f"give a checkpoint that `hpctrain checkpoint list {run.path}` shows."
            )
        return path
    called = "" if name is None else f" of {name!r}"
    raise CheckpointError(
        f"No run{called} in {output.absolute()} has a best checkpoint, which requires checkpoint.best, and an evaluation and a "
        f"checkpoint after the same step; give a checkpoint file, or auto for the newest checkpoint."
    )


def _stored_best(directory: Path) -> object:
    try:
        return json_object(read_bytes(directory / BEST_RECORD, _LARGEST_BYTES))
    except (DataError, OSError):
        return None
