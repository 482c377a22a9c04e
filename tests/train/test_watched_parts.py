"""Parts cover every element once and have similar sizes; their checksums and guards find each change."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.train.watched_parts import PartChecksums, PartGuard, WatchedPiece, cut

SIZES = st.lists(st.integers(0, 40), max_size=6)


def _arrays(sizes: list[int]) -> list[WatchedPiece]:
    flat = np.arange(sum(sizes), dtype=np.float32)
    stops = np.cumsum(sizes, dtype=int).tolist()
    return [WatchedPiece(f"array {k}", flat[stop - size : stop]) for k, (size, stop) in enumerate(zip(sizes, stops, strict=True))]


@given(sizes=SIZES, most=st.integers(1, 9), least_bytes=st.integers(0, 100))
def test_parts_hold_each_element_once_and_in_order(sizes: list[int], most: int, least_bytes: int) -> None:
    parts = cut(_arrays(sizes), most=most, least_bytes=least_bytes)
    elements = [float(value) for part in parts for piece in part for value in piece.values]
    assert elements == list(range(sum(sizes)))
    assert 1 <= len(parts) <= most
    counts = [sum(piece.values.size for piece in part) for part in parts]
    assert max(counts) - min(counts) <= 1
    assert len(parts) == 1 or 4 * max(counts) >= least_bytes


@given(sizes=SIZES.filter(any), data=st.data())
def test_a_flipped_bit_changes_the_checksum_of_its_piece_alone(sizes: list[int], data: st.DataObject) -> None:
    arrays = _arrays(sizes)
    (part,) = cut(arrays, most=1, least_bytes=0)
    before = PartChecksums(part).fetch().result()
    k = data.draw(st.integers(0, len(part) - 1))
    place = data.draw(st.integers(0, part[k].values.size - 1))
    part[k].values.view(np.uint32)[place] ^= np.uint32(1 << data.draw(st.integers(0, 31)))
    assert np.flatnonzero(PartChecksums(part).fetch().result() != before).tolist() == [k]


@given(sizes=SIZES.filter(any), data=st.data())
def test_a_guard_finds_what_has_changed_since_it_was_remembered(sizes: list[int], data: st.DataObject) -> None:
    (part,) = cut(_arrays(sizes), most=1, least_bytes=0)
    guard = PartGuard(part)
    piece = part[data.draw(st.integers(0, len(part) - 1))]

    def flip() -> None:
        place = data.draw(st.integers(0, piece.values.size - 1))
        piece.values.view(np.uint32)[place] ^= np.uint32(1 << data.draw(st.integers(0, 31)))

    guard.compare()  # remembers
    guard.forget()
    flip()
    guard.verify()  # remembers again
    flip()
    guard.remember()
    guard.compare()
    assert guard.found == ()
    flip()
    guard.compare()
    assert guard.found == (piece.name,)
    guard.remember()
    guard.verify()
    assert guard.found == (piece.name,)
