// Checksums of many arrays of 32-bit words: CRC-32, equal to zlib's, and plain sums, each in one launch over a table of arrays.
//
// A CRC-32 is the remainder of a polynomial over GF(2) whose coefficients are the data's bits. Bit 31 of a number is the coefficient of x^0, as
// in zlib. Without zlib's first and last inversion it is linear. The remainder of a part is therefore moved to its position by a product with
// a power of x, and added by XOR, in any order. The host adds the term of the inversions, which is the checksum of as many zeros.
#include "tables.cuh"

constexpr uint32_t POLYNOMIAL = 0xedb88320u, ONE = 0x80000000u;

__device__ __forceinline__ uint32_t product(uint32_t a, uint32_t b) {
  uint32_t sum = 0;
#pragma unroll 8
  for (int bit = 0; bit < 32; bit++) {
    sum ^= b & (0u - (a >> 31));
    a <<= 1;
    b = (b >> 1) ^ (POLYNOMIAL & (0u - (b & 1u)));
  }
  return sum;
}

// x^(32 words).
__device__ __forceinline__ uint32_t power(int64_t words) {
  uint32_t made = ONE, square = POLYNOMIAL;
  for (; words; words >>= 1) {
    if (words & 1) made = product(made, square);
    square = product(square, square);
  }
  return made;
}

struct Remainder {
  // A thread sums words that are THREADS apart. Each is multiplied by x^32 once, and once for each later word in the tile of `size`.
  static __device__ __forceinline__ uint32_t of(const uint32_t* words, int32_t size) {
    if (int32_t(threadIdx.x) >= size) return 0;
    const uint32_t step = power(THREADS);
    uint32_t sum = 0;
    int32_t last = 0;
    for (int32_t i = threadIdx.x; i < size; last = i, i += THREADS) sum = product(sum, step) ^ words[i];
    return product(sum, power(size - last));
  }
  static __device__ __forceinline__ uint32_t joined(uint32_t a, uint32_t b) { return a ^ b; }
  static __device__ __forceinline__ uint32_t in_place(uint32_t sum, int64_t words_after) { return product(sum, power(words_after)); }
};

struct WordSum {
  static __device__ __forceinline__ uint32_t of(const uint32_t* words, int32_t size) {
    uint32_t sum = 0;
    for (int32_t i = threadIdx.x; i < size; i += THREADS) sum += words[i];
    return sum;
  }
  static __device__ __forceinline__ uint32_t joined(uint32_t a, uint32_t b) { return a + b; }
  static __device__ __forceinline__ uint32_t in_place(uint32_t sum, int64_t) { return sum; }
};

// The combination of all threads' sums, valid in all lanes of warp 0.
template <class Kind> __device__ __forceinline__ uint32_t joined_in_block(uint32_t sum, uint32_t* warps) {
  for (int m = 16; m; m /= 2) sum = Kind::joined(sum, __shfl_xor_sync(0xffffffffu, sum, m));
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = threadIdx.x < THREADS / 32 ? warps[threadIdx.x] : 0;
  __syncthreads();
  for (int m = 16; m; m /= 2) sum = Kind::joined(sum, __shfl_xor_sync(0xffffffffu, sum, m));
  return sum;
}

template <class Kind> __device__ __forceinline__ void sum_tiles(const int64_t* table, int32_t arrays, uint32_t* partial, int64_t tiles, uint32_t* warps) {
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t* array = array_of(table, arrays, tile);
    const int64_t begin = (tile - array[2]) * TILE, left = array[1] - begin;
    const int32_t size = left < TILE ? int32_t(left) : TILE;
    const uint32_t sum = joined_in_block<Kind>(Kind::of(reinterpret_cast<const uint32_t*>(array[0]) + begin, size), warps);
    if (threadIdx.x == 0) partial[tile] = Kind::in_place(sum, left - size);
  }
}

// One block per array, which combines the sums of the array's tiles.
template <class Kind> __device__ __forceinline__ void join_tiles(const int64_t* table, const uint32_t* partial, uint32_t* sums, uint32_t* warps) {
  const int64_t* array = table + int64_t(blockIdx.x) * COLUMNS;
  uint32_t sum = 0;
  for (int64_t tile = array[2] + threadIdx.x; tile < array[2 + COLUMNS]; tile += THREADS) sum = Kind::joined(sum, partial[tile]);
  sum = joined_in_block<Kind>(sum, warps);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

#define MAKE(Kind, name) \
  extern "C" __global__ __launch_bounds__(256) void sum_##name(const int64_t* table, int32_t arrays, uint32_t* partial, int64_t tiles) { \
    SHARED(uint32_t, warps, THREADS / 32); \
    sum_tiles<Kind>(table, arrays, partial, tiles, warps); } \
  extern "C" __global__ __launch_bounds__(256) void join_##name(const int64_t* table, const uint32_t* partial, uint32_t* sums) { \
    SHARED(uint32_t, warps, THREADS / 32); \
    join_tiles<Kind>(table, partial, sums, warps); } \
  EXPORT(sum_##name) EXPORT(join_##name)
MAKE(Remainder, remainders) MAKE(WordSum, words)

// Marks the arrays whose sums differ from the recorded ones.
extern "C" __global__ __launch_bounds__(256) void mark_changed(uint8_t* changed, const uint32_t* sums, const uint32_t* remembered, int64_t arrays) {
  for (int64_t i = first_item(); i < arrays; i += item_step()) if (sums[i] != remembered[i]) changed[i] = 1;
}
EXPORT_INDEPENDENT(mark_changed)
