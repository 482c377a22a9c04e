// Softmax cross entropy with label smoothing and weights of classes, ranks of the labels, and the gradient: one block per row of logits.
//
// Exponentials have the dtype of sums, and are summed in double. A label's gradient is computed from the sum over the other classes, since
// 1 - p of a probability p near 1 would lose all digits.
#include "common.cuh"

constexpr int MOST_WARPS = 8;
constexpr int32_t WRONG = 0x7fffffff;  // rank of a label in a row with NaN

struct Sum2 { template <class S> __device__ __forceinline__ S operator()(S a, S b) const { return a + b; } };
// Returns NaN if either number is NaN.
struct Larger { template <class S> __device__ __forceinline__ S operator()(S a, S b) const { return a != a || a > b ? a : b; } };

// Reduces over all threads of a block, with the same bits in each: first within warps, then over the warps in order.
template <class S, class Combine> __device__ __forceinline__ S over_block(S x, S* warps, Combine combine) {
  for (int m = 16; m; m /= 2) x = combine(x, __shfl_xor_sync(0xffffffffu, x, m));
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
  __syncthreads();
  x = warps[0];
  for (uint32_t w = 1; w < blockDim.x / 32; w++) x = combine(x, warps[w]);
  __syncthreads();
  return x;
}

__device__ __forceinline__ float exponential(float x) { return expf(x); }
__device__ __forceinline__ double exponential(double x) { return exp(x); }

template <class S> struct Shared { S* logits; int32_t* ranks; double* sums; };

// Weights of the classes (null: all are 1), a factor on them, and their mean with the factor.
struct Weights {
  const double* of; double factor, mean;
  __device__ __forceinline__ double operator()(int32_t c) const { return of ? of[c] * factor : 1; }
};

template <class T> __device__ __forceinline__ void cross_entropy(
    const T* x, int32_t label, T* dx, double* loss, int32_t* rank, int32_t classes, double smoothing, const Weights& weights, double scale,
    const Shared<typename Sum<T>::type>& shared) {
  typedef typename Sum<T>::type S;
  const S own = value(x[label]);
  S top = own;
  int32_t before = 0;
  for (int32_t c = threadIdx.x; c < classes; c += blockDim.x) {
    const S v = value(x[c]);
    top = Larger()(top, v);
    before += v > own || (v == own && c < label);
  }
  top = over_block(top, shared.logits, Larger());
  before = over_block(before, shared.ranks, Sum2());

  double others = 0, shifted = 0;
  for (int32_t c = threadIdx.x; c < classes; c += blockDim.x) {
    const S v = value(x[c]);
    if (c != label) others += double(exponential(v - top));
    const double below = double(v) - double(top);
    shifted += weights.of ? below * weights(c) : below;
  }
  others = over_block(others, shared.sums, Sum2());
  shifted = smoothing != 0 ? over_block(shifted, shared.sums, Sum2()) : 0;
  const double total = others + double(exponential(own - top)), uniform = smoothing / classes;

  // The label's part of the target, and the sum of the target over all classes.
  const double part = weights.of ? (1 - smoothing) * weights(label) : 1 - smoothing;
  const double target = weights.of ? part + smoothing * weights.mean : 1;

  if (threadIdx.x == 0) {
    double aim = part * (double(own) - double(top));
    if (smoothing != 0) aim += uniform * shifted;
    *loss = target * log(total) - aim;
    *rank = top != top ? WRONG : before;
  }
  if (!dx) return;
  const S probability = S(scale * target / total), share = S(scale * uniform);
  const double rest = weights.of ? smoothing * weights.mean - uniform * weights(label) : smoothing - uniform;  // of the other classes
  const S at_label = S(scale * (rest - target * (others / total)));
  for (int32_t c = threadIdx.x; c < classes; c += blockDim.x) {
    const S other = weights.of ? S(scale * uniform * weights(c)) : share;
    const S d = c == label ? at_label : exponential(value(x[c]) - top) * probability - other;
    dx[c] = Round<T>::of(d);
  }
}

#define MAKE(T, tag) \
  extern "C" __global__ __launch_bounds__(256) void cross_entropy_##tag( \
      const T* logits, const int32_t* labels, T* d_logits, double* losses, int32_t* ranks, const double* weights, int32_t classes, double smoothing, \
      double factor, double mean, double scale) { \
    SHARED(Sum<T>::type, tops, MOST_WARPS); \
    SHARED(int32_t, places, MOST_WARPS); \
    SHARED(double, sums, MOST_WARPS); \
    const int64_t row = blockIdx.x; \
    cross_entropy<T>( \
        logits + row * classes, labels[row], d_logits ? d_logits + row * classes : nullptr, losses + row, ranks + row, classes, smoothing, \
        Weights{weights, factor, mean}, scale, Shared<Sum<T>::type>{tops, places, sums}); } \
  EXPORT(cross_entropy_##tag)
MAKE(float, f32) MAKE(bf16, bf16)
#ifdef ON_CPU
MAKE(double, f64)
#endif

// One block: the sum of the losses, the number of labels of rank 0, and the number of labels of a rank below `top`.
extern "C" __global__ __launch_bounds__(256) void sum_losses(const double* losses, const int32_t* ranks, double* sums, int32_t top, int64_t rows) {
  SHARED(double, warps, MOST_WARPS);
  double loss = 0, first = 0, among = 0;
  for (int64_t row = threadIdx.x; row < rows; row += blockDim.x) {
    loss += losses[row];
    first += ranks[row] < 1;
    among += ranks[row] < top;
  }
  loss = over_block(loss, warps, Sum2());
  first = over_block(first, warps, Sum2());
  among = over_block(among, warps, Sum2());
  if (threadIdx.x == 0) sums[0] = loss, sums[1] = first, sums[2] = among;
}
EXPORT(sum_losses)
