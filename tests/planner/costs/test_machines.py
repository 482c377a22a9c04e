"""Machines as data and as files, and how links, cards and rates become one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.comm.link import LinkModel
from hpctrain.core.errors import ConfigError
from hpctrain.planner.costs import machine_file
from hpctrain.planner.costs.machine import Link, LinkSegment, Machine, OperatorClass, OperatorRate, seconds_with_threads
from hpctrain.planner.measure import calibration, link_measurement
from hpctrain.planner.measure.calibration import RankFacts, calibrate
from hpctrain.planner.measure.link_measurement import SIZES, Effort, LinkProbe, MessagePoint
from hpctrain_testing.virtual.communicator import ThreadCommunicator
from hpctrain_testing.virtual.run import run_virtual, virtual_engine
from tests.support.sampling import amount

LINK = Link((LinkSegment(0, 2e-6, 4e-9), LinkSegment(8192, 10e-6, 1e-9)), operation_seconds=3e-6, byte_seconds=1e-10)
RATES = {OperatorClass.CONVOLUTION: OperatorRate(2e10, 8e9, 5e-6)}
MACHINE = Machine("test", 4, 8, 1.0, 1 << 30, LINK, LINK, 8, RATES, sources={"all": "made up"})


def message_seconds(link: Link, n_bytes: float) -> float:
    segment = link.segment(n_bytes)
    return segment.alpha_seconds + n_bytes * segment.beta_seconds_per_byte


@pytest.mark.parametrize(
    ("n_bytes", "expected"), [(0, 2e-6), (8191, 2e-6 + 8191 * 4e-9), (8192, 10e-6 + 8192e-9), (1e6, 1.01e-3)]
)
def test_a_message_costs_what_the_segment_of_its_size_says(n_bytes: float, expected: float) -> None:
    assert message_seconds(LINK, n_bytes) == pytest.approx(expected, rel=1e-12)


def test_a_scaled_machine_differs_in_what_was_asked_for_alone() -> None:
    fast = MACHINE.scaled(bandwidth=2, latency=0.5, compute=4)
    assert [segment.alpha_seconds for segment in fast.between.segments] == [1e-6, 5e-6]
    assert [segment.beta_seconds_per_byte for segment in fast.within.segments] == [2e-9, 0.5e-9]
    rate = fast.rates[OperatorClass.CONVOLUTION]
    assert (rate.flops_per_second, rate.bytes_per_second) == (8e10, 3.2e10)
    assert rate.call_seconds == pytest.approx(1.25e-6)
    assert fast.between.operation_seconds == 3e-6
    assert (fast.nodes, fast.memory_bytes, fast.sources) == (MACHINE.nodes, MACHINE.memory_bytes, MACHINE.sources)


def test_a_machine_without_bfloat16_estimates_it_from_float32_and_says_so() -> None:
    """Would find a file of float32 that is refused or used without a note, and estimates that replace measured rates."""
    convolution, memory = OperatorRate(2e10, 8e9, 5e-6, 4e9, 2e9), OperatorRate(1e10, 6e9, 1e-6)
    rates = {OperatorClass.CONVOLUTION: convolution, OperatorClass.MEMORY: memory}
    machine = replace(MACHINE, rates=rates)
    assert machine.rate(OperatorClass.CONVOLUTION_BFLOAT16) == replace(convolution, flops_per_second=4e10)
    assert machine.rate(OperatorClass.MEMORY_BFLOAT16) == memory
    assert machine.estimate_note("float32") == machine.estimate_note("float64") == ""
    sentence = "The rates of bfloat16 are estimated from those of float32, because machine test has none of bfloat16."
    assert machine.estimate_note("bfloat16") == sentence
    own = OperatorRate(1e9, 2e9, 3e-6)
    measured = replace(machine, rates={**rates, OperatorClass.CONVOLUTION_BFLOAT16: own})
    assert measured.rate(OperatorClass.CONVOLUTION_BFLOAT16) == own
    assert measured.estimate_note("bfloat16") == ""


def test_messages_that_are_longer_than_those_that_move_in_chunks_are_passed() -> None:
    eager, chunked = LinkSegment(0, 1e-6, 1e-9), LinkSegment(1 << 16, 1e-6, 1e-9, unattended_bytes=1 << 16, polls=1)
    long = LinkSegment(1 << 22, 1e-6, 1e-9, polls=3)
    link = Link((eager, chunked, long))
    assert [link.is_passed(one) for one in link.segments] == [False, False, True]
    assert not Link((eager, long)).is_passed(long)  # none of them moves in chunks


TOP = Path(__file__).parents[3]
NAMES = sorted(path.stem for path in (TOP / "configs" / "machines").glob("*.yaml"))
TEXT = (TOP / "configs" / "machines" / "xc40.yaml").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_an_installed_machine_is_found_by_its_name_and_every_number_has_a_source(name: str) -> None:
    machine = machine_file.read(name)
    assert machine == machine_file.read(TOP / "configs" / "machines" / f"{name}.yaml")
    assert machine.name == name
    assert {kind.of_dtype("float32") for kind in OperatorClass} <= set(machine.rates)
    numbers = {"nodes", "ranks_per_node", "cores_per_rank", "memory_bytes", "ranks_per_card"}
    for name, link in (("within", machine.within), ("between", machine.between)):
        numbers |= {f"{name}.{key}" for key, value in vars(link).items() if value is not None}
    for section, rates in (("rates", machine.rates), ("single_thread_rates", machine.single_thread_rates)):
        numbers |= {
            f"{section}.{kind}.{key}" for kind, rate in rates.items() for key, speed in vars(rate).items() if speed is not None
        }
    numbers |= {"node_bytes_per_second"} if math.isfinite(machine.node_bytes_per_second) else set()
    assert set(machine.sources) == numbers
    assert all(len(source.split()) >= 2 for source in machine.sources.values())
    assert machine_file.parse(machine_file.text(machine)) == machine
    removed = "concurrency: {source: measured, memory: 1.5}\n"  # of files of version 0.1.0
    assert machine_file.parse(machine_file.text(machine) + removed) == machine


def test_installed_machines_are_named() -> None:
    assert machine_file.names() == NAMES


SECONDS = st.floats(0, 1, allow_nan=False)
COUNTS = st.integers(1, 2**40)
SOURCES = st.sampled_from(["measured", "not measured; guessed", "a: b # c", "yes"])


@st.composite
def links(draw: st.DrawFn) -> Link:
    begins = sorted(draw(st.sets(st.integers(1, 2**30), max_size=3)))
    unattended = st.none() | st.integers(0, 2**40)
    segments = tuple(
        LinkSegment(begin, draw(SECONDS), draw(SECONDS), draw(unattended), draw(st.integers(0, 9))) for begin in (0, *begins)
    )
    return Link(segments, draw(SECONDS), draw(SECONDS), draw(SECONDS), draw(st.integers(0, 2**30)))


@st.composite
def operator_rates(draw: st.DrawFn) -> dict[OperatorClass, OperatorRate]:
    speeds = st.floats(1, 1e15)
    optional = speeds | st.none()
    kinds = list(OperatorClass)[: draw(st.sampled_from([3, 6]))]  # with and without bfloat16
    return {
        kind: OperatorRate(draw(speeds), draw(speeds), draw(SECONDS), draw(optional), draw(optional), draw(optional))
        for kind in kinds
    }


@st.composite
def machines(draw: st.DrawFn, least_cores: float = 0.01) -> Machine:
    rates = draw(operator_rates())
    ranks = draw(st.integers(1, 200))
    cores = draw(st.floats(least_cores, 100))
    name, *others = draw(st.tuples(st.sampled_from(["a", "null", "12"]), COUNTS, COUNTS, links(), links(), st.integers(1, ranks)))
    machine = Machine(
        *(name, others[0], ranks, cores, *others[1:], rates, draw(st.sampled_from(["", "words: and more"]))),
        single_thread_rates=draw(operator_rates()) if least_cores >= 2 or (cores >= 2 and draw(st.booleans())) else {},
        node_bytes_per_second=draw(st.floats(1, 1e15) | st.just(math.inf)),
    )
    keys = machine_file.parse(machine_file.text(machine)).sources  # of a machine without sources: each says so
    assert set(keys.values()) == {"not stated"}
    return replace(machine, sources={key: draw(SOURCES) for key in keys})


@settings(max_examples=amount(8, 40), deadline=None)
@given(machine=machines())
def test_any_machine_comes_back_from_its_text_with_its_sources(machine: Machine) -> None:
    assert machine_file.parse(machine_file.text(machine)) == machine


@settings(max_examples=amount(25, 200), deadline=None)
@given(machine=machines(least_cores=2), number=st.integers(1, 20_000), factor=st.sampled_from([0.5, 1.0, 3.0]))
def test_ranks_per_node_share_a_node_and_can_be_changed_back(machine: Machine, number: int, factor: float) -> None:
    """Find a derived machine that exceeds the cores, memory or memory traffic of a node, or loses the numbers of its origin."""
    number = 1 + number % machine.cores_per_node
    other = machine.with_ranks_per_node(number)
    assert other.ranks_per_node * other.threads_per_rank <= machine.cores_per_node
    assert other.ranks_per_node * other.memory_bytes <= machine.ranks_per_node * machine.memory_bytes
    assert 1 <= other.ranks_per_card <= other.ranks_per_node
    assert other.nodes_of(machine.nodes * number) == machine.nodes
    if other is not machine:
        for kind in other.rates:
            rate = machine.rates[kind]
            most = max(machine.node_bytes_per_second, machine.ranks_per_node * rate.bytes_per_second)
            assert number * other.rates[kind].bytes_per_second <= most * (1 + 1e-9)
    assert other.with_ranks_per_node(machine.ranks_per_node) is machine
    assert other.with_ranks_per_node(number) == other
    scaled, of_scaled = other.scaled(compute=factor), machine.scaled(compute=factor)
    assert scaled.with_ranks_per_node(machine.ranks_per_node) == of_scaled
    for kind, rate in of_scaled.with_ranks_per_node(number).rates.items():
        for name, speed in vars(rate).items():
            assert (
                speed is None
                if vars(scaled.rates[kind])[name] is None
                else speed == pytest.approx(vars(scaled.rates[kind])[name], rel=1e-9)
            )


@settings(max_examples=amount(50, 1000), deadline=None)
@given(one_thread=st.floats(1e-9, 1), full_threads=st.floats(1e-9, 1), full=st.integers(2, 200))
def test_seconds_with_threads_are_monotone_through_both_points(one_thread: float, full_threads: float, full: int) -> None:
    """Find a curve that misses a point, becomes negative, or changes its direction beyond the points."""
    seconds = [seconds_with_threads(one_thread, full_threads, full, threads) for threads in range(1, 3 * full)]
    assert (seconds[0], seconds[full - 1]) == (one_thread, full_threads)
    assert all(value > 0 for value in seconds)
    rises = [after - before for before, after in pairwise(seconds)]
    slack = 1e-9 * max(one_thread, full_threads)
    assert max(rises) <= slack if full_threads <= one_thread else min(rises) >= -slack


SHARED_RATES, SINGLE_RATES = ({OperatorClass.MEMORY: OperatorRate(*rate)} for rate in ((8e10, 25e9, 2e-6), (1e10, 12.5e9, 1e-6)))
SHARED = replace(
    Machine("shared", 4, 4, 8.0, 16 << 30, LINK, LINK, 2, SHARED_RATES),
    single_thread_rates=SINGLE_RATES,
    node_bytes_per_second=2e11,
)


def test_additional_ranks_share_the_memory_the_cards_and_the_links_of_a_node() -> None:
    """Find 32 ranks that each read as fast as one core alone, or a card that too few of them share."""
    many = SHARED.with_ranks_per_node(32)
    rate = many.rates[OperatorClass.MEMORY]
    assert (many.cores_per_rank, many.memory_bytes, many.ranks_per_card) == (1.0, 2 << 30, 16)
    assert (rate.flops_per_second, rate.call_seconds) == (pytest.approx(1e10), 1e-6)
    assert rate.bytes_per_second == pytest.approx(2e11 / 32)  # one thread alone reaches 12.5 GB/s, but 32 do not
    assert [one.beta_seconds_per_byte for one in many.within.segments] == [4e-9, 1e-9]  # 32 copies at 1 GB/s fit into 200 GB/s
    slow = replace(SHARED, node_bytes_per_second=32e9).with_ranks_per_node(32)
    assert [one.beta_seconds_per_byte for one in slow.within.segments] == [4e-9, 2e-9]
    assert slow.between.segments == SHARED.between.segments
    two = SHARED.with_ranks_per_node(2)
    assert (two.ranks_per_card, two.threads_per_rank) == (1, 16)
    assert two.rates[OperatorClass.MEMORY].bytes_per_second == pytest.approx(1 / (3.428571e-11 + 4.571429e-11 / 16), rel=1e-6)


@pytest.mark.parametrize(("machine", "numbers"), [(SHARED, (33,)), (SHARED, (8, 5)), (MACHINE, (4,))])
def test_more_threads_than_cores_and_an_unknown_effect_of_threads_are_refused(machine: Machine, numbers: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError):
        machine.with_ranks_per_node(*numbers)


def test_a_file_that_cannot_be_read_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Cannot read the machine file .* \(Is a directory\)"):
        machine_file.read(tmp_path)
    (tmp_path / "bytes.yaml").write_bytes(b"name: \xff")
    with pytest.raises(ConfigError, match="Byte 6 is not valid UTF-8"):
        machine_file.read(tmp_path / "bytes.yaml")


def test_a_number_takes_the_source_of_the_nearest_section() -> None:
    line = next(line for line in TEXT.splitlines() if "operation_seconds" in line)
    machine = machine_file.parse(TEXT.replace(line, "  operation_seconds: 1e-6", 1))
    assert machine.within.operation_seconds == 1e-6
    assert machine.sources["within.operation_seconds"] == machine.sources["within.segments"]
    assert machine_file.source_of(replace(machine, sources={"within": "w"}), "within.segments") == "w"


def _points(
    seconds: Callable[[int], float], following: Callable[[int], float] | None = None, polls: float = 0
) -> list[MessagePoint]:
    after = following or seconds
    return [MessagePoint(n, seconds(n), after(n), polls, 1e-3, 1e-5 + 2e-10 * n, 1e-5 + 5e-10 * n) for n in SIZES]


def test_a_straight_line_is_found_again() -> None:
    found = link_measurement.link(_points(lambda n: 5e-6 + 2e-9 * n))
    for n_bytes in (1, 100, 5000, 10**6, 10**8):
        assert message_seconds(found, n_bytes) == pytest.approx(5e-6 + 2e-9 * n_bytes, rel=1e-6)
    assert found.burst_bytes == 0
    assert found.operation_seconds == pytest.approx(1e-5, rel=0.02)
    assert found.byte_seconds == pytest.approx(1e-10, rel=0.01)  # sent and received
    assert found.sum_seconds == pytest.approx(3e-10)


def test_two_protocols_are_two_lines_and_no_jump_is_lost() -> None:
    def seconds(n: int) -> float:
        return 1e-6 + 4e-9 * n if n < 64 << 10 else 50e-6 + 3.5e-9 * n

    found = link_measurement.link(_points(seconds))
    for n_bytes in SIZES:
        assert message_seconds(found, n_bytes) == pytest.approx(seconds(n_bytes), rel=1e-6)


def test_a_disturbed_point_does_not_make_larger_messages_quicker() -> None:
    points = _points(lambda n: 1.0 if n == 4096 else 5e-6 + 2e-9 * n)
    found = link_measurement.link(points)
    times = [message_seconds(found, n) for n in SIZES]
    assert times == sorted(times)
    assert times[-1] == pytest.approx(5e-6 + 2e-9 * SIZES[-1])
    assert times[1] < 1e-4


@pytest.mark.parametrize("burst_bytes", [300_000, 500_000])
@pytest.mark.parametrize("beta", [16e-9, 8e-9, 4e-9])
def test_what_passes_after_a_pause_is_found_again(burst_bytes: int, beta: float) -> None:
    def seconds(n: int) -> float:
        return 20e-6 + beta * max(0, n - burst_bytes)

    points = _points(seconds, lambda n: seconds(2 * n) - seconds(n))
    found = link_measurement.link(points)
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
    last = link_measurement.segments(points)[-1]
    assert (last.unattended_bytes, last.polls) == expected


def test_a_message_of_a_few_chunks_moves_in_its_neighbours_chunks() -> None:
    points = [
        MessagePoint(4096, 1e-5, 1e-5, 0, 1e-3, 0.0, 0.0),
        MessagePoint(128 << 10, 1e-3, 1e-3, 3, 2e-3, 0.0, 0.0),
        MessagePoint(512 << 10, 4e-3, 4e-3, 9, 8e-3, 0.0, 0.0),
        MessagePoint(2 << 20, 16e-3, 16e-3, 33, 32e-3, 0.0, 0.0),
    ]
    found = link_measurement.segments(points)
    assert [(one.from_bytes, one.unattended_bytes, one.polls) for one in found][:2] == [(0, None, 0), (128 << 10, 64 << 10, 1)]


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
    fitted = link_measurement.link(points)
    assert fitted.burst_bytes == pytest.approx(500_000, rel=0.15)  # of 4 MB, of which 1.5 % are 60,000 bytes
    assert fitted.segments[-1].beta_seconds_per_byte == pytest.approx(8e-9, rel=within)


MESSAGES = (512, 16 << 10, 512 << 10)
ONCE = Effort(MESSAGES, 1, 0.0)


@pytest.fixture
def few_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Virtual time is exact, so once is enough; computation between polls costs real time."""
    for name in ("_REPEATS_SHORT", "_REPEATS_LONG", "_POLLED_REPEATS"):
        monkeypatch.setattr(link_measurement, name, 1)
    monkeypatch.setattr(link_measurement, "_busy", lambda seconds: None)


