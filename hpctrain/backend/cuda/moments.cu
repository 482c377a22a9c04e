// Descent by two moments of the gradient (Adam) over a table of runs. The order of operations is the host's, so the bits are the same.
#include "common.cuh"
#include "exact.cuh"
#include "runs.cuh"

template <class S> struct Rule {
  S lr, beta1, rest1, beta2, rest2, epsilon; bool decoupled; S first_scale, second_scale;
  // The direction u; both moments are replaced.
  __device__ __forceinline__ S operator()(S w, S g, S& m, S& v, S gradient_scale, S decay) const {
    g = exact_product(g, gradient_scale);
    if (decay != 0 && !decoupled) g = exact_sum(g, exact_product(w, decay));
    m = exact_sum(exact_product(m, beta1), exact_product(g, rest1));
    v = exact_sum(exact_product(v, beta2), exact_product(exact_product(g, g), rest2));
    const S u = exact_quotient(exact_product(m, first_scale), exact_sum(exact_product(exact_root(v), second_scale), epsilon));
    return decay != 0 && decoupled ? exact_sum(u, exact_product(w, decay)) : u;
  }
};

// Where `directs`, the direction takes the place of the gradient, and the weights stay.
template <class S> struct Update {
  S* data; S* gradient; S* first; S* second; bf16* shadow; Rule<S> rule; bool directs;
  __device__ __forceinline__ void one(const Run<S>& run, int64_t i) const {
    const int64_t at = i + run.offset;
    S m = first[at], v = second[at];
    const S w = data[i], u = rule(w, gradient[i], m, v, run.gradient_scale, run.decay);
    first[at] = m;
    second[at] = v;
    if (directs) {
      gradient[i] = u;
      return;
    }
    data[i] = exact_difference(w, exact_product(u, rule.lr));
    if (shadow) shadow[i] = Round<bf16>::of(data[i]);
  }
  __device__ __forceinline__ void pack(const Run<S>& run, int64_t i) const {
    const bool packed = run.offset % W == 0;
    const int64_t at = i + run.offset;
    Pack<S, W> w = load<S, W>(data + i), g = load<S, W>(gradient + i);
    Pack<S, W> m = load_state(first + at, packed), v = load_state(second + at, packed);
    Pack<bf16, W> rounded;
#pragma unroll
    for (int k = 0; k < W; k++) {
      g.at[k] = rule(w.at[k], g.at[k], m.at[k], v.at[k], run.gradient_scale, run.decay);
      w.at[k] = exact_difference(w.at[k], exact_product(g.at[k], rule.lr));
      rounded.at[k] = Round<bf16>::of(w.at[k]);
    }
    store_state(first + at, m, packed);
    store_state(second + at, v, packed);
    if (directs) {
      store(gradient + i, g);
      return;
    }
    store(data + i, w);
    if (shadow) store(shadow + i, rounded);
  }
};

#define MAKE(S, tag) \
  extern "C" __global__ __launch_bounds__(256) void moments_##tag( \
      S* data, S* gradient, S* first, S* second, bf16* shadow, const Run<S>* runs, int32_t count, S lr, S beta1, S rest1, S beta2, S rest2, \
      S epsilon, int32_t decoupled, S first_scale, S second_scale, int32_t directs, int32_t aligned, int64_t tiles) { \
    const Rule<S> rule{lr, beta1, rest1, beta2, rest2, epsilon, decoupled != 0, first_scale, second_scale}; \
    over_runs<S>(runs, count, aligned != 0, tiles, Update<S>{data, gradient, first, second, shadow, rule, directs != 0}); } \
  EXPORT_INDEPENDENT(moments_##tag)
MAKE(float, f32)
#ifdef ON_CPU
MAKE(double, f64)
#endif
