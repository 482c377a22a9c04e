// Copies the patch of x under each window of a convolution to a row of a matrix. Row (n, i, j) has window_h * span elements, with zeros
// where the window leaves the image, and is padded with zeros to a whole pack. `span` is the number of the window's columns times channels,
// which are contiguous in x.
//
// A thread writes the same pack of each of its rows, so it divides only once to find the pack's elements. Most windows lie inside the image,
// and are read without checks.
#include "common.cuh"

struct Shape { int height, width, rows, columns; };  // height of x in pixels, its width in elements; windows along both
struct Move { int y, x, top, left; };                // steps from window to window, and padding; x and left in elements

template <class T, int W>
__device__ __forceinline__ void patches(const T* x, T* out, const Shape& shape, const Move& move, int window_h, int span, int64_t rows) {
  const T zero = Round<T>::of(typename Sum<T>::type(0));
  const int packs = blockDim.x;
  int h[W], at[W];
#pragma unroll
  for (int k = 0; k < W; k++) {
    h[k] = int(threadIdx.x * W + k) / span;
    at[k] = int(threadIdx.x * W + k) - h[k] * span;
  }
  for (int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y; row < rows; row += int64_t(gridDim.x) * blockDim.y) {
    const int64_t line = row / shape.columns, image = line / shape.rows;
    const int left = int(row - line * shape.columns) * move.x - move.left, top = int(line - image * shape.rows) * move.y - move.top;
    const T* source = x + (image * shape.height + top) * shape.width + left;
    Pack<T, W> v;
    if (top >= 0 && top + window_h <= shape.height && left >= 0 && left + span <= shape.width) {
#pragma unroll
      for (int k = 0; k < W; k++) v.at[k] = h[k] < window_h ? source[h[k] * shape.width + at[k]] : zero;
    } else {
#pragma unroll
      for (int k = 0; k < W; k++) {
        const int y = top + h[k], column = left + at[k];
        const bool inside = h[k] < window_h && y >= 0 && y < shape.height && column >= 0 && column < shape.width;
        v.at[k] = inside ? source[h[k] * shape.width + at[k]] : zero;
      }
    }
    store(out + (row * packs + threadIdx.x) * W, v);
  }
}

#define MAKE(T, tag, W) \
  extern "C" __global__ void __launch_bounds__(256) patches_##tag( \
      const T* x, T* out, int height, int width, int rows, int columns, int step_y, int step_x, int top, int left, int window_h, int span, \
      int64_t all_rows) { \
    patches<T, W>(x, out, {height, width, rows, columns}, {step_y, step_x, top, left}, window_h, span, all_rows); } \
  EXPORT_INDEPENDENT(patches_##tag)
MAKE(float, f32, 4) MAKE(bf16, bf16, 8)
#ifdef ON_CPU
MAKE(double, f64, 2)
#endif
