// Sums over the pixels of images (N, pixels, packs * W), and copies of values (N, packs * W) to all pixels.
#include "common.cuh"

// One thread per pack of sums, so that adjacent threads read adjacent packs of a pixel. Sums in the order of the pixels, rounded once.
template <class T, int W> __device__ __forceinline__ void sum_pixels(
    T* target, const T* source, typename Sum<T>::type scale, int64_t pixels, int32_t packs, int64_t items) {
  typedef typename Sum<T>::type S;
  for (int64_t item = first_item(); item < items; item += item_step()) {
    const int64_t image = item / packs;
    const T* from = source + (image * pixels * packs + (item - image * packs)) * W;
    S sum[W];
#pragma unroll
    for (int i = 0; i < W; i++) sum[i] = 0;
    for (int64_t pixel = 0; pixel < pixels; pixel++) {
      const Pack<T, W> v = load<T, W>(from + pixel * packs * W);
#pragma unroll
      for (int i = 0; i < W; i++) sum[i] += value(v.at[i]);
    }
    Pack<T, W> out;
#pragma unroll
    for (int i = 0; i < W; i++) out.at[i] = Round<T>::of(sum[i] * scale);
    store(target + item * W, out);
  }
}

template <class T, int W> __device__ __forceinline__ void spread_pixels(
    T* target, const T* source, typename Sum<T>::type scale, int64_t pixels, int32_t packs, int64_t items) {
  for (int64_t item = first_item(); item < items; item += item_step()) {
    const int64_t pixel = item / packs, image = pixel / pixels;
    Pack<T, W> v = load<T, W>(source + (image * packs + (item - pixel * packs)) * W);
#pragma unroll
    for (int i = 0; i < W; i++) v.at[i] = Round<T>::of(value(v.at[i]) * scale);
    store(target + item * W, v);
  }
}

#define KERNEL(name, T, tag, W) \
  extern "C" __global__ __launch_bounds__(256) void name##_##tag##_w##W( \
      T* target, const T* source, Sum<T>::type scale, int64_t pixels, int32_t packs, int64_t items) { \
    name<T, W>(target, source, scale, pixels, packs, items); \
  } \
  EXPORT_INDEPENDENT(name##_##tag##_w##W)
#define MAKE(T, tag, W) KERNEL(sum_pixels, T, tag, W) KERNEL(spread_pixels, T, tag, W)
MAKE(float, f32, 4) MAKE(float, f32, 1) MAKE(bf16, bf16, 8) MAKE(bf16, bf16, 1)
#ifdef ON_CPU
MAKE(double, f64, 2) MAKE(double, f64, 1)
#endif
