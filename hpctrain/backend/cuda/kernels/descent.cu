// Momentum descent over a table of runs of flat memory, in the very order of the host's arithmetic: the bits are the same.
//
// A run is elements [start, stop) that are updated alike; `offset` leads from a place in the flat buffers to that in the momentum. Runs are
// divided into tiles of TILE elements, counted from the last whole pack at or before their start; `first_tile` counts the tiles before.
#include "common.cuh"
#include "exact.cuh"

constexpr int TILE = 4096, THREADS = 256, W = 4;

template <class S> struct Run { int64_t start, stop, offset, first_tile; S gradient_scale, decay; };

template <class S> struct Rule {
  S lr, factor; bool nesterov;
  // The new weight; m is replaced where there is momentum.
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

template <class S> __device__ __forceinline__ const Run<S>& run_of(const Run<S>* runs, int32_t count, int64_t tile) {
  int32_t low = 0, high = count;
  while (high - low > 1) {
    const int32_t middle = (low + high) / 2;
    if (runs[middle].first_tile <= tile) low = middle; else high = middle;
  }
  return runs[low];
}

template <class S> struct Flat { S* data; const S* gradient; S* momentum; bf16* shadow; };

template <class S> __device__ __forceinline__ void update_one(const Flat<S>& flat, const Run<S>& run, int64_t i, const Rule<S>& rule) {
  S m = flat.momentum ? flat.momentum[i + run.offset] : 0;
  const S w = rule(flat.data[i], flat.gradient[i], m, run.gradient_scale, run.decay);
  flat.data[i] = w;
  if (flat.momentum) flat.momentum[i + run.offset] = m;
  if (flat.shadow) flat.shadow[i] = Round<bf16>::of(w);
}

// The momentum's pack, which need not lie where packs may: its place follows from what else its owner has.
template <class S> __device__ __forceinline__ Pack<S, W> load_momentum(const S* m, bool packed) {
  if (packed) return load<S, W>(m);
  Pack<S, W> pack;
#pragma unroll
  for (int k = 0; k < W; k++) pack.at[k] = m[k];
  return pack;
}

template <class S> __device__ __forceinline__ void store_momentum(S* m, const Pack<S, W>& pack, bool packed) {
  if (packed) return store(m, pack);
#pragma unroll
  for (int k = 0; k < W; k++) m[k] = pack.at[k];
}

template <class S> __device__ __forceinline__ void update_pack(const Flat<S>& flat, const Run<S>& run, int64_t i, const Rule<S>& rule) {
  const bool packed = run.offset % W == 0;
  Pack<S, W> w = load<S, W>(flat.data + i), g = load<S, W>(flat.gradient + i), m;
  if (flat.momentum) m = load_momentum(flat.momentum + i + run.offset, packed);
  Pack<bf16, W> rounded;
#pragma unroll
  for (int k = 0; k < W; k++) {
    w.at[k] = rule(w.at[k], g.at[k], m.at[k], run.gradient_scale, run.decay);
    rounded.at[k] = Round<bf16>::of(w.at[k]);
  }
  store(flat.data + i, w);
  if (flat.momentum) store_momentum(flat.momentum + i + run.offset, m, packed);
  if (flat.shadow) store(flat.shadow + i, rounded);
}

// aligned: the buffers' first elements lie where packs may.
template <class S> __device__ __forceinline__ void descend(const Flat<S>& flat, const Run<S>* runs, int32_t count, const Rule<S>& rule, bool aligned, int64_t tiles) {
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const Run<S> run = run_of(runs, count, tile);
    const int64_t first = run.start / W * W + (tile - run.first_tile) * TILE;
#pragma unroll 2
    for (int32_t p = threadIdx.x; p < TILE / W; p += THREADS) {
      const int64_t i = first + p * W;
      if (aligned && i >= run.start && i + W <= run.stop) {
        update_pack(flat, run, i, rule);
      } else {
        for (int64_t k = i < run.start ? run.start : i; k < i + W && k < run.stop; k++) update_one(flat, run, k, rule);
      }
    }
  }
}

#define MAKE(S, tag) \
  extern "C" __global__ __launch_bounds__(256) void descend_##tag( \
      S* data, const S* gradient, S* momentum, bf16* shadow, const Run<S>* runs, int32_t count, S lr, S factor, int32_t nesterov, int32_t aligned, \
      int64_t tiles) { \
    descend<S>(Flat<S>{data, gradient, momentum, shadow}, runs, count, Rule<S>{lr, factor, nesterov != 0}, aligned != 0, tiles); } \
  EXPORT_INDEPENDENT(descend_##tag)
MAKE(float, f32)
#ifdef ON_CPU
MAKE(double, f64)
#endif
