// Sums of squares of many arrays, and tests for finite elements, each in one launch over a table of arrays.
#include "tables.cuh"

// Calls `look` with each of this thread's elements of a tile. They are loaded in packs of W if the array's address allows it.
template <class T, int W, class Look> __device__ __forceinline__ void look_at(const int64_t* array, int64_t tile, Look& look) {
  const T* x = reinterpret_cast<const T*>(array[0]) + (tile - array[2]) * TILE;
  const int64_t left = array[1] - (tile - array[2]) * TILE;
  const int32_t size = left < TILE ? int32_t(left) : TILE;
  const int32_t packs = array[0] % (W * sizeof(T)) ? 0 : size / W;
  for (int32_t p = threadIdx.x; p < packs; p += THREADS) {
    Pack<T, W> v = load<T, W>(x + p * W);
#pragma unroll
    for (int k = 0; k < W; k++) look(value(v.at[k]));
  }
  for (int32_t i = packs * W + threadIdx.x; i < size; i += THREADS) look(value(x[i]));
}

struct Squares {
  double sum = 0;
  template <class S> __device__ __forceinline__ void operator()(S x) { sum += double(x) * double(x); }
};

struct NotFinite {
  bool any = false;
  template <class S> __device__ __forceinline__ void operator()(S x) { any |= !(x - x == 0); }
};

// The sum over a block of THREADS threads, valid in all lanes of warp 0.
__device__ __forceinline__ double block_sum(double x, double* warps) {
  x = warp_sum(x);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
  __syncthreads();
  x = threadIdx.x < THREADS / 32 ? warps[threadIdx.x] : 0;
  __syncthreads();
  return warp_sum(x);
}

template <class T, int W> __device__ __forceinline__ void square_sums(const int64_t* table, int32_t arrays, double* partial, int64_t tiles, double* warps) {
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    Squares squares;
    look_at<T, W>(array_of(table, arrays, tile), tile, squares);
    const double sum = block_sum(squares.sum, warps);
    if (threadIdx.x == 0) partial[tile] = sum;
  }
}

// All threads that find such an element write the same byte, so the order does not matter.
template <class T, int W> __device__ __forceinline__ void find_not_finite(const int64_t* table, int32_t arrays, uint8_t* flags, int64_t tiles) {
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t* array = array_of(table, arrays, tile);
    NotFinite look;
    look_at<T, W>(array, tile, look);
    if (look.any) flags[(array - table) / COLUMNS] = 1;
  }
}

// One block per array, which sums the sums of the array's tiles.
extern "C" __global__ __launch_bounds__(256) void finish_sums(const int64_t* table, const double* partial, double* sums) {
  SHARED(double, warps, THREADS / 32);
  const int64_t* array = table + int64_t(blockIdx.x) * COLUMNS;
  double sum = 0;
  for (int64_t tile = array[2] + threadIdx.x; tile < array[2 + COLUMNS]; tile += THREADS) sum += partial[tile];
  sum = block_sum(sum, warps);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}
EXPORT(finish_sums)

#define MAKE(T, tag, W) \
  extern "C" __global__ __launch_bounds__(256) void square_sums_##tag(const int64_t* table, int32_t arrays, double* partial, int64_t tiles) { \
    SHARED(double, warps, THREADS / 32); \
    square_sums<T, W>(table, arrays, partial, tiles, warps); } \
  extern "C" __global__ __launch_bounds__(256) void find_not_finite_##tag(const int64_t* table, int32_t arrays, uint8_t* flags, int64_t tiles) { \
    find_not_finite<T, W>(table, arrays, flags, tiles); } \
  EXPORT(square_sums_##tag) EXPORT_INDEPENDENT(find_not_finite_##tag)
MAKE(float, f32, 4) MAKE(bf16, bf16, 8)
#ifdef ON_CPU
MAKE(double, f64, 2)
#endif
