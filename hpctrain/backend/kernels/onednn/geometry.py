"""Windows as oneDNN wants them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpctrain.backend.onednn.binding import dims
from hpctrain.backend.specs import Pair, Window


def convolution_geometry(window: Window) -> tuple[Any, Any, Any, Any]:
    """Strides, dilations (0 is dense), leading and trailing padding."""
    top, bottom, left, right = window.padding
    return dims(window.stride), dims([d - 1 for d in window.dilation]), dims((top, left)), dims((bottom, right))


def adjoint(window: Window) -> Window | None:
    """The window of the convolution of the output's gradient with the turned kernel that gives the input's; None for strides."""
    if window.stride != (1, 1):
        return None
    height, width = window.extent
    top, bottom, left, right = window.padding
    padding = (height - 1 - top, height - 1 - bottom, width - 1 - left, width - 1 - right)
    if min(padding) < 0:
        return None
    return Window(window.kernel, (1, 1), padding, window.dilation)


def pooling_geometry(window: Window, size: Sequence[int], output: Sequence[int]) -> tuple[tuple[Any, ...], Pair]:
    """Return strides, kernel, dilations, leading and trailing padding, and the trailing padding that ceil mode adds."""
    (top, bottom, left, right), stride, extent = window.padding, window.stride, window.extent
    reach = [(output[dim] - 1) * stride[dim] + extent[dim] for dim in (0, 1)]
    extra = (max(0, reach[0] - size[0] - top - bottom), max(0, reach[1] - size[1] - left - right))
    trailing = (bottom + extra[0], right + extra[1])
    geometry = (
        dims(stride),
        dims(window.kernel),
        dims([d - 1 for d in window.dilation]),
        dims((top, left)),
        dims(trailing),
    )
    return geometry, extra
