"""Traces of all ranks as one file in Chrome's trace event format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

A rank is a process of the file. Its program is one thread with nested events, each queue another track, whose operations may
overlap and so are asynchronous events. Times are microseconds of rank 0's clock.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from hpctrain.trace.tracer import Category, Events

_PROGRAM = 0  # thread number of the program's own events; queues follow


class ChromeTrace:
    """Writes one rank after another; the file is whole once the `with` block has ended.

    Args:
        base_ns: the instant, by rank 0's clock, that becomes 0.

    Attributes:
        error: the first that the system refused, after which nothing is written; the file is removed at the end then.
    """

    def __init__(self, path: Path, base_ns: int) -> None:
        self._path = path
        self._base_ns = base_ns
        self._file: TextIO | None = None
        self._metadata: dict[str, Any] = {}
        self._first = True
        self.error: OSError | None = None

    def __enter__(self) -> ChromeTrace:
        with self._kept_errors():
            self._file = self._path.open("w", encoding="utf-8")
            self._file.write('{"displayTimeUnit": "ms", "traceEvents": [')
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._kept_errors():
            if self._file is not None:
                self._file.write(f'\n],\n"otherData": {json.dumps(self._metadata)}}}\n')
                self._file.close()
        if self.error is not None:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _kept_errors(self) -> Iterator[None]:
        """Keep what the system refuses inside the block, and write no more from then on."""
        try:
            yield
        except OSError as error:
            self.error = self.error or error
            file, self._file = self._file, None
            with contextlib.suppress(OSError):
                if file is not None:
                    file.close()

    def describe(self, values: Mapping[str, Any]) -> None:
        """Add to the file's metadata."""
        self._metadata.update(values)

    def add_rank(self, rank: int, events: Events, name: str | None = None) -> None:
        """Write the events of one rank, whose times are rank 0's. name: of its process in viewers; None: "rank 3"."""
        with self._kept_errors():
            self._add_rank(rank, events, f"rank {rank}" if name is None else name)

    def _add_rank(self, rank: int, events: Events, label: str) -> None:
        self._write({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": label}})
        self._write({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
        for thread, track in enumerate(("program", *events.tracks[1:])):
            self._write({"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": track}})
        labels = [json.dumps(name) for name in events.names]
        kinds = [category.name.lower() for category in Category]
        begin_us = (events.start_ns - self._base_ns) / 1e3
        length_us = (events.stop_ns - events.start_ns) / 1e3
        rows = zip(
            events.category.tolist(),
            events.name.tolist(),
            events.track.tolist(),
            events.number.tolist(),
            begin_us.tolist(),
            length_us.tolist(),
            strict=True,
        )
        for category, label_index, track, number, begin, length in rows:
            head = f'"name":{labels[label_index]},"cat":"{kinds[category]}","pid":{rank}'
            if category in (Category.COMMUNICATION, Category.DELAY):
                common = f'{head},"tid":{track},"id":"{rank}.{track}.{number}"'
                self._line(f'{{"ph":"b",{common},"ts":{begin:.3f},"args":{{"sequence":{number}}}}}')
                self._line(f'{{"ph":"e",{common},"ts":{begin + length:.3f}}}')
            else:
                thread = track if category == Category.THREAD else _PROGRAM
                extra = f',"args":{{"number":{number}}}' if category in (Category.WAIT, Category.STEP) else ""
                self._line(f'{{"ph":"X",{head},"tid":{thread},"ts":{begin:.3f},"dur":{length:.3f}{extra}}}')

    def _write(self, event: Mapping[str, Any]) -> None:
        self._line(json.dumps(event))

    def _line(self, text: str) -> None:
        if self._file is None:  # refused before
            return
        self._file.write("\n" + text if self._first else ",\n" + text)
        self._first = False
