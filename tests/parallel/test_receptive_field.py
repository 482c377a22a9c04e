"""Receptive fields against windows counted tap by tap."""

from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.backend.kernels.specs import Window
from hpctrain.boxes import even_intervals
from hpctrain.parallel.receptive_field import local_window, receptive_field, window_receptive_field


@st.composite
def _windows(draw: st.DrawFn) -> tuple[int, int, int, int, tuple[int, int]]:
    """(size, kernel, dilation, stride, padding) with at least one output."""
    kernel, dilation = draw(st.integers(1, 7)), draw(st.integers(1, 3))
    extent = dilation * (kernel - 1) + 1
    padding = draw(st.tuples(st.integers(0, extent + 2), st.integers(0, extent + 2)))
    size = draw(st.integers(max(1, extent - sum(padding)), 40))
    return size, kernel, dilation, draw(st.integers(1, 3)), padding


@settings(max_examples=400)
@given(_windows(), st.integers(1, 8), st.booleans())
def test_what_is_read_is_what_the_taps_touch(
    found: tuple[int, int, int, int, tuple[int, int]], ranks: int, ceil_mode: bool
) -> None:
    size, kernel, dilation, stride, padding = found
    window = Window((kernel, 1), (stride, 1), (*padding, 0, 0), (dilation, 1))
    ceil_mode = ceil_mode and 2 * max(padding) <= kernel and dilation == 1  # pools only
    outputs = window.output_size((size, 1), ceil_mode=ceil_mode)[0]
    for begin, end in even_intervals(outputs, ranks):
        part = receptive_field(size, (begin, end), extent=window.extent[0], stride=stride, padding=padding)
        taps = [o * stride - padding[0] + k * dilation for o in range(begin, end) for k in range(kernel)]
        inside = [tap for tap in taps if 0 <= tap < size]
        if begin == end:
            assert part.start == part.stop
            continue
        # The rows from the first to the last tap's, without the padding; the first output starts where its padding does.
        assert part.start - part.before == taps[0]
        read = range(part.start, part.stop)
        assert set(inside) <= set(read)
        if len(read) > 1 or 0 <= part.start < size:
            assert part.start >= 0
            assert part.stop <= size
        else:
            assert not inside  # one row of zeros stands for the padding
        # The local window gives as many outputs as were asked for.
        local = Window((kernel, 1), (stride, 1), (part.before, part.after, 0, 0), (dilation, 1))
        assert local.output_size((len(read), 1), ceil_mode=part.ceil)[0] == end - begin
        assert not part.ceil or ceil_mode


def test_even_kernels_reach_further_to_one_side() -> None:
    part = receptive_field(10, (5, 10), extent=4, stride=1, padding=(2, 1))
    assert (part.start, part.stop, part.before, part.after) == (3, 10, 0, 1)


def test_halo_rows_of_an_inner_boundary() -> None:
    """k - s rows in all: 7 for 11x11/4, 5 for 7x7/2, 1 for 3x3/2."""
    for kernel, stride, padding, size in ((11, 4, 2, 224), (7, 2, 3, 224), (3, 2, 1, 112), (3, 1, 1, 56), (1, 1, 0, 14)):
        outputs = (size + 2 * padding - kernel) // stride + 1
        upper, lower = (
            receptive_field(size, part, extent=kernel, stride=stride, padding=(padding, padding))
            for part in even_intervals(outputs, 2)
        )
        assert upper.stop - lower.start == kernel - stride


def test_both_dims_and_the_padding_that_is_left() -> None:
    window = Window((3, 3), (1, 1), (1, 1, 1, 1))
    vertical, horizontal = window_receptive_field(window, (8, 6), ((0, 4), (3, 6)))
    assert (vertical.start, vertical.stop, horizontal.start, horizontal.stop) == (0, 5, 2, 6)
    local = local_window(window, vertical, horizontal)
    assert local.padding == (1, 0, 0, 1)
    assert local.output_size((5, 4)) == (4, 3)
