// The bias of a linear layer: y (rows, packs * W) = sums + bias, rounded once. `sums` and y may be the same array.
#include "images.cuh"

template <class T, int W>
__device__ __forceinline__ void add_bias(
    const typename Sum<T>::type* sums, const typename Sum<T>::type* __restrict__ bias, T* y, int packs, int rows) {
  typedef typename Sum<T>::type S;
  for (int row = first_row(); row < rows; row += row_step())
    for (int pack = threadIdx.x; pack < packs; pack += blockDim.x) {
      const int64_t at = (int64_t(row) * packs + pack) * W;
      const Pack<S, W> sum = load<S, W>(sums + at);
      Pack<T, W> out;
#pragma unroll
      for (int i = 0; i < W; i++) out.at[i] = Round<T>::of(sum.at[i] + bias[pack * W + i]);
      store(y + at, out);
    }
}

#define MAKE(T, tag, W) \
  extern "C" __global__ void __launch_bounds__(256, 4) \
      add_bias_##tag##_w##W(const Sum<T>::type* sums, const Sum<T>::type* bias, T* y, int packs, int rows) { \
    add_bias<T, W>(sums, bias, y, packs, rows); \
  } \
  EXPORT_INDEPENDENT(add_bias_##tag##_w##W)
MAKE(float, f32, 4) MAKE(float, f32, 1) MAKE(bf16, bf16, 8) MAKE(bf16, bf16, 1)
#ifdef ON_CPU
MAKE(double, f64, 2) MAKE(double, f64, 1)
#endif
