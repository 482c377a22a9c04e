"""File format of a rank's flight record: a head, a ring of operations and a table of names, in a memory-mapped file.

Because the file is mapped, the operating system writes its content to the disk however the process ends. All numbers are
little-endian words of 8 bytes. The first word of an operation's record, its number, is written last, so a torn record belongs to
no operation.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path

from hpctrain.core.errors import DataError
from hpctrain.core.files import open_own, open_regular
from hpctrain.core.text import ranks_of
from hpctrain.launch import processes
from hpctrain.launch.process_end import FINISHED, STOPPED, End

MAGIC = int.from_bytes(b"hpcFLY01", "little")
#: number of operations in a ring
SLOTS = 2048

_HEAD_WORDS = 32
#: number of collective phases whose names the head keeps; ranks that diverge block each other within a step or two
PHASES_KEPT = 7
_RECORD_WORDS = 9
_NAME_BYTES = 1 << 18
_SIZE = 8 * (_HEAD_WORDS + _RECORD_WORDS * SLOTS) + _NAME_BYTES
_NAMES_AT = _SIZE - _NAME_BYTES
_LONGEST_NAME = 4000
#: maximum plausible number of ranks; a larger one is a sign of damage
_MOST_RANKS = 1 << 20
#: replaces names that do not fit into the table
_NO_ROOM = "(name left out: the table is full)"
# A process that this machine does not show may belong to another container, so its heartbeat must also be still for this long.
_GONE_SECONDS = 3.0


class Word(IntEnum):
    """Words of the head. Times are nanoseconds of the process's clock; 0: never."""

    MAGIC = 0
    JOB = 1  # number shared by all ranks of one start
    RANK = 2
    RANKS = 3
    PROCESS = 4
    HOST = 5  # offset of a name in the table, like PHASE, WAIT, SENTENCE and BLAMED
    ENDED = 6  # an `End`
    SIGNAL = 7  # number of the signal, or exit code of a process that exited
    CLOCK_AT = 8  # process's clock minus wall clock
    BEGUN = 9
    SEEN = 10  # latest tick of the heartbeat
    ALIVE = 11  # latest tick with progress
    PHASE = 12
    PHASE_SINCE = 13
    EPOCH = 14
    STEP = 15
    WAIT = 16  # 0: no wait
    WAIT_SINCE = 17
    WAIT_RECORD = 18  # number of the awaited operation; 0: outside the queues
    SENTENCE = 19  # message of the error that ended the process
    POSTED = 20  # number of operations so far
    NAMES = 21  # number of bytes used in the table of names
    DEADLINE = 22  # nanoseconds without progress after which the process ends the job
    BLAMED = 23  # name with the ranks that caused the end, if known
    PHASES = 24  # number of collective phases that the process has entered
    LATEST_PHASES = 25  # names of the latest phases: phase n at n modulo `PHASES_KEPT` from here, up to the head's last word


class Field(IntEnum):
    """Words of an operation's record."""

    NUMBER = 0  # from 1
    QUEUE = 1
    PURPOSE = 2
    SEQUENCE = 3
    OPERATION = 4
    POSTED = 5  # time of queueing; those of posting and completion follow
    STARTED = 6
    DONE = 7
    LINE = 8  # name with the source line; 0: unknown


