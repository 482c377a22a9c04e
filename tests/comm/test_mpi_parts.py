"""Parts of the MPI communicator with a scripted MPI: handles, buffers, and what follows from lost ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.backend.cuda.device import DeviceArray
from hpctrain.comm.base import piece
from hpctrain.comm.mpi import LostRanks, MpiBuffers, MpiHandle, dtype_char, named, not_empty
from hpctrain.core.errors import RankLostError

FAILED, PENDING, REVOKED, OTHER = 75, 76, 77, 17


class MpiError(Exception):
    """As mpi4py's."""

    def __init__(self, kind: int) -> None:
        super().__init__(kind)
        self._kind = kind

    def Get_error_class(self) -> int:
        return self._kind


class ScriptedMpi:
    """The names that are used of the module."""

    Exception = MpiError
    ERR_PROC_FAILED, ERR_PROC_FAILED_PENDING, ERR_REVOKED = FAILED, PENDING, REVOKED


class Group:
    """Some ranks of a world, whose numbers are its own."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks, self.size = ranks, len(ranks)

    def Translate_ranks(self, places: list[int], other: Group) -> list[int]:
        return [other.ranks.index(self.ranks[place]) for place in places]

    def Free(self) -> None:
        pass


class RevocableCommunicator:
    """A communicator that can be revoked; some of its ranks are dead."""

    def __init__(self, size: int = 4, dead: tuple[int, ...] = ()) -> None:
        self.size, self.dead, self.revocations = size, dead, 0
        self.probes, self.known_after = 0, -1

    def Get_failed(self) -> Group:
        return Group(self.dead)

    def Get_group(self) -> Group:
        return Group(tuple(range(self.size)))

    def Get_size(self) -> int:
        return self.size

    def Iprobe(self) -> bool:
        self.probes += 1
        if self.probes == self.known_after:
            self.dead = (3,)
            raise MpiError(PENDING)
        return False

    def Is_revoked(self) -> bool:
        return self.revocations > 0

    def Revoke(self) -> None:
        self.revocations += 1


class Operation:
    """An operation in flight, which ends at a test with or without an error, as a handle does."""

    def __init__(self, lost: LostRanks, tests: int, kind: int | None) -> None:
        self.tests, self.kind, self.ended, self._lost = tests, kind, False, lost
        lost.begun(self)

    def test(self) -> bool:
        assert not self.ended, "tested after its end"
        self.tests -= 1
        if self.tests > 0:
            self._lost.polled()
            return False
        self.ended = True
        self._lost.ended(self)
        if self.kind is not None:
            self._lost.check(MpiError(self.kind))
        return True


@pytest.mark.parametrize("kind", [FAILED, PENDING, REVOKED])
def test_an_error_of_a_lost_rank_revokes_every_communicator_once(kind: int) -> None:
    world, parts = RevocableCommunicator(dead=(2,)), [RevocableCommunicator(2), RevocableCommunicator(2)]
    lost = LostRanks(ScriptedMpi, world)
    for part in parts:
        lost.made(part)
    for _ in range(2):
        with pytest.raises(RankLostError, match=r"Rank 2 of 4 was lost.*--resume.*on_lost_rank to shrink"):
            lost.check(MpiError(kind))
    assert [comm.revocations for comm in (world, *parts)] == [1, 1, 1]


def test_another_error_is_not_of_a_lost_rank() -> None:
    world = RevocableCommunicator()
    LostRanks(ScriptedMpi, world).check(MpiError(OTHER), sleep=lambda seconds: None)
    assert not world.revocations


@pytest.mark.parametrize("probes", [1, 40])
def test_any_error_is_of_a_lost_rank_once_one_is_known(probes: int) -> None:
    """A message to a process that has just died fails before MPI hears of its death."""
    world = RevocableCommunicator()
    world.known_after = probes
    with pytest.raises(RankLostError, match="Rank 3 of 4 was lost"):
        LostRanks(ScriptedMpi, world).check(MpiError(OTHER), sleep=lambda seconds: None)
    assert world.revocations == 1


def test_a_rank_that_waits_elsewhere_sees_the_world_revoked() -> None:
    """It shares no other communicator with those that know."""
    world, part = RevocableCommunicator(), RevocableCommunicator(2)
    lost = LostRanks(ScriptedMpi, world)
    lost.made(part)

    def poll() -> None:
        for _ in range(10_000):
            lost.polled()

    poll()
    world.Revoke()
    with pytest.raises(RankLostError, match="A rank of 4 was lost"):
        poll()
    assert part.revocations == 1


@given(st.lists(st.tuples(st.integers(1, 600), st.sampled_from([None, FAILED, REVOKED])), max_size=8))
def test_all_that_is_in_flight_is_tested_until_it_has_ended(operations: list[tuple[int, int | None]]) -> None:
    lost = LostRanks(ScriptedMpi, RevocableCommunicator(dead=(1,)))
    lost.revoke()
    handles = [Operation(lost, tests, kind) for tests, kind in operations]
    assert lost.settle(60.0, sleep=lambda seconds: None)
    assert all(handle.ended for handle in handles)
    assert not lost.unsettled()


def test_what_does_not_end_is_kept_and_reported() -> None:
    lost = LostRanks(ScriptedMpi, RevocableCommunicator(dead=(1,)))
    lost.revoke()
    stuck = Operation(lost, 10**9, None)
    assert not lost.settle(0.01)
    assert lost.unsettled() == (stuck,)


def test_ranks_are_named() -> None:
    assert [named(ranks) for ranks in ((), (3,), (1, 2, 5))] == ["A rank", "Rank 3", "Ranks 1-2, 5"]


class Request:
    """Ends at the last of its tests, or fails there."""

    def __init__(self, *results: bool | Exception) -> None:
        self._results = list(results)

    def Test(self) -> bool:
        result = self._results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result


class Clock:
    """Nanoseconds that only scripted calls advance."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    scripted = Clock()
    monkeypatch.setattr("hpctrain.comm.mpi.time.perf_counter_ns", scripted)
    monkeypatch.setattr(MpiHandle, "_shortest_ns", 400)
    return scripted