@pytest.mark.slow
@pytest.mark.usefixtures("few_messages")
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_modelled_link_is_found_again_and_all_ranks_know_it(ranks: int) -> None:
    link = LinkModel(50e-6, 8e-9)

    def program(comm: ThreadCommunicator) -> list[MessagePoint]:
        pair = comm.split(0 if comm.rank < 2 else None, comm.rank, "pair")
        return LinkProbe(comm, pair, virtual_engine(comm)).measure(ONCE)

    results = run_virtual(ranks, program, link=link)
    assert all(points == results[0] for points in results)
    assert [point.n_bytes for point in results[0]] == list(MESSAGES)
    for point in results[0]:
        assert point.seconds == pytest.approx(50e-6 + 8e-9 * point.n_bytes, rel=0.01)
        assert point.polls == 0 or point.n_bytes >= 16 << 10
    assert message_seconds(link_measurement.link(results[0]), 100_000) == pytest.approx(50e-6 + 8e-9 * 100_000, rel=0.01)


def test_computation_that_a_message_lengthens_is_time_of_the_core() -> None:
    """Find a price of messages without the interrupts that lengthen an operator between two polls of one of the ranks."""

    def program(comm: ThreadCommunicator) -> float:
        probe = LinkProbe(comm, comm.split(0, comm.rank, "pair"), virtual_engine(comm))

        def lap() -> float:
            comm.compute(1.5e-3)
            return 1.5e-3 if comm.rank else 1e-3

        return probe._core_seconds(probe._gather(1 << 20), lap, 1e-3)  # the message takes 8.4 ms, 6 laps

    assert run_virtual(2, program, link=LinkModel(50e-6, 8e-9)) == [pytest.approx(6 * 0.5e-3)] * 2


