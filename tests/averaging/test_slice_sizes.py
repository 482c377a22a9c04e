"""Sizes from alpha and beta: laws of the optimum."""

from hypothesis import given
from hypothesis import strategies as st

from hpctrain.averaging.compute_times import Times
from hpctrain.averaging.slice_sizes import RULE_LINK, bucket_bytes, credit_window, parts_of, slice_bytes, slice_elements
from hpctrain.boxes import even
from hpctrain.comm.link import LinkModel
from hpctrain.nn.parameter import GroupLayout, ParameterSpec

LINK = LinkModel(alpha_seconds=1e-4, beta_seconds_per_byte=1e-8)


def _exposed(size_bytes: float, total: int, ranks: int, link: LinkModel) -> float:
    """Latency of all slices, and the transfer of the last."""
    return (ranks - 1) * (link.alpha_seconds * total / size_bytes + size_bytes / ranks * link.beta_seconds_per_byte)


@given(st.integers(1 << 16, 1 << 30), st.integers(2, 512), st.floats(1e-7, 1e-3), st.floats(1e-11, 1e-7))
def test_no_other_power_of_two_is_much_better(total: int, ranks: int, alpha: float, beta: float) -> None:
    link = LinkModel(alpha, beta)
    best = bucket_bytes(total, ranks, link)
    assert best & (best - 1) == 0
    others = (2.0**k for k in range(14, total.bit_length()))
    assert all(_exposed(best, total, ranks, link) <= 1.1 * _exposed(size, total, ranks, link) for size in others)


def test_without_a_link_to_wait_for_one_bucket_is_best() -> None:
    assert bucket_bytes(10**8, 1, LINK) == 10**8
    assert bucket_bytes(10**8, 4, LinkModel(1e-6, 0.0)) == 10**8


def _slices_cost(size_bytes: float, total: int, ranks: int, link: LinkModel) -> float:
    """The core's time for all slices, and the transfers of the last."""
    count, others = total / size_bytes, ranks - 1
    return 2 * others * (count * link.operation_seconds + size_bytes / ranks * link.beta_seconds_per_byte)


@given(
    st.integers(1 << 16, 1 << 31),
    st.integers(2, 512),
    st.floats(1e-7, 1e-3),
    st.floats(1e-11, 1e-7),
    st.sampled_from([4096, 200_000]),
)
def test_no_other_size_of_small_slices_is_much_better(total: int, ranks: int, operation: float, beta: float, least: int) -> None:
    link = LinkModel(1e-4, beta, operation)
    best = slice_bytes(least, total, ranks, link)
    assert least <= best <= max(least, 1 << 24)
    others = (least << k for k in range(13) if least << k <= 1 << 24)
    assert all(_slices_cost(best, total, ranks, link) <= 1.1 * _slices_cost(size, total, ranks, link) for size in others)


def test_without_a_measured_link_slices_are_the_least() -> None:
    free = LinkModel(1e-5, 1e-9)
    links = (None, LinkModel(1e-5, 0.0), free)
    assert [slice_bytes(1000, 10**9, 4, link) for link in links] == [1000] * 3
    assert slice_bytes(1000, 10**9, 1, RULE_LINK) == 1000


def test_sizes_by_rule_are_those_of_the_documentation() -> None:
    """200,000 bytes are the paper's 50,000 parameters in float32."""
    sizes = {
        total: [slice_bytes(200_000, total, ranks, RULE_LINK) for ranks in (2, 3, 4)]
        for total in (46_800_000, 102_200_000, 553_400_000)
    }
    assert sizes == {
        46_800_000: [800_000, 800_000, 800_000],
        102_200_000: [800_000, 1_600_000, 1_600_000],
        553_400_000: [3_200_000, 3_200_000, 3_200_000],
    }


def test_the_window_holds_what_the_link_sends_between_two_looks() -> None:
    size = 200_000  # 1.1 ms on 2 ranks
    assert credit_window(size, 2, LINK, None) == 56
    times = Times({"a": 0.5, "b": 0.45, "c": 0.1}, {})
    assert credit_window(size, 2, LINK, times) == 956
    assert credit_window(size, 2, LINK, Times({"a": 0.5}, {})) == 4
    assert credit_window(size, 1, LINK, times) is None
    assert credit_window(size, 2, None, times) is None
    assert credit_window(size, 2, LinkModel(0.0, 0.0), times) is None


@given(st.integers(0, 1 << 28), st.sampled_from([4, 8]), st.integers(1, 300))
def test_large_arrays_are_sent_in_parts_that_leave_each_rank_its_share(size: int, item_bytes: int, ranks: int) -> None:
    parts = parts_of(size, item_bytes, ranks)
    assert [begin for begin, _ in parts] == [0, *(end for _, end in parts[:-1])][: len(parts)]
    assert (parts[-1][1] if parts else 0) == size
    limit = max(1 << 24, ranks << 20) + ranks * item_bytes
    assert all((end - begin) * item_bytes <= limit for begin, end in parts)
    if len(parts) > 1:
        assert parts[0][1] * item_bytes > limit // 3
    assert [sum(each) for each in zip(*(even(end - begin, ranks) for begin, end in parts), strict=True)] == [
        share for share in even(size, ranks) if parts
    ]


@given(st.sampled_from(["float32", "float64"]), st.integers(1, 1 << 26), st.integers(2, 64))
def test_slices_have_the_bytes_that_are_set_or_that_the_link_asks_for(dtype: str, size: int, ranks: int) -> None:
    layout = GroupLayout({"weight": ParameterSpec((size,), lambda chance, shape: chance.standard_normal(shape))}, dtype)
    asked = bucket_bytes(size * layout.item_bytes, ranks, LINK)
    assert slice_elements(None, layout, ranks, LINK) == slice_elements(asked, layout, ranks, None)
    least, most = slice_elements(asked, layout, ranks, None)
    assert (least * layout.item_bytes, most >= least) == (asked, True)
    assert slice_elements(1, layout, ranks, LINK) == (1, 1)
