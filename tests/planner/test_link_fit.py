"""From points to a link: synthetic links are found again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from hpctrain.planner import link_fit
from hpctrain.planner.link_measurement import SIZES, MessagePoint


def _points(
    seconds: Callable[[int], float], following: Callable[[int], float] | None = None, polls: float = 0
) -> list[MessagePoint]:
    after = following or seconds
    return [MessagePoint(n, seconds(n), after(n), polls, 1e-3, 1e-5 + 2e-10 * n, 1e-5 + 5e-10 * n) for n in SIZES]


def test_a_straight_line_is_found_again() -> None:
    found = link_fit.link(_points(lambda n: 5e-6 + 2e-9 * n))
    for n_bytes in (1, 100, 5000, 10**6, 10**8):
        assert found.message_seconds(n_bytes) == pytest.approx(5e-6 + 2e-9 * n_bytes, rel=1e-6)
    assert found.burst_bytes == 0
    assert found.operation_seconds == pytest.approx(1e-5, rel=0.02)
    assert found.byte_seconds == pytest.approx(1e-10, rel=0.01)  # sent and received
    assert found.sum_seconds == pytest.approx(3e-10)


def test_two_protocols_are_two_lines_and_no_jump_is_lost() -> None:
    def seconds(n: int) -> float:
        return 1e-6 + 4e-9 * n if n < 64 << 10 else 50e-6 + 3.5e-9 * n

    found = link_fit.link(_points(seconds))
    for n_bytes in SIZES:
        assert found.message_seconds(n_bytes) == pytest.approx(seconds(n_bytes), rel=1e-6)


def test_a_disturbed_point_does_not_make_larger_messages_quicker() -> None:
    points = _points(lambda n: 1.0 if n == 4096 else 5e-6 + 2e-9 * n)
    found = link_fit.link(points)
    times = [found.message_seconds(n) for n in SIZES]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(5e-6 + 2e-9 * SIZES[-1])
    assert times[1] < 1e-4


@pytest.mark.parametrize("burst_bytes", [300_000, 500_000])
@pytest.mark.parametrize("beta", [16e-9, 8e-9, 4e-9])
def test_what_passes_after_a_pause_is_found_again(burst_bytes: int, beta: float) -> None:
    def seconds(n: int) -> float:
        return 20e-6 + beta * max(0, n - burst_bytes)

    points = _points(seconds, lambda n: seconds(2 * n) - seconds(n))
    found = link_fit.link(points)
    assert found.burst_bytes == pytest.approx(burst_bytes, rel=0.03)
    assert [segment.beta_seconds_per_byte for segment in found.segments] == pytest.approx([beta] * len(found.segments), rel=0.01)
    assert max(segment.alpha_seconds for segment in found.segments) < 3e-4


@pytest.mark.parametrize(
    ("polls", "seconds", "gap", "expected"),
    [
        (0, 1e-3, 1e-3, (None, 0)),  # not measured
        (33, 17e-3, 35e-3, (65536, 1)),  # one chunk between two polls
        (1, 1e-3, 2e-3, (None, 0)),  # at the first poll all is there
        (3, 1e-3, 2e-3, (None, 2)),
        (8, 70e-3, 10e-3, (None, 0)),  # as many polls as the message takes anyway
        (11, 70e-3, 10e-3, (None, 3)),
    ],
)
def test_polls_say_how_much_moves_between_them(
    polls: float, seconds: float, gap: float, expected: tuple[int | None, int]
) -> None:
    point = MessagePoint(2 << 20, seconds, seconds, polls, gap, 0.0, 0.0)
    points = [MessagePoint(512, 1e-6, 1e-6, 0, gap, 0.0, 0.0), point]
    last = link_fit.segments(points)[-1]
    assert (last.unattended_bytes, last.polls) == expected


def test_a_message_of_a_few_chunks_moves_in_its_neighbours_chunks() -> None:
    points = [
        MessagePoint(4096, 1e-5, 1e-5, 0, 1e-3, 0.0, 0.0),
        MessagePoint(128 << 10, 1e-3, 1e-3, 3, 2e-3, 0.0, 0.0),
        MessagePoint(512 << 10, 4e-3, 4e-3, 9, 8e-3, 0.0, 0.0),
        MessagePoint(2 << 20, 16e-3, 16e-3, 33, 32e-3, 0.0, 0.0),
    ]
    found = link_fit.segments(points)
    assert [(one.from_bytes, one.unattended_bytes, one.polls) for one in found][:2] == [(0, None, 0), (128 << 10, 64 << 10, 1)]


def test_a_disturbed_second_message_makes_no_burst() -> None:
    found = link_fit.link(_points(lambda n: 2e-5 + 8e-9 * n, lambda n: 3 * 8e-9 * n))
    assert found.burst_bytes == 0
    assert found.message_seconds(50_000_000) == pytest.approx(8e-9 * 50_000_000, rel=0.1)


@pytest.mark.parametrize(
    ("slower", "slower_next", "within"),
    [(1.0, 1.07, 0.015), (1.07, 0.93, 0.015), (1.07, 1.0, 0.045)],  # one of both measurements of a size is disturbed, or both are
)
def test_the_rate_of_large_messages_is_not_that_of_one_disturbed_message(
    slower: float, slower_next: float, within: float
) -> None:
    def seconds(n: int) -> float:
        return 20e-6 + 8e-9 * max(0, n - 500_000)

    points = _points(seconds, lambda n: seconds(2 * n) - seconds(n))
    points[-1] = replace(points[-1], seconds=slower * points[-1].seconds, next_seconds=slower_next * points[-1].next_seconds)
    fitted = link_fit.link(points)
    assert fitted.burst_bytes == pytest.approx(500_000, rel=0.15)  # of 4 MB, of which 1.5 % are 60,000 bytes
    assert fitted.segments[-1].beta_seconds_per_byte == pytest.approx(8e-9, rel=within)