@pytest.mark.parametrize(("polls", "expected"), [(1, None), (3, None), (5, 5_592_405), (12, 2_188_333)])
def test_buffers_hold_what_moves_between_two_polls_unless_the_link_limits_it(polls: int, expected: int | None) -> None:
    def program(comm: ThreadCommunicator) -> int | None:
        probe = LinkProbe(comm, comm.split(0, comm.rank, "pair"), virtual_engine(comm))
        setattr(probe, "_polls", lambda *arguments: polls - comm.rank)  # noqa: B010
        return probe.buffered_bytes(MessagePoint(2 << 20, 6e-3, 6e-3, 1, 1e-2, 0.0, 0.0))

    assert run_virtual(2, program) == [expected] * 2


def test_the_core_pays_for_middle_messages_although_tiny_ones_and_bytes_are_cheap() -> None:
    """Find a price that takes the time of an operation from its smallest message, which no handshake precedes."""
    of_core = {512: 4.4e-5, 64 << 10: 8.5e-5, 512 << 10: 2.6e-4, 2 << 20: 4.6e-4}
    found = link_measurement.link([MessagePoint(n, 1e-9 * n, 1e-9 * n, 0, 1e-3, core, core) for n, core in of_core.items()])
    for n_bytes, core in of_core.items():
        assert found.operation_seconds + 2 * n_bytes * found.byte_seconds == pytest.approx(core, rel=0.4)