class Ledger:
    """Stands in for `LostRanks`."""

    error = OSError

    def __init__(self, *, knows: bool = False) -> None:
        self.calls: list[str] = []
        self._knows = knows

    def begun(self, handle: MpiHandle) -> None:
        self.calls.append("begun")

    def ended(self, handle: MpiHandle) -> None:
        self.calls.append("ended")

    def polled(self) -> None:
        self.calls.append("polled")

    def check(self, error: Exception) -> None:
        if self._knows:
            raise RankLostError("Rank 1 of 3 was lost.")


def test_a_handle_is_complete_when_its_request_is() -> None:
    handle = MpiHandle(Request(False, True), "barrier")
    assert [handle.test(), handle.test()] == [False, True]


class TimedRequest:
    """Moves data in its first calls, and in none after them."""

    def __init__(self, clock: Clock, moving: int) -> None:
        self._clock, self._moving, self.calls = clock, moving, 0

    def Test(self) -> bool:
        self.calls += 1
        self._clock.now += 5_000 if self.calls <= self._moving else 1_500
        return False


@pytest.mark.parametrize(("moving", "calls"), [(0, 1), (1, 2), (5, 6), (200, 64)])
def test_a_test_calls_mpi_while_data_moves(clock: Clock, moving: int, calls: int) -> None:
    """With a single call, the link would idle during the next operator; calls without end would stop the program."""
    request = TimedRequest(clock, moving)
    assert not MpiHandle(request, "allgather").test()
    assert request.calls == calls


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64", "uint8", "uint16"])
def test_its_text_has_elements_and_dtype(dtype: str) -> None:
    assert str(MpiHandle(Request(), "allreduce", np.zeros((2, 3), dtype))) == f"allreduce of 6 {dtype} elements"
    assert str(MpiHandle(Request(), "barrier")) == "barrier"


def test_who_watches_for_lost_ranks_hears_of_begin_polls_and_end() -> None:
    ledger = Ledger()
    handle = MpiHandle(Request(False, True), "barrier", None, cast(LostRanks, ledger))
    assert [handle.test(), handle.test()] == [False, True]
    assert ledger.calls == ["begun", "polled", "ended"]


@pytest.mark.parametrize(("knows", "raised"), [(True, RankLostError), (False, OSError)])
def test_an_error_is_one_of_a_lost_rank_where_one_is_known(knows: bool, raised: Any) -> None:
    ledger = Ledger(knows=knows)
    handle = MpiHandle(Request(OSError("MPI_ERR_OTHER")), "barrier", None, cast(LostRanks, ledger))
    with pytest.raises(raised):
        handle.test()
    assert ledger.calls == ["begun", "ended"]


NAMES = ("FLOAT", "DOUBLE", "INT32_T", "INT64_T", "UINT8_T", "UINT16_T")


def _buffers() -> MpiBuffers:
    library: Any = SimpleNamespace(**{name: name for name in NAMES})
    library.buffer = SimpleNamespace(fromaddress=lambda address, size: (address, size))
    return MpiBuffers(library)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [("float32", "FLOAT"), ("float64", "DOUBLE"), ("uint8", "UINT8_T"), ("bfloat16", "UINT16_T")],
)
def test_arrays_of_a_device_are_addresses(dtype: str, name: str) -> None:
    array = DeviceArray(4096, (3, 2), dtype, None)
    assert _buffers().whole(array) == ((4096, array.nbytes), name)
    assert _buffers().whole(array.reshape(-1)[2:4])[0] == (4096 + 2 * array.itemsize, 2 * array.itemsize)


def test_arrays_of_the_host_are_themselves() -> None:
    for dtype, name in (("int32", "INT32_T"), ("int64", "INT64_T"), ("uint16", "UINT16_T")):
        array = np.zeros(3, dtype)
        assert _buffers().whole(array) == (array, name) or _buffers().whole(array)[0] is array
    with pytest.raises(AssertionError, match="C-contiguous"):
        _buffers().whole(np.zeros((3, 2), np.float32)[:, 0])


def test_pieces() -> None:
    array = np.arange(6.0)
    _, (counts, places), datatype = _buffers().others_parts(array, [1, 3, 2], 1)
    assert (counts, places, datatype) == ([1, 0, 2], [0, 1, 4], "DOUBLE")
    np.testing.assert_array_equal(piece(array, [1, 3, 2], 1), [1.0, 2.0, 3.0])
    assert piece(DeviceArray(64, (6,), "float32", None), [1, 3, 2], 2).pointer == 64 + 16


def test_an_empty_buffer_begins_where_no_other_does() -> None:
    array = np.zeros(4)
    assert not_empty(array) is array
    for empty in (array[:0], DeviceArray(64, (0,), "bfloat16", None)):
        other = not_empty(empty)
        assert (other.size, dtype_char(other)) == (0, dtype_char(empty))
        assert other.ctypes.data != array.ctypes.data
