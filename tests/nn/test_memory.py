"""Packing: blocks that live at one time never overlap, and little is wasted."""

from hypothesis import given
from hypothesis import strategies as st

from hpctrain.nn.memory import ALIGNMENT_BYTES, Block, lower_bound, pack


@st.composite
def _blocks(draw: st.DrawFn) -> list[Block]:
    found = []
    for _ in range(draw(st.integers(0, 25))):
        first = draw(st.integers(0, 30))
        found.append(Block(draw(st.integers(0, 5000)), first, first + draw(st.integers(0, 12))))
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
    padded = sum(-(-b.size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for b in blocks)
    assert lower_bound(blocks) <= arena <= padded


def test_a_chain_reuses_two_buffers() -> None:
    chain = [Block(1024, k, k + 1) for k in range(10)]
    assert pack(chain)[1] == 2048


def test_packing_is_the_same_every_time() -> None:
    blocks = [Block(100 * (k % 4 + 1), k, k + k % 5) for k in range(20)]
    assert pack(blocks) == pack(list(blocks))
