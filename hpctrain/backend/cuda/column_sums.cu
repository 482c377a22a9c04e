// Sums over the rows of a matrix (rows, columns), such as the gradient of a bias, in two launches. In the first, each block sums its rows to
// one row; the second sums these rows. Blocks are (packs of columns, rows) of 256 threads in total; blockDim.y is a power of two. If y, the
// output of a ReLU, is given, the matrix is its gradient, and is replaced by the gradient before the ReLU before it is summed.
#include "common.cuh"

#define THREADS 256

template <class T, int W, bool RELU>
__device__ __forceinline__ void column_sums(T* x, const T* y, typename Sum<T>::type* sums, int64_t rows, int64_t columns) {
  typedef typename Sum<T>::type S;
  SHARED(S, shared, THREADS * W);
  int64_t column = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * W;
  S* place = shared + (threadIdx.y * blockDim.x + threadIdx.x) * W;
  S sum[W];
#pragma unroll
  for (int i = 0; i < W; i++) sum[i] = 0;
  if (column < columns)
#pragma unroll 2
    for (int64_t row = int64_t(blockIdx.y) * blockDim.y + threadIdx.y; row < rows; row += int64_t(gridDim.y) * blockDim.y) {
      Pack<T, W> v = load<T, W>(x + row * columns + column);
      if (RELU) {
        Pack<T, W> out = load<T, W>(y + row * columns + column);
#pragma unroll
        for (int i = 0; i < W; i++) v.at[i] = Round<T>::of(value(v.at[i]) * (value(out.at[i]) > 0 ? S(1) : S(0)));  // NaN stays NaN
        store(x + row * columns + column, v);
      }
#pragma unroll
      for (int i = 0; i < W; i++) sum[i] += value(v.at[i]);
    }
#pragma unroll
  for (int i = 0; i < W; i++) place[i] = sum[i];
  for (unsigned half = blockDim.y / 2; half; half /= 2) {
    __syncthreads();
    if (threadIdx.y < half)
#pragma unroll
      for (int i = 0; i < W; i++) place[i] += place[half * blockDim.x * W + i];
  }
  if (threadIdx.y == 0 && column < columns)
#pragma unroll
    for (int i = 0; i < W; i++) sums[blockIdx.y * columns + column + i] = place[i];
}

#define MAKE(T, tag, W)                                                                                                               \
  extern "C" __global__ void __launch_bounds__(THREADS)                                                                               \
      column_sums_##tag##_w##W(T* x, Sum<T>::type* sums, int64_t rows, int64_t columns) {                                             \
    column_sums<T, W, false>(x, nullptr, sums, rows, columns);                                                                        \
  }                                                                                                                                   \
  extern "C" __global__ void __launch_bounds__(THREADS)                                                                               \
      column_sums_relu_##tag##_w##W(T* dy, const T* y, Sum<T>::type* sums, int64_t rows, int64_t columns) {                           \
    column_sums<T, W, true>(dy, y, sums, rows, columns);                                                                              \
  }                                                                                                                                   \
  EXPORT(column_sums_##tag##_w##W)                                                                                                    \
  EXPORT(column_sums_relu_##tag##_w##W)
MAKE(float, f32, 4) MAKE(float, f32, 1) MAKE(bf16, bf16, 8) MAKE(bf16, bf16, 1)
#ifdef ON_CPU
MAKE(double, f64, 2) MAKE(double, f64, 1)
#endif
