// How kernels of windows go over images: blocks of (x, y) threads, y rows at a time, along a row x packs of W channels at a time.
// So the divisions that find a row are made once for all packs of a thread in it.
#include "common.cuh"

__device__ __forceinline__ int first_row() { return int(blockIdx.x * blockDim.y + threadIdx.y); }
__device__ __forceinline__ int row_step() { return int(gridDim.x * blockDim.y); }

// Where pack `item` of a row lies: its column, and its first channel.
template <int W> struct Place {
  int column, channel;
  __device__ __forceinline__ Place(int item, int packs)
      : column(int(unsigned(item) / unsigned(packs))), channel((item - column * packs) * W) {}
};

// x / divisor for 0 <= x: the same for all threads, so that a stride of 1 or 2 costs no division.
__device__ __forceinline__ int quotient(int x, int divisor) {
  return divisor == 1 ? x : divisor == 2 ? x >> 1 : int(unsigned(x) / unsigned(divisor));
}

// Writes the gradient of W channels, added to what is there where `accumulate` is set; rounded once.
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