class RingWriter:
    """Ring of this process, in memory at first, and in a file after `move`.

    Attributes:
        words: head and records, as integers.
    """

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, _SIZE)
        self.words = memoryview(self._map).cast("q")
        self._names: dict[str, int] = {}
        self.words[Word.MAGIC] = MAGIC
        self.name("")  # offset 0 means no name

    def move(self, path: Path) -> None:
        """Move the ring to a new file, which replaces the record of an earlier start.

        The earlier file is replaced, not truncated: after truncation, SIGBUS would kill a process that still maps the file.

        Raises:
            OSError: the file cannot be created, or the disk is full.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        begun = path.with_name(f".{path.name}.{processes.own_mark()}")
        descriptor = os.open(begun, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o664)
        try:
            os.posix_fallocate(descriptor, 0, _SIZE)  # a full disk raises an error here, instead of SIGBUS later
            moved = mmap.mmap(descriptor, _SIZE)
            moved[:] = self._map[:]
            os.replace(begun, path)
        except BaseException:
            begun.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        self._go_on_in(moved)

    def leave_file(self) -> None:
        """Move the ring to this process's memory."""
        self._go_on_in(mmap.mmap(-1, _SIZE))

    def _go_on_in(self, moved: mmap.mmap) -> None:
        moved[:] = self._map[:]
        self.words, old, earlier = memoryview(moved).cast("q"), self.words, self._map
        self._map = moved
        old.release()
        earlier.close()

    def name(self, text: str) -> int:
        """Return the offset of a text in the table of names, and add the text if it is new."""
        place = self._names.get(text)
        return self._add(text) if place is None else place

    def _add(self, text: str) -> int:
        data = text.encode("utf-8", "replace")[:_LONGEST_NAME]
        begin = self.words[Word.NAMES]
        end = begin + 8 + len(data) + -len(data) % 8
        if end > _NAME_BYTES - 64 and text != _NO_ROOM:
            return self.name(_NO_ROOM)
        at = _NAMES_AT + begin
        self._map[at + 8 : at + 8 + len(data)] = data
        self.words[at // 8] = len(data)
        self.words[Word.NAMES] = end
        self._names[text] = begin
        return begin

    def flush(self) -> None:
        """Write changes to the disk, where other nodes can read them, and wait for the disk.

        Errors of the disk are ignored: the caller has a more serious error to report, or continues.
        """
        with contextlib.suppress(OSError):
            self._map.flush()


def record_at(number: int) -> int:
    """Return the index of the first word of an operation's record. Operations are numbered from 1."""
    return _HEAD_WORDS + _RECORD_WORDS * ((number - 1) % SLOTS)


def phase_at(number: int) -> int:
    """Return the index of the word with the name of a collective phase. Phases are numbered from 1."""
    return Word.LATEST_PHASES + number % PHASES_KEPT


def _latest(phases: int) -> range:
    """Return the numbers of the phases whose names are kept after `phases` phases."""
    return range(max(1, phases - PHASES_KEPT + 1), phases + 1)


def file_name(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank:05d}.flight"


@dataclass(frozen=True)
class RecordedOperation:
    """Operation of a queue. Times are nanoseconds of the process's clock; 0: not yet.

    Attributes:
        number: number of the operation in its process.
        queue: name of the queue, with its ranks.
        purpose: what the operation is for, usually the name of a parameter.
        sequence: number of the operation in its queue.
        operation: name and size of the posted operation; "" before it is posted.
        posted_ns, started_ns, done_ns: times at which it was queued, posted and complete.
        line: source line that queued it, "file:number"; "": unknown.
    """

    number: int
    queue: str
    purpose: str
    sequence: int
    operation: str
    posted_ns: int
    started_ns: int
    done_ns: int
    line: str = ""


@dataclass(frozen=True)
class FlightRecord:
    """Content of one rank's ring. Times are nanoseconds of its clock. Other attributes are words of the head (`Word`).

    Attributes:
        operations: latest operations, in the order of queueing.
        wall_offset_ns: the process's clock minus the wall clock.
        phases: (number, name) of the latest collective phases, numbered from 1.
        gone: whether the process ended on this machine, seconds ago, without a record of its end.
    """

    job: int
    rank: int
    ranks: int
    process: int
    host: str
    end: End
    signal: int
    wall_offset_ns: int
    begun_ns: int
    seen_ns: int
    alive_ns: int
    phase: str
    phase_since_ns: int
    epoch: int
    step: int
    wait: str
    wait_since_ns: int
    wait_number: int
    sentence: str
    blamed: tuple[int, ...]
    deadline_ns: int
    operations: tuple[RecordedOperation, ...]
    phases: tuple[tuple[int, str], ...] = ()
    gone: bool = False

    @property
    def last_ns(self) -> int:
        """Last time at which the process is known to have been alive."""
        return max(self.moved_ns, self.seen_ns)

    @property
    def moved_ns(self) -> int:
        """Last time at which the process is known to have made progress. A wait counts as progress."""
        times = [self.begun_ns, self.alive_ns, self.phase_since_ns, self.wait_since_ns]
        times += [max(recorded.posted_ns, recorded.started_ns, recorded.done_ns) for recorded in self.operations]
        return max(times)

    def wall_seconds(self, clock_ns: int) -> float:
        """Convert a time of the process's clock to seconds of the wall clock."""
        return (clock_ns - self.wall_offset_ns) * 1e-9


def read(path: Path, *, operations: bool = True) -> FlightRecord:
    """Return a rank's record. The rank may still be writing to it.

    Args:
        operations: whether to read the operations. Callers that read many records repeatedly leave them out.

    Raises:
        DataError: the file is not a record, is truncated, or holds impossible numbers.
        OSError: the file cannot be read.
    """
    data = _content(path)
    words = memoryview(data)[: _SIZE - _NAME_BYTES].cast("q")
    if sys.byteorder != "little":
        raise DataError(f"Cannot read {path} on this big-endian machine; read it on a little-endian one.")
    fault = _fault(words)
    if fault:
        raise DataError(f"{path} is a damaged flight record: {fault}; delete it.")
    names = dict(_names(data, words[Word.NAMES]))

    def text(word: int) -> str:
        return names.get(word, "?")

    record = FlightRecord(
        job=words[Word.JOB],
        rank=words[Word.RANK],
        ranks=words[Word.RANKS],
        process=words[Word.PROCESS],
        host=text(words[Word.HOST]),
        end=End(words[Word.ENDED]),
        signal=words[Word.SIGNAL],
        wall_offset_ns=words[Word.CLOCK_AT],
        begun_ns=words[Word.BEGUN],
        seen_ns=words[Word.SEEN],
        alive_ns=words[Word.ALIVE],
        phase=text(words[Word.PHASE]),
        phase_since_ns=words[Word.PHASE_SINCE],
        epoch=words[Word.EPOCH],
        step=words[Word.STEP],
        wait=text(words[Word.WAIT]),
        wait_since_ns=words[Word.WAIT_SINCE],
        wait_number=words[Word.WAIT_RECORD],
        sentence=text(words[Word.SENTENCE]),
        blamed=_ranks(text(words[Word.BLAMED])),
        deadline_ns=words[Word.DEADLINE],
        operations=tuple(_operations(words, text)) if operations else (),
        phases=tuple((number, text(words[phase_at(number)])) for number in _latest(words[Word.PHASES])),
    )
    return replace(record, gone=_is_gone(record))


def _is_gone(record: FlightRecord) -> bool:
    """Return whether a process of this machine ended seconds ago without a record of its end; False on other machines."""
    if record.end is not End.RUNNING or record.host != platform.node():
        return False
    status = processes.status_of(record.process)
    return (status is None or status.dead) and time.time() - record.wall_seconds(record.last_ns) > _GONE_SECONDS


def _content(path: Path) -> bytes:
    """Return the content of a record's file, at most the size of a record. Pipes and devices are not read."""
    with open(open_regular(path), "rb") as file:
        data = file.read(_SIZE + 1)
    if len(data) != _SIZE or int.from_bytes(data[:8], "little") != MAGIC:
        fault = f"does not have {_SIZE} bytes" if len(data) != _SIZE else "begins with other bytes"
        raise DataError(
            f"{path} is not a flight record of this version: it {fault}; use the hpctrain that wrote it, or delete it."
        )
    return data


def _fault(words: memoryview) -> str:
    """Return the impossible value in the head of a record, in words; empty if there is none."""
    rank, ranks, end, number = (words[word] for word in (Word.RANK, Word.RANKS, Word.ENDED, Word.SIGNAL))
    if not 0 <= rank < (ranks or _MOST_RANKS) <= _MOST_RANKS:
        return f"it belongs to rank {rank} of {ranks}"
    if end not in End.__members__.values():
        return f"it has the unknown end {end}"
    if end == End.SIGNAL and number not in signal.Signals.__members__.values():
        return f"it was ended by the unknown signal {number}"
    return ""


def mark_end(path: Path, number: int, end: End = End.SIGNAL, process: int | None = None) -> bool:
    """Write the end of another process into its record, and return whether it was written.

    Call it on the same machine, because both processes must use the same clock. An end that the process wrote itself is kept,
    except that a finished run may still end by a signal, with an exit code of a failure, or without a launcher.

    Args:
        number: number of the signal; for End.EXITED, the exit code; for End.LAUNCHER, SIGSTOP if the launcher was stopped,
            otherwise 0.
        process: process whose record is changed; the record of another process is not. None: any process.

    Raises:
        OSError: the file cannot be written.
    """
    descriptor = open_own(path, os.O_RDWR)
    try:
        words = (Word.MAGIC, Word.ENDED, Word.PROCESS)
        head = [int.from_bytes(os.pread(descriptor, 8, 8 * word), "little") for word in words]
        ended_well = end is End.DEADLINE or (end is End.EXITED and number in (FINISHED, STOPPED))
        if head[0] != MAGIC or head[1] not in ((End.RUNNING,) if ended_well else (End.RUNNING, End.FINISHED)):
            return False
        if process not in (None, head[2]):  # the record of another process has replaced it
            return False
        for word, value in ((Word.SIGNAL, number), (Word.SEEN, time.perf_counter_ns()), (Word.ENDED, end)):
            os.pwrite(descriptor, value.to_bytes(8, "little"), 8 * word)
        return True
    finally:
        os.close(descriptor)


def _ranks(text: str) -> tuple[int, ...]:
    """Return the ranks in a text; empty if the table of names was full, or the text is damaged."""
    try:
        return ranks_of(text, _MOST_RANKS)
    except ValueError:
        return ()


def _names(data: bytes, length: int) -> Iterator[tuple[int, str]]:
    place = 0
    while place < min(length, _NAME_BYTES - 8):
        at = _NAMES_AT + place
        size = int.from_bytes(data[at : at + 8], "little")
        yield place, _shown(data[at + 8 : at + 8 + size].decode("utf-8", "replace"))
        place += 8 + size + -size % 8


def _shown(name: str) -> str:
    """Return a name with its control characters replaced, because they would affect a terminal."""
    if name.isprintable():
        return name
    return "".join(character if character.isprintable() or character == "\n" else "?" for character in name)


def _operations(words: memoryview, text: Callable[[int], str]) -> Iterator[RecordedOperation]:
    posted: int = words[Word.POSTED]
    for number in range(max(1, posted - SLOTS + 1), posted + 1):
        at = record_at(number)
        if words[at + Field.NUMBER] == number:
            values = words[at : at + _RECORD_WORDS]
            yield RecordedOperation(
                number,
                text(values[Field.QUEUE]),
                text(values[Field.PURPOSE]),
                values[Field.SEQUENCE],
                text(values[Field.OPERATION]),
                values[Field.POSTED],
                values[Field.STARTED],
                values[Field.DONE],
                text(values[Field.LINE]),
            )
