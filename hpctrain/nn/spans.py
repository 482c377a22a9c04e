"""A program's actions divided into spans, each of which runs as one unit, such as a captured CUDA graph. Pure.

Around a unit the averager is talked to, never inside: forward waits for parameters before a span, gradients are announced behind
one. So spans end where the messages of a step begin or are waited for, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

#: by parameter, the slices that hold some of it; parameters that no message carries are left out
Slices = Mapping[str, Sequence[int]]


def forward_spans(needs: Sequence[Iterable[str]], slices: Slices) -> list[range]:
    """Spans of forward's actions: a new one begins where a slice is needed that no action of the span so far has needed.

    Args:
        needs: of each action, the parameters that it reads.
    """
    starts = [0]
    needed: set[int] = set()
    for position, names in enumerate(needs):
        more = {k for name in names for k in slices.get(name, ())} - needed
        if more and position > starts[-1] and needed:
            starts.append(position)
        needed |= more
    return _ranges(starts, len(needs))


def backward_spans(announced: Sequence[Iterable[str]], slices: Slices) -> list[range]:
    """Spans of backward's actions: one ends behind the action that makes the last gradient of a slice.

    Args:
        announced: of each action, the parameters whose gradients are final behind it.
    """
    missing: dict[int, set[str]] = {}
    for name, held in slices.items():
        for k in held:
            missing.setdefault(k, set()).add(name)
    starts = [0]
    for position, names in enumerate(announced):
        complete = False
        for name in names:
            for k in slices.get(name, ()):
                missing[k].discard(name)
                complete |= not missing[k]
        if complete:
            starts.append(position + 1)
    return _ranges(starts, len(announced))


def _ranges(starts: Sequence[int], stop: int) -> list[range]:
    """Those between the starts that are not empty."""
    ends = [*starts[1:], stop]
    return [range(start, end) for start, end in zip(starts, ends, strict=True) if start < end]
