// Runs of flat memory: elements [start, stop) with the same gradient scale and decay. `offset` is an element's index in the state minus its
// index in the flat buffers. Runs are divided into tiles of TILE elements, which begin at the pack boundary at or before `start`;
// `first_tile` is the number of tiles of all earlier runs.
constexpr int TILE = 4096, THREADS = 256, W = 4;

template <class S> struct Run { int64_t start, stop, offset, first_tile; S gradient_scale, decay; };

template <class S> __device__ __forceinline__ const Run<S>& run_of(const Run<S>* runs, int32_t count, int64_t tile) {
  int32_t low = 0, high = count;
  while (high - low > 1) {
    const int32_t middle = (low + high) / 2;
    if (runs[middle].first_tile <= tile) low = middle; else high = middle;
  }
  return runs[low];
}

// A pack of the state. It need not be aligned as a pack, since its index differs by `offset`.
template <class S> __device__ __forceinline__ Pack<S, W> load_state(const S* m, bool packed) {
  if (packed) return load<S, W>(m);
  Pack<S, W> pack;
#pragma unroll
  for (int k = 0; k < W; k++) pack.at[k] = m[k];
  return pack;
}

template <class S> __device__ __forceinline__ void store_state(S* m, const Pack<S, W>& pack, bool packed) {
  if (packed) return store(m, pack);
#pragma unroll
  for (int k = 0; k < W; k++) m[k] = pack.at[k];
}

// update: function of one element, or of a pack of W. aligned: whether the buffers' first elements are aligned as packs.
template <class S, class U> __device__ __forceinline__ void over_runs(const Run<S>* runs, int32_t count, bool aligned, int64_t tiles, const U& update) {
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const Run<S> run = run_of(runs, count, tile);
    const int64_t first = run.start / W * W + (tile - run.first_tile) * TILE;
#pragma unroll 2
    for (int32_t p = threadIdx.x; p < TILE / W; p += THREADS) {
      const int64_t i = first + p * W;
      if (aligned && i >= run.start && i + W <= run.stop) {
        update.pack(run, i);
      } else {
        for (int64_t k = i < run.start ? run.start : i; k < i + W && k < run.stop; k++) update.one(run, k);
      }
    }
  }
}