@pytest.mark.slow
@pytest.mark.usefixtures("few_messages")
def test_a_slow_link_is_left_at_the_size_that_takes_too_long() -> None:
    def program(comm: ThreadCommunicator) -> list[MessagePoint]:
        sizes = Effort((512, 1024, 2 << 20, 4 << 20), 2, 0.0)
        return LinkProbe(comm, comm.split(0, comm.rank, "pair"), virtual_engine(comm)).measure(sizes)

    points = run_virtual(2, program, link=LinkModel(1e-3, 1e-6))[0]
    assert [point.n_bytes for point in points] == [512, 1024, 2 << 20]


@pytest.mark.slow
@pytest.mark.usefixtures("few_messages")
@pytest.mark.parametrize("ranks", [4, 5])
def test_pairs_that_measure_at_once_begin_together(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    begins: list[tuple[int, float]] = []

    def program(comm: ThreadCommunicator) -> list[MessagePoint]:
        late = comm.rank // 2  # the second pair comes to everything later
        engine = virtual_engine(comm)
        pair = comm.split(comm.rank // 2 if comm.rank < 4 else None, comm.rank, "pair")
        together = comm.split(0 if comm.rank < 4 else None, comm.rank, "together")
        probe = LinkProbe(comm, pair, engine, together)
        if pair is not None:
            meet = probe._meet

            def met() -> None:
                if late:
                    engine.wait_handle(pair.ibarrier(), "delay")
                meet()
                begins.append((comm.rank, engine.now()))

            monkeypatch.setattr(probe, "_meet", met)
        return probe.measure(ONCE, details=False)

    results = run_virtual(ranks, program, link=LinkModel(50e-6, 8e-9))
    assert all(points == results[0] for points in results)
    of_rank = [[now for rank, now in begins if rank == one] for one in range(4)]
    assert of_rank[0]
    assert all(times == pytest.approx(of_rank[0]) for times in of_rank)


@pytest.mark.slow
@pytest.mark.usefixtures("few_messages")
def test_pairs_that_measure_at_once_take_the_time_of_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a shared card, one pair may go first, so that both pairs on average seem to share it less than they do.

    Alone finds a time of the faster pair, or the mean of both, from which each rank would seem to have a card to itself.
    """

    def program(comm: ThreadCommunicator) -> list[MessagePoint]:
        pair = comm.split(comm.rank // 2, comm.rank, "pair")
        probe = LinkProbe(comm, pair, virtual_engine(comm), comm.split(0, comm.rank, "together"))
        gather = probe._gather
        monkeypatch.setattr(probe, "_gather", lambda n_bytes: gather(n_bytes * (1 + comm.rank // 2)))
        return probe.measure(ONCE, details=False)

    for point in run_virtual(4, program, link=LinkModel(50e-6, 8e-9))[0]:
        assert point.seconds == pytest.approx(50e-6 + 8e-9 * 2 * point.n_bytes, rel=0.01)


@given(
    st.sampled_from([(ranks, count) for ranks in (2, 3, 4, 6, 8) for count in range(1, ranks + 1) if ranks % count == 0]),
    st.sampled_from([(2 << 20,), (512 << 10, 2 << 20), (4 << 20, 8 << 20)]),
    st.lists(st.floats(1.0, 3.0), min_size=6, max_size=6),
)
def test_messages_that_a_disturbance_makes_longer_do_not_hide_a_shared_card(
    card: tuple[int, int], sizes: tuple[int, ...], longer: list[float]
) -> None:
    """A shared card does not seem to belong to one rank when messages of a single pair are disturbed.

    One message of the largest size of each kind is undisturbed; all second messages, and the other sizes, may take longer.
    """
    ranks, count = card

    def points(sharing: int, disturbed: list[float]) -> list[MessagePoint]:
        seconds = [
            sharing * 8e-9 * size * (1.0 if size == sizes[-1] else more) for size, more in zip(sizes, disturbed, strict=False)
        ]
        return [MessagePoint(size, one, one * disturbed[2], 0.0, 0.0, 0.0, 0.0) for size, one in zip(sizes, seconds, strict=True)]

    assert calibration._sharing(points(1, longer[:3]), points(count, longer[3:]), ranks) == count


VIRTUAL_LINK = LinkModel(30e-6, 2e-9)


FEW_SIZES = Effort((512, 16 << 10, 256 << 10), 1, 0.0)


def _rates(rank: int) -> Callable[[Callable[[], None]], Mapping[OperatorClass, OperatorRate]]:
    def measure(before: Callable[[], None]) -> Mapping[OperatorClass, OperatorRate]:
        before()
        return {kind: OperatorRate(1e10 + rank, 1e9 + rank, 1e-6 * (1 + rank)) for kind in OperatorClass}

    return measure


def _machine(ranks: int, per_node: int) -> Machine:
    def program(comm: ThreadCommunicator) -> Machine:
        facts = RankFacts(frozenset({comm.rank % per_node // 2}), 8 << 30, "a processor")
        return calibrate(
            comm, virtual_engine(comm), facts, _rates(comm.rank), name="virtual", when="2026-01-01", effort=FEW_SIZES
        )

    machines = run_virtual(ranks, program, link=VIRTUAL_LINK, ranks_per_node=per_node)
    assert all(machine == machines[0] for machine in machines)
    return machines[0]


@pytest.mark.usefixtures("few_messages")
@pytest.mark.parametrize(("ranks", "per_node"), [(1, 1), (2, 2), (2, 1), (4, 2), (3, 2)])
def test_what_is_there_is_measured_and_the_rest_says_so(ranks: int, per_node: int) -> None:
    machine = _machine(ranks, per_node)
    nodes = -(-ranks // per_node)
    assert (machine.nodes, machine.ranks_per_node) == (nodes, per_node)
    assert machine.cores_per_rank == -(-per_node // 2) / per_node
    assert machine.memory_bytes == (8 << 30) // per_node
    measured = "measured on 2026-01-01, a processor"
    for link, there in ((machine.within, per_node > 1), (machine.between, nodes > 1)):
        source = machine.sources["within.segments" if link is machine.within else "between.segments"]
        assert source.startswith(measured if there else "not measured: one ")
        if there:
            assert message_seconds(link, 1 << 20) == pytest.approx(30e-6 + 2e-9 * (1 << 20), rel=0.02)
    rate = machine.rates[OperatorClass.CONVOLUTION]
    assert (rate.flops_per_second, rate.call_seconds) == (1e10, 1e-6 * ranks)  # of the slowest rank
    assert machine_file.parse(machine_file.text(machine)) == machine


@pytest.mark.usefixtures("few_messages")
@pytest.mark.parametrize(("threads", "cores", "varied"), [(2, 4, True), (1, 4, False), (2, 6, False), (1, 2, False)])
def test_the_effect_of_threads_is_measured_if_all_ranks_use_several_cores_fully(threads: int, cores: int, varied: bool) -> None:
    """Find rates of one thread next to `rates` of ranks with a single core, or with fewer threads than cores."""

    def program(comm: ThreadCommunicator) -> Machine:
        facts = RankFacts(frozenset(range(cores)), 8 << 30, "a processor", threads)

        def measure_threads(before: Callable[[], None]) -> tuple[Mapping[OperatorClass, OperatorRate], float]:
            return {kind: OperatorRate(5e9 - comm.rank, 5e8, 1e-7) for kind in OperatorClass}, 1e9 + comm.rank

        named = {"name": "virtual", "when": "2026-01-01", "effort": FEW_SIZES}
        return calibrate(comm, virtual_engine(comm), facts, _rates(comm.rank), **named, measure_threads=measure_threads)

    machine = run_virtual(2, program, link=VIRTUAL_LINK, ranks_per_node=2)[0]
    assert bool(machine.single_thread_rates) is varied
    assert machine_file.parse(machine_file.text(machine)) == machine
    if varied:
        assert machine.single_thread_rates[OperatorClass.PRODUCT] == OperatorRate(5e9 - 1, 5e8, 1e-7)  # of the slowest rank
        assert machine.node_bytes_per_second == 2e9 + 1  # of both ranks
        assert ", one thread per rank, all ranks" in machine.sources["single_thread_rates.memory.bytes_per_second"]
    else:
        assert machine.node_bytes_per_second == math.inf


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_copy_in_laps_with_other_ranks(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Find a lap that does not call `before`, or that does not wait for its threads."""
    monkeypatch.setattr(calibration, "_COPIED_BYTES", 1 << 12)
    laps = []
    assert 0 < calibration.measure_memory_traffic(threads, lambda: laps.append(1)) < 1e13
    assert len(laps) == calibration._STEPS
