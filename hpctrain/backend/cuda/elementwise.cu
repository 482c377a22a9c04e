// Rectified linear units and residual sums, element by element. Items are packs of W elements; arrays may be the same.
#include "common.cuh"

template <class T, int W> __device__ __forceinline__ void relu_forward(const T* x, T* y, int64_t packs) {
  for (int64_t p = first_item(); p < packs; p += item_step()) {
    Pack<T, W> v = load<T, W>(x + p * W);
#pragma unroll
    for (int i = 0; i < W; i++) v.at[i] = Round<T>::of(relu(value(v.at[i])));
    store(y + p * W, v);
  }
}

template <class T, int W, bool RELU> __device__ __forceinline__ void add_forward(const T* a, const T* b, T* y, int64_t packs) {
  for (int64_t p = first_item(); p < packs; p += item_step()) {
    Pack<T, W> v = load<T, W>(a + p * W), w = load<T, W>(b + p * W);
#pragma unroll
    for (int i = 0; i < W; i++) {
      const typename Sum<T>::type sum = value(v.at[i]) + value(w.at[i]);
      v.at[i] = Round<T>::of(RELU ? relu(sum) : sum);
    }
    store(y + p * W, v);
  }
}

// Writes the gradient before the ReLU (dy without a ReLU) to da and db, unless they are null. adds: bit 0 adds to da, bit 1 to db.
template <class T, int W, bool RELU>
__device__ __forceinline__ void add_backward(const T* y, const T* dy, T* da, T* db, int32_t adds, int64_t packs) {
  for (int64_t p = first_item(); p < packs; p += item_step()) {
    Pack<T, W> g = load<T, W>(dy + p * W);
    if (RELU) {
      Pack<T, W> v = load<T, W>(y + p * W);
#pragma unroll
      for (int i = 0; i < W; i++) g.at[i] = value(v.at[i]) > 0 ? g.at[i] : T{};
    }
#pragma unroll
    for (int target = 0; target < 2; target++) {
      T* d = target ? db : da;
      if (!d) continue;
      Pack<T, W> out = g;
      if (adds >> target & 1) {
        Pack<T, W> old = load<T, W>(d + p * W);
#pragma unroll
        for (int i = 0; i < W; i++) out.at[i] = Round<T>::of(value(old.at[i]) + value(g.at[i]));
      }
      store(d + p * W, out);
    }
  }
}

#define MAKE_ADD(T, tag, W, RELU, relu) \
  extern "C" __global__ void __launch_bounds__(256) add_##relu##forward_##tag##_w##W(const T* a, const T* b, T* y, int64_t packs) { \
    add_forward<T, W, RELU>(a, b, y, packs); } \
  extern "C" __global__ void __launch_bounds__(256) add_##relu##backward_##tag##_w##W( \
      const T* y, const T* dy, T* da, T* db, int32_t adds, int64_t packs) { add_backward<T, W, RELU>(y, dy, da, db, adds, packs); } \
  EXPORT_INDEPENDENT(add_##relu##forward_##tag##_w##W) EXPORT_INDEPENDENT(add_##relu##backward_##tag##_w##W)
#define MAKE(T, tag, W) \
  extern "C" __global__ void __launch_bounds__(256) relu_forward_##tag##_w##W(const T* x, T* y, int64_t packs) { \
    relu_forward<T, W>(x, y, packs); } \
  EXPORT_INDEPENDENT(relu_forward_##tag##_w##W) \
  MAKE_ADD(T, tag, W, false, ) MAKE_ADD(T, tag, W, true, relu_)
MAKE(float, f32, 4) MAKE(float, f32, 1) MAKE(bf16, bf16, 8) MAKE(bf16, bf16, 1)
#ifdef ON_CPU
MAKE(double, f64, 2) MAKE(double, f64, 1)
#endif
