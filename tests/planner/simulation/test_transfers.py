"""Messages move while somebody looks, and as far as the transport takes them unattended."""

from __future__ import annotations

import pytest

from hpctrain.planner.collective_costs import Stage
from hpctrain.planner.simulation.event_loop import EventLoop
from hpctrain.planner.simulation.lanes import Lane
from hpctrain.planner.simulation.shared_resource import SharedResource
from hpctrain.planner.simulation.transfers import StageTransfer


class _Looker:
    """Looks at given instants, and waits from one on."""

    def __init__(self, loop: EventLoop, lane: Lane, looks: list[float], waits_from: float | None) -> None:
        self.attends = False
        self.transfer: StageTransfer | None = None
        self._lane = lane
        for seconds in looks:
            loop.at(seconds, self._look)
        if waits_from is not None:
            loop.at(waits_from, self._wait)

    def owes(self, seconds: float) -> None:
        """Messages take no time of a core here."""
        assert seconds == 0

    def blocked(self, transfer: StageTransfer) -> None:
        """It goes on at the next look."""

    def _look(self) -> None:
        self._lane.look()
        assert self.transfer is not None
        self.transfer.look()

    def _wait(self) -> None:
        self.attends = True
        assert self.transfer is not None
        self.transfer.attend()


def _end(
    seconds: float,
    *,
    latency: float = 0.0,
    rounds: int = 1,
    unattended: float | None = None,
    polls: int = 0,
    looks: tuple[float, ...] = (),
    waits_from: float | None = None,
) -> float | None:
    """The end of a stage that takes so many seconds of the wire; None: never."""
    loop, ends = EventLoop(), []
    lane = Lane(SharedResource(loop, 1.0))
    looker = _Looker(loop, lane, list(looks), waits_from)
    stage = Stage(True, latency, seconds, 1.0, 0.0, rounds, unattended_bytes=unattended, polls=polls)
    looker.transfer = StageTransfer(loop, looker, stage, lane, 1.0, lambda: ends.append(loop.now))
    looker.transfer.begin()
    loop.run()
    return ends[0] if ends else None


def test_a_message_that_the_transport_takes_moves_by_itself() -> None:
    assert _end(2.0, latency=0.5) == 2.5


def test_a_wait_that_begins_as_the_last_byte_arrives_finds_all_of_it_moved() -> None:
    assert _end(2.0, waits_from=2.0) == 2.0


def test_nothing_moves_beyond_what_goes_unattended() -> None:
    assert _end(2.0, unattended=1.5) is None
    assert _end(2.0, unattended=1.5, looks=(5.0,)) == 5.5
    assert _end(2.0, unattended=1.5, looks=(1.0,)) == pytest.approx(2.0)  # the look came while it moved
    assert _end(2.0, unattended=0.5, looks=(1.0, 2.0, 3.0)) == pytest.approx(3.5)


def test_each_round_begins_at_a_look() -> None:
    assert _end(3.0, rounds=3, latency=0.3) is None
    assert _end(3.0, rounds=3, latency=0.3, looks=(2.0, 10.0)) == pytest.approx(11.1)


def test_a_handshake_takes_polls() -> None:
    assert _end(3.0, polls=2, looks=(1.0,)) is None
    assert _end(3.0, polls=2, latency=0.5, looks=(1.0, 2.0)) == pytest.approx(5.5)
    assert _end(4.0, rounds=2, polls=1, looks=(1.0, 4.0, 5.0)) == pytest.approx(7.0)
    assert _end(3.0, polls=2, looks=(1.0,), waits_from=7.0) == pytest.approx(10.0)
    assert _end(3.0, polls=2, waits_from=0.0) == pytest.approx(3.0)


def test_a_wait_lets_everything_move() -> None:
    assert _end(3.0, rounds=3, latency=0.3, waits_from=0.0) == pytest.approx(3.3)
    assert _end(3.0, rounds=3, latency=0.3, waits_from=5.0) == pytest.approx(5.0 + 2.2)
    assert _end(2.0, unattended=0.5, waits_from=4.0) == pytest.approx(5.5)
    assert _end(2.0, unattended=1.0, waits_from=0.5) == pytest.approx(2.0)


@pytest.mark.parametrize("rounds", [1, 2, 7])
@pytest.mark.parametrize("unattended", [0.1, 1.0, None])
def test_more_looks_never_make_it_later(rounds: int, unattended: float | None) -> None:
    few = _end(2.0, rounds=rounds, unattended=unattended, looks=tuple(float(k) for k in range(1, 60)))
    many = _end(2.0, rounds=rounds, unattended=unattended, looks=tuple(k / 4 for k in range(1, 240)))
    waiting = _end(2.0, rounds=rounds, unattended=unattended, waits_from=0.0)
    assert few is not None
    assert many is not None
    assert waiting is not None
    assert waiting <= many + 1e-9
    assert many <= few + 1e-9


def test_an_ended_wait_leaves_a_round_under_way() -> None:
    loop, ends = EventLoop(), []
    lane = Lane(SharedResource(loop, 1.0))
    looker = _Looker(loop, lane, [9.0], None)
    looker.attends = True
    transfer = StageTransfer(loop, looker, Stage(True, 0.0, 4.0, 1.0, 0.0, 4), lane, 1.0, lambda: ends.append(loop.now))
    looker.transfer = transfer
    transfer.begin()

    def leave() -> None:
        looker.attends = False
        transfer.leave()

    loop.at(2.5, leave)  # in the third of four rounds of a second, which ends at 3; the fourth begins at the next look
    loop.run()
    assert ends == pytest.approx([10.0])


def test_a_wait_that_begins_at_the_last_byte_ends_the_round() -> None:
    assert _end(2.0, unattended=5.0, waits_from=2.0) == pytest.approx(2.0)
    assert _end(2.0, rounds=2, unattended=5.0, waits_from=1.0) == pytest.approx(2.0)
