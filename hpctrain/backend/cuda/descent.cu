// Momentum descent over a table of runs of flat memory. The order of operations is the host's, so the bits are the same.
#include "common.cuh"
#include "exact.cuh"
#include "runs.cuh"

template <class S> struct Rule {
  S lr, factor; bool nesterov;
  // Returns the new weight; updates m if there is momentum.
  __device__ __forceinline__ S operator()(S w, S g, S& m, S gradient_scale, S decay) const {
    g = exact_product(g, gradient_scale);
    if (decay != 0) g = exact_sum(g, exact_product(w, decay));
    if (factor != 0) {
      m = exact_sum(exact_product(m, factor), g);
      g = nesterov ? exact_sum(g, exact_product(m, factor)) : m;
    }
    return exact_difference(w, exact_product(g, lr));
  }
};

template <class S> struct Flat { S* data; const S* gradient; S* momentum; bf16* shadow; };

template <class S> __device__ __forceinline__ void update_one(const Flat<S>& flat, const Run<S>& run, int64_t i, const Rule<S>& rule) {
  S m = flat.momentum ? flat.momentum[i + run.offset] : 0;
  const S w = rule(flat.data[i], flat.gradient[i], m, run.gradient_scale, run.decay);
  flat.data[i] = w;
  if (flat.momentum) flat.momentum[i + run.offset] = m;
  if (flat.shadow) flat.shadow[i] = Round<bf16>::of(w);
}

template <class S> __device__ __forceinline__ void update_pack(const Flat<S>& flat, const Run<S>& run, int64_t i, const Rule<S>& rule) {
  const bool packed = run.offset % W == 0;
  Pack<S, W> w = load<S, W>(flat.data + i), g = load<S, W>(flat.gradient + i), m;
  if (flat.momentum) m = load_state(flat.momentum + i + run.offset, packed);
  Pack<bf16, W> rounded;
#pragma unroll
  for (int k = 0; k < W; k++) {
    w.at[k] = rule(w.at[k], g.at[k], m.at[k], run.gradient_scale, run.decay);
    rounded.at[k] = Round<bf16>::of(w.at[k]);
  }
  store(flat.data + i, w);
  if (flat.momentum) store_state(flat.momentum + i + run.offset, m, packed);
  if (flat.shadow) store(flat.shadow + i, rounded);
}

template <class S> struct Update {
  Flat<S> flat; Rule<S> rule;
  __device__ __forceinline__ void one(const Run<S>& run, int64_t i) const { update_one(flat, run, i, rule); }
  __device__ __forceinline__ void pack(const Run<S>& run, int64_t i) const { update_pack(flat, run, i, rule); }
};

#define MAKE(S, tag) \
  extern "C" __global__ __launch_bounds__(256) void descend_##tag( \
      S* data, const S* gradient, S* momentum, bf16* shadow, const Run<S>* runs, int32_t count, S lr, S factor, int32_t nesterov, int32_t aligned, \
      int64_t tiles) { \
    over_runs<S>(runs, count, aligned != 0, tiles, Update<S>{{data, gradient, momentum, shadow}, {lr, factor, nesterov != 0}}); } \
  EXPORT_INDEPENDENT(descend_##tag)
MAKE(float, f32)
#ifdef ON_CPU
MAKE(double, f64)
#endif
