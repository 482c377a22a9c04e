// Loops of window kernels over images. A block of (x, y) threads processes y rows at a time, and along a row x packs of W channels at a
// time. A thread divides to find its row only once for all its packs in the row.
#include "common.cuh"

__device__ __forceinline__ int first_row() { return int(blockIdx.x * blockDim.y + threadIdx.y); }
__device__ __forceinline__ int row_step() { return int(gridDim.x * blockDim.y); }

// The column and the first channel of pack `item` of a row.
template <int W> struct Place {
  int column, channel;
  __device__ __forceinline__ Place(int item, int packs)
      : column(int(unsigned(item) / unsigned(packs))), channel((item - column * packs) * W) {}
};

// x / divisor for x >= 0. All threads have the same divisor, so strides 1 and 2 need no division.
__device__ __forceinline__ int quotient(int x, int divisor) {
  return divisor == 1 ? x : divisor == 2 ? x >> 1 : int(unsigned(x) / unsigned(divisor));
}

// Writes the gradient of W channels, or adds it to dx if `accumulate` is set; rounded once.
template <class T, int W, class S> __device__ __forceinline__ void write_gradient(T* dx, S (&sum)[W], int accumulate) {
  Pack<T, W> out;
  if (accumulate) {
    out = load<T, W>(dx);
#pragma unroll
    for (int i = 0; i < W; i++) sum[i] += value(out.at[i]);
  }
#pragma unroll
  for (int i = 0; i < W; i++) out.at[i] = Round<T>::of(sum[i]);
  store(dx, out);
}
