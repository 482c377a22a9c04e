// Kernels that look at each element alone. Items are packs of W elements.
#include "common.cuh"

template <class T, int W> __device__ __forceinline__ void relu_forward(const T* x, T* y, int64_t packs) {
  for (int64_t p = first_item(); p < packs; p += item_step()) {
    Pack<T, W> v = load<T, W>(x + p * W);
#pragma unroll
    for (int i = 0; i < W; i++) v.at[i] = Round<T>::of(relu(value(v.at[i])));
    store(y + p * W, v);
  }
}

#define MAKE(T, tag, W) \
  extern "C" __global__ void relu_forward_##tag##_w##W(const T* x, T* y, int64_t packs) { relu_forward<T, W>(x, y, packs); } \
  EXPORT_INDEPENDENT(relu_forward_##tag##_w##W)
MAKE(float, f32, 4) MAKE(float, f32, 1) MAKE(bf16, bf16, 8) MAKE(bf16, bf16, 1)
#ifdef ON_CPU
MAKE(double, f64, 2) MAKE(double, f64, 1)
#endif
