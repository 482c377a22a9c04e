"""Index arithmetic of windows: which outputs a kernel tap serves, and where their inputs lie."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hpctrain.backend.specs import Pair, Window


@dataclass(frozen=True)
class TapRange:
    """Outputs [first, stop) of one dim whose input through one tap lies inside the image, and those inputs as a slice.

    The converse of `hpctrain.parallel.receptive_field`, which gives the inputs of some outputs through all taps.
    """

    first: int
    stop: int
    inputs: slice

    @property
    def outputs(self) -> slice:
        return slice(self.first, self.stop)

    @property
    def empty(self) -> bool:
        """No output reads an input."""
        return self.first == self.stop

    def within(self, low: int, high: int) -> TapRange:
        """The part that serves outputs [low, high), which are counted from `low` on."""
        first, stop = max(self.first, low), min(self.stop, high)
        if stop <= first:
            return TapRange(0, 0, slice(0, 0, self.inputs.step))
        step = self.inputs.step
        start = self.inputs.start + (first - self.first) * step
        return TapRange(first - low, stop - low, slice(start, start + (stop - first - 1) * step + 1, step))


def tap_range(tap: int, size: int, outputs: int, stride: int, padding: int, dilation: int) -> TapRange:
    """The inputs of a tap: output o reads input o * stride - padding + tap * dilation; those inside [0, size) are kept."""
    offset = tap * dilation - padding
    first = max(0, -(offset // stride))
    stop = max(first, min(outputs, (size - 1 - offset) // stride + 1))
    if stop == first:
        return TapRange(first, first, slice(0, 0, stride))
    start = first * stride + offset
    return TapRange(first, stop, slice(start, start + (stop - first - 1) * stride + 1, stride))


@dataclass(frozen=True)
class Tap:
    """One tap (r, s) of a window: number r * S + s, and its range in both dims."""

    number: int
    rows: TapRange
    columns: TapRange

    @property
    def empty(self) -> bool:
        """No output reads an input through this tap."""
        return self.rows.empty or self.columns.empty


def taps(window: Window, size: Pair, outputs: Pair) -> Iterator[Tap]:
    """The taps of `window` on images of `size`, in row-major order, those that never meet the image left out."""
    for r in range(window.kernel[0]):
        rows = tap_range(r, size[0], outputs[0], window.stride[0], window.padding[0], window.dilation[0])
        for s in range(window.kernel[1]):
            columns = tap_range(s, size[1], outputs[1], window.stride[1], window.padding[2], window.dilation[1])
            tap = Tap(r * window.kernel[1] + s, rows, columns)
            if not tap.empty:
                yield tap


@dataclass(frozen=True)
class Span:
    """The positions that one dim of a block reads: `size` positions, of which [before, after) are the image's [start, stop)."""

    size: int
    before: int
    after: int
    start: int
    stop: int

    @property
    def padded(self) -> bool:
        return self.after - self.before != self.size


def span(first: int, size: int, image: int) -> Span:
    """Positions [first, first + size) of an image of `image` positions, zeros elsewhere."""
    start = min(max(first, 0), image)
    stop = max(start, min(first + size, image))
    before = min(max(start - first, 0), size)
    return Span(size, before, before + stop - start, start, stop)


def split(size: int, limit: int) -> Iterator[tuple[int, int]]:
    """[0, size) in parts of nearly equal size, of at most `limit`."""
    parts = -(-size // max(1, limit))
    for i in range(parts):
        yield i * size // parts, (i + 1) * size // parts


@dataclass(frozen=True)
class OutputBlock:
    """Output rows [o0, o1) of the images [n0, n1): neighbours in the memory of (N, Ho, Wo, ...)."""

    n0: int
    n1: int
    o0: int
    o1: int

    @property
    def images(self) -> slice:
        return slice(self.n0, self.n1)

    @property
    def rows(self) -> slice:
        return slice(self.o0, self.o1)


def blocks(images: int, outputs: Pair, limit: int) -> Iterator[OutputBlock]:
    """All output pixels in blocks of about `limit`: some whole images, or some rows of one; none where there are no pixels."""
    ho, wo = outputs
    if 0 in (images, ho, wo):
        return
    if ho * wo <= limit:
        for n0, n1 in split(images, limit // (ho * wo)):
            yield OutputBlock(n0, n1, 0, ho)
        return
    for n in range(images):
        for o0, o1 in split(ho, limit // wo):
            yield OutputBlock(n, n + 1, o0, o1)
