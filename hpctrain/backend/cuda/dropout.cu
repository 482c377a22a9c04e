// Dropout with masks of a counter-based generator: word i % 4 of Philox4x32-10 (Salmon et al., SC 2011) at counter (i / 4, sample id) decides
// on element i of a sample, or word 0 at counter (0, sample id) on the whole sample. Masks are not saved, but drawn again in backward.
#include "common.cuh"
#include "exact.cuh"

struct Words { uint32_t at[4]; };

__device__ __forceinline__ Words philox(uint32_t key0, uint32_t key1, uint64_t block, uint64_t sample) {
  uint32_t c0 = uint32_t(block), c1 = uint32_t(block >> 32), c2 = uint32_t(sample), c3 = uint32_t(sample >> 32);
#pragma unroll
  for (int round = 0; round < 10; round++) {
    const uint64_t a = uint64_t(0xD2511F53u) * c0, b = uint64_t(0xCD9E8D57u) * c2;
    c0 = uint32_t(b >> 32) ^ c1 ^ key0;
    c2 = uint32_t(a >> 32) ^ c3 ^ key1;
    c1 = uint32_t(b), c3 = uint32_t(a);
    key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
  }
  return Words{{c0, c1, c2, c3}};
}

// The index of element (i, j, k) of (.., rows, packs of W) in the unsplit activation of its sample: first + i * step0 + j * step1 + k.
struct Place { int64_t first, step0, step1; int32_t rows, packs; int64_t packs_of_sample; };

// Numbers of one step, in device memory: whether it is training, the operator's key, the ids of the samples.
struct Step { const int64_t* training; const uint32_t* key; const int64_t* ids; };

template <class T, int W, bool ADD, bool SAMPLE> __device__ __forceinline__ void dropout(
    const T* x, T* y, const Step& step, const Place& place, typename Sum<T>::type scale, uint32_t threshold, int64_t items) {
  typedef typename Sum<T>::type S;
  const bool training = *step.training != 0;
  const uint32_t key0 = step.key[0], key1 = step.key[1];
  for (int64_t p = first_item(); p < items; p += item_step()) {
    Pack<T, W> v = load<T, W>(x + p * W), old;
    if (ADD) old = load<T, W>(y + p * W);
    const int64_t sample = p / place.packs_of_sample;
    const int64_t inside = p - sample * place.packs_of_sample;
    const int64_t row = inside / place.packs, i = row / place.rows;
    const int64_t index = place.first + i * place.step0 + (row - i * place.rows) * place.step1 + (inside - row * place.packs) * W;
    Words words;
#pragma unroll
    for (int e = 0; e < W; e++) {
      if (SAMPLE ? e == 0 : e % 4 == 0) words = philox(key0, key1, SAMPLE ? 0 : uint64_t(index + e) >> 2, uint64_t(step.ids[sample]));
      uint32_t word;
      if (SAMPLE) {
        word = words.at[0];
      } else if (W >= 4) {
        word = words.at[e % 4];
      } else {
        const uint32_t which = uint32_t(index + e) & 3;
        word = which < 2 ? (which == 0 ? words.at[0] : words.at[1]) : (which == 2 ? words.at[2] : words.at[3]);
      }
      S z = training ? exact_product(S(value(v.at[e])), word >= threshold ? scale : S(0)) : S(value(v.at[e]));
      if (ADD) z = exact_sum(S(value(old.at[e])), z);
      v.at[e] = Round<T>::of(z);
    }
    store(y + p * W, v);
  }
}

#define KERNEL(T, name, W, ADD, SAMPLE) \
  extern "C" __global__ __launch_bounds__(256) void name( \
      const T* x, T* y, const int64_t* training, const uint32_t* key, const int64_t* ids, int64_t first, int64_t step0, int64_t step1, \
      int32_t rows, int32_t packs, int64_t packs_of_sample, Sum<T>::type scale, uint32_t threshold, int64_t items) { \
    dropout<T, W, ADD, SAMPLE>( \
        x, y, Step{training, key, ids}, Place{first, step0, step1, rows, packs, packs_of_sample}, scale, threshold, items); } \
  EXPORT_INDEPENDENT(name)
#define MAKE(T, tag, W) \
  KERNEL(T, dropout_##tag##_w##W, W, false, false) KERNEL(T, dropout_add_##tag##_w##W, W, true, false) \
  KERNEL(T, sample_dropout_##tag##_w##W, W, false, true) KERNEL(T, sample_dropout_add_##tag##_w##W, W, true, true)
MAKE(float, f32, 4) MAKE(float, f32, 1) MAKE(bf16, bf16, 8) MAKE(bf16, bf16, 1)
#ifdef ON_CPU
MAKE(double, f64, 2) MAKE(double, f64, 1)
#endif
