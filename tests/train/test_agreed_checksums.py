"""Sums over ranks of a few numbers per rank show whether the checksums of each group of ranks are equal."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.train.agreed_checksums import AgreedChecksums

CHECKSUMS = st.integers(0, 2**32 - 1)


@given(columns=st.integers(1, 40), rows=st.integers(1, 4), common=CHECKSUMS, data=st.data())
def test_sums_tell_whether_all_of_a_group_are_equal(columns: int, rows: int, common: int, data: st.DataObject) -> None:
    ranks = columns * rows
    alike = [range(ranks)], [range(row, ranks, rows) for row in range(rows)]
    of_all, of_rows = [common] * ranks, [data.draw(CHECKSUMS) for _ in range(rows)] * columns
    odd, kind, other = data.draw(st.integers(0, ranks - 1)), data.draw(st.integers(0, 1)), data.draw(CHECKSUMS)
    values = (of_all, of_rows)[kind]
    alone = (ranks, columns)[kind] == 1
    equal = values[odd] == other
    agreed = [AgreedChecksums(alike, rank) for rank in range(ranks)]

    def well(found: int | None = None) -> bool:
        numbers = [one.numbers((of_all[rank], of_rows[rank]), found=rank == found) for rank, one in enumerate(agreed)]
        return agreed[0].are_well(np.sum(numbers, axis=0))

    assert well()
    assert not well(found=odd)
    values[odd] = other
    assert well() == (equal or alone)


def test_sums_of_many_ranks_are_exact() -> None:
    """200,000 ranks have the largest numbers, and one of them differs in one bit."""
    alike = [range(200_000)], [range(200_000)]
    agreed = AgreedChecksums(alike, 7)
    most = agreed.numbers((2**32 - 1, 2**32 - 1), found=False)
    assert agreed.are_well(200_000 * most)
    assert not agreed.are_well(199_999 * most + agreed.numbers((2**32 - 1, 2**32 - 2), found=False))
