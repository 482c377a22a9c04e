"""Links between emulated devices: the operations of NCCL between GPUs, as host messages between their processes.

A call is a piece of a stream's work. It begins when it is next in its stream, and ends once the pieces of the other devices have
progressed far enough. Ranks may be threads of one process or processes under MPI. If devices enqueue different calls, every rank
raises an error. If two groups are used in different orders on two ranks, each waits for the other, as on GPUs; virtual ranks
report the deadlock, and processes reach their deadline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from hpctrain.backend.arithmetic import Peers
from hpctrain.backend.cuda.device import DeviceArray, DeviceStream
from hpctrain_testing.emulator.memory import EmulatedDeviceError, borrowed, bytes_of, on_host

#: number of bytes of a description that ranks compare; of longer ones they also compare the length
_WORDS_BYTES = 256
#: first tag of messages between two devices; collectives have lower tags
_FIRST_TAG = 1 << 12

_Handles = Sequence[Any]


@dataclass(frozen=True)
class _Call:
    """One call.

    Attributes:
        arrays: borrowed arrays; for a reduction, the sent and the received one.
        peer: root, target or source; -1: all ranks.
    """

    kind: Literal["send", "receive", "broadcast", "sum to all", "sum to one"]
    arrays: tuple[DeviceArray, ...]
    peer: int = -1

    @property
    def words(self) -> str:
        """Text that must be equal on all ranks; empty for a message between two ranks."""
        if self.kind in ("send", "receive"):
            return ""
        array = self.arrays[0]
        root = "" if self.peer < 0 else f" at {self.peer}"
        return f"{self.kind}{root} of {array.size} {array.dtype}"


@dataclass
class LinkWork:
    """A piece of work in steps. Each step begins once the messages of the previous step are complete."""

    steps: Iterator[_Handles]
    waiting: list[Any] = field(default_factory=list)

    def advance(self) -> bool:
        """Do the steps whose messages have arrived; return whether all steps are done."""
        while True:
            self.waiting = [handle for handle in self.waiting if not handle.test()]
            if self.waiting:
                return False
            step = next(self.steps, None)
            if step is None:
                return True
            self.waiting = list(step)


class EmulatedLinks:
    """Links of one emulated device; implements `DeviceLinks`.

    Args:
        peers: communicator of the processes.
        stream: stream of the links' work.
        enqueue: callback of the device that adds work to a stream.
        require: callback that raises for arrays that are not in memory in use.
    """

    def __init__(self, peers: Peers, stream: DeviceStream, enqueue: Callable[..., None], require: Callable[..., None]) -> None:
        self._peers, self._stream, self._enqueue, self._require = peers, stream, enqueue, require
        self._together: list[tuple[_Call, tuple[DeviceArray, ...]]] | None = None

    @contextmanager
    def together(self) -> Iterator[None]:
        assert self._together is None, "groups of calls are not nested"
        self._together = []
        try:
            yield
            self._put(self._together)
        finally:
            self._together = None

    def send(self, array: DeviceArray, to: int) -> None:
        self._add("send", (array,), to)

    def receive(self, array: DeviceArray, source: int) -> None:
        self._add("receive", (array,), source)

    def broadcast(self, array: DeviceArray, root: int) -> None:
        self._add("broadcast", (array,), root)

    def sum_to_all(self, array: DeviceArray) -> None:
        self._add("sum to all", (array,))

    def sum_to_one(self, send: DeviceArray, recv: DeviceArray, root: int) -> None:
        self._add("sum to one", (send, recv), root)

    def fault(self) -> str | None:
        return None  # errors are raised immediately

    def abort(self) -> None:
        """Do nothing: no work runs outside the process."""

    def _add(self, kind: Any, arrays: tuple[DeviceArray, ...], peer: int = -1) -> None:
        call = _Call(kind, tuple(map(borrowed, arrays)), peer)
        if self._together is None:
            self._put([(call, arrays)])
        else:
            self._together.append((call, arrays))

    def _put(self, calls: Sequence[tuple[_Call, tuple[DeviceArray, ...]]]) -> None:
        if calls:
            keep_alive = [array for _, arrays in calls for array in arrays]
            work = LinkWork(self._steps([call for call, _ in calls]))
            # All work is done in steps, so the piece itself does nothing.
            self._enqueue(self._stream, lambda: None, "links", keep_alive, goes_on=work.advance)

    def _steps(self, calls: Sequence[_Call]) -> Iterator[_Handles]:
        """Compare the calls of all ranks, move arrays, and add summands."""
        mine = self._description(calls)
        everybody = np.empty(mine.size * self._peers.size, np.uint8)
        yield [self._peers.iallgather(mine, everybody, [mine.size] * self._peers.size)]
        self._check(everybody.reshape(self._peers.size, -1))
        for call in calls:
            leaves_target = call.kind == "sum to one" and call.peer != self._peers.rank
            self._require(*(call.arrays[:1] if leaves_target else call.arrays))
        parts: list[dict[int, np.ndarray]] = [{} for _ in calls]  # summands by rank
        yield self._messages(calls, parts)
        for call, arrived in zip(calls, parts, strict=True):
            if arrived:
                total = arrived[0].copy()
                for rank in range(1, self._peers.size):
                    total += arrived[rank]
                on_host(call.arrays[-1])[...] = total

    def _description(self, calls: Sequence[_Call]) -> np.ndarray:
        """Return the texts of collectives, and the bytes sent to and received from each other rank."""
        words = ", ".join(filter(None, (call.words for call in calls))).encode()
        text = np.zeros(_WORDS_BYTES, np.uint8)
        keep_alive = words[: _WORDS_BYTES - 8]
        text[: len(keep_alive)] = np.frombuffer(keep_alive, np.uint8)
        text[-8:] = np.frombuffer(np.int64(len(words)).tobytes(), np.uint8)
        moved: Counter[tuple[str, int]] = Counter()
        for call in calls:
            moved[call.kind, call.peer] += call.arrays[0].nbytes
        counts = [moved[kind, other] for kind in ("send", "receive") for other in range(self._peers.size)]
        return np.concatenate([text, np.array(counts, np.int64).view(np.uint8)])

    def _check(self, everybody: np.ndarray) -> None:
        """Raise on every rank unless all ranks have enqueued the same calls.

        Raises:
            EmulatedDeviceError: ranks have enqueued different calls.
        """
        words = [bytes(row[: _WORDS_BYTES - 8]).rstrip(b"\0").decode() or "messages alone" for row in everybody]
        for rank, row in enumerate(everybody):
            if not np.array_equal(row[:_WORDS_BYTES], everybody[0, :_WORDS_BYTES]):
                raise EmulatedDeviceError(
                    f"The devices of ranks 0 and {rank} have enqueued different calls: {words[0]}; and {words[rank]}."
                )
        ranks = self._peers.size
        sent, received = (
            everybody[:, _WORDS_BYTES:].copy().view(np.int64).reshape(ranks, 2, ranks).transpose(1, 0, 2)
        )  # [rank, other]
        wrong = np.argwhere(sent != received.T)
        if wrong.size:
            source, target = wrong[0]
            texts = f"sends {sent[source, target]} bytes to rank {target}, which expects {received[target, source]}"
            raise EmulatedDeviceError(f"The device of rank {source} {texts}.")

    def _messages(self, calls: Sequence[_Call], parts: Sequence[dict[int, np.ndarray]]) -> _Handles:
        """Start moving the arrays of all calls.

        Args:
            parts: mappings, one per call, that are filled with the summands of this and other ranks.
        """
        handles: list[Any] = []
        numbers: Counter[tuple[str, int]] = Counter()
        me, others = self._peers.rank, [rank for rank in range(self._peers.size) if rank != self._peers.rank]
        for tag, (call, arrived) in enumerate(zip(calls, parts, strict=True)):
            memory = bytes_of(call.arrays[0])
            if call.kind in ("send", "receive"):
                pair = _FIRST_TAG + numbers[call.kind, call.peer]
                numbers[call.kind, call.peer] += 1
                begin = self._peers.isend if call.kind == "send" else self._peers.irecv
                handles.append(begin(memory, call.peer, pair))
            elif call.kind == "broadcast":
                handles += (
                    [self._peers.isend(memory, other, tag) for other in others]
                    if call.peer == me
                    else [self._peers.irecv(memory, call.peer, tag)]
                )
            else:
                handles += self._summands(call, tag, arrived, others)
        return handles

    def _summands(self, call: _Call, tag: int, arrived: dict[int, np.ndarray], others: Sequence[int]) -> list[Any]:
        """Send this rank's summand to the ranks that add; receive all summands if this rank is one of them."""
        me, values = self._peers.rank, on_host(call.arrays[0])
        handles = [self._peers.isend(values, other, tag) for other in others if call.peer in (-1, other)]
        if call.peer in (-1, me):
            arrived[me] = values.copy()
            for other in others:
                arrived[other] = np.empty_like(values)
                handles.append(self._peers.irecv(arrived[other], other, tag))
        return handles
