"""What oneDNN's lines say of its primitives."""

from __future__ import annotations

from hpctrain.bench import engine_profile


def test_lines_of_onednn_are_read() -> None:
    lines = [
        "onednn_verbose,info,oneDNN v3.2.0",
        "onednn_verbose,exec,cpu,convolution,jit:avx2,forward_training,src_f32::blocked:aBcd8b::f0 wei_f32,attr-scratchpad:user,"
        "alg:convolution_direct,mb2_ic16oc32_ih14oh14,0.5",
        "onednn_verbose,exec,cpu,reorder,jit:blk,undef,src_f32 dst_f32,attr-scratchpad:user,,32x16x3x3,0.25",
        "something else",
    ]
    conv, copy = engine_profile.parse(lines)
    assert (conv.kind, conv.implementation, conv.propagation) == ("convolution", "jit:avx2", "forward_training")
    assert (conv.problem, conv.seconds) == ("mb2_ic16oc32_ih14oh14", 0.0005)
    assert (copy.kind, copy.problem, copy.seconds) == ("reorder", "32x16x3x3", 0.00025)
