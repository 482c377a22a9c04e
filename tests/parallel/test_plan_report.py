"""The report as data: words add up position by position, and statistics count as float64 whatever the run's dtype is."""

from hypothesis import given
from hypothesis import strategies as st

from hpctrain.parallel.layout import LayoutKind
from hpctrain.parallel.parallel_plan import Parallelism, ParallelPlan
from hpctrain.parallel.plan_report import LayerReport, PlanReport, RedistributionReport, Traffic, nothing

RANKS = 3
WORDS = st.tuples(*[st.integers(0, 10**12)] * RANKS)
TRAFFIC = st.builds(Traffic, WORDS, WORDS, WORDS, WORDS)


@given(TRAFFIC, TRAFFIC, TRAFFIC)
def test_traffic_adds_up_like_numbers(a: Traffic, b: Traffic, c: Traffic) -> None:
    assert a + b == b + a
    assert (a + b) + c == a + (b + c)
    assert a + nothing(RANKS) == a


@given(TRAFFIC, TRAFFIC, st.sampled_from([4, 8]))
def test_bytes_are_those_of_the_words(a: Traffic, b: Traffic, item_bytes: int) -> None:
    assert a.bytes_forward(item_bytes) == tuple(
        item_bytes * words + 8 * statistics for words, statistics in zip(a.forward, a.statistics_forward, strict=True)
    )
    both = (a + b).bytes_backward(item_bytes)
    assert both == tuple(x + y for x, y in zip(a.bytes_backward(item_bytes), b.bytes_backward(item_bytes), strict=True))


@given(TRAFFIC, TRAFFIC, WORDS)
def test_totals_are_of_all_entries(of_layer: Traffic, of_move: Traffic, parameters: tuple[int, ...]) -> None:
    layer = LayerReport(
        "conv", "conv2d 3x3", Parallelism.DOMAIN, LayoutKind.TILES, (1, 3, 3, 1), (), (), of_layer, parameters, (0,) * RANKS
    )
    move = RedistributionReport("fc.move", "fc", "rows", "samples", of_move, (0,) * RANKS)
    report = PlanReport(ParallelPlan(RANKS), (1, 0, 0), "float32", 4, (layer, move, layer), (), None)
    assert report.layers == (layer, layer)
    assert report.redistributions == (move,)
    assert report.traffic == of_layer + of_move + of_layer
    assert report.parameters == tuple(2 * size for size in parameters)
