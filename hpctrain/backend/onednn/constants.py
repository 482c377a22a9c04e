"""Constants of oneDNN's C interface (version 3), under the names of its headers without the prefix."""

from __future__ import annotations

SUCCESS = 0
STATUS_NAMES = {
    1: "dnnl_out_of_memory",
    2: "dnnl_invalid_arguments",
    3: "dnnl_unimplemented",
    4: "dnnl_last_impl_reached",
    5: "dnnl_runtime_error",
    6: "dnnl_not_required",
    7: "dnnl_invalid_graph",
    8: "dnnl_invalid_graph_op",
    9: "dnnl_invalid_shape",
    10: "dnnl_invalid_data_type",
}
UNIMPLEMENTED = 3

# dnnl_engine_kind_t, dnnl_stream_flags_t, dnnl_scratchpad_mode_t
CPU = 1
STREAM_IN_ORDER = 1
SCRATCHPAD_MODE_USER = 1

# dnnl_data_type_t, by the names of specs
DATA_TYPE = {"bfloat16": 2, "float32": 3}

# dnnl_format_tag_t; the letters are the dims in memory order, capitals and digits the blocks
FORMAT_TAG = {"any": 1, "a": 2, "ab": 3, "ba": 14, "abcd": 5, "acdb": 22, "aBcd8b": 102, "aBcd16b": 78}

# dnnl_prop_kind_t
FORWARD_TRAINING = 64
FORWARD_INFERENCE = 96
BACKWARD = 128
BACKWARD_DATA = 160

# dnnl_alg_kind_t
CONVOLUTION_DIRECT = 0x1
ELTWISE_RELU = 0x20
ELTWISE_SQRT = 0x25
ELTWISE_RELU_USE_DST = 0x100
POOLING_MAX = 0x1FF
POOLING_AVERAGE_INCLUDE_PADDING = 0x2FF
POOLING_AVERAGE_EXCLUDE_PADDING = 0x3FF
BINARY_ADD = 0x1FFF0
BINARY_MUL = 0x1FFF1
BINARY_DIV = 0x1FFF4
BINARY_SUB = 0x1FFF5

# dnnl_normalization_flags_t
USE_GLOBAL_STATS = 0x1
USE_SCALE = 0x2
USE_SHIFT = 0x4
FUSE_NORM_RELU = 0x8

# Execution arguments
ARG_SRC = 1
ARG_SRC_1 = 2
ARG_DST = 17
ARG_WEIGHTS = 33
ARG_BIAS = 41
ARG_MEAN = 49
ARG_VARIANCE = 50
ARG_SCALE = 51
ARG_SHIFT = 52
ARG_WORKSPACE = 64
ARG_SCRATCHPAD = 80
ARG_DIFF_SRC = 129
ARG_DIFF_DST = 145
ARG_DIFF_WEIGHTS = 161
ARG_DIFF_BIAS = 169
ARG_DIFF_SCALE = 255
ARG_DIFF_SHIFT = 256


def post_operand(number: int) -> int:
    """Return the execution argument of a binary post-operation's second operand (DNNL_ARG_ATTR_MULTIPLE_POST_OP | ARG_SRC_1).

    Args:
        number: index of the post-operation among all of them.
    """
    return 32768 * (number + 1) | ARG_SRC_1


# dnnl_query_t
QUERY_IMPL_INFO_STR = 8
QUERY_WEIGHTS_MD = 131
QUERY_DIFF_WEIGHTS_MD = 132
QUERY_WORKSPACE_MD = 135
QUERY_SCRATCHPAD_MD = 136

MAX_DIMS = 12

# dnnl_cpu_isa_t
ISA_AVX512_CORE = 0x27
ISA_AVX512_CORE_BF16 = 0xE7
