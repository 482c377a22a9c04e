"""Packing: blocks that live at one time never overlap, and little is wasted."""

from hypothesis import given
from hypothesis import strategies as st

from hpctrain.backend.alignment import ALIGNMENT_BYTES, aligned
from hpctrain.nn.compile.packing import Block, lower_bound, meetings, pack


@st.composite
def _blocks(draw: st.DrawFn) -> list[Block]:
    found = []
    for _ in range(draw(st.integers(0, 25))):
        first = draw(st.integers(0, 30))
        last = first + draw(st.integers(0, 12))
        second = last + draw(st.integers(1, 9))
        again = draw(st.sampled_from([(), ((second, second + draw(st.integers(0, 5))),)]))  # live, free, and live once more
        found.append(Block(draw(st.integers(0, 5000)), first, last, again))
    return found


@given(_blocks())
def test_blocks_alive_together_never_overlap(blocks: list[Block]) -> None:
    offsets, arena = pack(blocks)
    for i, (a, low_a) in enumerate(zip(blocks, offsets, strict=True)):
        assert low_a % ALIGNMENT_BYTES == 0
        assert low_a + a.size_bytes <= arena
        for b, low_b in zip(blocks[:i], offsets[:i], strict=True):
            if a.meets(b) and a.size_bytes and b.size_bytes:
                assert low_a + a.size_bytes <= low_b or low_b + b.size_bytes <= low_a


@given(_blocks())
def test_the_arena_is_between_the_bound_and_the_sum(blocks: list[Block]) -> None:
    _, arena = pack(blocks)
    padded = sum(aligned(b.size_bytes) for b in blocks)
    assert lower_bound(blocks) <= arena <= padded


@given(_blocks(), st.sampled_from([1, 64, 256]))
def test_offsets_are_aligned_as_asked(blocks: list[Block], alignment_bytes: int) -> None:
    offsets, arena = pack(blocks, alignment_bytes)
    assert not any(offset % alignment_bytes for offset in (*offsets, arena))
    assert arena >= lower_bound(blocks, alignment_bytes)


def test_a_chain_reuses_two_buffers() -> None:
    chain = [Block(1024, k, k + 1) for k in range(10)]
    assert pack(chain)[1] == 2048


def test_memory_between_two_spans_is_used() -> None:
    """What is made again for backward leaves its memory to others in between, and to nobody while it lives."""
    twice, between, first, second = Block(1024, 0, 1, ((8, 9),)), Block(1024, 2, 7), Block(1024, 1, 2), Block(1024, 7, 8)
    assert pack([twice, between])[1] == 1024
    for other in (first, second):
        assert twice.meets(other)
        assert other.meets(twice)
        assert pack([twice, other])[1] == 2048
    assert not twice.meets(between)
    assert lower_bound([twice, between]) == 1024
    assert lower_bound([twice, first, second]) == 2048


@given(_blocks())
def test_blocks_meet_where_a_time_slot_is_in_both(blocks: list[Block]) -> None:
    slots = [{t for low, high in block.spans for t in range(low, high + 1)} for block in blocks]
    for a, mine in zip(blocks, slots, strict=True):
        for b, theirs in zip(blocks, slots, strict=True):
            assert a.meets(b) == bool(mine & theirs)


def test_packing_is_the_same_every_time() -> None:
    blocks = [Block(100 * (k % 4 + 1), k, k + k % 5) for k in range(20)]
    assert pack(blocks) == pack(list(blocks))


@given(_blocks())
def test_meetings_are_those_of_pairs(blocks: list[Block]) -> None:
    assert meetings(blocks).tolist() == [[a.meets(b) for b in blocks] for a in blocks]
