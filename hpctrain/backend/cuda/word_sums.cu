// Sums of the 32-bit words of many arrays, in two launches over a table of arrays.
#include "tables.cuh"

// The sum of all threads' sums, valid in all lanes of warp 0.
__device__ __forceinline__ uint32_t joined_in_block(uint32_t sum, uint32_t* warps) {
  for (int m = 16; m; m /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, m);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = threadIdx.x < THREADS / 32 ? warps[threadIdx.x] : 0;
  __syncthreads();
  for (int m = 16; m; m /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, m);
  return sum;
}

extern "C" __global__ __launch_bounds__(256) void sum_words(const int64_t* table, int32_t arrays, uint32_t* partial, int64_t tiles) {
  SHARED(uint32_t, warps, THREADS / 32);
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t* array = array_of(table, arrays, tile);
    const int64_t begin = (tile - array[2]) * TILE, left = array[1] - begin;
    const int32_t size = left < TILE ? int32_t(left) : TILE;
    const uint32_t* words = reinterpret_cast<const uint32_t*>(array[0]) + begin;
    uint32_t sum = 0;
    for (int32_t i = threadIdx.x; i < size; i += THREADS) sum += words[i];
    sum = joined_in_block(sum, warps);
    if (threadIdx.x == 0) partial[tile] = sum;
  }
}
EXPORT(sum_words)

// One block per array, which adds up the sums of the array's tiles.
extern "C" __global__ __launch_bounds__(256) void join_words(const int64_t* table, const uint32_t* partial, uint32_t* sums) {
  SHARED(uint32_t, warps, THREADS / 32);
  const int64_t* array = table + int64_t(blockIdx.x) * COLUMNS;
  uint32_t sum = 0;
  for (int64_t tile = array[2] + threadIdx.x; tile < array[2 + COLUMNS]; tile += THREADS) sum += partial[tile];
  sum = joined_in_block(sum, warps);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}
EXPORT(join_words)

// Marks the arrays whose sums differ from the recorded ones.
extern "C" __global__ __launch_bounds__(256) void mark_changed(uint8_t* changed, const uint32_t* sums, const uint32_t* remembered, int64_t arrays) {
  for (int64_t i = first_item(); i < arrays; i += item_step()) if (sums[i] != remembered[i]) changed[i] = 1;
}
EXPORT_INDEPENDENT(mark_changed)
