"""Quiet moments: a rank whose core is slowed makes none for all."""

from __future__ import annotations

from benchmarks.quiet import QuietCores
from hpctrain.comm.base import Communicator
from hpctrain.virtual.run import run_virtual


class _Paced(QuietCores):
    """Cores that take the seconds that a test says."""

    def __init__(self, world: Communicator, seconds: list[float]) -> None:
        self._paces = [1.0] * 50 + seconds
        super().__init__(world)

    def probe(self) -> float:
        return self._paces.pop(0) if len(self._paces) > 1 else self._paces[0]


def test_a_moment_is_quiet_where_no_rank_is_slowed() -> None:
    def moments(comm: Communicator) -> list[bool]:
        cores = _Paced(comm, [1.0, 1.5, 1.0] if comm.rank else [1.0, 1.0, 1.05])
        return [cores.now() for _ in range(3)]

    assert run_virtual(2, moments) == [[True, False, True]] * 2


def test_a_wait_ends_with_the_first_quiet_moment_or_when_its_time_is_up() -> None:
    def waits(comm: Communicator) -> tuple[bool, bool]:
        cores = _Paced(comm, [2.0, 2.0, 1.0, 3.0])
        return cores.wait(60.0), cores.wait(0.0)

    assert run_virtual(2, waits) == [(True, False)] * 2
