#include "common.cuh"

// Rounds `count` float32 bit patterns from `first` on to bfloat16, by `Round`, which is one instruction on a GPU, and by integers. Each
// thread counts its differences; the pattern of its first one is kept.
extern "C" __global__ void __launch_bounds__(256)
    compare_roundings(int64_t first, int64_t count, int64_t* __restrict__ differences, int64_t* __restrict__ patterns) {
  int64_t different = 0, pattern = -1;
  for (int64_t i = first_item(); i < count; i += item_step()) {
    const uint32_t u = uint32_t(first + i);
    const uint16_t rounded = (u & 0x7fffffff) > 0x7f800000 ? 0x7fff : uint16_t((uint64_t(u) + 0x7fff + (u >> 16 & 1)) >> 16);
    if (Round<bf16>::of(__uint_as_float(u)).bits == rounded) continue;
    if (!different++) pattern = u;
  }
  differences[first_item()] = different;
  patterns[first_item()] = pattern;
}
EXPORT_INDEPENDENT(compare_roundings)
