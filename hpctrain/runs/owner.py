"""Identity and ownership of a run: the proof that a directory is a run, and the rule that one job at a time writes to it.

A run has a marker file, `run.json`, which also orders runs without clocks or time zones. Files in a directory are written, cut or
deleted only after this proof, because other programs may also write a `config.yaml` or a `metrics.jsonl`.

The directory `owners` of a run has a record of each owner, `owner-00001.jsonl` and so on. The record with the highest number is
that of the current owner. A record is created atomically, by a hard link, which every file system, including NFS and Lustre,
creates at most once. If several processes try to succeed a dead owner, exactly one creates the next record. A killed process
leaves no lock. While the owner is alive, the last line of its record changes every BEAT_SECONDS. When the owner ends, this line
marks the run as released.

An owner is considered dead if its process has ended on the same machine, if its scheduler reports that its job is over, or if its
record has not changed for MISSED_SECONDS. The waiting process measures this time; clocks of two machines are never compared.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import platform
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from hpctrain.core.errors import CheckpointError, RunOwnedError
from hpctrain.core.files import json_object, read_bytes, require_regular
from hpctrain.launch import processes
from hpctrain.launch.processes import ProcessMark
from hpctrain.launch.scheduler import SchedulerJob, own_job
from hpctrain.runs.records import Bookkeeping, reason
from hpctrain.storage.atomic_write import synchronise_directory, write_json

#: name of the file that proves that a directory is a run
MARKER = "run.json"
_FORMAT = "hpctrain-run"
#: version of the format of run directories
FORMAT_VERSION = 1
#: size limit of a small JSON file, in bytes: it may belong to another program
_MOST_BYTES = 1 << 20
_MOST_NS = 1 << 62


@dataclass(frozen=True)
class RunMarker:
    """Identity of a run, and its position in the order of runs.

    Args:
        identity: random text; the run's checkpoints contain it as well.
        order: nanoseconds since 1970 at the start of the run, but always greater than the values of all earlier runs. The order
            of the runs in an output directory is therefore independent of clocks that differ or jump.
        directory: name of the directory in which the run began; a copy of the run has another. Empty if it was not recorded.
    """

    identity: str
    order: int
    directory: str = ""


def unreadable(path: Path, why: object) -> CheckpointError:
    """Return the error for a file or directory of a run that cannot be read. No other run takes the place of such a run."""
    return CheckpointError(
        f"{path} cannot be read ({reason(why) if isinstance(why, OSError) else why}); restore it, grant read permission, or move "
        f"its run elsewhere."
    )


def mark(path: Path, marker: RunMarker) -> None:
    """Write the marker of the run directory `path` atomically.

    Raises:
        OSError: the marker cannot be written.
    """
    begun = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(marker.order // 10**9))
    content = {"format": _FORMAT, "format_version": FORMAT_VERSION, "run": marker.identity, "order": marker.order}
    write_json(path / MARKER, {**content, "begun": begun, "directory": path.name})


def read_marker(path: Path) -> RunMarker | None:
    """Return the marker of the run directory `path`; None if it has none, or if `run.json` belongs to another program.

    Raises:
        CheckpointError: the marker cannot be read, is damaged, or has another version of the format.
    """
    try:
        status = (path / MARKER).stat()
        version = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        return _read_marker(path.absolute(), *version)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise unreadable(path / MARKER, error) from error


@lru_cache(maxsize=1 << 10)
def _read_marker(path: Path, *version: int) -> RunMarker | None:
    """Return the marker in a run directory. The result is cached by `version` of its file, as a start needs it several times."""
    content = json_object(read_bytes(path / MARKER, _MOST_BYTES))
    if content is None:
        raise unreadable(path / MARKER, "it is not a JSON object")
    if content.get("format") != _FORMAT:
        return None
    if (found := content.get("format_version")) != FORMAT_VERSION:
        raise CheckpointError(
            f"The run {path} has format version {found}, but this hpctrain reads version {FORMAT_VERSION}; "
            f"use the hpctrain that wrote it."
        )
    identity, order = content.get("run"), content.get("order")
    if not isinstance(identity, str) or not isinstance(order, int):
        raise unreadable(path / MARKER, "it has no identity or no order")
    return RunMarker(identity, min(max(0, order), _MOST_NS), str(content.get("directory", "")))


FOLDER = "owners"
#: environment variable with the mark of the `hpctrain run` process that started a training
SUPERVISOR = "HPCTRAIN_SUPERVISOR"
BEAT_SECONDS = 5.0
#: time without a change of its record after which an owner on another machine is considered dead
MISSED_SECONDS = 60.0

_NAME = re.compile(r"owner-(\d{5,})\.jsonl")
_LOOK_SECONDS = 0.5
# Maximum time between two checks that counts as watched: the waiting process may have been stopped in between.
_MOST_BETWEEN_LOOKS_SECONDS = 2.0
_LINE_BYTES = 40
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Owner:
    """Owner of a run, as described by its record.

    Args:
        token: text unique to this owner.
        mark: its process, as the text of a `ProcessMark`.
        since: time at which it became the owner, in UTC.
        supervisor: mark of the process of `hpctrain run` that started it; "" if none did.
    """

    number: int
    token: str
    mark: str
    host: str
    since: str
    command: str
    job: SchedulerJob = field(default_factory=SchedulerJob)
    supervisor: str = ""

    def __str__(self) -> str:
        process = ProcessMark.parse(self.mark)
        job = f" of {self.job}" if str(self.job) else ""
        return f"{self.command}, process {process.number if process else '?'} on {self.host}{job}, since {self.since}"


@dataclass(frozen=True)
class _Record:
    """Contents of an owner's record.

    Attributes:
        owner: owner; None if the record is damaged.
        released: whether the owner has released the run.
        is_file: whether this is the file that the owner created and not a copy of it.
    """

    number: int
    text: bytes
    owner: Owner | None
    released: bool = False
    is_file: bool = False


def owners(run: Path) -> list[Owner]:
    """Return all owners of a run, the latest last. Records that are damaged or cannot be read are omitted."""
    found = []
    with contextlib.suppress(OSError):
        for number in _numbers(run):
            with contextlib.suppress(RunOwnedError):
                record = _read(run, number)
                found += [] if record is None or record.owner is None else [record.owner]
    return found


def living_owner(run: Path) -> Owner | None:
    """Return the latest owner of a run; None if there is none, if it is known to have ended, or if its record is damaged.

    The call does not wait for a sign of life, so the returned owner may be dead.

    Raises:
        RunOwnedError, OSError: the record of the owner cannot be read, or records cannot be listed.
    """
    record = _latest(run, _numbers(run))
    over = record is None or record.released or _process_lives(record) is False
    return None if record is None or over else record.owner


def was_owned_by_job(run: Path, job: SchedulerJob) -> bool:
    """Return whether a start of `job`, such as one before the job was requeued, has owned the run."""
    return bool(job.chain) and any(job.is_chain_of(owner.job) for owner in owners(run))


class Contender:
    """Process that tries to become the owner of a run.

    Args:
        command: command that the process runs, for messages of other processes.
    """

    def __init__(self, run: Path, command: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._clock = run, clock
        self._owner = Owner(
            number=0,
            token=secrets.token_hex(8),
            mark=str(processes.own_mark()),
            host=platform.node(),
            since=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
            command=command,
            job=own_job(os.environ),
            supervisor=os.environ.get(SUPERVISOR, ""),
        )
        self._watched: _Record | None = None
        self._still_seconds = self._looked_at = 0.0

    def attempt(self) -> Ownership | None:
        """Return the ownership; None if it is unknown yet whether the owner is alive, or another process was faster: call again.

        Raises:
            RunOwnedError: another owner is alive.
            OSError: the run cannot be written.
        """
        (self._run / FOLDER).mkdir(exist_ok=True)
        numbers = _numbers(self._run)
        latest = _latest(self._run, numbers)
        ended = "" if latest is None else self._reason_ended(latest)
        if ended is None:
            return None
        owner = replace(self._owner, number=max(numbers, default=0) + 1)
        if not _make(self._run, owner):  # another process was faster; the next attempt finds its record
            return None
        if ended and latest is not None:
            _log.warning("%s is taken over from %s, %s.", self._run, latest.owner or "an unknown owner", ended)
        return Ownership(self._run, owner)

    def _reason_ended(self, record: _Record) -> str | None:
        """Return the reason why an owner is considered dead, as the end of a sentence.

        Returns:
            The reason; "" if the owner has released the run; None if it is not known yet whether the owner is alive.

        Raises:
            RunOwnedError: the owner is alive.
        """
        owner = record.owner
        if record.released:
            return ""
        if owner is not None:
            if self._owner.job.follows(owner.job):
                return "because the same job was queued again"
            lives = _process_lives(record)
            if lives is False:
                return "whose process has ended"
            if lives:
                raise _refusal(self._run, owner)
        return self._watch(record)

    def _watch(self, record: _Record) -> str | None:
        """Compare a record from another machine with its text at the previous check.

        Result and errors are those of `_reason_ended`.
        """
        now, before = self._clock(), self._watched
        owner = record.owner
        if before is None or before.number != record.number:
            lives = None if owner is None else owner.job.lives()
            if lives is False:
                return "whose job has ended according to its scheduler"
            if lives and owner is not None:
                raise _refusal(self._run, owner)
            self._watched, self._still_seconds, self._looked_at = record, 0.0, self._clock()
            _log.warning(
                "%s was last written to by %s. Only a change of its record shows whether this owner is alive; "
                "waiting up to %.0f s for a change.",
                self._run,
                owner or "an unknown owner",
                MISSED_SECONDS,
            )
            return None
        if record.text != before.text and owner is not None:
            raise _refusal(self._run, owner)
        self._still_seconds += min(now - self._looked_at, _MOST_BETWEEN_LOOKS_SECONDS)
        self._looked_at = now
        silent = self._still_seconds >= MISSED_SECONDS
        return f"which has shown no sign of life for {MISSED_SECONDS:.0f} s" if silent else None


class Claim:
    """Right of a job to write to a run, as each of its ranks knows it."""

    def __init__(self, run: Path, owner: Owner) -> None:
        self.run, self.owner = run, owner

    def require(self) -> None:
        """Raise unless the job still owns the run. Another job may take it over if the owner is stopped for long.

        Raises:
            RunOwnedError: another process has taken over.
            CheckpointError: the records of owners cannot be read.
        """
        try:
            self._next().lstat()
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise unreadable(self._next(), error) from error
        others = [owner for owner in owners(self.run) if owner.number > self.owner.number]
        raise RunOwnedError(
            f"The run {self.run} was taken over by {others[-1] if others else 'another job'}, because the owner in this job "
            f"seemed to have ended; this job stops writing to the run."
        )

    def _next(self) -> Path:
        return _path(self.run, self.owner.number + 1)


class Ownership(Claim):
    """Claim of the process that holds it, until `release`. A thread regularly updates the record as a sign of life."""

    def __init__(self, run: Path, owner: Owner) -> None:
        super().__init__(run, owner)
        self._path = _path(run, owner.number)
        self._beats = 0
        self._bookkeeping = Bookkeeping()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hpctrain-owner", daemon=True)
        self._thread.start()

    def require(self) -> None:
        """Raise unless this process still owns the run."""
        if self._ended.is_set():
            raise RunOwnedError(f"The run {self.run} was released by this process and is no longer written to.")
        super().require()

    def release(self) -> None:
        """Release the run. A second call has no effect."""
        if not self._ended.is_set():
            self._ended.set()
            if self._thread is not threading.current_thread():
                self._thread.join(2 * BEAT_SECONDS)
            self._write({"released": self._beats})

    def restore(self) -> None:
        """Write the record again if the run directory was removed.

        Raises:
            OSError: the record cannot be written.
        """
        if not self._path.exists() and not self._next().exists():
            (self.run / FOLDER).mkdir(parents=True, exist_ok=True)
            _make(self.run, self.owner)

    def _run(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            self._beats += 1
            self._write({"beat": self._beats})

    def _write(self, line: dict[str, int]) -> None:
        """Overwrite the last line of the record in place. A failure is logged: without signs of life, the run may be taken over.

        The line is short enough that readers never see a part of it. Overwriting it needs no additional disk space.
        """

        def write() -> None:
            with contextlib.suppress(FileNotFoundError):  # the directory was removed; the next checkpoint restores it
                descriptor = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
                try:
                    os.pwrite(descriptor, _last_line(line), os.fstat(descriptor).st_size - _LINE_BYTES)
                finally:
                    os.close(descriptor)

        self._bookkeeping.attempt("sign of life of the owner", write)


@contextlib.contextmanager
def owned(run: Path | None, command: str) -> Iterator[None]:
    """Own a run during the block; do nothing if `run` is None. The call waits until it is known whether another owner is alive.

    Raises:
        RunOwnedError: another owner is alive.
        OSError: the run cannot be written.
    """
    if run is None:
        yield
        return
    contender = Contender(run, command)
    while (ownership := contender.attempt()) is None:
        time.sleep(_LOOK_SECONDS)
    try:
        yield
    finally:
        ownership.release()


def _refusal(run: Path, owner: Owner) -> RunOwnedError:
    return RunOwnedError(
        f"The run {run} is being written to by {owner}, and a run has one owner at a time; wait until the owner ends, stop it, "
        f"or start a new run with another name or output."
    )


def _path(run: Path, number: int) -> Path:
    return run / FOLDER / f"owner-{number:05d}.jsonl"


def _numbers(run: Path) -> list[int]:
    """Return the numbers of all records, in order; raise OSError if they cannot be listed."""
    try:
        names = os.listdir(run / FOLDER)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(int(match[1]) for match in map(_NAME.fullmatch, names) if match)


def _latest(run: Path, numbers: Sequence[int]) -> _Record | None:
    """Return the record with the highest number; None if there is none."""
    for number in reversed(numbers):
        record = _read(run, number)
        if record is not None:
            return record
    return None


def _read(run: Path, number: int) -> _Record | None:
    """Return a record, which may be damaged; None if it has been deleted.

    Raises:
        RunOwnedError: the record cannot be read, so its owner may be alive.
    """
    try:
        require_regular(_path(run, number))
        # Some file systems return an outdated status for a file that is not open.
        with open(_path(run, number), "rb") as file:
            inode, text = os.fstat(file.fileno()).st_ino, file.read(1 << 16)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunOwnedError(
            f"The run {run} may have a living owner, whose record {_path(run, number)} cannot be read ({reason(error)}); grant "
            f"read permission, or start a new run with another name or output."
        ) from error
    try:
        first, last = map(json.loads, text.splitlines())
        owner = _owner(number, first)
        return _Record(number, text, owner, "released" in last, first["inode"] == inode)
    except (ValueError, TypeError, KeyError):
        return _Record(number, text, None)


def _owner(number: int, values: dict[str, Any]) -> Owner:
    known = ("token", "mark", "host", "since", "command", "supervisor")
    return Owner(number=number, job=SchedulerJob(**values["job"]), **{key: values[key] for key in known})


def _process_lives(record: _Record) -> bool | None:
    """Return whether the owner's process is alive; None if this is unknown or does not decide the ownership.

    A copy of a run contains the records of the original's owner, which does not own the copy; these records never change.
    """
    owner = record.owner
    mark = None if owner is None else ProcessMark.parse(owner.mark)
    if owner is None or mark is None:
        return None
    lives = mark.lives
    return None if lives and not record.is_file else lives


def _last_line(values: dict[str, int]) -> bytes:
    return json.dumps(values).encode().ljust(_LINE_BYTES - 1) + b"\n"


def _make(run: Path, owner: Owner) -> bool:
    """Create the record of an owner; return False if another owner has its number.

    Raises:
        OSError: the directory cannot be written.
    """
    target = _path(run, owner.number)
    begun = target.with_name(f".{target.name}.{owner.token}.{owner.mark}")
    descriptor = os.open(begun, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        try:
            _write_record(descriptor, owner)
        finally:
            os.close(descriptor)
        made = _link_new(begun, target, owner)
    finally:
        begun.unlink(missing_ok=True)
    if made:
        synchronise_directory(target.parent)
    return made


def _write_record(descriptor: int, owner: Owner) -> None:
    """Write a record to a new file and synchronise it."""
    of_version_1 = {"missed_seconds": MISSED_SECONDS, "outlives": False}  # release 0.1.0 requires them
    values = {**asdict(owner), **of_version_1, "inode": os.fstat(descriptor).st_ino}
    with open(descriptor, "wb", closefd=False) as file:
        file.write(json.dumps(values).encode() + b"\n" + _last_line({"beat": 0}))
    os.fsync(descriptor)


def _link_new(begun: Path, target: Path, owner: Owner) -> bool:
    """Link a complete file to a new name; return False if a file has that name already."""
    try:
        os.link(begun, target)
    except FileExistsError:
        return begun.stat().st_nlink > 1  # the link was made, but the file server's answer was lost and the request repeated
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return _create_new(target, owner)
    return True


def _create_new(target: Path, owner: Owner) -> bool:
    """Create a record on a file system without links.

    Other processes may briefly see an incomplete record, and then treat its owner as unknown.
    """
    try:
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except FileExistsError:
        return False
    try:
        _write_record(descriptor, owner)
    except OSError:
        target.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    return True
