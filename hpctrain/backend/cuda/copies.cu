// Copies, casts, fills and sums of flat arrays, and copies between boxes of strided arrays.
#include "common.cuh"
#include "exact.cuh"

// Strides over `size` elements in packs of W, and over the elements after the last whole pack one by one.
template <int W, class Operation> __device__ __forceinline__ void over_packs(const Operation& operation, int64_t size) {
  const int64_t packs = size / W, rest = size - packs * W;
  for (int64_t p = first_item(); p < packs; p += item_step()) operation.template at<W>(p * W);
  if (W > 1 && first_item() < rest) operation.template at<1>(packs * W + first_item());
}

template <class A, class B> struct Cast {
  const A* source; B* target;
  template <int W> __device__ __forceinline__ void at(int64_t i) const {
    Pack<A, W> a = load<A, W>(source + i);
    Pack<B, W> b;
#pragma unroll
    for (int k = 0; k < W; k++) b.at[k] = Round<B>::of(value(a.at[k]));
    store(target + i, b);
  }
};

template <class T> struct Fill {
  T* target; T x;
  template <int W> __device__ __forceinline__ void at(int64_t i) const {
    Pack<T, W> v;
#pragma unroll
    for (int k = 0; k < W; k++) v.at[k] = x;
    store(target + i, v);
  }
};

// target := target + sign * source; a product with 1 or -1 is exact.
template <class T> struct AddSigned {
  typedef typename Sum<T>::type S;
  T* target; const T* source; S sign;
  template <int W> __device__ __forceinline__ void at(int64_t i) const {
    Pack<T, W> a = load<T, W>(target + i), b = load<T, W>(source + i);
#pragma unroll
    for (int k = 0; k < W; k++) a.at[k] = Round<T>::of(S(value(a.at[k])) + sign * S(value(b.at[k])));
    store(target + i, a);
  }
};

// target := (target - source) * kept + source, rounded after each operation, as on the host.
template <class T> struct Average {
  typedef typename Sum<T>::type S;
  T* target; const T* source; S kept;
  template <int W> __device__ __forceinline__ void at(int64_t i) const {
    Pack<T, W> a = load<T, W>(target + i), b = load<T, W>(source + i);
#pragma unroll
    for (int k = 0; k < W; k++) {
      const S w = value(b.at[k]);
      a.at[k] = Round<T>::of(exact_sum(exact_product(exact_difference(S(value(a.at[k])), w), kept), w));
    }
    store(target + i, a);
  }
};

// A box of 4 dims: element (i, j, k, l) has the index i * step0 + j * step1 + k * step2 + l in each array. Items are packs along l.
template <class T, int W, bool ADD> __device__ __forceinline__ void box(
    T* target, const T* source, int64_t t0, int64_t t1, int64_t t2, int64_t s0, int64_t s1, int64_t s2, int32_t n1, int32_t n2, int32_t packs,
    int64_t items) {
  for (int64_t p = first_item(); p < items; p += item_step()) {
    const int64_t row = p / packs;
    const int32_t l = int32_t(p - row * packs) * W;
    const int64_t plane = row / n2, i = plane / n1;
    const int64_t k = row - plane * n2, j = plane - i * n1;
    T* to = target + i * t0 + j * t1 + k * t2 + l;
    Pack<T, W> v = load<T, W>(source + i * s0 + j * s1 + k * s2 + l);
    if (ADD) {
      Pack<T, W> old = load<T, W>(to);
#pragma unroll
      for (int e = 0; e < W; e++) v.at[e] = Round<T>::of(value(old.at[e]) + value(v.at[e]));
    }
    store(to, v);
  }
}

#define CAST(A, a, B, b, W) \
  extern "C" __global__ __launch_bounds__(256) void cast_##a##_##b##_w##W(B* target, const A* source, int64_t size) { \
    over_packs<W>(Cast<A, B>{source, target}, size); } \
  EXPORT_INDEPENDENT(cast_##a##_##b##_w##W)
#define FLAT(T, S, tag, W) \
  extern "C" __global__ __launch_bounds__(256) void fill_##tag##_w##W(T* target, S x, int64_t size) { \
    over_packs<W>(Fill<T>{target, Round<T>::of(x)}, size); } \
  extern "C" __global__ __launch_bounds__(256) void add_##tag##_w##W(T* target, const T* source, S sign, int64_t size) { \
    over_packs<W>(AddSigned<T>{target, source, sign}, size); } \
  extern "C" __global__ __launch_bounds__(256) void average_##tag##_w##W(T* target, const T* source, S kept, int64_t size) { \
    over_packs<W>(Average<T>{target, source, kept}, size); } \
  EXPORT_INDEPENDENT(fill_##tag##_w##W) EXPORT_INDEPENDENT(add_##tag##_w##W) EXPORT_INDEPENDENT(average_##tag##_w##W)
#define BOX_ARGUMENTS(T) \
  (T * target, const T* source, int64_t t0, int64_t t1, int64_t t2, int64_t s0, int64_t s1, int64_t s2, int32_t n1, int32_t n2, int32_t packs, \
   int64_t items)
#define BOX(T, tag, W) \
  extern "C" __global__ __launch_bounds__(256) void copy_box_##tag##_w##W BOX_ARGUMENTS(T) { \
    box<T, W, false>(target, source, t0, t1, t2, s0, s1, s2, n1, n2, packs, items); } \
  extern "C" __global__ __launch_bounds__(256) void add_box_##tag##_w##W BOX_ARGUMENTS(T) { \
    box<T, W, true>(target, source, t0, t1, t2, s0, s1, s2, n1, n2, packs, items); } \
  EXPORT_INDEPENDENT(copy_box_##tag##_w##W) EXPORT_INDEPENDENT(add_box_##tag##_w##W)
#define MAKE(T, S, tag, W) FLAT(T, S, tag, W) BOX(T, tag, W)

CAST(float, f32, bf16, bf16, 4) CAST(float, f32, bf16, bf16, 1) CAST(bf16, bf16, float, f32, 4) CAST(bf16, bf16, float, f32, 1)
MAKE(float, float, f32, 4) MAKE(float, float, f32, 1) MAKE(bf16, float, bf16, 8) MAKE(bf16, float, bf16, 1)
#ifdef ON_CPU
CAST(double, f64, float, f32, 4) CAST(double, f64, float, f32, 1) CAST(float, f32, double, f64, 4) CAST(float, f32, double, f64, 1)
CAST(double, f64, bf16, bf16, 4) CAST(double, f64, bf16, bf16, 1) CAST(bf16, bf16, double, f64, 4) CAST(bf16, bf16, double, f64, 1)
MAKE(double, double, f64, 2) MAKE(double, double, f64, 1)
#endif
