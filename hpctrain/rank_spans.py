"""Ranks as people write them."""

from __future__ import annotations

from collections.abc import Sequence


def spans(ranks: Sequence[int]) -> str:
    """Ranks in ascending order as people write them: (0, 1, 2, 5) -> "0-2, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def ranks_of(text: str, below: int | None = None) -> tuple[int, ...]:
    """Return the ranks that `spans` has written.

    Args:
        below: number of ranks of the job, to check text that may be damaged; None: no check.

    Raises:
        ValueError: `spans` cannot have written the text, or a rank in it is not below `below`.
    """
    ranks: list[int] = []
    for span in text.split(", ") if text else ():
        first, _, last = span.partition("-")
        if below is not None and not 0 <= int(first) <= int(last or first) < below:
            raise ValueError(f"{span} is not below {below}")
        ranks.extend(range(int(first), int(last or first) + 1))
        if below is not None and len(ranks) > below:
            raise ValueError(f"more than {below} ranks")
    return tuple(ranks)
