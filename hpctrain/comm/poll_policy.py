"""How often a program looks at its messages at the end of an operator, and how it waits: rules without clocks of their own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WaitPolicy:
    """The way from a spin to a sleep, in seconds.

    A wait polls, offering its core to others after each poll for `offering_seconds`: as quick as a spin where it has the core to
    itself. Later it sleeps for `sleep_seconds` between polls, so that a slow rank gets the core; or for `growing_share` of the
    time waited so far where that is longer, up to `longest_seconds`.
    """

    offering_seconds: float = 1e-3
    sleep_seconds: float = 50e-6
    growing_share: float = 0.0
    longest_seconds: float = 10e-3

    def sleeps(self, waited_seconds: float) -> bool:
        """Whether a wait that has lasted so long sleeps before its next poll."""
        return waited_seconds > self.offering_seconds

    def next_sleep(self, waited_seconds: float) -> float:
        """The seconds that a wait which has lasted so long sleeps before its next poll."""
        return max(self.sleep_seconds, min(self.growing_share * waited_seconds, self.longest_seconds))


#: for ranks that share a core: one that polls takes it from the rank that it waits for
SLEEPS_AT_ONCE = WaitPolicy(offering_seconds=0.0)

#: for start-up with more ranks on a node than cores: polls every 50 us of 63 ranks leave little to the one that they wait for
MORE_RANKS_THAN_CORES = WaitPolicy(growing_share=0.02)


class FurtherPolls:
    """Further polls at the end of an operator, as long as they take no more than a share of the operator's time.

    A message that moves in many small pieces, as over TCP, moves by one piece for each look. A poll is expected to take as long
    as the one before; so an operator is followed by one poll at least, and by a second one only where it lasted `1 / share` times
    as long as both.

    Args:
        share: of an operator's time that all polls after it may take, 0 .. 1.
    """

    def __init__(self, share: float) -> None:
        assert 0 <= share <= 1
        self._share = share
        self._ended_seconds: float | None = None
        self._begin_seconds = self._latest_seconds = self._allowed_seconds = 0.0

    def begin(self, now: float) -> None:
        """An operator has ended at this instant of any clock; the first poll begins."""
        operator_seconds = 0.0 if self._ended_seconds is None else now - self._ended_seconds
        self._allowed_seconds = self._share * operator_seconds
        self._begin_seconds = self._latest_seconds = now

    def another(self, now: float) -> bool:
        """A poll has ended at this instant: whether one more may begin."""
        poll_seconds, self._latest_seconds = now - self._latest_seconds, now
        return now - self._begin_seconds + poll_seconds <= self._allowed_seconds

    def end(self, now: float) -> None:
        """The last poll has ended, and the next operator begins."""
        self._ended_seconds = now
